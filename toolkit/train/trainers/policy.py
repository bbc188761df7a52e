"""Reinforcement learning with rewards of answers that a model gives itself (GRPO, RLOO).

A step is prompts with several answers each. All of them are generated and scored before its first micro-batch, by the
policy as it is then; prompts with their answers then are trained like any answers, with a loss that weighs each by how
much better it was than the others. TRL's trainers group answers by their own sampler, draw them from one generator of a
process, and average some losses within micro-batches: here data order, answers and loss are the same however a step is
divided, and a run goes on from a checkpoint as if it had not stopped.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object

from toolkit.common import UserError
from toolkit.data.batching.answer_batches import PromptCollator
from toolkit.files import write_atomically
from toolkit.models.device import sent
from toolkit.models.lora_products import without_adapters
from toolkit.models.losses.policy import advantages, divisor, policy_losses, server_weights
from toolkit.models.parallel.layer_sums import dividing
from toolkit.recipe.reinforcement import Policy
from toolkit.report.held_out_rows import of_mean
from toolkit.report.rewards import MARGIN
from toolkit.train.evaluation.evaluate import evaluating
from toolkit.train.health.watchdog import beat
from toolkit.train.trainers.preference import AnswerTrainer
from toolkit.train.trainers.rollouts import Asker, Rollout, keep_answers, uniform
from toolkit.train.trainers.served_answers import ServedAnswers, seed_of
from toolkit.train.trainers.told import Measurement

FILE = "rollouts.json"
"""In a checkpoint between two steps on the same answers: these answers, of all processes."""
OF_SERVER = ("server_difference", "server_weight", "server_capped")
"""Of tokens that a server drew, on average: by how many nats its log-probability differs from that of the model before
the step, what it counts, and whether that is the most that it may."""
APART = 0.5
"""Nats per token. Kernels that round to bf16 are some hundredths apart, two models several."""
_Answers = tuple[int, list[list[int]], list[list[float]] | None]
"""The row of a prompt, the tokens of its answers and, of a server's, their log-probabilities."""


