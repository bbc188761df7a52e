"""What stands in for a trace where a model's code cannot be traced: the usual transformer, from its config alone."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.common import UserError, in_a_line
from toolkit.planner.plan import UnknownSize
from toolkit.planner.trace.setting import Setting
from toolkit.planner.trace.types import NOTHING, Amount, Moment, Pass, Tensors, Trace
from toolkit.recipe import model_configs
from toolkit.recipe.heads import EMBEDDING, HEADED

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def estimated(setting: Setting, note: str) -> Trace:
    """A transformer with gated feed-forward layers and fused attention; within about a third of most real ones.

    An encoder's layers count beside the decoder's, each of which attends to the encoder's output as well.

    What a layer keeps for the backward pass, per token: for each of two norms its input and its normalized form in
    fp32 and its output (10 bytes per element of the hidden size), queries, keys, values and their rotated forms, the
    attention's output, four tensors of the feed-forward width, and two residual sums. The terms are those of
    Korthikanti et al. 2022 (https://arxiv.org/abs/2205.05198), equation 2, for RMS norms and a gated feed-forward.

    Args:
        note: Why there is no trace.

    Raises:
        UnknownSize: If the config does not say how large the model is.
    """
    try:
        return _estimated(setting, note)
    except UserError:
        raise
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError) as error:
        raise UnknownSize(
            f"this model cannot be planned: its config holds what cannot be ({in_a_line(error)}), and its code could "
            f"not be traced: {textwrap.shorten(note, 200, placeholder=' …')}",
            "correct its config.json, or set model.path to another model",
        ) from error


def _estimated(setting: Setting, note: str) -> Trace:
    text = dict(model_configs.text_config(setting.config))
    hidden, depth, vocab = (stated(text, *keys) or 0 for keys in (_HIDDEN, _LAYERS, ("vocab_size",)))
    crossing = depth if model_configs.is_encoder_decoder(setting.config) else 0
    layers = crossing + (stated(text, *_ENCODER) or depth) if crossing else depth
    if not (hidden and layers and vocab):
        raise UnknownSize(
            f"this model cannot be planned: its config states no hidden size, layers or vocabulary, and its code could "
            f"not be traced: {textwrap.shorten(note, 200, placeholder=' …')}",
            "set model.path to a language model that Transformers can build",
        )
    inner = stated(text, *_INNER) or 4 * hidden
    heads = stated(text, *_HEADS) or max(1, hidden // 64)
    head_dim = stated(text, "head_dim", "d_kv") or hidden // heads
    kv_heads = stated(text, "num_key_value_heads") or heads
    experts, active = model_configs.experts(setting.config)
    inner = int(text.get("moe_intermediate_size") or inner) if experts > 1 else inner

    wide, narrow = heads * head_dim, kv_heads * head_dim
    attentions = layers + crossing
    linear = [
        ((wide, hidden), attentions), ((narrow, hidden), 2 * attentions), ((hidden, wide), attentions),
        ((inner, hidden), 2 * experts * layers), ((hidden, inner), experts * layers),
    ]  # fmt: skip
    tensors = _tensors(setting, linear, hidden, layers, vocab)
    size = _BYTES[setting.autocast or setting.local]
    often = attentions / layers
    kept = 20 * hidden + size * (often * (4 * wide + 2 * narrow) + 4 * inner * active + 2 * hidden)
    between = size * hidden
    recomputes = setting.checkpointing in ("full", "selective", "offload")
    stays = between if recomputes and setting.checkpointing != "offload" else 0 if recomputes else kept
    activations = Amount((0.0, float(kept if recomputes else between), 0.0), (0.0, float(stays), 0.0))
    headed = setting.objective in HEADED
    scored = (1 if setting.objective == EMBEDDING else 2) if headed else vocab
    logits = Amount((0.0, float(12 * (scored if headed else hidden)), 0.0))
    matrices = often * (wide + narrow) * hidden * 2 + 3 * inner * hidden * active
    times = 2.0 if setting.method["name"] == "full" else 1.0
    again = 1.0 if recomputes else 0.0
    matmul, attention, moved = 2.0 * matrices, often * 4.0 * wide, 6.0 * kept

    def work(passes: float) -> Pass:
        return Pass(
            matmul=Amount((0.0, passes * 2.0 * scored * hidden), (0.0, passes * matmul)),
            attention=Amount((), (0.0, 0.0, passes * attention)),
            moved=Amount((), (0.0, passes * moved)),
            launches=Amount((passes * 50.0,), (passes * 50.0,)),
        )

    trained = sum(each.numel * each.count * _BYTES[setting.local] for each in tensors if each.trained)
    gradients = Amount((float(trained), 0.0, 0.0))
    return Trace(
        layers=layers,
        tensors=tensors,
        moments=(
            Moment("forward", "head", False, activations, NOTHING, logits, NOTHING),
            Moment("forward", "head", True, activations, NOTHING, logits, NOTHING),
            Moment("backward", "last_layer", False, activations, NOTHING, logits, NOTHING),
            Moment("backward", "first_layer", False, Amount((0.0, float(kept), 0.0)), NOTHING, NOTHING, gradients),
            Moment("backward", "last_layer", True, activations, NOTHING, logits, NOTHING),
            Moment("evaluation", "last_layer", False, Amount((0.0, float(kept), 0.0)), NOTHING, logits, NOTHING),
        ),
        passes={
            "forward": work(1),
            "backward": work(times + again),
            "recompute": work(again),
            "evaluation": work(1),
        },
        boundary=Amount((0.0, float(between), 0.0)),
        buffers=0,
        caches=None,
        origin="formulas",
        note=note,
    )


_HIDDEN = ("hidden_size", "d_model", "n_embd", "dim")
_LAYERS = ("decoder_layers", "num_decoder_layers", "num_hidden_layers", "n_layer", "num_layers", "n_layers")
_ENCODER = ("encoder_layers", "num_layers")
_HEADS = ("decoder_attention_heads", "num_attention_heads", "n_head", "num_heads")
_INNER = ("intermediate_size", "decoder_ffn_dim", "d_ff", "n_inner", "ffn_dim")


def stated(config: Mapping[str, Any], *keys: str) -> int | None:
    """The number of the first of these keys that is set; of a list, which has an entry for each layer, the largest."""
    value = next((config[key] for key in keys if config.get(key)), None)
    return None if value is None else int(max(value) if isinstance(value, list) else value)


def _tensors(
    setting: Setting, linear: Sequence[tuple[tuple[int, int], int]], hidden: int, layers: int, vocab: int
) -> tuple[Tensors, ...]:
    full = setting.method["name"] == "full"
    stored: Any = setting.method.get("quantization", "none")
    kind: Any = "base" if stored == "none" else stored
    tensors = [Tensors("embeddings", (vocab, hidden), 1, full, "base")]
    if setting.objective == EMBEDDING:
        pass
    elif setting.objective in HEADED:
        tensors.append(Tensors("head", (2, hidden), 1, True, "base"))
    elif not setting.config.get("tie_word_embeddings", True):
        tensors.append(Tensors("head", (vocab, hidden), 1, full, "base"))
    tensors += [Tensors("layer", shape, count, full, kind) for shape, count in linear]
    tensors += [Tensors("layer", (hidden,), 2 * layers, full, "base"), Tensors("other", (hidden,), 1, full, "base")]
    if not full:
        rank = int(setting.method["r"])
        for (rows, columns), count in linear:
            tensors += [
                Tensors("layer", (rank, columns), count, True, "adapter"),
                Tensors("layer", (rows, rank), count, True, "adapter"),
            ]
    return tuple(tensors)
