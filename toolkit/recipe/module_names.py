"""Names of a model's modules and parameters, and what a recipe names that is not among them.

`validate` needs them without torch: bundled models list theirs, and a folder of safetensors has them in its index or in
the head of its file. Those of a file are taken for the model's own only where Transformers loads them as they are; of
mixtures, multimodal and quantized models it renames some, so that nothing is said of those.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from toolkit.recipe import model_configs
from toolkit.recipe.errors import origin_of
from toolkit.recipe.problem import Problem
from toolkit.recipe.schema import Model, Recipe
from toolkit.recipe.sections import Method
from toolkit.recipe.spelling import did_you_mean

_LONGEST_HEAD = 10**8
"""Bytes; the library reads none that are longer."""
_SINGLE = "model.safetensors"
_MANY = re.compile(r"<(\d+)>")
"""In a name of the bundle: so many layers, counted from 0."""


def name_problems(recipe: Recipe, config: Mapping[str, Any], origins: Mapping[str, str]) -> Iterator[Problem]:
    """Names and patterns of the method that match nothing, where the model's names are known without loading it.

    Args:
        config: The model's `config.json`; empty where it is not known.
    """
    if names := parameter_names(recipe.model, config):
        parts = [name.split(".") for name in names]
        modules = {".".join(each[:depth]) for each in parts for depth in range(1, len(each))}
        idle = (*_idle(recipe.method, {*modules, *names}), *_excluded(recipe.extra.lora, modules))
        for key, what, change in (*unmatched(recipe.method, modules, names), *idle):
            yield Problem(key, what, origin_of(key, origins), hint=change)


def unmatched(method: Method, modules: Collection[str], parameters: Collection[str]) -> Iterator[tuple[str, str, str]]:
    """Key, what is wrong, and what to change, for each name or pattern that matches nothing."""
    named = method.target_modules if isinstance(method.target_modules, list) else []
    for key, asked in (("method.modules_to_save", method.modules_to_save), ("method.target_modules", named)):
        for module in asked:
            paths = [path for path in modules if matches(path, [module])]
            inside = [name for name in parameters if name.startswith(tuple(f"{path}." for path in paths))]
            own = {f"{path}.{kind}" for path in paths for kind in ("weight", "bias")}
            if not paths:
                yield key, f"this model has no module {module!r}", meant(module, modules) + _with_weights(parameters)
            elif asked is named and inside and not own.intersection(inside):
                yield key, f"{module!r} is no layer that an adapter can be added to", _with_weights(inside)
    for pattern in method.freeze:
        if not fnmatch.filter(parameters, pattern):
            some = list(parameters)
            change = f"{meant(pattern, parameters)}parameters are named like {some[0]}, {some[len(some) // 2]}"
            yield "method.freeze", f"no parameter of this model matches {pattern!r}", change


def _with_weights(parameters: Iterable[str]) -> str:
    """What can be named of modules with these parameters."""
    ends = {tuple(f".{name}".split(".")[-2:]) for name in parameters}
    layers = sorted({module for module, own in ends if own == "weight"})
    experts = sorted(f"{module}.{own}" for module, own in ends if module == "experts" and not own.endswith("bias"))
    said = [f"modules with weights: {', '.join(layers)}"] if layers else []
    return "; ".join([*said, f"for experts set method.target_parameters=[{', '.join(experts)}]"] if experts else said)


def _idle(method: Method, names: Collection[str]) -> Iterator[tuple[str, str, str]]:
    """As `unmatched`, for keys that name modules among those with adapters; PEFT itself reports what is no valid
    pattern."""
    for key, given, pattern in adapter_patterns(method):
        with contextlib.suppress(re.error):
            if not any(re.fullmatch(pattern, name) for name in names):
                change = meant(given, names) or f"names are like {max(names, key=len)}"
                yield f"method.{key}", f"{given!r} matches nothing in this model", change


def _excluded(extra: Mapping[str, Any], modules: Collection[str]) -> Iterator[tuple[str, str, str]]:
    """As `unmatched`, for `exclude_modules`: PEFT itself refuses the key only if nothing in it matches."""
    asked = extra.get("exclude_modules")
    if isinstance(asked, list) and asked and not any(matches(path, asked) for path in modules):
        change = meant(asked[0], modules) or f"names are like {max(modules, key=len)}"
        yield "extra.lora.exclude_modules", f"{asked[0]!r} matches nothing in this model", change


def adapter_patterns(method: Method) -> Iterator[tuple[str, str, str]]:
    """Key, entry and regular expression, as PEFT matches names with them, of what names parameters and adapters."""
    yield from (("target_parameters", name, rf"(.*\.)?{re.escape(name)}") for name in method.target_parameters)
    for key in ("rank_pattern", "alpha_pattern"):
        yield from ((key, pattern, rf"(.*\.)?({pattern})") for pattern in getattr(method, key))


def matches(path: str, modules: Iterable[str]) -> bool:
    """Whether PEFT would take the module at this path for one of the named ones."""
    return any(path == module or path.endswith(f".{module}") for module in modules)


def meant(pattern: str, names: Iterable[str]) -> str:
    """Asks for the part of some names that comes closest to the last word of a pattern; empty if none does."""
    words = re.findall(r"[A-Za-z]\w*", pattern)
    parts = {part for name in names for part in name.split(".")} - {"weight", "bias"}
    close = next((close for word in reversed(words) if word not in parts and (close := did_you_mean(word, parts))), "")
    return f"did you mean {close!r}? " if close else ""


def parameter_names(model: Model, config: Mapping[str, Any]) -> list[str]:
    """Names of a model's parameters as Transformers has them; empty where they are not known."""
    if known := model_configs.known_model(model):
        return [name for each in known.names for name in _expanded(each)]
    folder = model_configs.local_files(model)
    renamed = {"text_config", "quantization_config"} & config.keys() or model_configs.fused_experts(config)
    names = stored_names(folder) if folder and config and not (renamed or model.gguf_file) else []
    # Saved without the output head, they lack the name of the model inside.
    if not any(name.startswith(("model.", "transformer.")) for name in names):
        return []
    return [*names, "lm_head.weight"]  # A tied one is not stored.


