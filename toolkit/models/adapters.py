"""What of a model is trained, and how its weights are kept: freezing, adapters, quantization, types."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.utils.quantization_config import QuantizationConfigMixin

from toolkit.common import UserError, first_line
from toolkit.distributed.engines import Dtypes
from toolkit.models.adapted_layers import check_adapted, linear_in, linear_modules, unadaptable, wrapped
from toolkit.models.heads import head_modules
from toolkit.models.lora_products import add_by_product
from toolkit.models.quantization.stored import FORMS
from toolkit.models.quantization.stored_loading import StoredConfig
from toolkit.models.reach import EVERYWHERE, Reach
from toolkit.models.tiny import by_itself
from toolkit.models.weight_reads import kept_whole, reads_of
from toolkit.recipe import Recipe
from toolkit.recipe.heads import EMBEDDING, OF_TEXTS
from toolkit.recipe.module_names import matches, unmatched

_TASKS = {
    "seq2seq": "SEQ_2_SEQ_LM",
    "token_classification": "TOKEN_CLS",
    EMBEDDING: "FEATURE_EXTRACTION",
    **dict.fromkeys(OF_TEXTS, "SEQ_CLS"),
}
"""PEFT's name of an objective's task."""


def keep_unpacked(model: torch.nn.Module) -> None:
    """Keeps 4-bit weights as they are stored.

    bitsandbytes 0.50 repacks them for AVX512 at the first forward pass in evaluation mode; the packed form has no
    backward pass and later gradients are silently wrong.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def add_method(
    model: PreTrainedModel, recipe: Recipe, dtypes: Dtypes, whole: bool = True, new_tokens: Sequence[int] = (),
    reach: Reach = EVERYWHERE,
) -> Any:  # fmt: skip
    """Freezes, or adds adapters. Returns the model to train.

    Args:
        new_tokens: Ids of the tokens whose rows are trained beside adapters.
        whole: Whether the model has all its layers, so that each pattern must match.
        reach: Of the loss; what is outside of it stays as it is.

    Raises:
        UserError: If a pattern or module name matches nothing in this model, or cannot be trained.
    """
    method = recipe.method
    modules = [name for name, _ in model.named_modules()]
    for key, what, change in unmatched(method, modules, [name for name, _ in model.named_parameters()]):
        raise UserError(f"{key}: {what}", change)
    if method.name == "full":
        _freeze(model, method.freeze, reach)
        return model
    try:
        model.get_input_embeddings()
    except NotImplementedError as error:
        raise UserError(
            f"method: PEFT asks for embeddings of tokens, which a {model.config.model_type} has none of",
            "set method.name=full",
        ) from error
    from peft import LoraConfig, TaskType
    from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import TrainableTokensWrapper

    TrainableTokensLayer.get_merged_weights = _with_token_rows  # type: ignore[assignment,method-assign]
    begun: Any = method.init_lora_weights
    saved, tied = _modules_to_save(model, method.target_modules, method.modules_to_save)
    heads = head_modules(model) if recipe.headed else []
    # PEFT names these two itself.
    saved = [*saved, *(name for name in heads if name not in ("score", "classifier", *saved))]
    by_layer = method.layers_to_transform and method.target_modules == "all-linear"
    reads = reads_of(model.config, recipe.objective, recipe.model.trust_remote_code)
    others = unadaptable(model, reads) | linear_in(model, heads)
    for name, why in others.items() if isinstance(method.target_modules, list) else ():
        if matches(name, method.target_modules):
            raise UserError(
                f"method.target_modules: no adapter can be added to {name}: {why}",
                f"remove {name.rpartition('.')[2]} from method.target_modules",
            )
    adapter = LoraConfig(
        r=method.r,
        lora_alpha=method.lora_alpha,  # type: ignore[arg-type]
        lora_dropout=method.lora_dropout,
        target_modules=linear_modules(model, others) if by_layer else method.target_modules,
        target_parameters=method.target_parameters or None,
        layers_to_transform=list(method.layers_to_transform) or None,
        rank_pattern=dict(method.rank_pattern),
        alpha_pattern=dict(method.alpha_pattern),
        modules_to_save=saved or None,
        ensure_weight_tying=tied,
        trainable_token_indices=None if tied else _token_rows(model, new_tokens, saved, recipe),
        # For all others, see `adapter_init`.
        init_lora_weights=begun if begun in ("gaussian", "orthogonal") else True,
        use_rslora=method.use_rslora,
        use_dora=method.use_dora,
        task_type=TaskType(_TASKS.get(recipe.objective, "CAUSAL_LM")),
        **recipe.extra.lora,
    )
    try:
        adapted = wrapped(model, adapter, [*others], reach.outside)
    except (ValueError, TypeError, RuntimeError, UserWarning, re.error) as error:
        raise UserError(
            f"method: PEFT cannot add these adapters to this {model.config.model_type}: {first_line(error)}",
            "change method.target_modules, or the key that it names",
        ) from error
    if whole:
        check_adapted(adapted, method)
    base: Any = adapted.get_base_model()
    head = base.get_output_embeddings()
    if isinstance(head, TrainableTokensWrapper):
        head.register_parameter("bias", None)  # TRL's fused head asks for it.
    cast_parameters((each for each in adapted.parameters() if each.requires_grad), dtypes.local)
    if dtypes.autocast:
        # PEFT casts a layer's input up to the adapter's fp32 masters; autocast computes in 16 bits without that copy.
        for module in adapted.modules():
            if isinstance(module, BaseTunerLayer):
                module.cast_input_dtype_enabled = False  # type: ignore[attr-defined]
    if recipe.model.adapter:
        _load_adapter(adapted, recipe.model.adapter, tied)
    add_by_product(adapted)
    return adapted


