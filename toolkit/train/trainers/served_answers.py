"""Answers of a training that a vLLM server generates: what is checked of it, how it gets the weights, how it is asked.

Before the answers of a step are asked for, the first process writes the weights as they are then into a folder of the
run, from which the server loads them: an adapter under a new name, or all weights in place of those that it has. Then
every process asks for the answers to its own prompts, all at once. Each answer has a seed that follows from the run's,
the step and the row, so what it says depends on nothing else but for the rounding of the server's own batches.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.utils import broadcast_object_list

from toolkit.distributed.engines import Dtypes
from toolkit.distributed.rendezvous import Rendezvous, SharedError, Values
from toolkit.distributed.vllm_lines import answers_line
from toolkit.files import write_json
from toolkit.models.adapters import of_twice_the_rank, on_whole_base
from toolkit.recipe import Recipe
from toolkit.train.checkpoints.snapshots import take
from toolkit.train.health.watchdog import beat
from toolkit.train.vllm_server import Given, NoAnswer, Server

FOLDER = "served"
"""In the run folder: weights for the server to load."""
_AT_ONCE = 256
"""Requests of a process that are under way at the same time; that many sequences vLLM computes together by default."""
_PROBE = "Words, 12 of them; and a name: Zoë.\n"
"""Tokenizers differ in how they split it."""
_ALIKE = 1e-6
"""Log-probabilities that were divided by different temperatures are further apart."""


def seed_of(seed: int, step: int, row: int) -> int:
    """Of the answers to a row in a step; vLLM counts up from it for each of them."""
    return int(np.random.SeedSequence([seed, step, row]).generate_state(1, np.uint64)[0] >> np.uint64(16))


def connect(rendezvous: Rendezvous, recipe: Recipe, tokenizer: Any, folder: Path) -> tuple[Server, dict[str, str]]:
    """The server of a recipe that names one, before anything slow begins. All processes call this.

    Args:
        folder: The run's.

    Returns:
        It, and what the manifest says of it.

    Raises:
        UserError: On all processes: if one of them does not reach it, or if it is not what the recipe takes.
    """
    assert recipe.rollout.server is not None, "a server answers"
    server, lost = Server(recipe.rollout.server, answers_line(recipe)), ""
    try:
        server.version()
    except NoAnswer as error:
        lost = error.whole

    def judge(found: Values) -> dict[str, str]:
        if far := [rank for rank, what in found.items() if what]:
            who = "" if rendezvous.alone else f" (asked by {rendezvous.name(*far)})"
            raise SharedError(found[far[0]] + who, server.advice)
        try:
            return check(server, recipe, tokenizer, folder)
        except NoAnswer as error:
            raise SharedError(error.whole, error.change) from None

    about: dict[str, str] = rendezvous.exchange("server", lost, judge)
    return server, about


def check(server: Server, recipe: Recipe, tokenizer: Any, folder: Path) -> dict[str, str]:
    """Asks a server what it serves, and whether it takes new weights.

    Raises:
        NoAnswer: If it is not what the recipe takes.
    """
    models = server.models()
    base = next((each for each in models if not each.get("parent")), None)
    if base is None:
        raise server.error("serves no model")
    name, longest = str(base["id"]), base.get("max_model_len")
    about = {"address": server.address, "vllm": server.version(), "model": str(base.get("root") or name)}
    if longest is not None and int(longest) < recipe.batch.seq_len:
        raise server.error(f"takes rows of {longest} tokens, and batch.seq_len is {recipe.batch.seq_len}")
    own = tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
    split = server.ask("/tokenize", {"model": name, "prompt": _PROBE, "add_special_tokens": False})
    if not split.fails and split.content.get("tokens") != own:
        raise server.error(f"serves {about['model']}, whose tokens are others than those of {recipe.model.path}")
    _check_answers(server, recipe, name, len(tokenizer) - 1)
    if recipe.method.name == "lora":
        shutil.rmtree(folder / FOLDER, ignore_errors=True)
        for each in models:
            # What a run that was killed has left.
            if each.get("parent") and Path(str(each.get("root"))).is_relative_to((folder / FOLDER).resolve()):
                server.unload_adapter(str(each["id"]))
        _check_adapters(server, recipe, folder / FOLDER)
    elif server.ask("/collective_rpc", {}).missing:
        raise server.error("takes no new weights")
    return about


def _check_answers(server: Server, recipe: Recipe, name: str, last: int) -> None:
    """Whether the server knows the last token, and tells the log-probabilities with which it draws."""
    asked = recipe.rollout
    likeliest = []
    for temperature in (1.0, 0.5):
        found = server.complete(name, [last], 1, temperature=temperature, top_p=1.0, logprobs=1, seed=0)
        if found.fails:
            raise server.error(f"does not answer what ends with the last token of {recipe.model.path}: {found.message}")
        likeliest.append(max(found.content["choices"][0]["logprobs"]["top_logprobs"][0].values()))
    if abs(likeliest[0] - likeliest[1]) < _ALIKE and (asked.temperature != 1 or asked.top_p < 1):
        raise server.error("tells log-probabilities as they are before rollout.temperature and rollout.top_p")
    server.answers(name, [last], 1, temperature=0.0)


def _check_adapters(server: Server, recipe: Recipe, folder: Path) -> None:
    """Whether the server sees the run folder, and takes adapters of this rank: it is given settings without weights,
    which it reads before it misses those."""
    rank = recipe.method.published_rank
    probe = folder / "probe"
    probe.mkdir(parents=True, exist_ok=True)
    write_json(probe / "adapter_config.json", {"peft_type": "LORA", "r": rank, "lora_alpha": 1, "target_modules": []})
    try:
        found = server.load_adapter(f"probe-{uuid.uuid4().hex[:8]}", str(probe.resolve()))
    finally:
        shutil.rmtree(probe)
    said = found.message
    if found.missing:
        raise server.error("loads no adapters while it runs")
    if "not enabled" in said:
        raise server.error("was started without adapters")
    if "max_lora_rank" in said:
        raise server.error(f"makes no room for adapters of rank {rank}: {said}")
    if found.status == 404:
        raise server.error(f"does not see {probe}: output.dir must be a folder that it shares")


class ServedAnswers:
    """A server that has the weights of a model in training, and answers by them.

    Args:
        folder: The run's.
        stops: Tokens that end an answer.
        start: See `adapter_init.begin_with_base`.
    """

    def __init__(
        self, server: Server, recipe: Recipe, stops: frozenset[int], folder: Path, dtypes: Dtypes, start: dict[str, Any]
    ) -> None:
        self.server, self._recipe, self._dtypes, self._start = server, recipe, dtypes, start
        self._stops, self._folder, self._number = sorted(stops), folder.resolve() / FOLDER, 0
        self._run, self._model, self._loaded = uuid.uuid4().hex[:8], "", ""

    def load(self, trainer: Any) -> None:
        """Gives the server the weights as they are now. Every process must call this.

        Raises:
            NoAnswer: On the first process, if the server does not take them.
        """
        # Until here others may have been asking it.
        trainer.accelerator.wait_for_everyone()
        beat("giving the vLLM server the weights")
        state, model = take(trainer, self._dtypes), [""]
        if trainer.is_world_process_zero():
            self._number += 1
            before, folder = self._folder / str(self._number - 1), self._folder / str(self._number)
            self._write(trainer, state, folder)
            del state
            model = [self._hand_over(str(folder))]
            shutil.rmtree(before, ignore_errors=True)
        broadcast_object_list(model)
        self._model = model[0]

    def _write(self, trainer: Any, state: dict[str, Any], folder: Path) -> None:
        model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
        state = on_whole_base(state, self._start) if self._start else state
        shutil.rmtree(folder, ignore_errors=True)
        model.save_pretrained(folder, state_dict=state)
        if self._start:
            file = folder / "adapter_config.json"
            write_json(file, of_twice_the_rank(json.loads(file.read_text(encoding="utf-8"))))

    def _hand_over(self, folder: str) -> str:
        """Returns the name by which the server has the weights in a folder."""
        server = self.server
        if self._recipe.method.name == "full":
            server.load_weights(folder)
            return self._model or next(str(each["id"]) for each in server.models() if not each.get("parent"))
        # What the server keeps of prompts it knows by the adapter's name.
        name = f"{self._run}-{self._number}"
        found = server.load_adapter(name, folder)
        if found.fails:
            raise server.error(f"does not load the adapter in {folder}: {found.message}")
        if self._loaded:
            server.unload_adapter(self._loaded)
        self._loaded = name
        return name

    def answers(self, prompts: Sequence[list[int]], seeds: Sequence[int] | None = None) -> list[list[Given]]:
        """Answers to prompts: to each as many as `rollout.num_generations` says, drawn by its seed; without seeds the
        likeliest one.

        Raises:
            NoAnswer: If the server gives one of them none.
        """
        settings = self._recipe.rollout
        drawn = {"n": settings.num_generations, "temperature": settings.temperature, "top_p": settings.top_p}
        longest, stops = settings.max_completion_tokens, {"stop_token_ids": self._stops}

        def one(prompt: list[int], seed: int | None) -> list[Given]:
            how = {"temperature": 0.0} if seed is None else {**drawn, "seed": seed}
            return self.server.answers(self._model, prompt, longest, **stops, **how)

        with ThreadPoolExecutor(min(len(prompts), _AT_ONCE)) as asking:
            of_each = seeds or itertools.repeat(None, len(prompts))
            waiting = [asking.submit(one, prompt, seed) for prompt, seed in zip(prompts, of_each, strict=True)]
            try:
                for done in as_completed(waiting):
                    done.result()
                    beat("waiting for the vLLM server's answers", together=False)
            except BaseException:
                asking.shutdown(wait=False, cancel_futures=True)
                raise
            return [each.result() for each in waiting]

    def close(self) -> None:
        """Takes back what the server was given, as far as that still can be done."""
        if self._loaded:
            with contextlib.suppress(NoAnswer):
                self.server.unload_adapter(self._loaded)
        if self._number:
            shutil.rmtree(self._folder, ignore_errors=True)