def _expanded(name: str) -> Iterator[str]:
    many = _MANY.search(name)
    numbers = range(int(many[1])) if many else ("",)
    yield from (_MANY.sub(str(number), name) for number in numbers)


def stored_names(folder: Path) -> list[str]:
    """Names in the head of a single file of safetensors, or in the index of several."""
    return list(_head(folder / _SINGLE) or _index(folder))


def tensor_files(folder: Path) -> list[Path]:
    """The files of safetensors that Transformers reads a model from: one, or those that its index names. Beside them
    the same weights may lie in other forms, as Mistral's in `consolidated.safetensors`."""
    if (single := folder / _SINGLE).is_file():
        return [single]
    named = {folder / name for name in _index(folder).values() if isinstance(name, str)}
    return sorted(filter(Path.is_file, named or folder.glob("*.safetensors")))


def lacking_weights(folder: Path) -> str:
    """What a model's folder lacks of the files of safetensors that Transformers would read; empty if nothing."""
    if (folder / _SINGLE).is_file():
        return ""
    named = sorted({name for name in _index(folder).values() if isinstance(name, str)})
    gone = [name for name in named if not (folder / name).is_file()]
    if gone:
        return f"{len(gone)} of the {len(named)} files that {_SINGLE}.index.json names, such as {gone[0]}"
    if (folder / f"{_SINGLE}.index.json").is_file():
        return ""  # What is wrong with it is said when it is read.
    return f"{_SINGLE}.index.json" if any(folder.glob("model-*.safetensors")) else _SINGLE


def _index(folder: Path) -> dict[str, Any]:
    """Name of each tensor to its file; empty where there is no such index. What is wrong with one is said when it is
    read for the weights."""
    try:
        index = json.loads((folder / f"{_SINGLE}.index.json").read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return index if isinstance(index, dict) else {}


def _head(file: Path) -> dict[str, Any]:
    """What a file of safetensors says of each tensor; nothing if it cannot be read."""
    return _head_of(file, file.stat().st_mtime_ns) if file.is_file() else {}


@functools.cache
def _head_of(file: Path, modified: int) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            # Of another file, such as Git LFS's pointer, they are no length.
            head = json.loads(stream.read(length)) if length <= _LONGEST_HEAD else None
    except (OSError, ValueError, RecursionError):
        return {}
    tensors = head.items() if isinstance(head, dict) else ()
    return {name: about for name, about in tensors if isinstance(about, dict) and name != "__metadata__"}


def whole_numbers(folder: Path | None, config: Mapping[str, Any]) -> str:
    """A weight in a model's folder that is stored as complex numbers, or as whole ones and nothing says what they stand
    for; else empty.

    Transformers would take them, or their real parts, for the weights themselves.
    """
    if folder is None or "quantization_config" in config:
        return ""
    tensors = (each for file in tensor_files(folder) for each in _head(file).items())
    wrong = (
        f"{name} ({about['dtype']})"
        for name, about in tensors
        if name.endswith(".weight") and str(about.get("dtype")).startswith(("I", "U", "BOOL", "C"))
    )
    return next(wrong, "")
