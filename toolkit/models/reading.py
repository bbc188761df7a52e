"""Reading what others have written, with errors that name the key of the recipe and what to change."""

from __future__ import annotations

import importlib.util
import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import AutoTokenizer
from transformers.utils import CONFIG_NAME, cached_file

from toolkit.common import UserError, count_text, first_line, in_a_line, panicked
from toolkit.models import zero3_loading
from toolkit.models.heads import auto_class, begin_head, belongs_to_head, head_modules
from toolkit.models.losses.embedding import drop_pooler
from toolkit.recipe import Recipe, model_configs
from toolkit.recipe.config_limits import MARKED, has_mark
from toolkit.recipe.module_names import lacking_weights, stored_names
from toolkit.recipe.rules.inputs import no_folder

_log = logging.getLogger("toolkit.models")


def refuse_code_elsewhere(kind: Any, path: str, revision: str | None, key: str = "model.path") -> None:
    """Of a model whose own code may run: code in another repository, which no revision of a recipe names.

    Raises:
        UserError: Its files refer to such code; names it.
    """
    file = "tokenizer_config.json" if kind is AutoTokenizer else CONFIG_NAME
    try:
        found = Path(str(cached_file(path, file, revision=revision)))
        named = json.loads(found.read_text(encoding="utf-8")).get("auto_map", {}).values()
    except (OSError, ValueError, AttributeError):  # Whoever reads it for its content says so better.
        return
    every = [str(name) for each in named for name in (each if isinstance(each, list) else [each])]
    if code := next((name for name in every if "--" in name and name.partition("--")[0] != path), ""):
        raise UserError(
            f"{key}: {path} takes its code from another repository, {code}, in whatever version that has today",
            "read that code, put its files into a folder with the model, and name the classes without the repository "
            f"in {file}; or set model.trust_remote_code=false",
        )


def _is_pointer(file: Path) -> bool:
    """Whether Git has not yet fetched what a file is to hold."""
    if not file.is_file():
        return False
    with file.open("rb") as content:
        return content.read(23) == b"version https://git-lfs"


def require_weights(folder: Path, config: Any, objective: str) -> None:
    """Refuses a folder without the weights that are read from it, before anything slow is done.

    Raises:
        UserError: It lacks them; says what to do where it has them in another form.
    """
    if lacking := lacking_weights(folder):
        change = "download them, or set model.path to a folder that has them"
        if any(folder.glob("pytorch_model*.bin")):
            change = _from_pickles(str(folder), config, objective)
        raise UserError(f"model.path: {folder} lacks {lacking}", change)


def _from_pickles(path: str, config: Any, objective: str) -> str:
    """What to do about weights that lie in pickles alone, as those of older models do.

    Args:
        path: A folder, which gets the other files, or an id of the hub.
        config: Of the model.
        objective: Of the recipe.
    """
    kind = next(iter(getattr(config, "architectures", None) or ()), auto_class(objective).__name__)
    folder = path if Path(path).is_dir() else path.rpartition("/")[2]
    load = f"M.from_pretrained({path!r}, dtype='auto')"
    line = f"from transformers import {kind} as M; {load}.save_pretrained({folder!r})"
    also = "" if folder == path else f", and set model.path={folder} and model.tokenizer={path}"
    return f'pickles may run code, and are not read; convert them once: `python -c "{line}"`{also}'


def read(kind: Any, recipe: Recipe, arguments: dict[str, Any]) -> Any:
    """What one of Transformers' classes reads from a recipe's model.

    Args:
        kind: The class, such as `AutoConfig`.
        arguments: Of its `from_pretrained`, the place among them; with a `state_dict` nothing is read there.

    Raises:
        UserError: It cannot be read; names the key.
    """
    path = (arguments := dict(arguments)).pop("pretrained_model_name_or_path")
    key = "model.tokenizer" if path == recipe.model.tokenizer != recipe.model.path else "model.path"
    if no_folder(path):
        # Of a run, whose recipe was checked where it was started.
        place = "" if Path(path).is_absolute() else f", seen from {Path.cwd()}"
        change = "put it back" + ", or go to the folder that the run was started in" * bool(place)
        raise UserError(f"{key}: there is no folder or file {path}{place}", change)
    if Path(path).is_dir() and not any(Path(path).iterdir()):
        file = "tokenizer.json" if key == "model.tokenizer" else "config.json"
        raise UserError(f"{key}: the folder {path} is empty", f"set {key} to a folder with {file}")
    if arguments.get("trust_remote_code"):
        refuse_code_elsewhere(kind, path, arguments.get("revision"), key)
    try:
        if "state_dict" in arguments:
            # A class that has yet to find the model's own would look for it there.
            return kind._model_mapping[type(arguments["config"])].from_pretrained(None, **arguments)
        return kind.from_pretrained(path, **arguments)
    except (UserError, torch.OutOfMemoryError):
        raise
    except BaseException as error:  # Files of others may hold anything, and the libraries raise anything for it.
        if not (isinstance(error, Exception) or panicked(error)):
            raise
        _log.debug("%s of %s", kind.__name__, path, exc_info=True)
        if marked := next(filter(has_mark, sorted(Path(path).glob("*.json"))), None):
            raise UserError(f"{key}: {marked}{MARKED}", "save it so") from error
        if pointer := next(filter(_is_pointer, sorted(Path(path).glob("*"))), None):
            change = "run `git lfs pull` in the repository it came from"
            raise UserError(f"{key}: {pointer} is a Git LFS pointer, not what its name says", change) from error
        misspelt = key == "model.path" and not (Path(path).is_dir() or model_configs.known_model(recipe.model))
        close = model_configs.nearest(path) if misspelt else []
        change = f"did you mean {' or '.join(close)}? " if close else ""
        what = "tokenizer.json" if key == "model.tokenizer" else "config.json and *.safetensors, or a GGUF file"
        change += f"Set {key} to a hub id, or a folder with {what}"
        if kind is AutoTokenizer and Path(path, "config.json").is_file():
            change = "set model.tokenizer to a hub id, or a folder with tokenizer.json, or put the model's own there"
            if Path(path, "tokenizer.model").is_file() and not importlib.util.find_spec("sentencepiece"):
                change = f"run `pip install sentencepiece`, which reads the tokenizer.model there; or {change}"
        if arguments.get("use_safetensors") and "model.safetensors" in str(error) and not Path(path).is_dir():
            change = _from_pickles(path, arguments["config"], recipe.objective) + "; or take another model"
        if "trust_remote_code=True" in str(error) and not recipe.model.trust_remote_code:
            change = "set model.trust_remote_code=true, once you have read that code"
        said = first_line(error) if isinstance(error, OSError | ValueError) else in_a_line(error)
        what = f"cannot be loaded as {kind.__name__}: {said}"
        if isinstance(error.__cause__, LocalEntryNotFoundError):
            what = "is neither a folder here nor in the hub's cache"
            change += f"; `hf download {path}` fills the cache where there is a network"
        raise UserError(f"{key}: {Path(path, arguments.get('gguf_file', ''))} {what}", change) from error


