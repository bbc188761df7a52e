"""Writes `docs/models.md`: what each architecture of the installed Transformers can be used for, found out by use.

`python scripts/models_doc.py` writes it, which takes minutes; `make matrix` fails where it is stale. Each architecture
is built tiny from its own config class. Its loss and gradients on a padded batch through our trainer are compared with
those of a plain loop over its own logits.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from transformers import CONFIG_MAPPING, BitsAndBytesConfig, PreTrainedTokenizerFast
from transformers.models.auto import modeling_auto
from trl import SFTConfig

from toolkit.common import in_a_line
from toolkit.data.batching.collate import Collator, isolates
from toolkit.models.adapted_layers import unadaptable
from toolkit.models.adapters import keep_unpacked
from toolkit.models.attention import attention_kernels, backends
from toolkit.models.output_heads.head_choice import add_output_head, asks_routers, choose
from toolkit.models.quantization import experts
from toolkit.models.quantization.stored_loading import StoredConfig
from toolkit.models.tiny import tiny_model
from toolkit.models.weight_reads import Reads, kept_whole, reads_of
from toolkit.output import quiet_libraries
from toolkit.planner.trace import fake_kernels
from toolkit.planner.trace.passes import run
from toolkit.planner.trace.setting import Layout, Setting
from toolkit.planner.trace.shallow import build, load_config
from toolkit.recipe import compilation, model_configs
from toolkit.train.trainers.trainer import CausalTrainer, EncoderDecoderTrainer

PAGE = Path(__file__).resolve().parent.parent / "docs" / "models.md"
CAUSAL = sorted(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
ENCODER_DECODERS = list(modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)


def _of_three_axes(sections: list[int], **more: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections, **more}
    return {"text_config": {"rope_parameters": rope}}


_UNSTATED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 4},
    "xmod": {"default_language": "en_XX"},
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), _of_three_axes([16, 24, 24])),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), _of_three_axes([24, 20, 20])),
    **dict.fromkeys(("glm4v", "glm46v"), _of_three_axes([8, 12, 12], partial_rotary_factor=0.5)),
    "ernie4_5_vl_moe": _of_three_axes([22, 22, 20]),
}
"""What a config class leaves out that every published config states."""


@dataclass(frozen=True)
class Architecture:
    """What was found out.

    Args:
        trains: `fused`, `own` (all logits), `refused` or `not built`.
        why: Why it is refused or could not be built.
        packs: Whether documents packed into a row are kept apart.
        lora: How much of the layers' matrices `all-linear` adapters reach: all, part or none.
        quantises: How much of the layers' matrices is stored in nf4 and in fp8: all, part or none; or `refused`.
        plans: Whether plans are made from its own code (`traced`) or from its config (`formulas`).
    """

    kind: str
    trains: str
    why: str = ""
    packs: bool = False
    lora: str = ""
    quantises: str = ""
    plans: str = ""


def configuration(kind: str) -> Any:
    """The config of an architecture as its class makes it, to be trained as a decoder where it can be one.

    Raises:
        Exception: Whatever the class raises for its own defaults.
    """
    config = CONFIG_MAPPING[kind](**_UNSTATED.get(kind, {}))
    if key := model_configs.causal_key(config.to_dict()):
        setattr(config, key, True)
    return config


def survey(kind: str, objective: str = "sft") -> Architecture:
    """Everything about an architecture; raises what `look` and `plans` raise."""
    seen = look(kind, objective)
    return dataclasses.replace(seen, plans=plans(kind, objective)) if seen.trains in ("fused", "own") else seen


def compiles(kind: str, objective: str = "sft") -> str:
    """The word of `toolkit.recipe.compilation`, which its tests hold to what comes of it."""
    word = compilation.outcome(stated(kind, objective).to_dict(), objective)
    return word if word == "yes" else f"no: {word}"


def plans(kind: str, objective: str = "sft") -> str:
    """How it is planned: by taking one micro-batch through its code on tensors without numbers, if that can be done.

    Raises:
        AssertionError: If the plan counts other parameters than the model has.
    """
    model = tiny_model(stated(kind, objective), objective)
    config = model.config.to_dict()
    backend = backends.planned("auto", config, "float32", "cpu", None)
    layout: Layout = "seq2seq" if objective == "seq2seq" else "padded"
    setting = Setting(
        config, "cuda", objective, {"name": "full", "freeze": []}, "float32", "float32", "bfloat16", backend, layout
    )
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), fake_kernels.installed(setting):
        warnings.simplefilter("ignore")
        try:
            choice = choose(load_config(setting), objective=objective)
            run(build(setting, 2, fake), setting, choice, fake, 2, 64)
            whole = build(setting, None, FakeTensorMode()).model
        except Exception:  # A model's own code may raise anything.
            return "formulas"
    numbers = [sum(parameter.numel() for parameter in each.parameters()) for each in (whole, model)]
    assert numbers[0] == numbers[1], f"{kind}: {numbers}"
    return "traced"


def look(kind: str, objective: str = "sft") -> Architecture:
    """Tries an architecture.

    Raises:
        AssertionError: If it trains and its loss or a gradient is not that of a plain loop.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            config = stated(kind, objective)
            if objective == "seq2seq" and not config.is_encoder_decoder:
                return Architecture(kind, "refused", "it has no encoder")
            if model_configs.causal_key(config.to_dict()) is not None:
                return Architecture(kind, "refused", "an encoder: its tokens see those after them")
            model = tiny_model(config, objective)
            batch = _batch(objective)
            with torch.no_grad():
                model(
                    **{key: batch[key] for key in batch if key != "labels" or objective == "seq2seq"}, use_cache=False
                )
        except Exception as error:
            return Architecture(kind, "not built", in_a_line(error))
        assert objective == "seq2seq" or not _sees_ahead(model, batch), f"{kind} is not causal"
        head = _compare(model, config, batch) if objective == "sft" else _compare_pairs(model, config, batch)
        whole = kept_whole(config, objective, trust_remote_code=False)
        nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=whole or None)
        in_fp8, quantised = (_quantised(model, batch, settings) for settings in (StoredConfig("fp8", whole), nf4))
        reached = _reached(model, batch, reads_of(config, objective))
        assert in_fp8 == quantised != "refused", kind
        attention_kernels.find_documents(by_positions=True)
        try:
            packs = objective == "sft" and isolates(model, Collator(0, "packed"))
        except Exception:
            packs = False
        return Architecture(kind, head, "", packs, reached, quantised)


