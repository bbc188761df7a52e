"""Compiled layers compute what the layers compute: one graph for all that are alike, whatever the sizes of batches."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import models_doc
import pytest
import small
import torch
from peft import LoraConfig, get_peft_model
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from toolkit.common import UserError
from toolkit.distributed.engine_state import EngineState
from toolkit.distributed.layout import World
from toolkit.models import compiled_layers, dropout
from toolkit.models.compiled_layers import CompiledLayers, compiled
from toolkit.models.output_heads.head_choice import asks_routers
from toolkit.models.quantization.stored import StoredLinear, stored_as
from toolkit.models.tiny import tiny_model
from toolkit.recipe import compilation
from toolkit.recipe.rules import load_checked
from toolkit.train import agreed, live_state, preflight, verify

ELEMENTWISE = "activation_checkpointing=elementwise"
SIZES = ((2, 17), (2, 33), (3, 64), (2, 40))
SHORT = ((2, 5), (2, 7), (3, 9), (2, 8))
STEPWISE = {"falcon_mamba", "mamba", "rwkv", "xlstm"}
"""Their layers loop over the tokens, whose graphs grow with the row: short rows show in seconds what long ones do."""


def adapted(checkpointing: bool) -> Any:
    model = get_peft_model(llama(), LoraConfig(target_modules="all-linear", init_lora_weights=False))
    if checkpointing:
        model.get_base_model().activation_checkpointing_enable({"use_reentrant": False})
    return model.train()


def llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, attn_implementation="sdpa",
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def trained(model: Any, rows: int, length: int) -> tuple[float, float]:
    """Loss, and norm of the gradients, of a padded batch."""
    ids = torch.randint(5, 120, (rows, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    # Of the logits: not every model's own loss is of text alone.
    pairs = {"labels": ids} if model.config.is_encoder_decoder else {}
    outputs = model(input_ids=ids, attention_mask=mask, **pairs, use_cache=False)
    loss = functional.cross_entropy(outputs.logits.flatten(0, 1), ids.flatten())
    if (balance := getattr(outputs, "aux_loss", None)) is not None:
        loss = loss + balance
    model.zero_grad()
    loss.backward()
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    return loss.item(), torch.stack([each.norm() for each in gradients]).norm().item()


class Stored(GradientCheckpointingLayer):
    """A layer whose parts have gradients of the toolkit's own: dropout, and a base of fewer bits."""

    def __init__(self, rate: float, form: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        source, self.rate = torch.nn.Linear(32, 32, bias=False), rate
        self.base, self.norm = StoredLinear(source, form), torch.nn.LayerNorm(32)
        self.base.weight = stored_as(form, source.weight.data)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.base(functional.dropout(self.norm(hidden), self.rate))


def begun(rate: float, form: str) -> tuple[list[float], int, int]:
    """What a process computes with a compiled layer, and how many graphs it takes from the cache and adds to it."""
    torch._dynamo.reset()
    counted, before = counters["aot_autograd"], counters["aot_autograd"].copy()
    layers = torch.nn.Sequential(Stored(rate, form))
    CompiledLayers(layers)
    torch.manual_seed(4)
    outputs = layers(torch.randn(3, 7, 32, requires_grad=True))
    outputs.square().sum().backward()
    found = [outputs.norm().item(), *(each.grad.norm().item() for each in layers.parameters() if each.grad is not None)]
    hits, saved = (counted[f"autograd_cache_{each}"] - before[f"autograd_cache_{each}"] for each in ("hit", "saved"))
    return found, hits, saved


def test_the_next_run_takes_graphs_with_gradients_of_our_own_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "dropout", dropout.dropout)
    with fresh_cache():
        found, *first = begun(0.05, "fp8")
        again, *second = begun(0.05, "fp8")
        other_rate, *third = begun(0.5, "fp8")
        other_form, *fourth = begun(0.05, "int4")
        monkeypatch.setattr(compiled_layers, "_DROPOUT", dict.fromkeys(compiled_layers._DROPOUT, "changed"))
        changed, *fifth = begun(0.05, "fp8")
    assert [first, second, third, fourth, fifth] == [[0, 1], [1, 0], [0, 1], [0, 1], [0, 1]]
    assert found == again == changed and other_rate[0] > 1.1 * found[0] and other_form != found


