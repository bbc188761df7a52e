"""Attention backends: equal numbers, honest choices, and torch's variable-length kernel fed the right way."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import models_doc
import pytest
import torch
import transformers
from small import loss_and_gradients, place_with, set_up
from tiny import tiny_model
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations import sdpa_attention

from toolkit.common import UserError
from toolkit.data.batching.collate import Collator
from toolkit.distributed.engines import dtypes
from toolkit.models import device, own_attention
from toolkit.models.attention import attention_kernels, backends, varlen
from toolkit.models.attention.document_attention import document_attention
from toolkit.models.load import ModelSource
from toolkit.models.output_heads.output_head import OutputHead
from toolkit.models.tiny import tiny_model as tiny_copy
from toolkit.recipe import model_configs
from toolkit.recipe.rules import load_checked
from toolkit.recipe.schema import ATTENTION_BACKENDS
from toolkit.train.evaluation.generation import reading_masks
from toolkit.train.finished.export import load_base
from toolkit.train.verify import check_isolation

GEMMA2 = model_configs.bundled()["google/gemma-2-2b-it"].config
LLAMA = model_configs.bundled()["meta-llama/Llama-3.2-1B"].config


place = place_with("llama", "gemma")


@pytest.fixture(scope="module", autouse=True)
def more_models(place: Path) -> None:
    tiny_model("google/gemma-3-1b-it", place / "gemma3")
    tiny_model("Qwen/Qwen3-0.6B", place / "qwen3")
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    tiny_model({"model_type": "falcon", **sizes}, place / "falcon")


@pytest.mark.parametrize("model", ["llama", "gemma3"])
@pytest.mark.parametrize("packing", ["false", "true"])
def test_all_backends_train_the_same(model: str, packing: str) -> None:
    results = []
    for backend in ("eager", "sdpa", "torch_varlen"):
        overrides = [f"model.path={model}", f"model.attention={backend}", f"data.packing={packing}", "precision=fp32"]
        results.append(loss_and_gradients(set_up(*overrides)))
    expected, gradients = results[0]
    for loss, others in results[1:]:
        assert loss == pytest.approx(expected, rel=1e-6)
        for name, gradient in gradients.items():
            torch.testing.assert_close(others[name], gradient, rtol=1e-4, atol=1e-5)


def test_a_run_takes_eager_attention_where_its_plan_does(
    formulas: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "toolkit")
    table = {"fp32": {"eager": {8: 4e10}, "sdpa": {8: 1e10}}}
    measured = functools.partial(dataclasses.replace, attention=table)
    monkeypatch.setattr("toolkit.train.plan_guard.once_measured", measured)
    # It does not read where documents begin.
    training = set_up("model.path=falcon", "precision=fp32")
    assert training.trainer.model.config._attn_implementation == training.attention == "eager"
    assert "measured 4.00 times as fast as sdpa on this CPU" in caplog.text


OWN = """
import torch
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb, repeat_kv


class Attention(LlamaAttention):
    def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (
            each(hidden_states).view(shape).transpose(1, 2) for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        key, value = (repeat_kv(each, self.num_key_value_groups) for each in (key, value))
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attention_mask, is_causal=attention_mask is None
        )
        return self.o_proj(out.transpose(1, 2).flatten(2)), None


class Stock(LlamaForCausalLM):
    pass


