"""The part of vLLM's HTTP interface that a training's answers need.

vLLM pins versions of torch and Transformers of its own, so it runs in an environment of its own, and nothing of it is
imported here. Nothing is asked twice: a server that was started anew has the weights of the model's files, and would
answer with those.
"""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from toolkit.common import UserError, first_line

_SECONDS = 60.0
"""How long a server may take over a question."""
_WORK_SECONDS = 1800.0
"""The same for weights, and for an answer that may wait for others."""
_FREE_SECONDS = 30.0
"""How long it may take to let go of what it has kept of prompts."""


class NoAnswer(UserError):
    """A server does not answer, or not as vLLM does."""


@dataclass(frozen=True)
class Answered:
    """What a server said.

    Attributes:
        status: Of HTTP.
        content: As JSON holds it, or text.
    """

    status: int
    content: Any

    @property
    def fails(self) -> bool:
        """Whether it did not do what it was asked."""
        return self.status >= 400

    @property
    def missing(self) -> bool:
        """Whether it knows no such path, as where a way to be asked was not switched on."""
        return self.status == 404 and not (isinstance(self.content, dict) and "error" in self.content)

    @property
    def message(self) -> str:
        """Why it did not."""
        content = self.content
        if isinstance(content, dict):
            content = content.get("error") or content.get("detail") or content
        if isinstance(content, dict):
            content = content.get("message") or content
        return str(content)


@dataclass(frozen=True)
class Given:
    """An answer.

    Attributes:
        ids: Its tokens, with the one that ended it.
        log_probs: Of each token, as it was drawn.
    """

    ids: list[int]
    log_probs: list[float]


@dataclass(frozen=True)
class Server:
    """A vLLM server.

    Args:
        address: With `http://`.
        line: Starts it.
    """

    address: str
    line: str

    @property
    def advice(self) -> str:
        """How it is started."""
        return (
            f"start it, on devices of its own, with\n    {self.line}\n  then the same command trains, or goes on from "
            "the newest checkpoint"
        )

    def error(self, what: str) -> NoAnswer:
        """What is wrong with the server, and how it is started."""
        return NoAnswer(f"rollout.server: the vLLM server at {self.address} {what}", self.advice)

    def ask(self, path: str, content: Any = None, seconds: float = _SECONDS) -> Answered:
        """Sends JSON, or asks without.

        Raises:
            NoAnswer: If nobody answers.
        """
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("VLLM_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        body = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(self.address + path, body, headers)
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:
                return Answered(answer.status, _read(answer.read()))
        except urllib.error.HTTPError as error:
            with error:
                return Answered(error.code, _read(error.read()))
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            said = first_line(reason) if isinstance(reason, Exception) else str(reason)
            raise self.error(f"does not answer ({said})") from None

    def version(self) -> str:
        """Its version of vLLM."""
        found = self.ask("/version")
        version = found.content.get("version") if isinstance(found.content, dict) else None
        if found.fails or not version:
            raise self.error(f"is no vLLM: it says {found.message[:100]!r} of its version")
        return str(version)

    def models(self) -> list[dict[str, Any]]:
        """The model that it was started with, and adapters that were loaded since."""
        found = self.ask("/v1/models")
        if found.fails:
            raise self.error(f"does not name its models: {found.message}")
        return list(found.content["data"])

    def complete(self, model: str, prompt: list[int], longest: int, **settings: Any) -> Answered:
        """Asks for answers of at most so many tokens."""
        # Each of these has a default of the server's or of the model's own.
        whole = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        whole |= {"ignore_eos": True, "return_token_ids": True, "logprobs": 0, "max_tokens": longest}
        return self.ask("/v1/completions", {"model": model, "prompt": prompt, **whole, **settings}, _WORK_SECONDS)

    def answers(self, model: str, prompt: list[int], longest: int, **settings: Any) -> list[Given]:
        """As many answers as `n` in the settings says, or one.

        Raises:
            NoAnswer: If the server has none.
        """
        found = self.complete(model, prompt, longest, **settings)
        if found.fails:
            raise self.error(f"gives no answer: {found.message}")
        try:
            choices = sorted(found.content["choices"], key=lambda choice: int(choice["index"]))
            given = [Given(list(each["token_ids"]), list(each["logprobs"]["token_logprobs"])) for each in choices]
        except (LookupError, TypeError):
            raise self.error("gives answers without tokens or log-probabilities: it takes vLLM 0.11 or newer") from None
        if len(given) != settings.get("n", 1) or not all(0 < len(one.ids) == len(one.log_probs) for one in given):
            raise self.error("gave an answer that is none")
        return given

    def load_adapter(self, name: str, folder: str) -> Answered:
        """Loads an adapter, and answers by it whoever asks for that name."""
        return self.ask("/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder}, _WORK_SECONDS)

    def unload_adapter(self, name: str) -> None:
        """Forgets an adapter."""
        self.ask("/v1/unload_lora_adapter", {"lora_name": name})

    def load_weights(self, folder: str) -> None:
        """Reads all weights anew, and forgets what it kept of prompts.

        Raises:
            NoAnswer: If it does not.
        """
        call = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        found = self.ask("/collective_rpc", call, _WORK_SECONDS)
        if found.fails:
            raise self.error(f"does not read the weights in {folder}, which it must see as well: {found.message}")
        end = time.monotonic() + _FREE_SECONDS
        while not _is_true(found := self.ask("/reset_prefix_cache", {})):
            if found.fails or time.monotonic() > end:
                raise self.error(f"does not forget what it kept of prompts: {found.message}")
            time.sleep(0.5)


def _is_true(found: Answered) -> bool:
    return not found.fails and (not isinstance(found.content, dict) or bool(found.content.get("success", True)))


def _read(body: bytes) -> Any:
    try:
        return json.loads(body or b"null")
    except ValueError:
        return body.decode(errors="replace")
