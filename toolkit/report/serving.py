"""What to type next of a trained model: the lines that talk with it, score it, and serve it by vLLM and Transformers.

In one place for the end of a run, its report and its model card. An adapter is served on its base where vLLM can do
that; else it is merged first, which the toolkit proves equal.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from toolkit.common import concealed
from toolkit.distributed.vllm_lines import adapters, base
from toolkit.recipe import Recipe
from toolkit.recipe.reinforcement import VLLM_RANKS


def next_steps(run: Path, recipe: Recipe) -> list[tuple[str, str]]:
    """Of a finished run: what for, and the line to type."""
    place, final = str(run), run / "final"
    lines = [] if recipe.headed else [("talk with it", _line("toolkit", "chat", place))]
    if recipe.headed:
        pass  # The report has its scores.
    elif recipe.data.eval_split is not None or recipe.data.eval_sources:
        lines.append(("score it", _line("toolkit", "evaluate", place)))
    if recipe.method.name == "lora":
        lines.append(("merge it", _line("toolkit", "merge", place)))
    whole = str(run / "merged" if recipe.method.name == "lora" else final)
    if recipe.headed or recipe.objective == "seq2seq":
        return lines  # vLLM has no encoder-decoders for text, and neither does Transformers' server.
    once = ", once it is merged" if recipe.method.name == "lora" else ""
    name = run.resolve().name
    if on_base(recipe):
        lines.append(("serve it with vLLM", vllm_line(recipe, str(final), name)))
    else:
        lines.append((f"serve it with vLLM{once}", vllm_line(recipe, whole, name, merged=True)))
    lines.append((f"or with Transformers{once}", transformers_line(recipe, whole)))
    return lines


def on_base(recipe: Recipe) -> bool:
    """Whether vLLM can put the adapter on its base: `PEFTHelper` in vllm/lora/peft_helper.py refuses DoRA and modules
    that were trained in full, new tokens make the vocabulary larger, and a base that was quantized here is another one
    than in its files."""
    method, model = recipe.method, recipe.model
    gguf = model.gguf_file or model.path.endswith(".gguf") or model.path.startswith("builtin:")
    beyond = method.use_dora or method.modules_to_save or method.target_parameters or model.new_tokens
    largest = method.published_rank <= VLLM_RANKS[-1]
    return method.name == "lora" and method.quantization == "none" and largest and not (gguf or beyond)


def vllm_line(recipe: Recipe, model: str, name: str, merged: bool = False) -> str:
    """Serves a full or merged model, or an adapter on its base, under the name, with the template it was trained with.

    Args:
        model: Its folder.
        merged: Whether it is whole, though the recipe trains an adapter.
    """
    words = ["vllm", "serve"]
    if recipe.method.name == "full" or merged:
        words += [model, "--served-model-name", name]
    else:
        words += [*base(recipe), *adapters(recipe), "--lora-modules", f"{name}={model}"]
        # With an adapter vLLM takes the base's template; the folder has the one that was trained with.
        if recipe.model.chat_template:
            words += ["--chat-template", str(Path(model) / "chat_template.jinja")]
    return _line(*words, *_settings(recipe, "--default-chat-template-kwargs"))


def transformers_line(recipe: Recipe, model: str) -> str:
    """Serves a full or merged model."""
    return _line("transformers", "serve", model, *_settings(recipe, "--chat-template-kwargs"))


def _line(*words: str) -> str:
    # Quoted, a value of the environment would not be known again by what shows the line.
    return shlex.join(concealed(list(words)))


def _settings(recipe: Recipe, of_template: str) -> list[str]:
    kwargs = recipe.data.chat_template_kwargs
    trusted = ["--trust-remote-code"] if recipe.model.trust_remote_code else []
    return [*([of_template, json.dumps(kwargs)] if kwargs else []), *trusted]