class Masked(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        for number, layer in enumerate(self.model.layers):
            layer.self_attn = Attention(config, number)


class Bare(Masked):
    _supports_sdpa = False
"""


@pytest.mark.parametrize(
    ("name", "runs", "generates"),
    [("Stock", "torch_varlen", "sdpa"), ("Masked", "sdpa", "sdpa"), ("Bare", "eager", "eager")],
)
@pytest.mark.parametrize("packing", ["false", "true"])
def test_auto_takes_what_a_models_own_code_computes_right(
    name: str, runs: str, generates: str, packing: str, place: Path
) -> None:
    """Not `torch_varlen` and `sdpa` by its config, which the run or Transformers then refuses."""
    folder = Path(shutil.copytree(place / "llama", place / name, dirs_exist_ok=True))
    (folder / "modeling_own.py").write_text(OWN)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": f"modeling_own.{name}"}
    (folder / "config.json").write_text(json.dumps(config))
    overrides = ["precision=fp32", f"data.packing={packing}"]
    expected, _ = loss_and_gradients(set_up("model.path=llama", "model.attention=eager", *overrides))

    training = set_up(f"model.path={name}", "model.trust_remote_code=true", *overrides)
    if packing == "true" or training.attention in backends.VARLEN:
        check_isolation(training)

    assert training.trainer.model.config._attn_implementation == training.attention == runs
    assert loss_and_gradients(training)[0] == pytest.approx(expected, rel=1e-6)
    assert load_base(training.source).config._attn_implementation == generates


def test_capped_logits_are_never_dropped_in_silence() -> None:
    for backend in ("sdpa", "torch_varlen"):
        with pytest.raises(UserError, match="eager"):
            backends.resolve(backend, GEMMA2, "bfloat16", attention_kernels.available())
    assert backends.resolve("auto", GEMMA2, "float32", attention_kernels.available()) == "eager"
    training = set_up("model.path=gemma", "evaluation.num_prompts=1")
    assert training.trainer.model.config._attn_implementation == "eager"
    assert backends.with_mask(GEMMA2) == "eager"


def test_auto_leaves_what_a_teacher_cannot_attend_by() -> None:
    """Of a GPU's backends; and where no single one serves both, it says why."""
    there = backends.on_device("cuda", "9.0", "bfloat16")
    capped, in_fp32 = (
        backends.unfit_to_teach(config, dtype, "cuda") for config, dtype in ((GEMMA2, "bfloat16"), (LLAMA, "float32"))
    )
    assert backends.resolve("auto", LLAMA, "bfloat16", there) == "torch_varlen"
    assert backends.resolve("auto", LLAMA, "bfloat16", there, teacher=capped) == "eager"
    assert backends.resolve("auto", LLAMA, "bfloat16", there, teacher=in_fp32) == "sdpa"
    assert not backends.unfit_to_teach(LLAMA, "float32", "cpu")
    dropping = {**LLAMA, "attention_dropout": 0.1}
    assert backends.unfit("torch_varlen", dropping, "bfloat16")
    assert not backends.unfit_to_teach(dropping, "bfloat16", "cuda"), "a teacher drops nothing"
    with_alibi = {"model_type": "falcon", "alibi": True, "hidden_size": 64, "num_attention_heads": 2}
    with pytest.raises(UserError, match=r"teacher cannot attend.*sdpa: .*caps its attention logits"):
        backends.resolve("auto", with_alibi, "bfloat16", {"eager": "ok", "sdpa": "ok"}, teacher=capped)


def test_auto_picks_what_runs_here() -> None:
    expected = "torch_varlen" if attention_kernels.available()["torch_varlen"] == "ok" else "sdpa"
    assert backends.resolve("auto", LLAMA, "bfloat16", attention_kernels.available()) == expected
    in_fp32 = attention_kernels.available("float32")
    for config in (LLAMA, {}):
        expected = "torch_varlen" if device.kind() == "cpu" else "sdpa"
        assert backends.resolve("auto", config, "float32", in_fp32) == expected


@pytest.mark.parametrize("backend", ATTENTION_BACKENDS)
def test_every_backend_is_taken_or_refused_with_what_can_run(backend: str) -> None:
    reason = "ok" if backend == "auto" else attention_kernels.available()[backend]
    if reason == "ok":
        assert backends.resolve(backend, LLAMA, "bfloat16", attention_kernels.available()) in backends.IMPLEMENTATIONS
        return
    with pytest.raises(UserError) as caught:
        backends.resolve(backend, LLAMA, "bfloat16", attention_kernels.available())
    assert reason in str(caught.value) and "sdpa" in str(caught.value)


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({**LLAMA, "head_dim": 512}, "512"),
        ({**LLAMA, "attention_dropout": 0.1}, "drops"),
        (model_configs.bundled()["openai-community/gpt2-xl"].config, "drops"),
        ({"model_type": "gpt_oss"}, "sinks"),
        ({"is_encoder_decoder": True, "hidden_size": 64, "num_attention_heads": 2}, "encoder-decoder"),
        (model_configs.bundled()["facebook/blenderbot-400M-distill"].config, "encoder-decoder"),
        ({"text_config": GEMMA2}, "caps"),
        ({"model_type": "of_tomorrow", "layer_types": ["full_attention", "linear_attention"]}, "do not end at"),
    ],
)
def test_models_that_the_variable_length_kernel_would_get_wrong(config: dict[str, Any], word: str) -> None:
    assert word in backends.unfit("torch_varlen", config, "bfloat16")


