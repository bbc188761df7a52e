"""The class of model for an objective, and heads that score texts or words in place of the vocabulary.

Such a head is seldom in the files of the model that training starts from. It is drawn here, each tensor by the seed and
its own name, so that it begins alike on every engine; Transformers draws what is missing in the order, type and process
in which an engine has it load. What is saved has the head, its labels and the padding token in its config, by which
Transformers finds the last token of a text.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.integrations import is_deepspeed_zero3_enabled, is_fsdp_enabled
from transformers.models.auto import modeling_auto

from toolkit.recipe import model_configs
from toolkit.recipe.heads import EMBEDDING, HEADED, OF_TEXTS

_log = logging.getLogger("toolkit.models")
POOLER = "pooler"
"""What encoders call the layer between their last one and the head. Masked language models come without it."""
_UNNAMED = "LABEL_"
"""How Transformers names the labels of a config that names none."""
_CLASSES = {
    "seq2seq": (AutoModelForSeq2SeqLM, "an encoder-decoder"),
    **dict.fromkeys(OF_TEXTS, (AutoModelForSequenceClassification, "a classifier of texts")),
    "token_classification": (AutoModelForTokenClassification, "a classifier of tokens"),
    EMBEDDING: (AutoModel, "a model of texts"),
}
_OTHERS = (AutoModelForCausalLM, "a causal language model")
for _names, _kinds in (
    (modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, model_configs.OF_IMAGES),
    (modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, model_configs.OF_SOUND),
):
    # To Transformers they are no causal language models.
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.update({kind: _names[kind] for kind in sorted(_kinds)})


def auto_class(objective: str) -> Any:
    """Transformers' class that builds a model for an objective of recipes."""
    return _CLASSES.get(objective, _OTHERS)[0]


def pin(config: Any, revision: str | None, objective: str) -> None:
    """Notes in a configuration of which commit the code may run that comes with it; what is saved does not say so.

    The body in that code is made known to Transformers, whose generic heads make theirs without saying that it may run.
    """
    config._commit_hash = revision
    body = (getattr(config, "auto_map", None) or {}).get("AutoModel")
    if body and objective in HEADED and objective != EMBEDDING and type(config) not in AutoModel._model_mapping:
        try:
            AutoModel.register(
                type(config), get_class_from_dynamic_module(body, config.name_or_path, code_revision=revision)
            )
        except Exception as error:  # Code of others raises anything. Heads of its own may do without.
            _log.debug("AutoModel of %s: %s", config.name_or_path, error)


def from_config(objective: str, config: Any, trust_remote_code: bool, **arguments: Any) -> Any:
    """A model for an objective, made from its configuration.

    Code of its own is that of the commit that `pin` has noted, where Transformers would run the newest.

    Args:
        arguments: Others of `from_config`.
    """
    kind, commit = auto_class(objective), getattr(config, "_commit_hash", None)
    if commit and trust_remote_code and kind.__name__ in getattr(config, "auto_map", {}):
        arguments["code_revision"] = commit
    return kind.from_config(config, trust_remote_code=trust_remote_code, **arguments)


def called(objective: str) -> str:
    """What such a model is, in words."""
    return _CLASSES.get(objective, _OTHERS)[1]


def with_labels(config: Any, labels: Sequence[str], pad_token_id: int | None, whole: bool) -> Any:
    """A copy of a configuration whose head has an output for each label.

    Args:
        labels: Names of classes; one for a head that gives a single number.
        pad_token_id: What the tokenizer pads with.
        whole: Whether texts are scored as a whole.
    """
    config = copy.deepcopy(config)
    for each in {id(one): one for one in (config, config.get_text_config())}.values():
        each.id2label, each.label2id = dict(enumerate(labels)), {name: n for n, name in enumerate(labels)}
        each.pad_token_id = pad_token_id
    if whole and len(labels) > 1:
        config.problem_type = "single_label_classification"
    return config


def head_modules(model: Any) -> list[str]:
    """Names of the modules of a head, the pooler among them, that have parameters of their own; none of a model that
    ends with the outputs of its tokens."""
    if model.base_model is model:
        return []
    prefix = model.base_model_prefix
    outside = [name for name, _ in model.named_children() if name != prefix]
    # Encoders without one have None there.
    pooler = getattr(getattr(model, prefix, None), POOLER, None)
    inside = [f"{prefix}.{POOLER}"] if pooler is not None else []
    return [name for name in (*inside, *outside) if any(True for _ in model.get_submodule(name).parameters())]


def belongs_to_head(name: str, heads: Sequence[str]) -> bool:
    """Whether a parameter or module of this name is a part of one of these modules."""
    return any(name == head or name.startswith(f"{head}.") for head in heads)