def _with_token_rows(layer: Any, active_adapters: Iterable[str]) -> torch.Tensor:
    """PEFT's method of layers with rows of new tokens: their weights. Theirs sends the numbers of the rows to the
    device in every pass, for which the host waits."""
    weights, kept = layer.base_layer.weight, layer.__dict__.setdefault("_token_places", {})
    for name in active_adapters:
        key = name, weights.device
        if key not in kept:
            with torch.inference_mode(False):  # Passes that learn read it, too.
                kept[key] = torch.tensor(layer.token_indices[name], device=weights.device)
        weights = weights.index_copy(0, kept[key], layer.trainable_tokens_delta[name].to(weights))
    return weights


def on_whole_base(state: dict[str, torch.Tensor], start: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Trained adapters as adapters for the base as it was: B A - B0 A0 is [B, -B0] [A; A0], of twice the rank."""
    joined = dict(state)
    for name, begun in start.items():
        now = state[name].cpu()
        if ".lora_A." in name:
            joined[name] = torch.cat([now, begun.to(now.dtype)])
        elif ".lora_B." in name:
            joined[name] = torch.cat([now, -begun.to(now.dtype)], 1)
    return joined


def of_twice_the_rank(config: dict[str, Any]) -> dict[str, Any]:
    """PEFT's settings for what `on_whole_base` returns, with the same scale."""
    alpha = 2**0.5 if config["use_rslora"] else 2
    return config | {
        "init_lora_weights": True,
        "r": 2 * config["r"],
        "lora_alpha": alpha * config["lora_alpha"],
        "rank_pattern": {key: 2 * rank for key, rank in config["rank_pattern"].items()},
        "alpha_pattern": {key: alpha * value for key, value in config["alpha_pattern"].items()},
    }


def _load_adapter(adapted: Any, folder: str, tied: bool) -> None:
    """Reads the weights of a saved adapter into one of the same rank and targets, whose embeddings may be tied."""
    from peft import set_peft_model_state_dict
    from peft.utils import load_peft_weights

    try:
        weights = load_peft_weights(folder, device="cpu")
        if tied:
            _require_tied(weights, folder)
        result: Any = set_peft_model_state_dict(adapted, weights)
    except UserError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"model.adapter: {folder} does not fit this model: {first_line(error)}",
            "set model.path to the model that it was trained on",
        ) from error
    trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    # PEFT saves the trained rows of tied embeddings a second time, as the output head's, and embeddings that have got
    # rows for new tokens under the names that they have in memory, too.
    copies = ("trainable_tokens_delta", ".modules_to_save.weight")
    unexpected = [name for name in result.unexpected_keys if not name.endswith(copies)]
    if missing := sorted(trained & set(result.missing_keys)) or unexpected:
        raise UserError(
            f"model.adapter: {folder} and this model differ in {len(missing)} weights, such as {missing[0]}",
            "set model.path to the model that it was trained on",
        )


def _require_tied(weights: dict[str, torch.Tensor], folder: str) -> None:
    """PEFT parts tied embeddings unless it is told not to; of two that differ one would be lost."""
    ends = [each for name, each in weights.items() if name.endswith(("embed_tokens.weight", "lm_head.weight"))]
    if len(ends) != 2 or not torch.equal(*ends):
        raise UserError(
            f"model.adapter: {folder} has trained embeddings apart from the output head, which are one in this model",
            "merge it into its base by PEFT, with tie_word_embeddings=false, and set model.path to the result",
        )


def kept_in_fp32(model: Any, dtype: torch.dtype) -> Callable[[str], bool]:
    """Whether Transformers keeps the tensor of a name in fp32 when it loads a model in this type."""
    patterns = [re.compile(pattern.replace("*", ".*")) for pattern in model._get_dtype_plan(dtype)]
    return lambda name: any(pattern.search(name) for pattern in patterns)


