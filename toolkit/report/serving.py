"""Commands to use a trained model: talk with it, score it, and serve it with vLLM or Transformers.

In one place for the end of a run, its report and its model card, and for what is merged and exported. An adapter is
served on its base where vLLM can do that; else it is merged first, which the toolkit proves equal. Heads and vectors
are what vLLM calls pooling; Transformers has pipelines for heads, and sentence-transformers makes vectors.
"""

from __future__ import annotations

import json
from pathlib import Path

from toolkit.common import shell_line
from toolkit.distributed.vllm_lines import adapters, base
from toolkit.recipe import Recipe, model_configs
from toolkit.recipe.heads import REWARD
from toolkit.recipe.reinforcement import VLLM_RANKS
from toolkit.report.load import read_run

_TELLS_WORDS = (
    *("bert", "modernbert", "roberta", "xlm-roberta"),
    *("gemma", "gemma2", "llama", "mistral", "mixtral", "phi3", "qwen2", "qwen3", "qwen3_moe"),
)
"""Architectures that vLLM 0.33 has as classifiers of words: encoders of `_TOKEN_CLASSIFICATION_MODELS` in its registry,
and decoders of it whose head Transformers calls `score`, as `as_seq_cls_model` does. Of others it would take the head
for one of texts."""
_SERVED_BY_VLLM = (None, "int4")
"""Formats of `toolkit export`, and none."""


def next_steps(run: Path, recipe: Recipe) -> list[tuple[str, str]]:
    """Purpose and command of each next step after a finished run."""
    place, final = str(run), run / "final"
    lines = [] if recipe.headed else [("talk with it", shell_line("toolkit", "chat", place))]
    if recipe.headed:
        pass  # The report has its scores.
    elif recipe.data.eval_split is not None or recipe.data.eval_sources:
        lines.append(("score it", shell_line("toolkit", "evaluate", place)))
    if recipe.method.name == "lora":
        lines.append(("merge it", shell_line("toolkit", "merge", place)))
    whole = run / "merged" if recipe.method.name == "lora" else final
    once = ", once it is merged" if recipe.method.name == "lora" else ""
    name = run.resolve().name
    for what, line in serving(run, recipe, whole, name):
        if what == _BY_VLLM and not recipe.headed and on_base(recipe):
            lines.append((what, vllm_line(recipe, str(final), name)))
        else:
            lines.append((what + once, line))
    return lines


_BY_VLLM = "serve it with vLLM"


def serving(run: Path, recipe: Recipe, folder: Path, name: str, form: str | None = None) -> list[tuple[str, str]]:
    """How a whole model is served: with what, and the line to type.

    Args:
        run: The run folder, whose audit says how rows were rendered.
        folder: The model's: the run's own, merged or exported.
        name: Under which it is served.
        form: The format in which it was exported.
    """
    if recipe.objective == "seq2seq" or (form or "").startswith("gguf"):
        return []  # vLLM has no encoder-decoders for text, and neither does Transformers' server.
    model, lines = str(folder), []
    if form in _SERVED_BY_VLLM and (not recipe.headed or _pools(recipe)):
        line = pooling_line(recipe, model, name) if recipe.headed else vllm_line(recipe, model, name, merged=True)
        lines.append((_BY_VLLM, line))
    by = "sentence-transformers" if recipe.embeds else "Transformers"
    line = asking_line(recipe, model, _renders(run)) if recipe.headed else transformers_line(recipe, model)
    return [*lines, (f"or with {by}" if lines else f"use it with {by}", line)]


def _renders(run: Path) -> bool:
    """Whether rows were rendered with the chat template."""
    audit = read_run(run).audit
    return audit is not None and audit.chat_template.needed


def _pools(recipe: Recipe) -> bool:
    """Whether vLLM has the model with this head."""
    if recipe.objective != "token_classification":
        return True
    config = model_configs.config_of(recipe.model) or {}
    return config.get("model_type") in _TELLS_WORDS


def pooling_line(recipe: Recipe, model: str, name: str) -> str:
    """Has vLLM serve a whole model with a head, or one of vectors: `RunnerOption` and `ConvertOption` in
    vllm/config/model.py. Rewards are numbers of any size, to which it would apply a sigmoid."""
    words = ["vllm", "serve", model, "--served-model-name", name, "--runner", "pooling"]
    words += ["--convert", "embed" if recipe.embeds else "classify"]
    if recipe.objective == REWARD:
        words += ["--pooler-config", json.dumps({"use_activation": False})]
    return shell_line(*words, *_settings(recipe, "--default-chat-template-kwargs"))


def asking_line(recipe: Recipe, model: str, chat: bool) -> str:
    """Asks a whole model with a head, or one of vectors, about a text.

    Args:
        chat: Whether texts are conversations, which the template renders.
    """
    trust = ", trust_remote_code=True" if recipe.model.trust_remote_code else ""
    folder = json.dumps(model, ensure_ascii=False)
    if recipe.embeds:
        vectors = 'model.encode_query(["A question?"]), model.encode_document(["An answer.", "Rain falls."])'
        begin = "from sentence_transformers import SentenceTransformer"
        return shell_line(
            "python", "-c", f"{begin}; model = SentenceTransformer({folder}{trust}); print(model.similarity({vectors}))"
        )
    task = "token-classification" if recipe.objective == "token_classification" else "text-classification"
    if recipe.objective == REWARD:
        trust += ', function_to_apply="none"'
    begin = f'from transformers import pipeline; ask = pipeline("{task}", {folder}{trust})'
    if not chat:
        return shell_line("python", "-c", f'{begin}; print(ask("A text."))')
    turns = [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Hi."}][: 2 if recipe.pairs else 1]
    variables = "".join(f", {key}={value!r}" for key, value in recipe.data.chat_template_kwargs.items())
    text = f"ask.tokenizer.apply_chat_template({json.dumps(turns)}, tokenize=False{variables})"
    # The template has put the tokens already that begin and end a text.
    return shell_line("python", "-c", f"{begin}; print(ask({text}, add_special_tokens=False))")


def on_base(recipe: Recipe) -> bool:
    """Whether vLLM can put the adapter on its base: `PEFTHelper` in vllm/lora/peft_helper.py refuses DoRA and modules
    that were trained in full, and takes no biases of the base; new tokens make the vocabulary larger, and a base that
    was quantized here is another one than in its files."""
    method, model = recipe.method, recipe.model
    gguf = model.gguf_file or model.path.endswith(".gguf") or model.path.startswith("builtin:")
    modules = method.modules_to_save or method.target_parameters or model.new_tokens
    beyond = method.use_dora or modules or recipe.trains_biases
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
        # With an adapter vLLM takes the base's template and tokenizer; the folder has those that were trained with.
        if recipe.model.chat_template:
            words += ["--chat-template", str(Path(model) / "chat_template.jinja")]
        words += ["--tokenizer", model] if recipe.model.tokenizer else []
    return shell_line(*words, *_settings(recipe, "--default-chat-template-kwargs"))


def transformers_line(recipe: Recipe, model: str) -> str:
    """Serves a full or merged model."""
    return shell_line("transformers", "serve", model, *_settings(recipe, "--chat-template-kwargs"))


def _settings(recipe: Recipe, of_template: str) -> list[str]:
    kwargs = recipe.data.chat_template_kwargs
    trusted = ["--trust-remote-code"] if recipe.model.trust_remote_code else []
    return [*([of_template, json.dumps(kwargs)] if kwargs else []), *trusted]