@pytest.mark.parametrize("name", ["flash_attention_3", "flash_attention_4"])
def test_newer_flash_attention_is_refused_for_what_it_does_not_do(name: str) -> None:
    """It takes no rate of dropout, and gives sinks no gradient."""
    assert "drops" in backends.unfit(name, {**LLAMA, "attention_dropout": 0.1}, "bfloat16")
    assert "sinks" in backends.unfit(name, {"model_type": "gpt_oss"}, "bfloat16")
    assert not backends.unfit("flash_attention_2", {**LLAMA, "attention_dropout": 0.1}, "bfloat16")


@pytest.mark.parametrize("config", [LLAMA, GEMMA2])
def test_processes_share_rows_by_whichever_kernel_can(config: dict[str, Any]) -> None:
    there = {**backends.on_device("cuda", "9.0", "bfloat16"), "flash_attention_3": "ok"}
    taken = backends.resolve("auto", config, "bfloat16", there, shares_by="parallel.context")
    assert taken == ("torch_varlen" if config is LLAMA else "flash_attention_3")
    with pytest.raises(UserError, match=r"parallel\.context needs attention that takes the boundaries"):
        backends.resolve("auto", GEMMA2, "bfloat16", {**there, "flash_attention_3": "no"}, shares_by="parallel.context")


def test_a_run_tells_its_plan_of_the_package_that_shares_rows() -> None:
    """What is installed is not known to others, which say so."""
    recipe = load_checked("small", ["model.path=gemma", "parallel.context=2", "precision=bf16"]).recipe
    asked = (GEMMA2, "bfloat16", "cuda", "9.0", "parallel.context")
    there = {**backends.on_device("cuda", "9.0", "bfloat16"), "flash_attention_3": "ok"}
    taken, told = own_attention.resolve(ModelSource.open(recipe), "bfloat16", there)
    assert told and taken == "flash_attention_3" == backends.planned(taken, *asked)
    with pytest.raises(UserError) as refused:
        backends.planned("auto", *asked)
    assert "installed there of flash_attention_2, flash_attention_3" in refused.value.change
    with pytest.raises(UserError) as refused:
        backends.planned("auto", GEMMA2, "bfloat16", "cpu", None, "parallel.context")
    assert refused.value.change == "remove parallel.context"
    llama = load_checked("small", ["parallel.context=2", "precision=bf16"]).recipe
    assert own_attention.resolve(ModelSource.open(llama), "bfloat16", there) == ("torch_varlen", False)


@pytest.mark.parametrize("alibi", [True, False])
def test_eager_attention_is_refused_where_it_adds_alibi_twice(alibi: bool) -> None:
    """Of a row of one token, whose ALiBi is zero, and of a longer one."""
    from transformers import AutoModelForCausalLM, FalconConfig

    sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = FalconConfig(**sizes, alibi=alibi, initializer_range=0.3)
    rows = [torch.arange(length)[None] for length in (1, 24)]
    logits = []
    for name in ("eager", "sdpa"):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=name).eval()
        with torch.no_grad():
            logits.append([model(input_ids=row, use_cache=False).logits for row in rows])
    short, long = (torch.allclose(*each, atol=1e-5) for each in zip(*logits, strict=True))
    assert short and long is not alibi
    assert bool(backends.unfit("eager", config.to_dict(), "float32")) is alibi
    assert not backends.unfit("sdpa", config.to_dict(), "float32")


