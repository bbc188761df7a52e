"""TRL's and Transformers' trainers, with the division of rows, the norm of gradients and the held-out loss made exact.

Everything else is theirs. What is overridden is what would otherwise make losses depend on the engine or on the number
of processes, and what an engine needs to be told about weights that a loss reads past their own module.
"""

from __future__ import annotations

import contextlib
import functools
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate.accelerator
import accelerate.optimizer
import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.utils.data import DataLoader
from transformers import Seq2SeqTrainer
from transformers.integrations import is_deepspeed_zero3_enabled
from trl import SFTTrainer

from toolkit.common import UserError, concealed
from toolkit.data.batching.batches import MicroBatches
from toolkit.files import write_atomically
from toolkit.models.attention.attention_kernels import keep_attention
from toolkit.models.embedding_noise import add_noise
from toolkit.models.output_heads.head_choice import add_output_head
from toolkit.models.output_heads.output_head import HeadChoice
from toolkit.models.parallel.layer_sums import dividing
from toolkit.models.parallel.pipeline import piped
from toolkit.models.step_casts import StepCasts
from toolkit.train.checkpoints.divided import Divided
from toolkit.train.checkpoints.elastic import Continues
from toolkit.train.checkpoints.stage_files import naming_adapters
from toolkit.train.checkpoints.staging import Saves
from toolkit.train.health.batch_guard import BatchGuard
from toolkit.train.health.watchdog import beat
from toolkit.train.optimizer import decayed_parameters, inner_optimizer
from toolkit.train.process import end_with_training
from toolkit.train.trainers.divided_experts import DividedExperts
from toolkit.train.trainers.gathering import (
    decide_releases_anew,
    gather_for_dora,
    gather_head_with_model,
    name_units,
    share_buffers,
    take_choices_together,
    unshard_head,
)
from toolkit.train.trainers.gradients import Clipping
from toolkit.train.trainers.late_rows import LateRows
from toolkit.train.trainers.pipelined import Pipelined
from toolkit.train.trainers.told import Measuring

# Accelerate asks twice in every step, and the answer is looked for on the disk each time.
accelerate.optimizer.is_lomo_available = functools.cache(accelerate.optimizer.is_lomo_available)


def spare_walks(model: Any) -> None:
    """Has a model skip the walks through all its modules that Transformers' loop takes: in every micro-batch to tell
    them that they are trained, in every step to drop gradients. Both take milliseconds for a thousand modules."""
    train, trained = model.train, [each for each in model.parameters() if each.requires_grad]
    train()  # PEFT's wrapper says that it is, around a model that was loaded to be evaluated.

    def tell(mode: bool = True) -> Any:
        return model if model.training == mode else train(mode)

    def drop(set_to_none: bool = True) -> None:
        for each in trained:
            each.grad = None

    model.train, model.zero_grad = tell, drop


WAITING = "waiting for data"
"""What the profiler calls it."""


@dataclass
class Waiting:
    """What it took to get the batches of steps, and what is in them.

    Args:
        newest: Seconds in which the loop waited for those of the newest step.
        seconds: In which the loop waited for them, and the processes told each other how many tokens they train.
        trained: Tokens with a label, of all processes. A tensor, so that no device is waited for in a step.
        streamed: (3,) of a stream's rows, in the same way: see `Collator.tokens`.
    """

    newest: float = 0.0
    seconds: float = 0.0
    trained: Any = 0
    streamed: Any = (0, 0, 0)

    def take(self) -> tuple[float, int]:
        """Seconds of waiting and trained tokens since this was last called."""
        taken = self.seconds, int(self.trained)
        self.seconds, self.trained = 0.0, 0
        return taken

    def take_streamed(self) -> tuple[int, float]:
        """Tokens of a stream's rows, and the share of padding in what is computed of them, since this was last
        called."""
        counted, given, padded = map(int, self.streamed)
        self.streamed = (0, 0, 0)
        return counted, 1 - given / max(1, padded)


