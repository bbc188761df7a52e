"""Steps, evaluation and generation of a model whose layers follow each other on several processes.

The micro-batches of an optimizer step are those of the pipeline: the trainer hands all of them over at once, and gets
the loss and the gradients of the step. All processes of a pipeline read the same rows. What is saved is whole, see
`stage_files`.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import send_to_device
from torch.distributed.pipelining.schedules import ScheduleGPipe, ScheduleZBVZeroBubble
from transformers.modeling_outputs import CausalLMOutputWithPast

from toolkit.data.batching.collate import TWO_DOCUMENTS
from toolkit.data.encoding.encode import IGNORE
from toolkit.models.parallel.pipeline import CACHES, Chain, chain, draw_apart, piped, pipeline_group
from toolkit.models.parallel.stage import SCHEDULES, Sent, Stage, Whole, schedule_of, shape_of
from toolkit.train.checkpoints.divided import answering
from toolkit.train.checkpoints.stage_files import whole_optimizer, whole_parameters
from toolkit.train.trainers.stage_gradients import add_tied, average
from toolkit.train.trainers.told import Measurement

_HELD = (ScheduleGPipe, ScheduleZBVZeroBubble)
"""Schedules whose last stage does not go straight back through the output head."""
_TRIED = 8
"""Tokens of the row by which stages learn what they are sent."""


class Pipeline:
    """The stages of this process, ready for steps. All processes build it at the same time.

    Args:
        trainer: Whose model has been prepared.
        own: This process's part of the model.
        schedule: `parallel.schedule` of the recipe.
    """

    def __init__(self, trainer: Any, own: Chain, schedule: str) -> None:
        self._trainer, self._chain, self.schedule = trainer, own, schedule
        self._device = trainer.args.device
        self._count = torch.ones(())
        self._sending: list[Any] = []
        self._routed: tuple[torch.Tensor, ...] = ()
        self._caches: dict[Any, Any] = {}
        self._cut: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        own.decoder.register_forward_hook(self._add_scores)
        base = trainer.model.get_base_model() if hasattr(trainer.model, "get_base_model") else trainer.model
        self._forward = base.forward

        # `generate` checks its arguments against the original signature.
        @functools.wraps(type(base).forward)
        def forward(_: Any, *args: Any, **kwargs: Any) -> Any:
            return self._called(*args, **kwargs)

        base.forward = types.MethodType(forward, base)
        last = own.last
        self._sent: dict[int, Sent] = {}
        self.learn()
        self.stages = [
            Stage(
                Whole(own.modules(stage), functools.partial(self._of_step, stage)), stage, last + 1, self._device,
                self._sent.get(stage - 1), self._sent.get(stage),
            )
            for stage in own.stages
        ]  # fmt: skip
        self.order = schedule_of(schedule, self.stages, own, trainer.args.gradient_accumulation_steps)
        draw_apart(own)

    def effective(self) -> dict[str, Any]:
        """Over how many processes layers really are spread, which of them are in the stages of this one, and in what
        order micro-batches pass them; as in `EngineState`."""
        names = {kind: name for name, kind in SCHEDULES.items()}
        return {
            "engine": "pipeline",
            "pipeline": self.stages[0].group_size,
            "schedule": names[type(self.order)],
            "stages": {stage: self._chain.held(stage) for stage in self._chain.stages},
        }

    def step(self, batches: list[dict[str, Any]], count: Any) -> torch.Tensor:
        """Adds up the gradients of a step, and returns its loss.

        Args:
            batches: Its micro-batches on this process's device.
            count: Trained tokens of all of them, of all pipelines.
        """
        self._count = count
        losses: list[torch.Tensor] = []
        for stage in self.stages:
            stage.batches, stage.has_backward = batches, True
            stage.clear_runtime_states()
        targets = [()] * len(batches) if self._chain.last in self._chain.stages else None
        try:
            self.order._step_microbatches([()] * len(batches), None, targets, losses, return_outputs=False)
        except RuntimeError as error:
            # torch tells of each stage's error by another one, which says nothing of memory.
            raise error.__cause__ or error from error
        for stage in self.stages:
            stage.batches = []
        loss = torch.stack([each.detach() for each in losses]).sum() if losses else torch.zeros((), device=self._device)
        dist.all_reduce(loss, group=pipeline_group())
        if self._trainer.guard:
            self._trainer.guard.tell(len(batches), pipeline_group())
        add_tied(self._trainer.model, self._chain)
        average(self._trainer.model)
        return loss

    def score(self, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, None]:
        """As the trainer's, of a batch that all processes of the pipeline have: on the process with the last stage, and
        zero on the others. They need not wait for it."""
        nothing = torch.zeros((), device=self._device)
        return self._at_last(inputs, self._trainer.score) or (nothing, nothing, None)

    def measure(self, inputs: dict[str, Any]) -> Measurement:
        """As the trainer's, as `score`."""
        nothing = torch.zeros(len(inputs["label_positions"]), 2, dtype=torch.float64, device=self._device)
        return self._at_last(inputs, self._trainer.measure) or Measurement(nothing.sum(0), nothing)

    def _at_last(self, inputs: dict[str, Any], ask: Callable[[Any, dict[str, Any]], Any]) -> Any:
        """Takes a batch through the stages, and what is asked from the last one; None on processes without it."""
        result = None
        for stage, received in self._through(inputs):
            if stage == self._chain.last:
                with self._chain.only(stage):
                    result = ask(self._trainer.model_wrapped, self._with(inputs, received))
            else:
                self._send(stage, self._compute(stage, inputs, received))
        return result

    @contextmanager
    def at_last(self, batch: Mapping[str, Any]) -> Iterator[dict[str, Any] | None]:
        """While this context lasts, the model is the last stage; a batch for it, with hidden states drawn at random.
        None on other processes."""
        if self._chain.last not in self._chain.stages:
            yield None
            return
        with self._chain.only(self._chain.last):
            yield self._with(batch, self._drawn(self._chain.last, batch))

    def isolates(self) -> bool:
        """Whether two documents of a row see nothing of each other in any stage of any process."""
        batch = send_to_device(self._trainer.data_collator([TWO_DOCUMENTS]), self._device)
        training = self._trainer.model_wrapped.training
        self._trainer.model_wrapped.eval()  # As `collate.isolates` does, and why is said there.
        apart = True
        for stage in self._chain.stages:
            given = self._with(batch, self._drawn(stage or 1, batch))
            hidden = given["inputs_embeds"].requires_grad_()
            given = self._trainer.output_head.plain(given) | {"use_cache": False}
            self._routed = ()
            with torch.enable_grad(), self._chain.only(stage), self._trainer.accelerator.autocast():
                left = self._chain.decoder(**given).last_hidden_state[0].float()
                (gradient,) = torch.autograd.grad(left[4:8].square().sum(), hidden)
            apart = apart and bool((gradient[0, :4] == 0).all() and (gradient[0, 4:] != 0).any())
        self._trainer.model_wrapped.train(training)
        return bool(self._trainer.accelerator.gather(torch.tensor([apart], device=self._device)).all())

    def _drawn(self, stage: int, batch: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        """What a stage might be sent, without a change of the run's random numbers."""
        sent = self._sent.get(stage - 1) or self._sent[stage]
        places = sent.like(*shape_of(batch), self._device)
        generator = torch.Generator(self._device).manual_seed(0)
        return tuple(each.normal_(generator=generator) for each in places)

    def _through(
        self, inputs: Mapping[str, Any], scores: bool = True
    ) -> Iterator[tuple[int, tuple[torch.Tensor, ...]]]:
        """This process's stages, in order, and what each gets from the one before.

        Args:
            scores: Whether routers' scores are sent, where they are in training.
        """
        self._local: tuple[torch.Tensor, ...] = ()
        for stage in self._chain.stages:
            received: tuple[torch.Tensor, ...] = ()
            if stage and self._chain.split.place(stage - 1) == self._chain.place:
                received = self._local
            elif stage:
                received = self._sent[stage - 1].like(*shape_of(inputs), self._device)[: None if scores else 1]
                for each in received:
                    dist.recv(each, src=self._chain.rank(stage - 1), group=pipeline_group())
            yield stage, received

    def _send(self, stage: int, outputs: tuple[torch.Tensor, ...]) -> None:
        """To the next stage, without waiting for it to be ready for more than what was sent before."""
        if self._chain.split.place(stage + 1) == self._chain.place:
            self._local = outputs
            return
        for work, _ in self._sending:
            work.wait()
        to, group = self._chain.rank(stage + 1), pipeline_group()
        kept = [each.detach().contiguous() for each in outputs]
        self._sending = [(dist.isend(each, dst=to, group=group), each) for each in kept]

    def _of_step(self, stage: int, named: Any, *received: torch.Tensor) -> Any:
        """A stage in training, whose last one gives the loss."""
        inputs = named.batch
        if stage != self._chain.last:
            return self._compute(stage, inputs, received)
        trainer = self._trainer
        self._cut = [] if isinstance(self.order, _HELD) else None
        with self._chain.only(stage):
            given = self._with(inputs, received)
            loss = trainer.compute_loss(trainer.model_wrapped, given, num_items_in_batch=self._count)
        cut, self._cut = self._cut, None
        return loss if cut is None else _with_head_done(loss, cut)

    def _compute(self, stage: int, inputs: Mapping[str, Any], received: tuple[torch.Tensor, ...]) -> Any:
        """What a stage that is not the last one hands on."""
        given = self._trainer.output_head.plain(self._with(inputs, received)) | {"use_cache": False}
        if self._trainer.aux_loss_enabled:
            given["output_router_logits"] = True
        with self._chain.only(stage), self._trainer.accelerator.autocast():
            outputs = self._chain.decoder(**given)
        if self._trainer.casts and outputs.last_hidden_state.requires_grad:
            self._trainer.casts.keep_in_backward(outputs.last_hidden_state)
        self._routed = ()
        scores = getattr(outputs, "router_logits", None) if self._trainer.aux_loss_enabled else None
        if not scores:
            return (outputs.last_hidden_state,)
        return outputs.last_hidden_state, torch.stack([each.flatten(0, -2) for each in scores])

    def _with(self, inputs: Mapping[str, Any], received: tuple[torch.Tensor, ...]) -> dict[str, Any]:
        """A batch with hidden states instead of tokens, where a stage has received them."""
        if not received:
            return dict(inputs)
        hidden, *routed = received
        self._routed = tuple(routed[0].unbind(0)) if routed else ()
        return {key: value for key, value in inputs.items() if key != "input_ids"} | {"inputs_embeds": hidden}

    def _add_scores(self, _: Any, __: Any, outputs: Any) -> Any:
        """Puts the scores of the routers before this stage to its own: their balance is one of all layers."""
        if self._routed:
            outputs.router_logits = (*self._routed, *(outputs.router_logits or ()))
            self._routed = ()
        if self._cut is not None:
            outputs.last_hidden_state = self._leaf(outputs.last_hidden_state)
            if getattr(outputs, "router_logits", None):
                outputs.router_logits = tuple(map(self._leaf, outputs.router_logits))
        return outputs

    def _leaf(self, made: torch.Tensor) -> torch.Tensor:
        """The same numbers, at which a backward pass ends."""
        leaf = made.detach().requires_grad_()
        assert self._cut is not None
        self._cut.append((made, leaf))
        return leaf

    @torch.no_grad()
    def learn(self) -> None:
        """Notes what each stage next to this process's sends, tried on a row of a few tokens. All processes call this,
        again when the types of weights have changed."""
        row = {"input_ids": [1] * _TRIED, "labels": [IGNORE] * _TRIED}
        inputs = self._trainer._prepare_inputs(self._trainer.data_collator([row]))
        sent = self._sent = {}
        group, model = pipeline_group(), self._trainer.model_wrapped
        training = model.training
        model.eval()
        for stage in self._chain.stages:
            before = stage - 1
            if stage and self._chain.split.place(before) != self._chain.place:
                described: list[Any] = [None]
                dist.recv_object_list(described, src=self._chain.rank(before), group=group, device=self._device)
                sent[before] = Sent.named(described[0])
            if stage == self._chain.last:
                continue
            received = (
                tuple(each.zero_() for each in sent[before].like(*shape_of(inputs), self._device)) if stage else ()
            )
            sent[stage] = Sent.of(self._compute(stage, inputs, received))
            if self._chain.split.place(stage + 1) != self._chain.place:
                to = self._chain.rank(stage + 1)
                dist.send_object_list([sent[stage].names()], dst=to, group=group, device=self._device)
        model.train(training)

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward. Where it is asked for logits of tokens, as in generation, it goes through all stages;
        the stages themselves are called with hidden states or for scores."""
        if kwargs.get("fused_lm_head") or kwargs.get("inputs_embeds") is not None or kwargs.get("input_ids") is None:
            return self._forward(*args, **kwargs)
        ids = kwargs.pop("input_ids")
        kwargs.pop("inputs_embeds", None)
        inputs = {"input_ids": ids}
        caches = {name: cache for name in CACHES & kwargs.keys() if (cache := kwargs.pop(name)) is not None}
        logits = None
        for stage, received in self._through(inputs, scores=False):
            own = {name: self._cache_of(stage, cache) for name, cache in caches.items()}
            given = self._with(inputs, received) | kwargs | own
            with self._chain.only(stage), self._trainer.accelerator.autocast():
                if stage == self._chain.last:
                    logits = self._forward(**given).logits
                else:
                    given.pop("logits_to_keep", None)
                    given.pop("return_dict", None)
                    self._send(stage, (self._chain.decoder(**given).last_hidden_state,))
        return CausalLMOutputWithPast(logits=self._from_last(logits, ids), **caches)

    def _cache_of(self, stage: int, cache: Any) -> Any:
        """What a stage keeps of the rows that are generated. Each has its own: models ask it how long rows are, and an
        earlier stage of this process has added to its own already."""
        if cache is None or stage == self._chain.stages[0]:
            return cache
        if self._caches.get("of") is not cache:
            self._caches = {"of": cache, **{each: copy.deepcopy(cache) for each in self._chain.stages[1:]}}
            for each in self._chain.stages[1:]:
                self._caches[each].reset()
        return self._caches[stage]

    def _from_last(self, logits: torch.Tensor | None, ids: torch.Tensor) -> torch.Tensor:
        """The last stage's logits, on all processes of the pipeline."""
        described: list[Any] = [None if logits is None else (logits.shape, logits.dtype)]
        source, group = self._chain.rank(self._chain.last), pipeline_group()
        dist.broadcast_object_list(described, src=source, group=group, device=self._device)
        shape, dtype = described[0]
        place = torch.empty(shape, dtype=dtype, device=self._device) if logits is None else logits.contiguous()
        dist.broadcast(place, src=source, group=group)
        return place


def _with_head_done(loss: torch.Tensor, cut: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """A loss whose backward pass through the output head is over, and whose gradient is that of the layers.

    The zero-bubble schedule goes through a stage twice, for gradients of inputs and later of weights; fused heads have
    formed both by then, and keep neither for a second time. GPipe would keep gradients of the head's weight, or logits
    where the head is not fused, of all micro-batches of a step.

    Args:
        cut: What the layers have made, and the leaves that the loss was computed from instead.
    """
    loss.backward()
    # Of leaves that the loss does not read, such as scores of routers that are not balanced, there is no gradient.
    rest = torch.stack([(made * leaf.grad).sum() for made, leaf in cut if leaf.grad is not None]).sum()
    return rest - rest.detach() + loss.detach()


class Pipelined:
    """Of a trainer, how it trains, scores and saves a model whose layers are spread over processes. Set `schedule`."""

    schedule = "1f1b"
    pipeline: Pipeline | None = None
    _step: tuple[list[Any], Any] = ([], None)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if piped() > 1:
            accelerator = self.accelerator  # type: ignore[attr-defined]
            # DDP would wait for gradients of every micro-batch; they are averaged when the pipeline has run empty.
            accelerator.prepare_model = functools.partial(accelerator.prepare_model, evaluation_mode=True)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)  # type: ignore[misc]
        own = chain()
        if own and self.pipeline is None:
            self.pipeline = Pipeline(self, own, self.schedule)
        return prepared

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Theirs counts the trained tokens of all processes, also of those that read the same."""
        batches, count = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        count = count if count is None else count // piped()
        self._step = (batches, count) if piped() > 1 else ([], None)
        return batches, count

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """All micro-batches of a step pass when the loop comes to the last one."""
        if self.pipeline is None:
            return super().training_step(model, *args, **kwargs)  # type: ignore[misc]
        device = self.args.device  # type: ignore[attr-defined]
        if not self.accelerator.sync_gradients:  # type: ignore[attr-defined]
            return torch.zeros((), device=device)
        model.train()
        batches, count = self._step
        self._step = ([], None)
        return self.pipeline.step([self._prepare_inputs(each) for each in batches], count)  # type: ignore[attr-defined]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        own = chain()
        if own is None:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
            return
        state = whole_parameters(self.model, own)  # type: ignore[attr-defined]
        if self.args.should_save:  # type: ignore[attr-defined]
            self._save(output_dir, state)  # type: ignore[attr-defined]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        optimizer, own = self.optimizer, chain()  # type: ignore[attr-defined]
        if own is None:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
            return
        with answering(optimizer, whole_optimizer(optimizer, self.model, own)):  # type: ignore[attr-defined]
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
