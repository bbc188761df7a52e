"""What YAML allows and a recipe does not, and what PyYAML says of a file, in the words of somebody who wrote it."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Container, Iterator

import yaml
from omegaconf import grammar_parser
from omegaconf.errors import OmegaConfBaseException

from toolkit.recipe.schema import sections

_PLAIN = ("str", "int", "float", "bool", "null", "map", "seq", "merge", "timestamp")
_PLAIN_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in _PLAIN}
_TEXT_TAGS = {"tag:yaml.org,2002:str", "tag:yaml.org,2002:merge", "tag:yaml.org,2002:timestamp"}
INTERPOLATION = (
    "write ${section.key} for another value, ${oc.env:NAME} for an environment variable, \\${ for the characters"
)
DEEPEST = 20
"""Levels of nesting; no key of a recipe or of a library needs a quarter of them."""
_LONGEST_NUMBER = 100
"""Characters of a whole number: 64 bits take 64 digits in base 2. Python refuses to read one of thousands."""


def size(node: yaml.Node, known: dict[int, int]) -> int:
    """Keys and values of a node if its aliases were written out, each part counted once."""
    if id(node) not in known:
        known[id(node)] = 1  # Until it is counted, for an alias that leads to a part around it.
        parts = itertools.chain(*node.value) if isinstance(node, yaml.MappingNode) else node.value
        inside = () if isinstance(node, yaml.ScalarNode) else parts
        known[id(node)] += sum(size(part, known) for part in inside)
    return known[id(node)]


def slips(node: yaml.Node, path: str, around: list[yaml.Node]) -> Iterator[tuple[yaml.Node, str, str, str]]:
    """What YAML allows and a recipe does not, anywhere below a node."""
    if node in around:
        yield around[-1], path, "an alias leads to a part around it", "write the values out"
        return
    if len(around) == DEEPEST:
        yield node, path.partition(".")[0], f"is nested more than {DEEPEST} levels deep", "close brackets sooner"
        return
    if isinstance(node, yaml.ScalarNode) and "${" in node.value:
        try:
            grammar_parser.parse(node.value)
        except (OmegaConfBaseException, RecursionError):
            yield node, path, f"{node.value} is no interpolation that can be read", INTERPOLATION
    if isinstance(node, yaml.ScalarNode) and path in sections():
        key = re.match(r"(\w+)\s*[:=\N{FULLWIDTH COLON}]", node.value)
        if key and key[1] in _keys_below(path):
            yield node, path, f"{node.value} is a word, not a key with its value", f"write a space behind `{key[1]}:`"
    if node.tag == "tag:yaml.org,2002:int" and len(node.value) > _LONGEST_NUMBER:
        yield node, path, "is a number of more than 64 bits", "write a smaller number"
    if space := _odd_space(node):
        yield node, path, f"{space} stands at an end of this value", "write plain spaces, or quotes around the value"
    if node.tag not in _PLAIN_TAGS:
        tag = node.tag.removeprefix("tag:yaml.org,2002:")
        yield node, path, f"the YAML tag {tag} is not allowed", "write plain values"
    if isinstance(node, yaml.MappingNode):
        names: set[str] = set()
        for key, value in node.value:
            below = f"{path}.{key.value}" if path else str(key.value)
            if not isinstance(key, yaml.ScalarNode):
                yield key, path, "a list or a mapping stands where a key must", "write `key: value`"
                continue
            if not key.value:
                yield key, path, "a key is empty", "write `key: value`"
            elif space := _odd_space(key):
                yield key, path, f"{space} stands beside the key {key.value.strip()}", "indent with plain spaces"
            elif key.tag not in _TEXT_TAGS:
                yield key, path, f"the key {key.value!r} is not text", "write it in quotes"
            elif "." in key.value and key.value.partition(".")[0] in _keys_below(path):
                section, _, inside = key.value.rpartition(".")
                given = value.value if isinstance(value, yaml.ScalarNode) else "…"
                nested = f"{section.replace('.', ': {')}: {{{inside}: {given}}}" + "}" * section.count(".")
                yield key, below, "dotted keys are for the command line", f"write {nested}"
            elif key.value in names and key.value != "<<":
                merge = f"write one `{below}:` with all its keys; a ready-made option is its key `option`"
                yield key, below, "is given twice", merge if below in sections() else "remove one of them"
            names.add(str(key.value))
            yield from slips(value, below, [*around, node])
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from slips(value, f"{path}.{index}", [*around, node])


def _odd_space(node: yaml.Node) -> str:
    """What looks like a space beside a word that is not in quotes, and is a part of it to YAML; empty if nothing."""
    if not isinstance(node, yaml.ScalarNode) or node.style is not None:
        return ""
    spaces = node.value.replace(node.value.strip(), "", 1)
    return f"U+{ord(spaces[0]):04X} {unicodedata.name(spaces[0], '').lower()}".strip() if spaces else ""


def _keys_below(path: str) -> Container[str]:
    """The names that keys may have at the top of a recipe or in a section; none deeper."""
    return sections()[path].model_fields if path in sections() else () if path else sections()


def plainly(error: yaml.YAMLError) -> str:
    """PyYAML's message in the words of somebody who wrote the file."""
    if isinstance(error, yaml.reader.ReaderError):
        return f"it holds the character U+{error.character:04X}"
    what = str(getattr(error, "problem", None) or error)
    if "'\\t'" in what:
        return "a tab; indent with spaces"
    if "another document" in what:
        return "a second document starts at this line (`---`); a file holds one"
    if "but got '{'" in what:
        return "a `{` where none can stand; within brackets put `${…}` in quotes"
    if "mapping values are not allowed" in what:
        return "a `:` where none can stand; check the indentation, or put text that holds a colon in quotes"
    if "expected ':'" in what:
        return "no colon with a space behind it follows this key"
    if "stream" in what:
        return "a bracket or a quotation mark that is not closed"
    return what