def test_backends_that_transformers_lacks_are_known_without_it() -> None:
    import transformers
    from transformers.models.auto import modeling_auto

    decoders = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    others = modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES

    def kind(names: Any) -> Any:
        return getattr(transformers, names if isinstance(names, str) else names[0])

    encoders = {
        **modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        **modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    }
    every = (decoders, others, encoders)
    no_sdpa = {name for each in every for name in each if not kind(each[name])._supports_sdpa}
    own = {name for name in decoders if not kind(decoders[name])._supports_attention_backend}
    flex = {name for name in no_sdpa & decoders.keys() if kind(decoders[name])._supports_flex_attn}
    sources = {name: inspect.getsource(inspect.getmodule(kind(decoders[name]))) for name in no_sdpa & decoders.keys()}
    sinks = {name for name, source in sources.items() if "s_aux=" in source}
    assert flex == backends._FLEX_INSTEAD
    assert sinks == {name for name in decoders if "sinks" in backends.unfit("torch_varlen", {"model_type": name}, "")}
    assert {
        name for name in [*decoders, *others, *encoders] if backends.unfit("sdpa", {"model_type": name}, "float32")
    } == no_sdpa
    assert {
        name for name in decoders if "begin" in backends.unfit("torch_varlen", {"model_type": name}, "bfloat16")
    } == (own - sinks)
    bloom = {"model_type": "bloom", "hidden_size": 64, "n_head": 4}
    assert (
        backends.planned("auto", bloom, "bfloat16", "cuda", "9.0")
        == backends.resolve("auto", bloom, "bfloat16", attention_kernels.available())
        == "eager"
    )