def _ending_with_training(loader: Any) -> Any:
    # Transformers has no initialiser for other workers than those of training's rows. Accelerate keeps the loader of a
    # stream in one of its own.
    getattr(loader, "base_dataloader", loader).worker_init_fn = end_with_training
    return loader


def _of_worker(error: UserError) -> UserError:
    """An error of a stream's row. Of one in a worker, torch makes the whole stack trace the text of another."""
    _, traced, text = error.whole.rpartition(f"\n{UserError.__module__}.{UserError.__name__}: ")
    what, _, change = text.strip().partition("\n  ")
    return UserError(what, change) if traced else error


class _ExactMixin(LateRows, Measuring, Clipping, Pipelined, Divided, DividedExperts, Continues):
    """What both trainers share. Set `saves`, `batches`, `casts` and `guard` after construction."""

    saves: Saves
    batches: MicroBatches | None = None
    casts: StepCasts | None = None
    guard: BatchGuard | None = None
    neftune_noise_alpha: float | None
    _flops_per_token: int | None = None

    def __init__(self, model: Any, args: Any, **kwargs: Any) -> None:
        self.waiting = Waiting()
        if (args.activation_checkpointing_kwargs or {}).get("selective"):
            # SFTTrainer does this to the adapters' wrapper, which Transformers does not ask, and Seq2SeqTrainer not at
            # all: both would recompute attention too.
            keep_attention(model.get_base_model() if hasattr(model, "get_base_model") else model)
        super().__init__(model=model, args=args, **kwargs)
        if args.neftune_noise_alpha:
            add_noise(model.get_base_model() if hasattr(model, "get_base_model") else model, args.neftune_noise_alpha)
        self.neftune_noise_alpha = None  # Transformers would add its own.
        # That losses are divided once, by what all micro-batches of a step have, is ours to see to. Transformers asks
        # the model, whose class may say no (Gemma 4) or take no further arguments, and then weighs micro-batches alike.
        self.model_accepts_loss_kwargs = True
        if is_deepspeed_zero3_enabled():
            gather_for_dora(model)
            decide_releases_anew()
            take_choices_together(model)
        if self.is_fsdp_enabled:
            name_units(self.accelerator.state.fsdp_plugin, model)
            share_buffers()
            # Else every checkpoint says where it was written, which may be a secret and is read by nobody.
            FileSystemWriter.storage_meta = lambda writer: None  # type: ignore[assignment,method-assign]

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Loss over all trained tokens of the global batch.

        Most encoder-decoders average over their own micro-batch whatever they are told, which would weigh short targets
        more than long ones. TRL computes entropy and accuracy beside it, for which the device is waited for five times
        in every micro-batch.
        """
        total, count, balance = self.score(model, inputs)  # type: ignore[attr-defined]
        loss = total / (count if num_items_in_batch is None else num_items_in_batch)
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            # As many as the gradients are averaged over.
            loss = loss * (self.accelerator.num_processes // (dividing() * piped()))
        if balance is not None:
            # Of each micro-batch, and averaged over all.
            loss = loss + balance / self.current_gradient_accumulation_steps  # type: ignore[attr-defined]
        if self.casts and loss.requires_grad:
            self.casts.keep_in_backward(loss)
        if self.guard:
            self.guard.scored(loss.detach(), (total / count.clamp(min=1)).detach(), inputs.get("input_ids"))
        return loss

    def trained_tokens(self, count: Any) -> Any:
        """Trained tokens of a step, given what its loss is divided by."""
        return count

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Theirs takes a step before it asks whether training is over, which it is where it goes on from its end."""
        state, control = self.state, self.control
        control.should_training_stop = control.should_training_stop or state.global_step >= state.max_steps
        if not control.should_training_stop:
            try:
                super()._run_epoch(*args, **kwargs)  # type: ignore[misc]
            except Exception:
                # The metrics show the last whole step, whatever ended the next one. Who stops at once does not wait.
                with contextlib.suppress(Exception):
                    self.tell_late()
                raise

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        return decayed_parameters(model)

    def create_scheduler(self, num_training_steps: int, *args: Any, **kwargs: Any) -> Any:
        """Schedules that end at a rate of their own ask the optimizer for its peak, which DeepSpeed's do not say. After
        a run that is all warm-up one (`polynomial`) would divide by the steps that are left, which are none."""
        if self.is_deepspeed_enabled:
            self.optimizer.optimizer.defaults = inner_optimizer(self.optimizer).defaults
        steps = max(num_training_steps, self.args.warmup_steps + 1)
        return super().create_scheduler(steps, *args, **kwargs)  # type: ignore[misc]

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        beat(f"in step {self.state.global_step + 1}")
        # DeepSpeed has both methods of its own, and FSDP other parameters during a pass than between steps.
        engine = self.is_deepspeed_enabled or self.is_fsdp_enabled
        if not engine and "zero_grad" not in vars(model):
            spare_walks(model)
        if self.casts is None:
            return super().training_step(model, *args, **kwargs)
        with self.casts.micro_batch(last=self.accelerator.sync_gradients):
            return super().training_step(model, *args, **kwargs)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Theirs counts the model's parameters in every micro-batch."""
        tokens = inputs["input_ids"].numel()
        if self._flops_per_token is None:
            self._flops_per_token = super().floating_point_ops(inputs) // tokens  # type: ignore[misc]
        return self._flops_per_token * tokens

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """The micro-batches of a step and the number of their trained tokens."""
        started = time.monotonic()
        beat(f"waiting for the data of step {self.state.global_step + 1}")
        if callable(getattr(self.optimizer, "train", None)):
            # An evaluation has put schedule-free weights elsewhere, and a step begins with those that it trains.
            self.optimizer.train()
        try:
            with torch.profiler.record_function(WAITING):
                batches, count = super().get_batch_samples(*args, **kwargs)
        except UserError as error:
            raise _of_worker(error) from error
        self.waiting.newest = time.monotonic() - started
        self.waiting.seconds += self.waiting.newest
        self.waiting.trained = self.waiting.trained + (0 if count is None else self.trained_tokens(count))
        if self.batches is None:
            tokens = sum(self.data_collator.tokens(batch) for batch in batches)  # type: ignore[attr-defined]
            tokens = self.accelerator.reduce(tokens, reduction="sum")
            self.waiting.streamed = tokens + torch.as_tensor(self.waiting.streamed, device=tokens.device)
        return batches, count

    def get_train_dataloader(self) -> Any:
        """Theirs divides rows into batches by number."""
        if self.batches is None:
            return _ending_with_training(super().get_train_dataloader())  # type: ignore[misc]
        args = self.args
        loader: DataLoader[Any] = DataLoader(
            self.train_dataset,  # type: ignore[attr-defined]
            batch_sampler=self.batches,
            collate_fn=self.data_collator,  # type: ignore[attr-defined]
            num_workers=args.dataloader_num_workers,
            worker_init_fn=end_with_training,
            pin_memory=args.dataloader_pin_memory,
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
        )
        return self.accelerator.prepare_data_loader(loader)

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Theirs, with workers that outlive a signal to all processes."""
        return _ending_with_training(super().get_eval_dataloader(*args, **kwargs))  # type: ignore[misc]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The engines write all that a checkpoint needs themselves. Another copy, for which the whole model is gathered
        in the memory of one process, would be read by nobody; the trained model is gathered at the end."""
        if not (self.is_deepspeed_enabled or self.is_fsdp_enabled):
            super().save_model(output_dir, _internal_call)

    def _get_output_dir(self, trial: Any) -> str:
        return str(self.saves.place)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        beat(f"saving the checkpoint of step {self.state.global_step}")
        step, write = self.state.global_step, super()._save_checkpoint  # type: ignore[misc]
        self.saves.write(self.accelerator, step, lambda: write(model, trial))

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """The weights alone, under the names by which they are read back. Theirs are the hub's, under which models that
        Transformers 5 renames or joins while loading, such as mixtures of experts, would silently keep old weights."""
        model: Any = self.model  # type: ignore[attr-defined]
        folder = Path(output_dir or self.args.output_dir)
        if not self.args.should_save:
            return
        if not hasattr(model, "peft_config"):
            model.save_pretrained(folder, save_original_format=False, state_dict=state_dict)
            return
        with naming_adapters():
            model.save_pretrained(folder, state_dict=state_dict)
        # Both name the base by the path that it was loaded from.
        for file in (folder / "adapter_config.json", folder / "README.md"):
            write_atomically(file, concealed(file.read_text(encoding="utf-8")))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.is_deepspeed_enabled:
            # What DeepSpeed was started with, which it writes into every checkpoint and reads no more.
            self.model_wrapped.config = concealed(self.model_wrapped.config)  # type: ignore[attr-defined]
            # Programs that DeepSpeed lays beside every checkpoint and nothing here starts.
            self.model_wrapped._copy_recovery_script = lambda place: None  # type: ignore[attr-defined]
        super()._save_optimizer_and_scheduler(output_dir)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm)
        if self.guard:
            self.guard.norm = norm
        return norm

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """The run folder's own card is written once, at the end."""