def cast_parameters(parameters: Iterable[torch.nn.Parameter], dtype: str) -> None:
    """Converts parameters only: `Module.to` would also round the frequencies of rotary embeddings."""
    for parameter in parameters:
        parameter.data = parameter.data.to(getattr(torch, dtype))


def cast_buffers(model: Any, dtype: str) -> None:
    """Gives buffers, such as tables of positions, the type that they have in a model that is loaded in this dtype: that
    one, or one of their own, as frequencies of rotary embeddings and what balances experts have."""
    if all(name.endswith("inv_freq") for name, each in model.named_buffers() if each.is_floating_point()):
        return  # What most models have, and need not be built for.
    with by_itself(), torch.device("meta"):
        loaded = type(model)._from_config(model.config, dtype=getattr(torch, dtype))
    kept = kept_in_fp32(model, getattr(torch, dtype))
    types = {name: each.dtype for name, each in loaded.named_buffers() if not kept(name)}
    for name, each in model.named_buffers():
        each.data = each.data.to(types.get(name, each.dtype))


def quantization_config(recipe: Recipe, dtypes: Dtypes, config: Any) -> QuantizationConfigMixin | None:
    """How Transformers stores what is frozen, if in fewer bits.

    Args:
        config: The model's configuration object.
    """
    if recipe.method.quantization == "none":
        return None
    whole = kept_whole(config, recipe.objective, recipe.model.trust_remote_code)
    if recipe.method.quantization in FORMS:
        return StoredConfig(recipe.method.quantization, whole)
    if recipe.method.quantization == "int8":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=whole or None)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=recipe.method.double_quantization,
        bnb_4bit_compute_dtype=getattr(torch, dtypes.compute),
        # FSDP shards numbers of the type it computes in; bytes it would leave whole, others it would convert.
        bnb_4bit_quant_storage=getattr(torch, dtypes.compute) if recipe.strategy.name == "fsdp" else torch.uint8,
        llm_int8_skip_modules=whole or None,
    )


def _freeze(model: torch.nn.Module, patterns: list[str], reach: Reach) -> None:
    for name, parameter in model.named_parameters():
        named = any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
        parameter.requires_grad_(not named and not reach.is_outside(name))
    if patterns and not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError("method.freeze leaves nothing to train", "remove a pattern from method.freeze")


def _modules_to_save(model: PreTrainedModel, targets: str | list[str], saved: list[str]) -> tuple[list[str], bool]:
    """The modules to train in full, and whether the embeddings are among them and tied.

    PEFT keeps tied embeddings tied when they have the names that it knows, of which it wants one.
    """
    weights = [getattr(each, "weight", None) for each in (model.get_input_embeddings(), model.get_output_embeddings())]
    embeddings = [
        name
        for name, module in model.named_modules()
        if any(each is not None and getattr(module, "weight", None) is each for each in weights)
    ]
    tied = weights[0] is weights[1]
    if isinstance(targets, list) and (named := [name for name in embeddings if matches(name, targets)]):
        if not tied and all(model.get_submodule(name).weight is weights[0] for name in named):
            why = "has not been tried here"
        else:
            shared = ", and the input embeddings are the same weight" if tied else ""
            why = f"would be trained or merged wrongly: the loss reads the output head's weight itself{shared}"
        raise UserError(
            f"method.target_modules: an adapter on {' and '.join(named)} {why}",
            "train it in full with method.modules_to_save",
        )
    if not tied or not any(matches(name, saved) for name in embeddings):
        return saved, False
    if [name.rpartition(".")[2] for name in embeddings] != ["embed_tokens", "lm_head"]:
        raise UserError(
            f"method.modules_to_save: {' and '.join(embeddings)} share one weight, and adapters would part them",
            "remove them from method.modules_to_save, or set method.name=full",
        )
    others = [name for name in saved if not any(matches(each, [name]) for each in embeddings)]
    return [*others, "lm_head"], True


def _token_rows(
    model: PreTrainedModel, ids: Sequence[int], saved: list[str], recipe: Recipe
) -> dict[str, list[int]] | None:
    """The rows to train of embeddings and output head, by PEFT's names of them; not of those that are trained whole."""
    if not ids:
        return None
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is not None and getattr(head, "bias", None) is not None:
        raise UserError(
            f"model.new_tokens: the output head of this {model.config.model_type} has a bias, which PEFT leaves out",
            "set method.modules_to_save to embeddings and output head, or method.name=full",
        )
    modules = [embeddings] if head is None or head.weight is embeddings.weight else [embeddings, head]
    names = (name for name, module in model.named_modules() if any(module is each for each in modules))
    rows = {name: list(ids) for name in names if not matches(name, saved)}
    if rows and recipe.strategy.shards_parameters:
        raise UserError(
            f"model.new_tokens: {recipe.strategy.name} divides {' and '.join(rows)}, of which PEFT then cannot train "
            "single rows",
            "set strategy.name=zero2, or add them to method.modules_to_save",
        )
    return rows or None
