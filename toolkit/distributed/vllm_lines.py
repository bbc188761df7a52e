"""The command that starts vLLM to answer a training's prompts, and the options it shares with other vLLM commands."""

from __future__ import annotations

from urllib.parse import urlsplit

from toolkit.common import shell_line
from toolkit.distributed.engines import dtypes
from toolkit.recipe import Recipe
from toolkit.recipe.reinforcement import VLLM_RANKS

_PORT = 8000
"""On which vLLM serves by default."""


def base(recipe: Recipe) -> list[str]:
    """The model that the recipe starts from."""
    return [recipe.model.path, *(["--revision", recipe.model.revision] if recipe.model.revision else [])]


def adapters(recipe: Recipe) -> list[str]:
    """Room for an adapter of the recipe's rank."""
    rank = next(each for each in VLLM_RANKS if each >= recipe.method.published_rank)
    return ["--enable-lora", "--max-lora-rank", str(rank)]


def answers_line(recipe: Recipe) -> str:
    """Starts the server of `rollout.server`, in the type that the training computes in, for its longest rows.

    What a model's `generation_config.json` says is left out: answers are drawn from what the model is trained as.
    """
    lora, server = recipe.method.name == "lora", recipe.rollout.server
    assert server is not None, "a server answers"
    allowed = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True" if lora else "VLLM_SERVER_DEV_MODE=1"
    port = urlsplit(server).port or (443 if server.startswith("https") else 80)
    words = ["vllm", "serve", *base(recipe), *(adapters(recipe) if lora else [])]
    words += ["--tokenizer", recipe.model.tokenizer] if recipe.model.tokenizer else []
    words += ["--dtype", dtypes(recipe).export, "--max-model-len", str(recipe.batch.seq_len)]
    words += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    words += ["--port", str(port)] if port != _PORT else []
    words += ["--trust-remote-code"] if recipe.model.trust_remote_code else []
    return f"{allowed} {shell_line(*words)}"