class PolicyTrainer(AnswerTrainer):
    """A causal model that learns from rewards. Set `asker` and `resumed` once it is made, and `settings`."""

    settings: Policy  # type: ignore[assignment]
    asker: Asker
    data_collator: PromptCollator
    train_dataset: Any
    eval_dataset: Any
    resumed: Path | None = None
    """The checkpoint that the run goes on from."""
    folder: Path | None = None
    """The run's, on the process that writes it."""
    served: ServedAnswers | None = None
    """The server that generates the answers, if it is not this process."""
    _computed: int = 0
    _fresh: bool = False
    """Whether nothing has been learnt from a server's newest answers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.shown: list[dict[str, Any]] = []
        """The first prompt of the newest rollout on this process, with its answers and their scores."""
        self._kept: list[list[Rollout]] = []
        self._gave_weights = False

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """The micro-batches of a step, with the answers to its prompts; and what its losses are divided by."""
        batches, count = super().get_batch_samples(*args, **kwargs)
        if not batches:
            return batches, count
        step, times = self.state.global_step, self.settings.num_iterations
        rows = [batch["rows"].tolist() for batch in batches]
        fresh = step % times == 0 or not self._kept
        if fresh:
            self._kept = self._rollouts(rows, step) if step % times == 0 else self._read(rows)
        every = [each for batch in self._kept for each in batch]
        tokens = self._sum([sum(len(ids) for each in every for ids in each.answers)])[0]
        self._tokens = int(tokens)
        answers = self.batches.global_batch_size * self.asker.recipe.rollout.num_generations  # type: ignore[union-attr]
        longest = self.asker.recipe.rollout.max_completion_tokens
        count = divisor(self.objective, self.settings, answers, int(tokens), longest) * dividing()
        self.waiting.trained = self.waiting.trained + self._tokens
        self.row_at_once = True  # With an answer beside it.
        asked = self._sum([sum(len(each.asked) * len(each.answers) for each in every)])[0]
        self._computed += self._tokens + int(asked)
        self._note(every)
        return [self._laid_out(batch) for batch in self._kept], sent(count, self.args.device)

    @property
    def said(self) -> tuple[str, ...]:  # type: ignore[override]
        """See `_note` and `told`."""
        return (*self._of_answers, "clipped", "kl", *OF_SERVER)

    @property
    def _of_answers(self) -> list[str]:
        """What `_note` adds up, beside the number of prompts."""
        names = ["reward", *(f"reward_{name}" for name in self.asker.scorer.names)]
        return [*names, *(f"{name}_std" for name in names), "no_spread", "answer_tokens", "cut"]

    def take_tokens(self) -> int:
        """Tokens of prompts and answers that were trained on since this was last asked, of all processes."""
        taken, self._computed = self._computed, 0
        return taken

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        """Known when the answers are."""
        return None

    def trained_tokens(self, count: Any) -> Any:
        return 0

    def score(self, model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Of a batch: the sum of the answers' losses, their number, and the routers' balance loss."""
        log_probs, balance = self._of_tokens(model, inputs)
        kept, counts = inputs["kept"], inputs["answer_tokens"]
        gains = sent(np.concatenate([each.gains for each in kept]), log_probs.device)
        before = log_probs.detach()
        if kept[0].before is not None:
            known = [number for each in kept for answer in each.before for number in answer]
            before = sent(known, log_probs.device, torch.float64)
        elif self.settings.num_iterations > 1:
            parts = iter(before.split(counts))
            for each in kept:
                each.before = [next(parts).tolist() for _ in each.answers]
        weights, apart = self._weights(kept, before, counts)
        found = policy_losses(
            self.objective, self.settings, log_probs, before, inputs.get("reference"), gains, counts, weights
        )
        tokens = sent(sum(counts), log_probs.device, torch.float64)
        sums = torch.stack([tokens, found.clipped.double(), found.divergence, *apart])
        self.see(torch.nn.functional.pad(sums, (1 + len(self._of_answers), 0)))
        return found.losses.sum().float(), sent(float(len(counts)), log_probs.device), balance

    def _weights(
        self, kept: list[Rollout], before: torch.Tensor, counts: list[int]
    ) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        """What each token of a server's answers counts, and sums over them for `OF_SERVER`, 0 without a server.

        Raises:
            UserError: If the server has drawn by another model.
        """
        if kept[0].served is None:
            return None, [before.new_zeros(())] * len(OF_SERVER)
        drawn = [number for each in kept for answer in each.served or () for number in answer]
        served = sent(drawn, before.device, torch.float64)
        weights = server_weights(self.objective, self.settings, before, served, counts)
        apart = (before - served).abs()
        if self._fresh:
            self._fresh = False
            # What `top_p` leaves out makes what it keeps likelier.
            if (far := float(apart.mean()) + math.log(self.asker.recipe.rollout.top_p)) > APART:
                assert self.served is not None, "it has answered"
                raise self.served.server.error(
                    "drew its answers by another model than the one in training: their log-probabilities are "
                    f"{far:.2f} nats per token apart"
                )
        capped = (weights >= self.settings.server_cap).double()
        return weights, [each.sum() for each in (apart, weights, capped)]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Keeps answers of the step, too."""
        if "loss" in logs:
            keep_answers(self.folder, self.state.global_step, self.shown)
        super().log(logs, *args, **kwargs)

    def told(self, sums: list[float]) -> dict[str, float]:
        """What is said of the answers of a step: see `_note`, `OF_SERVER`; and the share of tokens that was clipped."""
        prompts, *of_answers = sums[: 1 + len(self._of_answers)]
        tokens, clipped, divergence, *of_server = sums[1 + len(of_answers) :]
        said = {name: each / prompts for name, each in zip(self._of_answers, of_answers, strict=True)}
        said |= {"clipped": clipped / tokens}
        if any(of_server):
            said |= {name: each / tokens for name, each in zip(OF_SERVER, of_server, strict=True)}
        return said | ({"kl": divergence / tokens} if self.settings.beta and self.objective == "grpo" else {})

    def measure(self, model: Any, inputs: dict[str, Any]) -> Measurement:
        """(held-out rows x (rewards + 2)): scores of the likeliest answer to each prompt, its tokens, and whether it is
        cut; those of the batch are filled in."""
        first, width = len(self.train_dataset), len(self.asker.scorer.names) + 2
        table = torch.zeros(len(self.eval_dataset), width, dtype=torch.float64)
        rows = inputs["rows"].tolist()
        asked = [self._asked(row) for row in rows]
        if self.served:
            if not self._gave_weights:
                self.served.load(self)
                self._gave_weights = True
            answers = [given.ids for (given,) in self.served.answers(asked)]
        else:
            answers = self.asker.answers(self._module, asked, self.args.device)
        for row, ids, given in zip(rows, asked, answers, strict=True):
            scores = self.asker.scores(ids, [given], *self._known(row))[0]
            table[row - first] = torch.tensor([*scores, len(given), self.asker.is_cut(given)], dtype=torch.float64)
        return Measurement(table.flatten())

    def figures(self, sums: list[float], rows: torch.Tensor | None) -> dict[str, float]:
        """What an evaluation says, of the likeliest answers to all held-out prompts.

        Returns:
            `eval_loss` (minus the mean reward, so that less is better), `eval_reward` and `eval_reward_…` of each
            reward, with half the width of their 95% intervals as `…_plus_minus`, `eval_answers`, `eval_answer_tokens`
            and `eval_cut`, the share that their limit ended.
        """
        self._gave_weights = False
        scorer = self.asker.scorer
        table = np.array(sums).reshape(len(self.eval_dataset), -1)
        scores, count = table[:, :-2], len(table)
        found: dict[str, float] = {}
        every = {"reward": scores @ scorer.weights}
        every |= {f"reward_{name}": scores[:, place] for place, name in enumerate(scorer.names)}
        for name, values in every.items():
            found[f"eval_{name}"] = float(values.mean())
            if not math.isnan(half := of_mean(values).half):
                found[f"eval_{name}{MARGIN}"] = half
        tokens, cut = table[:, -2:].mean(axis=0).tolist()
        beside = {"eval_answers": count, "eval_answer_tokens": tokens, "eval_cut": cut}
        return {"eval_loss": -found["eval_reward"]} | found | beside

    def row_losses(self, sums: list[float], rows: torch.Tensor | None) -> torch.Tensor:
        """Minus the reward of each row's answer."""
        table = np.array(sums).reshape(len(self.eval_dataset), -1)
        losses = torch.from_numpy(-(table[:, :-2] @ self.asker.scorer.weights))
        return torch.stack([losses, torch.ones_like(losses)], 1)

    @property
    def _module(self) -> Any:
        """The model without the engine around it."""
        return self.accelerator.unwrap_model(self.model_wrapped)

    def _row(self, number: int) -> Any:
        first = len(self.train_dataset)
        return self.train_dataset[number] if number < first else self.eval_dataset[number - first]

    def _asked(self, number: int) -> list[int]:
        return [int(token) for token in self._row(number)["input_ids"]]

    def _known(self, number: int) -> tuple[str, dict[str, Any]]:
        """Where a row stands, and what is known of it."""
        place, columns = json.loads(str(self._row(number)["columns"]))
        return place, columns

    def _rollouts(self, batches: list[list[int]], step: int) -> list[list[Rollout]]:
        """Answers to the prompts of a step, scored; of each micro-batch of this process."""
        asked = {row: self._asked(row) for batch in batches for row in batch}
        made = {}
        for row, given, served in self._drawn(asked, step):
            scores = self.asker.scores(asked[row], given, *self._known(row))
            made[row] = Rollout(row, asked[row], given, scores, served=served)
        # A row that ends one epoch and begins the next may be in a step twice.
        rolled = [[dataclasses.replace(made[row]) for row in batch] for batch in batches]
        self._weigh(rolled)
        return rolled

    def _drawn(self, asked: dict[int, list[int]], step: int) -> Iterator[_Answers]:
        """Answers to prompts by their rows."""
        if not self.served:
            yield from self._generated(asked, step)
            return
        self.served.load(self)
        beat(f"waiting for the answers of step {step + 1}")
        seeds = [seed_of(self.asker.recipe.seed, step, row) for row in asked]
        self._fresh = True
        for row, given in zip(asked, self.served.answers([*asked.values()], seeds), strict=True):
            yield row, [each.ids for each in given], [each.log_probs for each in given]

    def _generated(self, asked: dict[int, list[int]], step: int) -> Iterator[_Answers]:
        """The same of the model on this process."""
        settings = self.asker.recipe.rollout
        count, seed, longest = settings.num_generations, self.asker.recipe.seed, settings.max_completion_tokens
        numbers = np.concatenate([uniform(seed, step, row, count, longest) for row in asked])
        answers = self.asker.drawn(self, [ids for ids in asked.values() for _ in range(count)], numbers)
        for place, row in enumerate(asked):
            yield row, answers[place * count : (place + 1) * count], None

    def _weigh(self, rolled: list[list[Rollout]]) -> None:
        """Gives answers their advantages."""
        weights, costs = self.asker.scorer.weights, self._costs(rolled)
        rewards = {id(each): each.scores @ weights - costs.get(id(each), 0.0) for batch in rolled for each in batch}
        spread = None
        if self.settings.scale_rewards == "batch":
            values = np.concatenate([*rewards.values()])
            total, squares, count = self._sum([values.sum(), (values**2).sum(), len(values)])
            spread = math.sqrt(max(0.0, squares - total**2 / count) / (count - 1))
        for batch in rolled:
            for each in batch:
                each.gains = advantages(self.objective, self.settings, rewards[id(each)][None], spread)[0]

    def _costs(self, rolled: list[list[Rollout]]) -> dict[int, Any]:
        """What RLOO's rewards lose by how far the policy has moved from the reference, of each answer; nothing without
        a `beta`, and for GRPO, whose loss has it."""
        if not (self.settings.beta and self.objective == "rloo"):
            return {}
        costs: dict[int, Any] = {}
        with evaluating(self.model_wrapped), torch.no_grad():
            for batch in rolled:
                inputs: Any = self._prepare_inputs(self._answered(batch))
                moved = self._of_tokens(self.model_wrapped, inputs)[0] - self._by_reference(inputs)
                each = iter([float(part.sum()) for part in moved.split(inputs["answer_tokens"])])
                for rollout in batch:
                    costs[id(rollout)] = self.settings.beta * np.array([next(each) for _ in rollout.answers])
        return costs

    def _answered(self, batch: list[Rollout]) -> dict[str, Any]:
        prompts = [each.asked for each in batch for _ in each.answers]
        return self.data_collator.answered(prompts, [ids for each in batch for ids in each.answers])

    def _laid_out(self, batch: list[Rollout]) -> dict[str, Any]:
        """A micro-batch, with what the reference says of it where the loss asks for that."""
        inputs: dict[str, Any] = {
            name: sent(each, self.args.device) if isinstance(each, torch.Tensor) else each
            for name, each in self._answered(batch).items()
        }
        if self.settings.beta and self.objective == "grpo":
            with evaluating(self.model_wrapped), torch.no_grad():
                prepared: Any = self._prepare_inputs(inputs)
                inputs["reference"] = self._by_reference(prepared)
        return inputs | {"kept": batch}

    def _by_reference(self, inputs: dict[str, Any]) -> torch.Tensor:
        """(T,) log-probabilities of all answers' tokens by the model without its adapters."""
        with without_adapters(self._module):
            return self._of_tokens(self.model_wrapped, inputs)[0]

    def _of_tokens(self, model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(T,) log-probabilities of all answers' tokens, and the routers' balance loss."""
        known = {name: inputs[name] for name in inputs if name not in ("kept", "answer_tokens", "reference")}
        outputs, balance = self.scores(model, known)
        return outputs.log_probs[0].double()[: sum(inputs["answer_tokens"])], balance

    def _sum(self, values: Iterable[float]) -> list[float]:
        """Over all processes that have rows of their own."""
        mine = torch.tensor([*map(float, values)], dtype=torch.float64, device=self.args.device)
        total: list[float] = (self.accelerator.reduce(mine, reduction="sum") / dividing()).tolist()
        return total

    def _note(self, every: list[Rollout]) -> None:
        """Adds up what the answers of a step are like.

        It is, on average over prompts: `reward` and `reward_…` of each reward; `reward_std` and `reward_…_std`, the
        standard deviation among the answers to a prompt; `no_spread`, the share of prompts whose answers all have the
        same reward; `answer_tokens`; and `cut`, the share of answers that their limit ended.
        """
        scorer, sums = self.asker.scorer, []
        for each in every:
            columns = np.column_stack([each.scores @ scorer.weights, each.scores])
            spreads = columns.std(axis=0, ddof=1)
            cut = np.mean([self.asker.is_cut(ids) for ids in each.answers])
            tokens = np.mean([len(ids) for ids in each.answers])
            sums.append([1.0, *columns.mean(axis=0), *spreads, spreads[0] < 1e-9, tokens, cut])
        noted = sent(np.sum(sums, axis=0), self.args.device)
        self.see(torch.nn.functional.pad(noted, (0, 3 + len(OF_SERVER))))
        if not self.folder:
            return
        first = every[0]
        self.shown = [
            {"prompt": self.asker.text(first.asked), "answer": self.asker.text(ids)}
            | dict(zip(scorer.names, scores.tolist(), strict=True))
            for ids, scores in zip(first.answers, first.scores, strict=True)
        ]

    def _save_rng_state(self, output_dir: str) -> None:
        """Saves answers that are trained on once more, too."""
        super()._save_rng_state(output_dir)
        if self.state.global_step % self.settings.num_iterations == 0:
            return
        mine = [each.as_json() for batch in self._kept for each in batch]
        every = gather_object(mine)
        if self.is_world_process_zero():
            write_atomically(Path(output_dir) / FILE, json.dumps({str(each["row"]): each for each in every}))

    def _read(self, rows: list[list[int]]) -> list[list[Rollout]]:
        """Answers that a checkpoint was saved with."""
        file = (self.resumed or Path()) / FILE
        try:
            every = json.loads(file.read_text(encoding="utf-8"))
            return [[Rollout.from_json(every[str(row)]) for row in batch] for batch in rows]
        except (OSError, ValueError, LookupError, TypeError):
            raise UserError(
                f"{file}, with the answers that are trained on once more, is gone or damaged",
                "go on from an earlier checkpoint, which checkpoint.resume names",
            ) from None
