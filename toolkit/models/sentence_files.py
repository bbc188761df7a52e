"""The files by which sentence-transformers knows how a model makes vectors of texts: read of what training starts from,
and written beside what it has made. They are in the form that its versions from 2 on read."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from toolkit.common import UserError, brief
from toolkit.files import write_json
from toolkit.models.losses.embedding import named_poolings
from toolkit.recipe import Recipe, model_configs

_log = logging.getLogger("toolkit.models")

POOLING = "1_Pooling/config.json"
_NAMES = {
    "mean": ("mean", "pooling_mode_mean_tokens"),
    "cls": ("cls", "pooling_mode_cls_token"),
    "last": ("lasttoken", "pooling_mode_lasttoken"),
}
"""Poolings by their newer and their older names."""
_MODULES = (
    ("", "sentence_transformers.models.Transformer"),
    ("1_Pooling", "sentence_transformers.models.Pooling"),
    ("2_Normalize", "sentence_transformers.models.Normalize"),
)


def check_base(recipe: Recipe, find: Callable[[str], Path | None]) -> None:
    """Says what a sentence-transformers model does with texts and vectors beyond what is trained and saved here. For
    runs that begin: what has been trained on such a base is continued, merged and exported as it began.

    Args:
        find: A file of the model by its name, where it has one.

    Raises:
        UserError: Its vectors go through further layers, and the recipe does not say how they are made instead.
    """
    settings, known = recipe.embedding, {kind.rpartition(".")[2] for _, kind in _MODULES}
    modules = _read(find("modules.json"), list)
    kinds = [str(each.get("type")).rpartition(".")[2] for each in modules if isinstance(each, dict)]
    if other := ", ".join(kind for kind in kinds if kind not in known):
        what = f"model.path: the modules.json of {recipe.model.path} has {other}, which is neither read nor trained"
        if settings.pooling == "auto":
            raise UserError(
                what,
                f"set embedding.pooling to one of {', '.join(_NAMES)}, to train vectors that are made without it; or "
                "take another model",
            )
        _log.warning("%s: vectors are those of embedding.pooling=%s alone", what, settings.pooling)
    prompts = _read(find("config_sentence_transformers.json"), dict).get("prompts")
    own = {name: text for name, text in prompts.items() if text} if isinstance(prompts, dict) else {}
    given = {"query": settings.query_prompt, "document": settings.document_prompt}
    if any(value is not None for value in given.values()):
        own = {name: text for name, text in own.items() if name in given and given[name] is None}
    if own:
        _log.warning(
            "model.path: %s has prompts, without which texts are trained here, and what is saved has none of them: %s. "
            "Set embedding.query_prompt and embedding.document_prompt to those that are to stand before texts",
            recipe.model.path,
            brief(", ".join(f"{name} {text!r}" for name, text in own.items())),
        )


def _read(file: Path | None, kind: type) -> Any:
    """What a file holds; nothing if it is not there, or holds something else."""
    try:
        content = json.loads(file.read_text(encoding="utf-8")) if file else None
    except (OSError, ValueError):
        content = None
    return content if isinstance(content, kind) else kind()


def pooling_of(recipe: Recipe, config: Any, file: Path | None) -> str:
    """`embedding.pooling` of a recipe, decided.

    Args:
        config: The model's configuration.
        file: Its own `1_Pooling/config.json`, where it has one.

    Raises:
        UserError: The model pools in another way than there is here, and the recipe names none.
    """
    if recipe.embedding.pooling != "auto":
        return recipe.embedding.pooling
    if file:
        try:
            asked = named_poolings(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, AttributeError):
            asked = []
        known = [name for name, names in _NAMES.items() if len(asked) == 1 and asked[0] in names]
        if not known:
            raise UserError(
                f"{file} pools by {', '.join(asked) or 'nothing'}, which is not here",
                f"set embedding.pooling to one of {', '.join(_NAMES)}",
            )
        return known[0]
    decodes = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return "last" if decodes and model_configs.causal_key(config.to_dict()) is None else "mean"


def write_modules(folder: Path, source: Any) -> None:
    """Writes what `SentenceTransformer(folder)` reads beside the model, so that it makes the vectors that were trained.

    Args:
        source: The `ModelSource` that training started from.
    """
    recipe, settings = source.recipe, source.recipe.embedding
    width = model_configs.width(source.config.to_dict())
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": kind} for number, (path, kind) in enumerate(_MODULES)
    ]
    for path, _ in _MODULES[1:]:
        (folder / path).mkdir(exist_ok=True)
    write_json(folder / "modules.json", modules)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": recipe.batch.seq_len, "do_lower_case": False})
    write_json(
        folder / POOLING,
        {"word_embedding_dimension": width} | {old: name == source.pooling for name, (_, old) in _NAMES.items()},
    )
    write_json(folder / "2_Normalize/config.json", {})
    prompts = {"query": settings.query_prompt or "", "document": settings.document_prompt or ""}
    about = {"model_type": "SentenceTransformer", "prompts": prompts, "default_prompt_name": None}
    write_json(folder / "config_sentence_transformers.json", about | {"similarity_fn_name": "cosine"})