def reference(
    query: Any, key: Any, value: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, *,
    scale: float | None = None, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """`varlen_attn` as its documentation defines it, document by document; the real kernel needs a GPU."""
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert type(max_q) is int and type(max_k) is int, "a tensor here would synchronise the device"
    assert enable_gqa or query.shape[1] == key.shape[1]
    lengths = (cu_q[1:] - cu_q[:-1]).tolist()
    assert max(lengths) == max_q == max_k and sum(lengths) == len(query)
    left, right = window_size
    out = torch.empty_like(query)
    for start, length in zip(cu_q.tolist(), lengths, strict=False):
        part = slice(start, start + length)
        q, k, v = (tensor[part].transpose(0, 1) for tensor in (query, key, value))
        k, v = (tensor.repeat_interleave(len(q) // len(tensor), dim=0) for tensor in (k, v))
        ahead = torch.arange(length)[None, :] - torch.arange(length)[:, None]
        allowed = (ahead <= right if right >= 0 else ahead == ahead) & (-ahead <= left if left >= 0 else ahead == ahead)
        scores = (q @ k.transpose(1, 2)) * (scale or q.shape[-1] ** -0.5)
        out[part] = (scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ v).transpose(0, 1)
    return out


def documents_stay_alone(model: Any) -> bool:
    """Whether an architecture computes documents given by their boundaries as its own eager attention does one by one,
    also where what two of them begin with stands once.

    They are longer than the windows of tiny models, and so is a row.
    """
    ids, lengths = [5 + 7 * n % 100 for n in range(100)], [45, 3, 52]
    ids[48:78] = ids[:30]
    row = {"input_ids": ids, "labels": [-100] * 100, "seq_lengths": lengths}
    batch, once = (
        OutputHead.plain(None, Collator(0, "flat", shares=shares)([row]))  # type: ignore[arg-type]
        for shares in (False, True)
    )
    with torch.no_grad():
        model.set_attn_implementation("eager")
        one_by_one = [model(input_ids=torch.tensor([part]), use_cache=False).logits[0] for part in parts(ids, lengths)]
        model.set_attn_implementation("torch_varlen")
        try:
            found = model(**batch, use_cache=False).logits[0]
            shared = model(**once, use_cache=False).logits[0]
        except (TypeError, ValueError):
            return False
    expected = torch.cat(one_by_one)
    beginning, *documents = once["key_places"].tensor_split(once["cu_seq_lens_k"][1:-1].long())
    assert len(beginning) == 30 and list(map(len, documents)) == lengths
    close = 1e-4 * expected.abs().max().clamp(min=1)
    return all(bool((each - expected).abs().max() <= close) for each in (found, shared[torch.cat(documents)]))


def parts(ids: list[int], lengths: list[int]) -> Iterator[list[int]]:
    for begin, end in itertools.pairwise(itertools.accumulate(lengths, initial=0)):
        yield ids[begin:end]


@pytest.mark.parametrize("kind", sorted(set(models_doc.CAUSAL) - backends._NO_BOUNDARIES))
def test_every_architecture_that_gets_boundaries_keeps_documents_apart(kind: str) -> None:
    attention_kernels.register()
    listed = kind in backends._OTHER_LAYERS | backends._READS_MASKS | backends.OTHER_POSITIONS
    try:
        config = models_doc.stated(kind, "sft")
        for key in backends._ATTENTION_DROPOUT:
            if getattr(config, key, None):
                setattr(config, key, 0.0)
        reason = backends.unfit("torch_varlen", config.to_dict(), "float32")
        model = tiny_copy(config, "sft") if listed or not reason else None
    except Exception as error:  # A model's own code may raise anything for sizes that do not fit together.
        pytest.skip(f"not built: {error}")
    if model is None:
        pytest.skip(reason)
    assert documents_stay_alone(model) is not listed


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's kernel as it is called on a GPU, with the reference in its place."""
    monkeypatch.setattr(varlen, "_on_cpu", varlen._on_gpu)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", reference)


@pytest.mark.parametrize("where", ["cpu", "gpu"])
@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_variable_length_attention_equals_masked_attention_on_packed_documents(
    model: str, where: str, request: pytest.FixtureRequest
) -> None:
    """Grouped queries (both), sliding windows shorter than the documents and a scale of its own (Gemma 3)."""
    if where == "gpu":
        request.getfixturevalue("as_on_gpu")
    recipe = load_checked("small", [f"model.path={model}", "data.packing=true"]).recipe
    row = {"input_ids": [7 + n % 90 for n in range(60)], "labels": [-100] * 60, "seq_lengths": [25, 3, 32]}
    masked = ModelSource.open(recipe).load(dtypes(recipe), "sdpa")(**Collator(0, "packed")([row])).logits
    flat = ModelSource.open(recipe).load(dtypes(recipe), "torch_varlen")(**Collator(0, "flat")([row])).logits
    assert flat.shape == masked.shape
    torch.testing.assert_close(flat, masked, rtol=1e-4, atol=1e-5)


FLASH_REPOSITORY = "kernels-community/flash-attn2"


def hub_kernel(*, cached: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build of FlashAttention as `kernels` loads it, that computes on a CPU, in the hub's cache or not."""
    from transformers import modeling_flash_attention_utils as flash
    from transformers.integrations import hub_kernels

    def varlen(
        q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
        dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
    ) -> Any:  # fmt: skip
        assert causal and not dropout_p and softmax_scale
        heads = (each.transpose(0, 1) for each in (q, k, v))
        return document_attention(*heads, cu_seqlens_q, cu_seqlens_k, softmax_scale, max(0, window_size[0] + 1))

    def get_kernel(name: str, revision: str | None, version: int, allow_all_kernels: bool) -> Any:
        assert huggingface_hub.constants.HF_HUB_OFFLINE, "the hub is asked"
        if (name, cached) != (FLASH_REPOSITORY, True):
            raise ValueError(f"'{name}' is not available in the local cache")
        return SimpleNamespace(flash_attn_func=varlen, flash_attn_varlen_func=varlen)

    for place in (transformers.utils, hub_kernels):
        monkeypatch.setattr(place, "is_kernels_available", lambda: True)
    monkeypatch.setattr(hub_kernels, "get_kernel", get_kernel)
    for name in ("_loaded_implementation", "_flash_fn", "_flash_varlen_fn", "_process_flash_kwargs_fn"):
        monkeypatch.setattr(flash, name, None)


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_a_build_of_flash_attention_in_the_hubs_cache_is_taken(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_kernel(cached=True, monkeypatch=monkeypatch)
    recipe = load_checked("small", [f"model.path={model}", "data.packing=true"]).recipe
    row = {"input_ids": [7 + n % 90 for n in range(60)], "labels": [-100] * 60, "seq_lengths": [25, 3, 32]}
    masked = ModelSource.open(recipe).load(dtypes(recipe), "sdpa")(**Collator(0, "packed")([row])).logits
    flash = ModelSource.open(recipe).load(dtypes(recipe), "flash_attention_2")
    assert flash.config._attn_implementation == attention_kernels.implementation("flash_attention_2")
    assert flash.config._attn_implementation == FLASH_REPOSITORY
    batch = Collator(0, "flat")([row])
    torch.testing.assert_close(flash(**batch).logits, masked, rtol=1e-4, atol=1e-5)
    # Prompts are padded while it answers, and then it goes on as before.
    with reading_masks(flash):
        assert flash.config._attn_implementation == "sdpa"
    torch.testing.assert_close(flash(**batch).logits, masked, rtol=1e-4, atol=1e-5)
    assert attention_kernels.hub_build("flash_attention_3") == ""


def test_a_build_of_flash_attention_is_not_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    hub_kernel(cached=False, monkeypatch=monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(device, "kind", lambda: "cuda")
    monkeypatch.setattr(device, "capability", lambda: "9.0")
    before = huggingface_hub.constants.HF_HUB_OFFLINE
    assert "hub's cache" in attention_kernels.available()["flash_attention_2"]
    assert before == huggingface_hub.constants.HF_HUB_OFFLINE
    hub_kernel(cached=True, monkeypatch=monkeypatch)
    assert attention_kernels.available()["flash_attention_2"] == "ok"


@pytest.mark.usefixtures("as_on_gpu")
def test_variable_length_attention_runs_with_torch_2_11(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel takes heads that share keys and values, but knows no `enable_gqa`."""

    def kernel(
        query: Any, key: Any, value: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, *,
        scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
    ) -> Any:  # fmt: skip
        found = (query, key, value, cu_q, cu_k, max_q, max_k)
        return reference(*found, scale=scale, window_size=window_size, enable_gqa=True)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cu130"))
    query, key = torch.randn(1, 4, 10, 8), torch.randn(1, 2, 10, 8)
    boundaries = torch.tensor([0, 4, 10], dtype=torch.int32)
    out, _ = attention_kernels.varlen_attention(None, query, key, key, None, cu_seq_lens_q=boundaries, max_length_q=6)
    assert out.shape == (1, 10, 4, 8)


@pytest.mark.usefixtures("as_on_gpu")
def test_variable_length_kernel_gets_16_bits_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3 normalises queries and keys with fp32 masters, which leaves them in fp32 under autocast."""
    seen = []

    def kernel(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append({query.dtype, key.dtype, value.dtype})
        return reference(query, key, value, *args, **kwargs)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    recipe = load_checked("small", ["model.path=qwen3", "precision=bf16"]).recipe
    model = ModelSource.open(recipe).load(dtypes(recipe), "torch_varlen")
    row = {"input_ids": list(range(7, 17)), "labels": [-100] * 10, "seq_lengths": [4, 6]}
    with torch.autocast("cpu", torch.bfloat16):
        model(**Collator(0, "flat")([row]))
    assert seen and all(dtypes == {torch.bfloat16} for dtypes in seen)


class Count(TorchDispatchMode):
    """How often each operation ran."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.parametrize(("mode", "times"), [("none", 1), ("selective", 1), ("full", 2)])
def test_selective_checkpointing_keeps_what_documents_attended_to(mode: str, times: int) -> None:
    settings = ["model.attention=torch_varlen", f"activation_checkpointing={mode}", "max_steps=1"]
    training = set_up("model.path=llama", *settings)
    trainer, count = training.trainer, Count()
    step = trainer.training_step

    def counted(*args: Any, **kwargs: Any) -> Any:
        with count:
            return step(*args, **kwargs)

    trainer.training_step = counted
    trainer.train()
    backward = count.seen[torch.ops.toolkit.document_attention_backward.default]
    assert backward > 0 and count.seen[torch.ops.toolkit.document_attention.default] == times * backward


@torch.library.custom_op("tests::flash_attn_forward", mutates_args=())
def drawing_attention(query: torch.Tensor, dropout_p: float) -> torch.Tensor:
    """Draws from the generator where it drops out, as fused kernels on a GPU do."""
    return query * (torch.rand_like(query) >= dropout_p) if dropout_p else query.clone()


drawing_attention.register_autograd(lambda ctx, gradient: (gradient, None))


@pytest.mark.parametrize(("drops", "times"), [(0.0, 1), (0.1, 2)])
def test_selective_checkpointing_recomputes_attention_with_dropout(drops: float, times: int) -> None:
    """What drops out behind a kernel that is kept would drop other elements in the backward pass."""
    chosen: dict[str, Any] = {}
    model = SimpleNamespace(gradient_checkpointing_enable=lambda **kwargs: chosen.update(*kwargs.values()))
    attention_kernels.keep_attention(model)
    model.gradient_checkpointing_enable({"selective": True})
    masks, count = [], Count()

    def layer(hidden: torch.Tensor) -> torch.Tensor:
        attended = drawing_attention(hidden, drops)
        dropped = torch.nn.functional.dropout(hidden, 0.5)
        masks.append(dropped != 0)
        return attended + dropped.exp()

    with count:
        hidden = torch.ones(8, 64, requires_grad=True)
        torch.utils.checkpoint.checkpoint(layer, hidden, **chosen).sum().backward()
    forward, again = masks
    assert torch.equal(forward, again) and count.seen[torch.ops.tests.flash_attn_forward.default] == times


def test_variable_length_attention_refuses_what_it_cannot_do() -> None:
    tensor = torch.zeros(1, 2, 4, 8)
    padded, cached = (tensor, tensor, torch.tensor([[0, 1, 1, 1]])), (torch.cat([tensor, tensor], 2), tensor, None)
    for key, value, mask in (padded, cached):
        with pytest.raises(ValueError, match="cu_seq_lens"):
            attention_kernels.varlen_attention(None, tensor, key, value, mask)
    boundaries = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match="dropout"):
        attention_kernels.varlen_attention(
            None, tensor, tensor, tensor, None, dropout=0.1, cu_seq_lens_q=boundaries, max_length_q=4
        )


@pytest.mark.parametrize("where", ["cpu", "gpu"])
def test_rows_of_a_plain_call_are_documents(where: str, request: pytest.FixtureRequest) -> None:
    if where == "gpu":
        request.getfixturevalue("as_on_gpu")
    recipe = load_checked("small", ["model.path=gemma3"]).recipe
    ids = torch.arange(7, 67).view(2, 30)
    masked, by_rows = (
        ModelSource.open(recipe).load(dtypes(recipe), each)(input_ids=ids) for each in ("sdpa", "torch_varlen")
    )
    torch.testing.assert_close(by_rows.logits, masked.logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("capability", "size", "small"),
    [
        *((capability, 256, True) for capability in ("8.6", "8.9", "12.0", "12.1")),
        *((capability, 256, False) for capability in ("8.0", "9.0", "10.0", None)),
        ("8.9", 128, False),
    ],
)
def test_blocks_of_flex_attention_fit_into_the_shared_memory_of_the_card(
    capability: str | None, size: int, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 2's heads are 256 wide; with torch's own blocks nothing compiles on an RTX 3090 or 4090."""
    from transformers import AttentionInterface
    from transformers.integrations import flex_attention

    monkeypatch.setattr(AttentionInterface, "_global_mapping", dict(AttentionInterface._global_mapping))
    monkeypatch.setattr(device, "capability", lambda: capability)
    recipe = load_checked("small", ["model.path=gemma"]).recipe
    ModelSource.open(recipe).load(dtypes(recipe), "flex")
    seen, tensor, module = {}, torch.randn(1, 2, 128, size), torch.nn.Module()
    compiled = lambda query, *_, **kwargs: seen.update(kwargs) or query  # noqa: E731
    monkeypatch.setattr(flex_attention, "compile_friendly_flex_attention", compiled)

    AttentionInterface()["flex_attention"](module, tensor, tensor, tensor, None, scaling=0.1, softcap=50.0)

    options = seen["kernel_options"] or {}
    assert bool(options) is small
    forward, backward = ({key[4:]: options[key] for key in options if key.startswith(way)} for way in ("fwd_", "bwd_"))
    # What a block holds of queries, of keys and values for each stage but the last, and of scores.
    if small:
        width, (rows, columns) = 2 * size, (forward["BLOCK_M"], forward["BLOCK_N"])
        held = width * (rows + (forward["num_stages"] - 1) * 2 * columns) + 2 * rows * columns
        assert held < 99 * 1024 and {backward[f"BLOCK_{each}"] for each in ("M1", "N1", "M2", "N2")} == {32}
        assert backends.FLEX_BLOCK % columns == backends.FLEX_BLOCK % rows == 0


@pytest.mark.parametrize(
    ("capability", "dtype", "autocast", "shares"),
    [
        ("7.5", torch.float16, False, False),
        ("8.0", torch.float16, False, True),
        ("9.0", torch.float32, False, False),
        ("9.0", torch.float32, True, True),
    ],
)
def test_shared_heads_are_repeated_where_only_the_kernel_that_holds_all_scores_would_take_them(
    capability: str, dtype: torch.dtype, autocast: bool, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdpa_attention, "use_gqa_in_sdpa", sdpa_attention.use_gqa_in_sdpa)
    attention_kernels.repeat_shared_heads((7, 0))
    attention_kernels.repeat_shared_heads(capability)
    seen = []
    fused = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *args, **kwargs: seen.append(kwargs.get("enable_gqa", False)) or fused(*args, **kwargs),
    )
    module = torch.nn.Module()
    module.num_key_value_groups = 2  # type: ignore[assignment]
    query, key = torch.randn(1, 4, 8, 16, dtype=dtype), torch.randn(1, 2, 8, 16, dtype=dtype)

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        sdpa_attention.sdpa_attention_forward(module, query, key, key, None)

    assert seen == [shares]


def test_answers_do_not_depend_on_the_backend_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model trained with document boundaries generates with masks, and goes back to boundaries."""
    from toolkit.train.evaluation.evaluate import answer

    recipe = load_checked("small", []).recipe
    tokenizer = ModelSource.open(recipe).tokenizer()
    prompts = [[5, 6, 7, 8, 9, 10], [11, 12]]
    answers = []
    for backend in ("sdpa", "torch_varlen"):
        model = ModelSource.open(recipe).load(dtypes(recipe), backend)
        answers.append(answer(model, tokenizer, prompts, 6, frozenset()))
        assert model.config._attn_implementation == backends.IMPLEMENTATIONS[backend]
    assert answers[0] == answers[1]


def test_the_size_of_heads_that_a_config_leaves_to_its_class_is_not_guessed() -> None:
    """As Gemma 3 4B is published."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    assert not backends.unfit("torch_varlen", {"model_type": "gemma3", "text_config": text}, "bfloat16")