def stated(kind: str, objective: str) -> Any:
    """The config of an architecture for an objective."""
    config = configuration(kind)
    if objective == "sft":
        config.is_encoder_decoder = False
    elif getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 1
    return config


def _batch(objective: str) -> dict[str, torch.Tensor]:
    """Two rows of different lengths, of which the beginning is not trained."""
    ids = torch.randint(5, 120, (2, 24), generator=torch.Generator().manual_seed(0))
    mask, labels = torch.ones_like(ids), ids.clone()
    mask[1, -6:] = 0
    labels[:, :3] = labels[1, -6:] = -100
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": labels[:, 3:15].clone() if objective == "seq2seq" else labels,
    }


def _sees_ahead(model: Any, batch: dict[str, torch.Tensor]) -> bool:
    """Whether a token's logits change with the token after it."""
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    other = inputs["input_ids"].clone()
    other[0, 12] += 1
    with torch.no_grad():
        logits, changed = (model(**inputs | ids, use_cache=False).logits for ids in ({}, {"input_ids": other}))
    return not torch.allclose(logits[0, :12], changed[0, :12], atol=1e-4)


def _compare(model: Any, config: Any, batch: dict[str, torch.Tensor]) -> str:
    """Which head scores the labels, once loss and gradients are found equal to those of a plain loop."""
    inputs, following = {key: batch[key] for key in ("input_ids", "attention_mask")}, batch["labels"][:, 1:]
    routers = {"output_router_logits": True} if asks_routers(config) else {}
    own = model(**inputs, **routers, use_cache=False)
    loss = F.cross_entropy(own.logits[:, :-1].float().flatten(0, 1), following.flatten())
    if routers and own.get("aux_loss") is not None:
        loss = loss + config.get_text_config().router_aux_loss_coef * own.aux_loss
    expected = _backward(model, loss)
    choice = choose(config)
    trainer: Any = CausalTrainer(
        model, _arguments(), choice, train_dataset=_rows(), data_collator=Collator(0, "padded"),
        processing_class=_tokenizer(),
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1
    lengths = batch["attention_mask"].sum(1).tolist()
    rows = [
        {key: batch[key][row, :length].tolist() for key in ("input_ids", "labels")}
        for row, length in enumerate(lengths)
    ]
    measured = trainer.compute_loss(model, Collator(0, "padded")(rows), num_items_in_batch=following.ne(-100).sum())
    _check_equal(model, measured, loss, expected)
    return "fused" if choice.fused else "own"


def _compare_pairs(model: Any, config: Any, batch: dict[str, torch.Tensor]) -> str:
    own, labels = model(**batch, use_cache=False), batch["labels"]
    loss = F.cross_entropy(own.logits.float().flatten(0, 1), labels.flatten())
    if model.config.model_type != "prophetnet":  # Whose own loss is of the tokens after the next one, too.
        torch.testing.assert_close(loss, own.loss, rtol=1e-5, atol=1e-5)
    expected, choice = _backward(model, loss), choose(config, objective="seq2seq")
    add_output_head(model, choice, "seq2seq")
    positions = labels.flatten().ne(-100).nonzero()[:, 0]
    outputs, _ = EncoderDecoderTrainer.scores(None, model, batch | {"label_positions": positions})  # type: ignore[arg-type]
    _check_equal(model, -outputs.log_probs.sum() / outputs.label_mask.sum(), loss, expected)
    return "fused" if choice.fused else "own"


def _check_equal(model: Any, measured: torch.Tensor, loss: torch.Tensor, expected: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(measured, loss, rtol=2e-6, atol=2e-6)
    for name, gradient in _backward(model, measured).items():
        scale = expected[name].abs().max().item()
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5 * scale + 1e-7, msg=name)


def _backward(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


@functools.cache
def _arguments() -> SFTConfig:
    folder = tempfile.gettempdir()
    return SFTConfig(
        folder, bf16=False, use_cpu=True, max_length=None, activation_checkpointing=False, report_to="none",
        dataset_kwargs={"skip_prepare_dataset": True}, remove_unused_columns=False, log_level="error",
        average_tokens_across_devices=True, per_device_train_batch_size=2,
    )  # fmt: skip


@functools.cache
def _rows() -> Dataset:
    return Dataset.from_dict({"input_ids": [[5, 6]], "labels": [[-100, 6]]})


@functools.cache
def _tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(WordLevel({"<pad>": 0, "</s>": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>")


def _quantised(model: Any, batch: dict[str, torch.Tensor], settings: Any) -> str:
    """How much of the layers' matrices is quantised when the model is loaded so and computes."""
    experts.quantize_fused()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        stored = type(model).from_pretrained(
            folder, quantization_config=settings, device_map={"": "cpu"}, dtype=torch.float32
        )
    keep_unpacked(stored)
    inputs = batch if stored.config.is_encoder_decoder else {key: batch[key] for key in batch if key != "labels"}
    try:
        with torch.no_grad():
            stored(**inputs, use_cache=False)
    except Exception:  # It reads the weight of a layer itself.
        return "refused"
    quantised = sum(each.quant_state.shape.numel() for each in stored.parameters() if hasattr(each, "quant_state"))
    return _share(quantised, sum(_matrices(model).values()))


def _reached(model: Any, batch: dict[str, torch.Tensor], reads: Reads) -> str:
    """How much of the layers' matrices adapters reach that train."""
    matrices = _matrices(model)
    settings = LoraConfig(target_modules="all-linear", exclude_modules=[*unadaptable(model, reads)] or None)
    try:
        adapted: Any = get_peft_model(model, settings)
    except Exception:
        return "none"
    inputs = batch if model.config.is_encoder_decoder else {key: batch[key] for key in batch if key != "labels"}
    adapted(**inputs, use_cache=False).logits.sum().backward()
    layers = [each.get_base_layer() for each in adapted.modules() if isinstance(each, BaseTunerLayer)]
    reached = {id(parameter) for layer in layers for parameter in layer.parameters()}
    return _share(sum(size for key, size in matrices.items() if key in reached), sum(matrices.values()))


def _matrices(model: Any) -> dict[int, int]:
    """Sizes of the layers' matrices, by the ids of the parameters."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    outside = {id(parameter) for module in ends if module is not None for parameter in module.parameters()}
    modules = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    outside |= {id(module.weight) for module in modules}
    return {id(p): p.numel() for p in model.parameters() if p.ndim > 1 and id(p) not in outside}


def _share(among: int, matrices: int) -> str:
    part = among / max(1, matrices)
    # Kernels of short convolutions are no matrices to speak of.
    return "all" if part > 0.97 else "part" if part else "none"


_REASONS = {
    "refused": "Refused, because a token sees those after it, or because there is no encoder for objective seq2seq",
    "not built": "Not tried: the config class makes no model that runs on text alone, or none that can be made small",
}
_NOTES = """
## Where losses are not the same to the last digit

- **Mixtures of experts**: if a config states `router_aux_loss_coef`, the training loss includes the routers' balance
  loss. It is a product of two means over the tokens of a micro-batch, so it changes with micro-batch, packing and
  number of processes, and so do the curves. Over the global batch it would need all micro-batches before the first
  backward pass, and would no longer be what the field calls by this name. The run says so; the held-out loss does not
  include it. A model whose own forward computes no such loss gets none, whatever its config states.
- **T5, GPT-NeoX**: a padded batch and its rows one by one differ in the last digits of fp32 (losses by 5e-7, gradients
  by 5e-7 of their norm). In fp64 they agree to 1e-15, so the cause is the order of sums, not an extra token.
- **Mamba, Falcon-Mamba**: the scan keeps fp32 inside, so fp64 does not separate them further (1e-9 of the gradient).
  Their states carry over document boundaries, so they do not pack.
- **ProphetNet**: Transformers' code adds relative positions to the wrong tokens, in an order that depends on the
  longest target and on the number of rows. A tiny model's loss beside a target of three tokens more differs by 2e-4,
  and a later token changes the scores before it by 1e-3.
"""
_INTRODUCTION = """\
# Models

What each architecture of the installed Transformers can be used for. Each is built as a tiny model from its own config
class, so the page shows what the code can do, not how a checkpoint behaves. `python scripts/models_doc.py` writes this
page.

- **trains**: loss and gradients of a padded batch equal those of a plain loop over the model's own logits, in fp32.
  *fused*: TRL's fused output head, which never holds all logits, computes the same as the model. *own*: it does not
  (another layer, scale or cap before the logits, or routers by other names), so the model's own forward scores the
  labels. In encoder-decoders the model's own head scores in chunks instead of returning logits. Either way only
  trained tokens reach the head, if the model's code allows it. The run says which head it uses, the plan counts it,
  and `manifest.json` keeps it (`effective.output_head`). Before the first step both are compared once more with the
  real weights, on the first rows, in the run's precision. BERT and similar models train only as decoders, which their
  config must say (`is_decoder`).
- **packs**: documents in one row cannot see each other (`data.packing`); otherwise the run refuses to pack.
- **LoRA**: how much of the layers' matrices `method.target_modules: all-linear` reaches. **quantises**: how much of
  them is stored in 4 bits (`method.quantization: nf4`). The same holds for `fp8` and `int4`, including experts stored
  as one tensor, which stay in 16 bits under `int8`. Routers stay in 16 bits, and so do layers whose weights the
  model's code or a kernel reads. A run refuses less than nine tenths.
  A model that bitsandbytes has already stored so stays as it is, and takes `method=qlora` (nf4) or `lora_int8`.
- A model that is published in fp8 (`fp8`, `mxfp8`), as gpt-oss is (`mxfp4`) or by compressed-tensors is restored weight
  by weight as it is read. It is trained, planned and saved as one in full, and `method.quantization` stores it as it
  would that. Other forms, such as those of GPTQ and AWQ, are refused.
- Image and audio towers, and whatever else no text reaches, are not trained by any method and get no adapters. The
  files that prepare images or sound are copied beside a whole model, so that it still takes them.
- **compiles**: *yes*: `compile: auto` may compile the layers, because layers that are alike are one graph without a
  break for every length of rows, with equal losses and gradients. Otherwise it leaves them as they are, and
  `compile: layers` warns before it tries, because code leaves the graph (*breaks*), each layer or length has its own
  graph (*recompiles*), compiling ends in an error (*fails*), or Transformers does not mark the layers as such
  (*unmarked*).
- **plans**: *traced*: memory and work are read from a micro-batch that goes through the model's own code, and the
  parameters counted are those that it has. *formulas*: the code needs numbers to run, or more than two layers, so
  plans may be based on the config, and say so.

"""


def page(architectures: Iterable[Architecture], pairs: Iterable[Architecture]) -> str:
    """The text of `docs/models.md`."""
    text = _INTRODUCTION
    tables = (("Causal language models", "sft", list(architectures)), ("Encoder-decoders", "seq2seq", list(pairs)))
    for title, objective, found in tables:
        counts = Counter(each.trains for each in found)
        text += f"## {title}\n\n{', '.join(f'{count} {name}' for name, count in counts.most_common())}.\n\n"
        text += (
            "| architecture | trains | packs | compiles | plans | LoRA | quantises |\n"
            "| --- | --- | --- | --- | --- | --- | --- |\n"
        )
        for each in found:
            if each.trains in ("fused", "own"):
                packs = "yes" if each.packs else "no"
                compiled = compiles(each.kind, objective)
                text += f"| {each.kind} | {each.trains} | {packs} | {compiled} | "
                text += f"{each.plans} | {each.lora} | {each.quantises} |\n"
        text += "\n"
        for name in ("refused", "not built"):
            kinds = [each.kind for each in found if each.trains == name]
            if kinds:
                text += f"{_REASONS[name]}: {', '.join(kinds)}.\n\n"
    return text.rstrip() + "\n" + _NOTES


if __name__ == "__main__":
    quiet_libraries()
    PAGE.write_text(page(map(survey, CAUSAL), (survey(kind, "seq2seq") for kind in ENCODER_DECODERS)), encoding="utf-8")