@pytest.mark.parametrize(
    ("checkpointing", "backend"),
    [(False, "eager"), (True, "eager"), pytest.param(True, "inductor", marks=pytest.mark.matrix)],
)
def test_one_graph_serves_all_layers_and_lengths(checkpointing: bool, backend: str) -> None:
    torch._dynamo.reset()
    model = adapted(checkpointing)
    names = list(model.state_dict())
    settings = torch._dynamo.config.suppress_errors
    expected = [trained(model, *size) for size in SIZES]
    layers = CompiledLayers(model, backend=backend)
    assert compiled(model) and layers.layers == 3
    measured = [trained(model, *size) for size in SIZES]
    torch.testing.assert_close(torch.tensor(measured), torch.tensor(expected), rtol=1e-6, atol=0)
    assert layers.graphs == 1
    assert list(model.state_dict()) == names
    # What else is compiled, flex attention by itself, still fails aloud.
    assert torch._dynamo.config.suppress_errors == settings
    model.eval()
    with torch.no_grad():
        model(input_ids=torch.ones(1, 5, dtype=torch.long), labels=torch.ones(1, 5, dtype=torch.long))
    model.generate(input_ids=torch.ones(1, 4, dtype=torch.long), max_new_tokens=3, pad_token_id=0)
    assert layers.graphs == 1


@pytest.mark.parametrize(
    ("lora", "autocast", "off_by"),
    [
        (False, False, 0.0),
        # Copies of an adapter's weights are made by another kernel.
        pytest.param(True, True, 0.01, marks=pytest.mark.matrix),
        pytest.param(False, True, 0.0, marks=pytest.mark.matrix),
        pytest.param(True, False, 1e-6, marks=pytest.mark.matrix),
    ],
)
def test_element_wise_work_that_is_computed_again_gives_the_same(lora: bool, autocast: bool, off_by: float) -> None:
    """By Inductor: losses and gradients are those of compiled layers that keep it."""
    steps = []
    for elementwise in (False, True):
        torch._dynamo.reset()
        model = adapted(False) if lora else llama().train()
        layers = CompiledLayers(model, elementwise=elementwise)
        assert compiled_layers.recomputes_elementwise(model) == elementwise
        assert not any(getattr(each, "gradient_checkpointing", False) for each in model.modules())
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss, _ = trained(model, 2, 40)
        assert layers.graphs == 1
        gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        steps.append((loss, gradients))
    (loss, kept), (same, again) = steps
    assert same == loss and again.keys() == kept.keys()
    for name, gradient in kept.items():
        assert (again[name] - gradient).norm() <= off_by * gradient.norm(), name


def test_vector_instructions_are_known_by_the_time_they_are_asked_for() -> None:
    from torch._inductor import cpu_vec_isa

    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    compiled_layers.prepare("cuda")
    assert cpu_vec_isa.valid_vec_isa_list.cache_info().misses == 0
    compiled_layers.prepare("cpu")
    for _ in range(600):
        if cpu_vec_isa.valid_vec_isa_list.cache_info().currsize:
            break
        time.sleep(0.1)
    cpu_vec_isa.pick_vec_isa()
    assert cpu_vec_isa.valid_vec_isa_list.cache_info().hits == 1


ROWS = [
    ("seq2seq" if title == "Encoder-decoders" else "sft", kind, compiles)
    for title, table in re.findall(r"^## (.*)\n\n.*\n\n((?:\|.*\n)+)", models_doc.PAGE.read_text("utf-8"), re.MULTILINE)
    for kind, compiles in re.findall(r"^\| (\S+) \| (?:fused|own) \| \S+ \| (.*?) \|", table, re.MULTILINE)
]
"""Objective, architecture and what the page says of compiling it."""


def test_the_page_says_of_every_architecture_whether_it_compiles() -> None:
    assert len(ROWS) > 190
    assert [(objective, kind, models_doc.compiles(kind, objective)) for objective, kind, _ in ROWS] == ROWS


