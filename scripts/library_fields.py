"""Writes `toolkit/recipe/library_fields.json`: the fields of the libraries that `extra` in a recipe may name.

`python scripts/library_fields.py` writes it, `--check` fails when it is stale. `validate` must not import the
libraries, which takes ten seconds, so names and types are shipped.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.swap_tensor.aio_config import get_aio_config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from peft import LoraConfig
from pydantic import BaseModel, PydanticUserError, TypeAdapter
from transformers import Seq2SeqTrainingArguments
from trl import SFTConfig

FILE = Path(__file__).resolve().parent.parent / "toolkit" / "recipe" / "library_fields.json"

_MODELS: dict[str, type[BaseModel]] = {
    "zero_optimization": DeepSpeedZeroConfig,
    "fp16": DeepSpeedFP16Config,
    "bf16": DeepSpeedBF16Config,
    "comms_logger": CommsLoggerConfig,
}
_WITHOUT_MODEL: dict[str, Mapping[str, Any]] = {
    "aio": get_aio_config({"aio": {}}),
    "flops_profiler": vars(DeepSpeedFlopsProfilerConfig({})),
}
"""Sections whose types only their defaults tell."""


def fields() -> dict[str, dict[str, Any]]:
    """Part of `extra` to its fields, each with the JSON Schema of its values; empty where anything may stand."""
    return {
        "training_arguments": _dataclass(SFTConfig) | _dataclass(Seq2SeqTrainingArguments),
        "lora": _dataclass(LoraConfig),
        "deepspeed": _deepspeed(),
    }


def _dataclass(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: _schema(hints[field.name]) for field in dataclasses.fields(kind) if field.init}


def _schema(hint: Any) -> dict[str, Any]:
    try:
        schema = TypeAdapter(hint).json_schema()
    except PydanticUserError:
        return {}
    # Settings with classes of their own are none that a recipe passes on.
    return {} if "$ref" in json.dumps(schema) else _plain(schema)


def _plain(schema: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: schema[key] for key in ("type", "enum", "const") if key in schema}
    if "anyOf" in schema:
        kept["anyOf"] = [_plain(each) for each in schema["anyOf"]]
    return kept


def _deepspeed() -> dict[str, Any]:
    config = _Recorder({"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1})
    DeepSpeedConfig._initialize_params(DeepSpeedConfig.__new__(DeepSpeedConfig), config)
    result = {key: _of_default(value) for key, value in config.read.items()}
    for section, model in _MODELS.items():
        result |= _model(model, f"{section}.")
    for section, defaults in _WITHOUT_MODEL.items():
        result |= {f"{section}.{key}": _of_default(value) for key, value in defaults.items()}
    # A section is what stands in it.
    for section in (*_MODELS, *_WITHOUT_MODEL):
        result.pop(section, None)
    return result


class _Recorder(dict[str, Any]):
    """A configuration that notes which keys are asked for, with their defaults: outside sections there is no model."""

    def __init__(self, content: dict[str, Any]) -> None:
        super().__init__(content)
        self.read: dict[str, Any] = dict.fromkeys(content)

    def get(self, key: str, default: Any = None) -> Any:
        self.read[key] = default
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.read.setdefault(str(key), None)
        return super().__contains__(key)

    def keys(self) -> Any:
        return self


def _model(model: type[BaseModel], prefix: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        inner = [kind for kind in (field.annotation, *typing.get_args(field.annotation)) if _is_model(kind)]
        result |= _model(inner[0], f"{key}.") if inner else {key: _schema(field.annotation)}
    return result


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _of_default(value: Any) -> dict[str, Any]:
    return (
        {} if not isinstance(value, str | bool | int | float | list) else _plain(TypeAdapter(type(value)).json_schema())
    )


if __name__ == "__main__":
    text = json.dumps(fields(), indent=1, sort_keys=True) + "\n"
    if "--check" not in sys.argv:
        FILE.write_text(text, encoding="utf-8")
    elif not FILE.is_file() or FILE.read_text(encoding="utf-8") != text:
        sys.exit(f"{FILE} is stale: run python scripts/library_fields.py")
