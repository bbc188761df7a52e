"""Recognises keys and values of Transformers, TRL, Axolotl and LLaMA-Factory in a recipe.

Nearest spelling finds none of them. Tables cost nothing where no key is wrong, and a converter of whole files would
have to know what those tools do with each. What an answer says to write, the schema takes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml
from pydantic import ValidationError

from toolkit.recipe.data import FORMATS
from toolkit.recipe.dotted import in_yaml, inline
from toolkit.recipe.libraries import PASSED
from toolkit.recipe.other_advice import ADVICE
from toolkit.recipe.other_names import (
    BY_VALUE,
    HABITS,
    LISTS,
    OF_HARDWARE,
    PLACES,
    REFUSED,
    TRUTH,
    TYPES,
    VALUES,
)
from toolkit.recipe.schema import Recipe, leaf_paths, sections
from toolkit.recipe.spelling import did_you_mean

_BY_LETTERS = {re.sub("_", "", key).lower(): key for key in (*ADVICE, *PLACES, *BY_VALUE)}
"""Keys of other tools by their letters alone: `loadIn4Bit` and `load-in-4bit` are `load_in_4bit`."""
_SAYING_LITTLE = ("path", "name", "type")
"""Keys that mean something else in every section."""
_OF_SOURCES = {**{key: key for key in ("path", "name", "split", "revision")}, "field_messages": "columns"}
"""Keys of Axolotl's `datasets` to those of a source."""


def translation(key: str, given: Any, text: str) -> str:
    """What to write instead of another tool's key; empty for a key that none of them has.

    Args:
        key: Its last part.
        given: Its value.
        text: The value as it was written.
    """
    if key.startswith("_"):  # Hydra's `_target_`, torchtune's `_component_`.
        return ""
    key, text = _BY_LETTERS.get(re.sub("[_-]", "", key).lower(), key), in_yaml(text, given)
    if key in OF_HARDWARE:
        return f"write {key} of a device or its node into recipes/_hardware.yaml, see docs/hardware.md"
    key = "use_liger_kernel" if key.startswith("liger_") else key
    part = next((part for part, keys in PASSED.items() if key in keys), "")
    if (given is None or given in ("", [], {})) and (part or key in (*ADVICE, *PLACES, *BY_VALUE)):
        return "remove it: it is empty"
    if key in ADVICE and (given is False or str(given).lower() in ("no", "none")):
        return "remove it"
    if key == "saves_per_epoch" and isinstance(given, int) and given > 0:
        return f"write checkpoint.save_epochs: {1 / given:.4g}"
    if key in ADVICE:
        return ADVICE[key].format(given=text)
    if key in PLACES:
        return moved(PLACES[key], given, text)
    if key in BY_VALUE and not (isinstance(given, Mapping) and _all_inside(given)):
        answers = BY_VALUE[key]
        if answer := _of(answers, given) or ("remove it" if given is False else ""):
            return _said(answer)
        return f"write {' or '.join(dict.fromkeys(filter(_is_written, answers.values())))}"
    if part:
        return f"write extra: {{{part}: {{{key}: {text}}}}}"
    if key == "wandb" and isinstance(given, Mapping):
        given = {f"wandb_{name}": value for name, value in given.items()}
    return _all_inside(given) if isinstance(given, Mapping) else ""


def _all_inside(section: Mapping[str, Any]) -> str:
    """What to write instead of a section that only other tools have; empty if none of its keys is known."""
    answers = {key: _inside(key, given) for key, given in section.items()}
    said = [answer for answer in answers.values() if answer and not answer.startswith("remove it")]
    left = ", ".join(key for key, answer in answers.items() if answer not in said)
    return "; ".join(dict.fromkeys([*said, *([f"leave out {left}"] if left else [])])) if said else ""


def _inside(key: str, given: Any) -> str:
    """What to write for a key in such a section."""
    text = inline(given)
    if section := sections().get(key):
        main = f"{key}.{section.main_key}"
        return habit(key, given) or (moved(main, given, text) if isinstance(given, str) else "")
    if key in _SAYING_LITTLE:
        return ""
    if key in Recipe.model_fields:
        return moved(key, given, text)
    places = leaf_paths()
    if key not in places and (said := translation(key, given, text)):
        return said
    known = places.get(key) or places.get(did_you_mean(key, places), [])
    return moved(known[0], given, text) if len(known) == 1 and (key in places or is_accepted(known[0], given)) else ""