@pytest.mark.matrix
@pytest.mark.parametrize(("objective", "kind", "expected"), ROWS)
def test_layers_alike_are_one_graph_without_a_break_as_the_page_says(objective: str, kind: str, expected: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = without_dropout(tiny_model(models_doc.stated(kind, objective), objective)).train()
    if objective != "seq2seq" and asks_routers(model.config):
        model.config.get_text_config().output_router_logits = True
    assert tried(model, SHORT if kind in STEPWISE else SIZES) == expected.removeprefix("no: ")


@pytest.mark.parametrize("checkpointing", [False, True])
def test_what_routers_score_is_collected_from_one_graph(checkpointing: bool) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = without_dropout(tiny_model(models_doc.stated("mixtral", "sft"), "sft")).train()
    model.config.output_router_logits = True
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    assert tried(model, SIZES) == "yes"
    model.config.output_router_logits = False
    plain = trained(model, *SIZES[0])
    model.config.output_router_logits = True
    assert trained(model, *SIZES[0])[0] > plain[0] + 0.5, "the balance is in the loss"


def tried(model: Any, sizes: Sequence[tuple[int, int]]) -> str:
    """What comes of compiling the layers of a model for batches of these sizes: `yes`, or why not in a word."""
    expected = [trained(model, *size) for size in sizes]
    # Of the backends that need no compiler, the one that rewrites operations as Inductor does.
    layers = CompiledLayers(model, backend="aot_eager_decomp_partition")
    if not layers.layers:
        return "unmarked"
    try:
        measured = [trained(model, *sizes[0])]
        graphs = layers.graphs
        measured += [trained(model, *size) for size in sizes[1:]]
    except RuntimeError:
        return "fails"
    counters = torch._dynamo.utils.counters
    if counters["graph_break"] or counters["frames"]["ok"] < counters["frames"]["total"]:
        return "breaks"
    if layers.graphs > graphs or graphs > len(kinds(model)):
        return "recompiles"
    return "yes" if torch.allclose(torch.tensor(measured), torch.tensor(expected), rtol=1e-5, atol=0) else "differs"


def kinds(model: Any) -> set[Any]:
    """What tells layers apart: the list they are in, shapes of parameters, and attributes of modules but numbers."""
    return {
        (
            name.rpartition(".")[0],
            tuple(parameter.shape for parameter in layer.parameters()),
            repr([sorted((key, plain(key, value)) for key, value in vars(each).items()) for each in layer.modules()]),
        )
        for name, layer in model.named_modules()
        if isinstance(layer, GradientCheckpointingLayer)
    }


def plain(name: str, value: object) -> object:
    """What is compared of an attribute. SmolLM3 says by 0 or 1 whether a layer rotates (`use_rope`)."""
    return bool(value) if name.startswith("use_") else value if isinstance(value, str | bool | None) else type(value)


def without_dropout(model: Any) -> Any:
    """The model with no dropout or jitter, whoever keeps its rate: modules, or configs that they read."""
    configs = [value for module in model.modules() for value in vars(module).values() if hasattr(value, "to_dict")]
    for owner in [*model.modules(), *configs]:
        for name, value in vars(owner).items():
            if isinstance(value, float) and ("drop" in name or "jitter" in name or name == "p"):
                setattr(owner, name, 0.0)
    return model


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    small.populate(tmp_path, "llama")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("asked", ["compile=layers", "schedule.max_steps=100_000_000"])
def test_what_is_missing_leaves_the_layers_as_they_are(
    asked: str, place: Path, formulas: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the recipe asks for it, and where the plan of so long a run would."""
    monkeypatch.setenv("PATH", str(place))
    monkeypatch.delenv("CXX", raising=False)
    assert small.set_up(asked).compiled is None
    assert "layers are not compiled: there is no C++ compiler" in caplog.text


def test_a_run_that_needs_graphs_ends_where_there_can_be_none(
    place: Path, formulas: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = load_checked("small", [ELEMENTWISE]).recipe
    plain: Any = torch.nn.Linear(2, 2)
    with pytest.raises(UserError, match="not marked as such"):
        agreed.compiled(made, plain)
    assert agreed.compiled(load_checked("small").recipe, plain) is None
    monkeypatch.setenv("PATH", str(place))
    monkeypatch.delenv("CXX", raising=False)
    preflight.check_devices(load_checked("small", ["compile=layers"]).recipe, World())
    with pytest.raises(UserError, match=r"there is no C\+\+ compiler") as caught:
        preflight.check_devices(made, World())
    assert "activation_checkpointing.mode=full" in caught.value.change


def test_a_run_computes_element_wise_work_again_where_it_is_told_to(place: Path, formulas: None) -> None:
    """Whatever the plan says of compiling, and Transformers checkpoints nothing."""
    session = small.set_up(ELEMENTWISE, "compile=auto")
    assert session.compiled.layers == 2 and not session.trainer.args.activation_checkpointing
    graphs = EngineState(activation_checkpointing=live_state._checkpointing(session.module))
    assert graphs.activation_checkpointing == "graphs"
    kept = small.set_up("compile=layers", "output.name=other")
    with pytest.raises(UserError, match="activation_checkpointing: the recipe asks for graphs, none runs"):
        verify.verify(graphs, EngineState(activation_checkpointing=live_state._checkpointing(kept.module)))


def test_a_run_compiles_where_it_is_told_to_and_not_by_itself_on_a_cpu(place: Path, formulas: None) -> None:
    assert small.set_up("compile=auto").compiled is None
    session = small.set_up("compile=layers", "output.name=other")
    assert session.compiled.layers == 2 and session.compiled.graphs == 0


def test_yaml_says_off_without_quotes(place: Path) -> None:
    recipe = place / "recipes" / "small.yaml"
    recipe.write_text(recipe.read_text() + "compile: off\n")
    assert load_checked("small").recipe.compile == "off"


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ([], ""),
        (["strategy=zero2"], ""),
        (["strategy=zero3"], "zero3"),
        (["activation_checkpointing=selective"], "selective"),
        (["method=qlora"], ""),
        (["method.quantization=fp8"], ""),
        (["method.quantization=int8"], "int8"),
        (["method.use_dora=true"], "DoRA"),
        (["method.target_parameters=[post_attention_layernorm.weight]"], "single parameters"),
    ],
)
def test_auto_leaves_off_what_does_not_gain(overrides: list[str], reason: str) -> None:
    recipe = load_checked("llama_3_1_8b_lora", overrides).recipe
    assert reason in compilation.unfit(recipe, {"model_type": "llama"})
    assert bool(reason) == bool(compilation.unfit(recipe, {"model_type": "llama"}))
    assert compilation.unfit(recipe, {"model_type": "mamba"})


MIXTURE = {"model_type": "mixtral", "num_local_experts": 4}


@pytest.mark.parametrize(
    ("targets", "quantization", "reason"),
    [
        (["q_proj", "v_proj"], "none", ""),
        ("all-linear", "none", "adapters for experts"),
        (["q_proj", "v_proj"], "nf4", "quantized experts"),
        (["q_proj", "v_proj"], "fp8", "quantized experts"),
    ],
)
def test_auto_leaves_off_experts_that_are_restored_or_adapted(targets: Any, quantization: str, reason: str) -> None:
    values = {"method.target_modules": targets, "method.quantization": quantization}
    found = compilation.unfit(load_checked("llama_3_1_8b_lora").recipe.with_values(values), MIXTURE)
    assert bool(reason) == bool(found) and reason in found


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama", {"target_modules": "all-linear", "use_dora": True}),
        ("mixtral", {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj"]}),
    ],
)
def test_adapters_that_auto_leaves_off_break_graphs(kind: str, settings: dict[str, Any]) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    base = without_dropout(tiny_model(models_doc.stated(kind, "sft"), "sft"))
    assert tried(get_peft_model(base, LoraConfig(init_lora_weights=False, **settings)).train(), SIZES) == "breaks"


def test_layers_of_many_kinds_have_a_graph_each() -> None:
    """More than torch allows a function by itself."""
    torch._dynamo.reset()
    layers = 9
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=layers, num_attention_heads=1, vocab_size=128
    )
    ranks = {f"layers.{index}.self_attn.v_proj": index + 1 for index in range(layers)}
    adapter = LoraConfig(target_modules=["v_proj"], rank_pattern=ranks)
    model = get_peft_model(AutoModelForCausalLM.from_config(config), adapter).train()
    compiling = CompiledLayers(model, backend="eager")
    trained(model, 2, 8)
    assert compiling.graphs == layers


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_pass_without_gradients_drops_out_what_the_compiled_one_does(
    checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torch's own dropout, as on GPUs, which Inductor draws otherwise unless it is told."""
    monkeypatch.setattr(functional, "dropout", dropout._of_torch)
    torch._dynamo.reset()
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attention_dropout=0.3,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    if checkpointing:
        model.activation_checkpointing_enable()
    layers = CompiledLayers(model, draws_alike=True)
    tokens = torch.arange(24).view(2, 12)
    found = []
    for gradients in (False, True):
        torch.manual_seed(3)
        with torch.set_grad_enabled(gradients):
            found.append(model(input_ids=tokens, use_cache=False).logits.detach())
    assert layers.graphs
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)