def read_model(recipe: Recipe, arguments: dict[str, Any], stored: Any = None, *, head_follows: bool) -> Any:
    """A model that was read from files; Transformers draws at random what they lack, and passes over what they have
    beyond it.

    Args:
        arguments: Of its `from_pretrained`, the place among them.
        stored: The config that its files were saved with, if that is another.
        head_follows: See `ModelSource`.

    Raises:
        UserError: It cannot be read, lacks weights, or has some of other sizes.
    """
    arguments |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    with zero3_loading.loading():
        model, found = read(auto_class(recipe.objective), recipe, arguments)
    zero3_loading.forget_unused_names(model)
    parameters = {name for name, _ in model.named_parameters()}
    missing, other = sorted(parameters & found["missing_keys"]), sorted(found["mismatched_keys"], key=str)
    unknown = sorted(found["unexpected_keys"])
    if recipe.embeds:
        drop_pooler(model)
        missing = [name for name in missing if not name.startswith("pooler.")]
    if recipe.headed:
        heads = head_modules(model)
        lacking = [name for name in (*missing, *(name for name, *_ in other)) if belongs_to_head(name, heads)]
        begin_head(model, stored or model.config, lacking, recipe.seed, told=not head_follows)
        missing = [name for name in missing if name not in lacking]
        other = [each for each in other if each[0] not in lacking]
        # The head for the vocabulary.
        unknown = [name for name in unknown if name.startswith(f"{model.base_model_prefix}.") and "pooler" not in name]
    change = f"set model.path to a model that is whole, or correct the config.json of {recipe.model.path}"
    if missing:
        what = f"{len(missing):,} of the model's {len(parameters):,} weights, such as {missing[0]}"
        raise UserError(f"model.path: {recipe.model.path} lacks {what}", change)
    if other:
        name, stored, wanted = other[0]
        sizes = f"is {_size(stored)}, which its config makes {_size(wanted)}"
        also = f"; so are {len(other) - 1:,} others" if len(other) > 1 else ""
        raise UserError(f"model.path: {name} of {recipe.model.path} {sizes}{also}", change)
    if further := _further_tokens(model, arguments):
        told = {**model.config.to_dict(), **model.config.get_text_config().to_dict()}
        keys = [key for key, value in told.items() if re.search(r"nextn|mtp", key) and isinstance(value, int) and value]
        _log.warning(
            "model.path: %s holds %s further tokens (MTP), such as %s, which Transformers does not read: "
            "what is trained and saved has none%s",
            recipe.model.path,
            count_text(len(further), "weight that predicts", "weights that predict"),
            further[0],
            f", though its config.json states {', '.join(f'{key}={told[key]}' for key in keys)}" if keys else "",
        )
    if unknown:
        what = f"{len(unknown):,} weights that this model has no place for, such as {unknown[0]}"
        _log.warning("model.path: %s holds %s; they are left out", recipe.model.path, what)
    return model


def _further_tokens(model: Any, arguments: dict[str, Any]) -> list[str]:
    """Weights in a model's files by which it predicts more than the next token: layers behind its last one, or `mtp`.
    Transformers passes over them, and does not count them among those that it has no place for."""
    if (
        "state_dict" in arguments
        or "gguf_file" in arguments
        or not (passed := model._keys_to_ignore_on_load_unexpected)
    ):
        return []
    place = {"revision": arguments.get("revision", "main"), "_raise_exceptions_for_missing_entries": False}
    config = cached_file(arguments["pretrained_model_name_or_path"], CONFIG_NAME, **place)
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    beyond = re.compile(r"(?:^|\.)(?:layers\.(\d+)|(mtp\w*))\.")
    return [
        name
        for name in (stored_names(Path(config).parent) if config else ())
        if re.search("|".join(passed), name)
        and (at := beyond.search(name))
        and (at[2] or (layers is not None and int(at[1]) >= layers))
    ]


def _size(shape: Sequence[int]) -> str:
    return " x ".join(f"{size:,}" for size in shape) or "a number"