def habit(place: str, given: Any) -> str:
    """What to write for a value that other tools have for a key or section of ours; empty where none is known."""
    answers = HABITS.get(place, {})
    is_count = isinstance(given, int) and not isinstance(given, bool) and given > 0
    answer = _of(answers, given) or (answers.get("#", "").format(given=given) if is_count else "")
    answer = answer or (answers.get("*", "") if isinstance(given, str) else "")
    if not answer and isinstance(given, float) and 0 < given < 1:  # A share, where a number of steps is taken.
        answer = REFUSED.get(place, "").format(place=place)
    value = "" if answer else _of(VALUES.get(place, {}), given)
    return value if " " in value else f"write {place}: {value}" if value else _said(answer)


def moved(place: str, given: Any, text: str) -> str:
    """What to write at a key of ours for a value that stood elsewhere."""
    if given is None:
        return "remove it: it is empty"
    value, text = given, in_yaml(text, given)
    if answer := _of(VALUES.get(place, {}), given):
        if " " in answer:
            return answer
        value, text = yaml.safe_load(answer), answer
    elif place in ("data.sources", "data.eval_sources") and isinstance(given, list):
        value = [_source(each) for each in given]
        left = {key for each in given if isinstance(each, Mapping) for key in each if key not in (*_OF_SOURCES, "type")}
        text = inline(value)
        if left and is_accepted(place, value):
            return f"leave out {', '.join(sorted(left))}, which a source does not take, and write {place}: {text}"
    elif place in LISTS and isinstance(given, str) and given != "all-linear":
        value = [part.strip() for part in given.split(",")]
        text = in_yaml(f"[{', '.join(value)}]", value)
    named = place != "model.chat_template" or re.fullmatch(r"chatml|[^{\n]*[./][^{\n]*", str(value))
    if named and is_accepted(place, value):
        return f"write {place}: {text}"
    return REFUSED.get(place, "set {place}; `toolkit show --help` lists what it takes").format(place=place)


def _source(entry: Any) -> Any:
    """An entry of Axolotl's `datasets` as one of `data.sources`."""
    if not isinstance(entry, Mapping):
        return entry
    kept = {ours: entry[key] for key, ours in _OF_SOURCES.items() if entry.get(key)}
    if isinstance(messages := kept.get("columns"), str):
        kept["columns"] = {"messages": messages}
    form = entry.get("type")
    if isinstance(form, str):
        form = form.partition(".")[0].partition(":")[0]
        kept["format"] = TYPES.get(form, form if form in FORMATS else "auto")
    return kept


def is_accepted(place: str, value: Any) -> bool:
    """Whether the schema takes a value at a dotted key."""
    section, _, key = place.partition(".")
    values: dict[str, Any] = {"model": {"path": "m"}, "data": {"sources": ["d"]}}
    values[section] = {**values.get(section, {}), key: value} if key else value
    try:
        Recipe.model_validate(values)
    except ValidationError:
        return False
    return True


def _of(answers: Mapping[str, str], given: Any) -> str:
    """The answer to a plain value; true and false may be said otherwise."""
    word = str(given).lower()
    return answers.get(word) or answers.get(TRUTH.get(word, ""), "")


def _said(answer: str) -> str:
    return f"write {answer}" if _is_written(answer) else answer


def _is_written(answer: str) -> bool:
    """Whether it is a key with its value, and no sentence."""
    return re.match(r"[\w.]+: ", answer) is not None


def translated_keys() -> dict[str, list[str]]:
    """Every key of another tool to the keys of ours that its texts name."""
    texts = {
        key: ADVICE.get(key) or PLACES.get(key) or " ".join(BY_VALUE[key].values())
        for key in (*ADVICE, *PLACES, *BY_VALUE)
    }
    return {key: re.findall(r"\b[a-z_]+\.[a-z_0-9]+(?=[ :,;]|$)", text) for key, text in texts.items()}