class CausalTrainer(_ExactMixin, SFTTrainer):
    """Decoder-only models: TRL's trainer, whose output head never builds all logits at once where the model allows it.

    Args:
        choice: How the model's labels are scored, as far as its architecture tells.
    """

    model: Any
    said: tuple[str, ...] = ()
    """What stands in the metrics of a step beside what every training has."""

    def __init__(self, model: Any, args: Any, choice: HeadChoice, **kwargs: Any) -> None:
        super().__init__(model, args, **kwargs)
        base = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        if not choice.balances:
            # TRL would add one because the config has a coefficient; the model's own forward knows no such loss.
            self.aux_loss_enabled = base.config.get_text_config().output_router_logits = False
        self.output_head = add_output_head(base, choice)
        if not choice.fused:
            return
        if is_deepspeed_zero3_enabled():
            gather_head_with_model(self.model)
        elif self.is_fsdp_enabled:
            unshard_head(self.model)

    def score(self, model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Of a batch: minus the log-likelihood of its trained tokens, their number, and the routers' balance loss."""
        if self.pipeline and "input_ids" in inputs:
            # The last stage is given hidden states instead.
            return self.pipeline.score(inputs)
        outputs, balance = self.scores(model, inputs)
        return -outputs.log_probs.sum(), outputs.label_mask.sum(), balance

    def scores(self, model: Any, inputs: dict[str, Any]) -> tuple[Any, torch.Tensor | None]:
        """Of a batch: log-probabilities of the labels at its `label_positions`, and the routers' balance loss."""
        routed = {"output_router_logits": True} if self.aux_loss_enabled else {}
        outputs = model(**{**inputs, "use_cache": False}, **routed, fused_lm_head=True)
        return outputs, self.router_aux_loss_coef * outputs.aux_loss if self.aux_loss_enabled else None


class EncoderDecoderTrainer(_ExactMixin, Seq2SeqTrainer):
    """Encoder-decoder models, with an output head as `CausalTrainer` has."""

    def __init__(self, model: Any, args: Any, choice: HeadChoice, **kwargs: Any) -> None:
        super().__init__(model, args, **kwargs)
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.output_head = add_output_head(base, choice, "seq2seq")

    def score(self, model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, None]:
        """As `CausalTrainer.score`."""
        outputs, _ = self.scores(model, inputs)
        return -outputs.log_probs.sum(), outputs.label_mask.sum(), None

    def scores(self, model: Any, inputs: dict[str, Any]) -> tuple[Any, None]:
        """As `CausalTrainer.scores`."""
        return model(**inputs, use_cache=False, fused_lm_head=True), None