def begin_head(model: Any, stored: Any, lacking: Sequence[str], seed: int, *, told: bool) -> None:
    """Draws what of a head is not in the model's files, or is there for other labels.

    Args:
        stored: The configuration in the model's files.
        lacking: Names of parameters that the files lack, or have in another size.
        told: Whether the user is told of it.
    """
    names, before = _labels(model.config), _labels(stored)
    heads = head_modules(model)
    # A single output is what its name calls it, whatever that is.
    renamed = names != before and len(names) > 1 and not all(each.startswith(_UNNAMED) for each in before)
    if renamed and not lacking and sorted(names) == sorted(before) and (outputs := _outputs(model, heads, len(names))):
        renamed = False
        _reorder(outputs, [before.index(name) for name in names])
        if told:
            _log.info("the outputs of the model's head, %s, are put in the order %s", _listed(before), _listed(names))
    # The pooler knows nothing of labels.
    drawn = {
        name: parameter
        for name, parameter in model.named_parameters()
        if name in lacking or (renamed and POOLER not in name and belongs_to_head(name, heads))
    }
    if told and renamed and not lacking:
        _log.warning("the model's head tells %s apart, and begins anew for %s", _listed(before), _listed(names))
    elif told and drawn and len(drawn) < sum(belongs_to_head(name, heads) for name, _ in model.named_parameters()):
        _log.info("%d tensors of the head are not in the model's files, and begin at random", len(drawn))
    spread = getattr(model.config.get_text_config(), "initializer_range", None) or 0.02
    with _whole([*drawn.values()]), torch.no_grad():
        for name, parameter in drawn.items():
            if parameter.device.type == "meta":
                if is_fsdp_enabled():  # Another process sends it, to a place of its own.
                    module, _, key = name.rpartition(".")
                    model.get_submodule(module)._parameters[key] = torch.nn.Parameter(
                        torch.zeros_like(parameter, device="cpu")
                    )
                continue
            if parameter.dim() > 1:
                own = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7], "big")
                generator = torch.Generator().manual_seed(own)
                parameter.copy_(spread * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)


def _labels(config: Any) -> list[str]:
    """Names of a head's outputs in their order; `label2id` of a config that was read has that of the alphabet."""
    return [config.id2label[number] for number in sorted(config.id2label)]


def _outputs(model: Any, heads: Sequence[str], number: int) -> list[torch.nn.Parameter]:
    """Weight and bias of the layer that gives a head's outputs: the last one that has so many; none where none has."""
    found: list[torch.nn.Parameter] = []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None) if belongs_to_head(name, heads) else None
        # Under ZeRO-3 a parameter itself is empty.
        if weight is not None and getattr(weight, "ds_shape", weight.shape)[0] == number:
            found = [*module.parameters(recurse=False)]
    return found


def _reorder(parameters: list[torch.nn.Parameter], order: list[int]) -> None:
    """Puts the rows of parameters in another order."""
    with _whole(parameters), torch.no_grad():
        for parameter in parameters:
            if parameter.device.type != "meta":  # Where another process sends it.
                parameter.copy_(parameter[order])


@contextlib.contextmanager
def read_at(head: torch.nn.Module, places: torch.Tensor) -> Iterator[None]:
    """While this context lasts, a decoder's head for texts scores one row (1, tokens) at these places (texts,), and the
    model's logits are (1, texts x outputs): of a row Transformers takes the scores of one token, which here are all."""

    def select(_: Any, inputs: tuple[torch.Tensor]) -> torch.Tensor:
        tokens.append(inputs[0].shape[1])
        return inputs[0][:, places]

    def as_one(_: Any, __: Any, scores: torch.Tensor) -> torch.Tensor:
        return scores.reshape(1, 1, -1).expand(-1, tokens.pop(), -1)

    tokens: list[int] = []
    # Before the hooks of engines, which give up the weight again, and find in this output what is computed back.
    handles = [head.register_forward_pre_hook(select), head.register_forward_hook(as_one, prepend=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def forget_drawn(model: Any) -> None:
    """Of a model whose weights stay in their files, has those of its head stay nowhere that the files lack."""
    for name in head_modules(model):
        for module in model.get_submodule(name).modules():
            hook = getattr(module, "_hf_hook", None)
            if hook is not None:
                hook.original_devices = {}


@contextlib.contextmanager
def _whole(parameters: list[torch.nn.Parameter]) -> Iterator[None]:
    """While this context lasts, each process has all of these parameters."""
    if parameters and is_deepspeed_zero3_enabled():
        import deepspeed

        with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0):
            yield
    else:
        yield


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
