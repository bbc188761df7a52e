"""Held-out loss that is exact per token, generated answers, and metrics of them.

Sums of losses and tokens are reduced in double precision, so the figure is the same on any number of processes; a mean
of batches' means would depend on how rows fall into batches.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from accelerate.utils import broadcast_object_list, gather_object, send_to_device
from transformers.distributed.fsdp import is_fsdp_managed_module
from transformers.integrations import is_deepspeed_zero3_enabled

from toolkit.common import UserError, first_line
from toolkit.data.auditing.audit import Audit
from toolkit.data.encoding.encode import Encoder
from toolkit.data.prepare import sequence_lengths
from toolkit.data.rows import Chat, Completion, Pair, Row
from toolkit.data.thoughts import text_of
from toolkit.distributed.layout import answered_at_once
from toolkit.models.attention.backends import OTHER_POSITIONS
from toolkit.models.attention.decode_attention import decoding
from toolkit.models.lora_products import without_idle
from toolkit.models.parallel import expert_parallel
from toolkit.models.parallel.layer_sums import dividing
from toolkit.models.parallel.pipeline import piped
from toolkit.models.parallel.shared_rows import sharing
from toolkit.report.held_out_rows import joined, per_count
from toolkit.report.rewards import MARGIN
from toolkit.train.evaluation.generation import (
    LEAST,
    Sample,
    inputs_on,
    own_positions,
    read_once,
    reading_masks,
    without_defaults,
    write,
)
from toolkit.train.health.watchdog import beat
from toolkit.train.session import Session


def evaluate(session: Session) -> Evaluated:
    """One evaluation on all processes: held-out loss and, where asked for, metrics of generated targets."""
    trainer, settings = session.trainer, session.recipe.evaluation
    layout = session.layout
    size = answered_at_once(session.recipe, layout) if session.recipe.reinforces else layout.micro_batch_size
    if session.recipe.rollout.server:
        # A server divides what it is asked by itself.
        size = math.ceil(len(trainer.eval_dataset) / session.world.world_size)
    batch_size = settings.batch_size or size
    metrics, rows = held_out_loss(trainer, batch_size, session.progress.evaluating)
    if settings.generation_metrics:
        metrics |= generated_metrics(session, batch_size)
    # What is kept and when training ends is decided by them, on processes whose sums may be rounded otherwise.
    return Evaluated(broadcast_object_list([metrics])[0], rows)


def held_out_loss(trainer: Any, batch_size: int, on_batch: Callable[[int, int], None]) -> Evaluated:
    """The figures of a trainer's held-out rows: mean loss over all of them, and what else it says of them.

    Returns:
        See `figures` of the trainer; and `eval_loss_plus_minus`, where its loss is one of rows and there are several.
    """
    if callable(getattr(trainer.optimizer, "eval", None)):
        # Schedule-free optimizers train one point and evaluate another; each training step switches back.
        trainer.optimizer.eval()
    device = trainer.accelerator.device
    sums: Any = 0.0
    table: torch.Tensor | None = None
    for inputs, is_own, rows in batches_of(trainer, trainer.eval_dataset, batch_size, on_batch):
        measured = trainer.measure(trainer.model_wrapped, inputs)
        own = measured.sums.to(device)
        sums = sums + (own if is_own else torch.zeros_like(own))
        if measured.each is None:
            continue
        if table is None:
            table = measured.each.new_zeros(len(trainer.eval_dataset), measured.each.shape[1])
        if is_own:
            # The host knows the rows: no device is waited for.
            table.index_add_(0, rows, measured.each)
    # Gloo and NCCL both sum float64; a float32 sum of many tokens would lose digits.
    sums, table = (
        None if each is None else trainer.accelerator.reduce(each, reduction="sum") / dividing()
        for each in (sums, table)
    )
    figures: dict[str, float] = trainer.figures(sums.tolist(), table)
    losses = trainer.row_losses(sums.tolist(), table)
    if losses is None:
        return Evaluated(figures, None)
    columns = losses.cpu().numpy().T
    if not math.isnan(half := per_count(*columns).half):
        figures[f"eval_loss{MARGIN}"] = half
    return Evaluated(figures, joined(columns))


class Evaluated(NamedTuple):
    """What an evaluation says.

    Args:
        metrics: By name.
        rows: See `held_out_rows.joined`; None where a loss is not one of a row.
    """

    metrics: dict[str, float]
    rows: list[list[float]] | None


def batches_of(
    trainer: Any, dataset: Any, batch_size: int, on_batch: Callable[[int, int], None]
) -> Iterator[tuple[dict[str, Any], bool, torch.Tensor]]:
    """All rows of a data set in batches on this process's device, while the model is in evaluation mode.

    No logits are kept between batches. Rows are dealt in turn to the processes, or to groups of them that get the
    same ones, so nothing is counted twice; every process runs the same number of forward passes, because sharded
    engines need all processes in each.

    Returns:
        Batches of the collator; whether they are this process's own, else they are another's, for nothing; and the row
        (N) of each loss in the batch, see the collator's `examples_of`.
    """
    accelerator = trainer.accelerator
    together = sharing() * dividing()
    apart = accelerator.num_processes // piped()
    rank, world = accelerator.process_index % apart // together, apart // together
    # Rows of like length together: little padding.
    lengths = sequence_lengths(dataset)[:, 0]
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    rounds = math.ceil(len(batches) / world)
    with evaluating(trainer.model_wrapped), torch.no_grad():
        for turn in range(rounds):
            beat("evaluating")
            index = turn * world + rank
            rows = batches[min(index, len(batches) - 1)]
            examples = [dataset[row] for row in rows]
            inputs = trainer.data_collator(examples)
            places = torch.tensor(rows)[trainer.data_collator.examples_of(examples, inputs)]
            inputs, places = send_to_device((inputs, places), accelerator.device)
            yield inputs, index < len(batches), places
            on_batch(turn + 1, rounds)


@contextmanager
def before_training(session: Session) -> Iterator[None]:
    """For what is asked of the model before its first step: adapters that still add zero are left out where they can be
    without another compilation or a process that waits for others."""
    divided = session.recipe.strategy.shards_parameters or session.layout.tensor > 1
    with nullcontext() if session.compiled or divided else without_idle(session.module):
        yield


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Evaluation mode, and back to what it was."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def as_prompt(
    tokenizer: Any, text: str, audit: Audit, stop_token_ids: frozenset[int], template_kwargs: dict[str, Any]
) -> list[int]:
    """Token ids of a user's prompt, rendered the way the training rows were.

    Args:
        audit: The run's audit, which says whether the rows were conversations.
        template_kwargs: `data.chat_template_kwargs` of the recipe.
    """
    row: Row
    if audit.objective == "seq2seq":
        row = Pair(text, "")
    elif audit.chat_template.needed:
        row = Chat([{"role": "user", "content": text}])
    else:
        row = Completion(text, "")
    return Encoder(tokenizer, "auto", stop_token_ids, template_kwargs).prompt_ids(row)


def positions_left(model: Any, prompt: Sequence[int]) -> int:
    """How many tokens a model reads behind a prompt, or behind the one with which a decoder begins that reads the
    prompt elsewhere. GPT-2 and BART have no embeddings for more, others would go on without sense, and without end."""
    config = model.config.get_text_config(decoder=True)
    # Of LED, whose encoder reads more.
    sizes = (getattr(config, f"max_{kind}position_embeddings", None) or 0 for kind in ("decoder_", ""))
    most = next((size for size in sizes if size > 0), sys.maxsize)
    before = config.pad_token_id + 1 if config.model_type in OTHER_POSITIONS else 0
    return int(most) - before - (1 if model.config.is_encoder_decoder else len(prompt))


class CannotGenerate(UserError):
    """Of an architecture that Transformers does not write with."""


def generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    stop_token_ids: frozenset[int],
    autocast: str | None = None,
    sample: dict[str, Any] | Sample | None = None,
    num_beams: int = 1,
    device: torch.device | None = None,
    streamer: Any = None,
    once: bool = False,
) -> torch.Tensor:
    """Generates one answer per prompt, greedily unless `sample` says otherwise, from what the model says alone: see
    `without_defaults`.

    Args:
        model: An unwrapped Transformers or PEFT model.
        prompts: Token ids as the model reads them, chat template applied and special tokens added.
        max_new_tokens: Of the longest answer. Fewer, where the longest prompt leaves the model fewer positions.
        autocast: Name of the dtype the model was trained to compute in, or None.
        sample: Keyword arguments for sampling, e.g. `{"temperature": 0.7, "top_p": 0.9}`, or what gives them.
        device: Where the model computes, if that is not where its parameters are.
        streamer: One of Transformers', which gets each token as it comes.
        once: Whether prompts that are equal are read once, and answers that have ended leave the others unless
            processes write together. For architectures that `reads_once` says this of; without beams and streamer.

    Returns:
        (prompts, tokens) token ids of the answers, filled up with padding after the one that ended each.

    Raises:
        CannotGenerate: If Transformers' own code fails over this architecture.
    """
    encoder_decoder = bool(model.config.is_encoder_decoder)
    device = device or model.device
    # Decoders continue at the right edge, so they are padded on the left.
    side = "right" if encoder_decoder else "left"
    batch = tokenizer.pad(
        {"input_ids": list(prompts)}, padding="max_length", max_length=max(LEAST * once, *map(len, prompts)),
        padding_side=side, return_attention_mask=True, return_tensors="pt",
    ).to(device)  # fmt: skip
    context = torch.autocast(device.type, getattr(torch, autocast)) if autocast else nullcontext()
    # While training, mixtures of experts return router logits for their auxiliary loss; generation cannot use them.
    routed = hasattr(model.config.get_text_config(), "output_router_logits")
    together = _write_together(model)
    reading = {
        "use_cache": True,
        "pad_token_id": tokenizer.pad_token_id,
        "synced_gpus": together,
        **({"output_router_logits": False} if routed else {}),
    }
    # The last token is not read, so that one is always left.
    longest = max(1, min(max_new_tokens, *(positions_left(model, each) for each in prompts)))
    if together:
        longest = min(gather_object([longest]))
    ends: dict[str, Any] = {"eos_token_id": sorted(stop_token_ids) or None}
    draw = sample if callable(sample) else lambda rows, written: _sampling(sample)
    with (
        evaluating(model), torch.no_grad(), context, reading_masks(model), inputs_on(model, device),
        own_positions(model), without_defaults(model, num_beams), decoding(device),
    ):  # fmt: skip
        try:
            cache = read_once(model, prompts, batch, **reading) if once else None
            if once and not together:
                return write(model, batch, cache, longest, draw, **ends, **reading)
            generated = model.generate(
                **batch,
                **({"past_key_values": cache} if once else {}),
                **reading,
                **ends,
                max_new_tokens=longest,
                num_beams=num_beams,
                **({"streamer": streamer} if streamer else {}),
                **draw(torch.arange(len(prompts)), 0),
            )
        except UserError:
            raise
        except (ValueError, TypeError, AttributeError, LookupError, NotImplementedError) as error:
            raise CannotGenerate(
                f"Transformers cannot write with this {model.config.model_type}: {first_line(error)}",
                "set evaluation.num_prompts=0 and remove evaluation.generation_metrics; losses are not affected",
            ) from error
    return generated[:, 0 if encoder_decoder else batch["input_ids"].shape[1] :]


def _sampling(sample: dict[str, Any] | None) -> dict[str, Any]:
    # Without a number, Transformers takes 50 of the likeliest tokens.
    return {"do_sample": True, "top_k": 0, **sample} if sample else {"do_sample": False}


def _write_together(model: Any) -> bool:
    """Whether a process whose answers are complete goes on until those of all are, because it has a part of the
    parameters or tokens travel."""
    divided = is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)
    return expert_parallel.dividing() > 1 or (divided and dist.is_initialized() and dist.get_world_size() > 1)


def answer(model: Any, tokenizer: Any, *arguments: Any, **settings: Any) -> list[str]:
    """The answers of `generate`, which takes the same arguments, as texts."""
    generated = generate(model, tokenizer, *arguments, **settings)
    return [text_of(tokenizer, each).strip() for each in generated.tolist()]


def session_answers(session: Session, prompts: Sequence[list[int]], num_beams: int = 1) -> list[str]:
    """Answers of the model that is being trained, in the type it computes in; see `answer`."""
    return answer(
        session.module,
        session.tokenizer,
        prompts,
        session.recipe.evaluation.max_new_tokens,
        session.stop_token_ids,
        session.dtypes.autocast,
        num_beams=num_beams,
        device=session.trainer.args.device,
    )


def generated_metrics(session: Session, batch_size: int) -> dict[str, float]:
    """Generates a target for every held-out source and compares it with the reference.

    Returns:
        `eval_bleu` and `eval_chrf` (sacrebleu's corpus scores, 0 to 100), `eval_exact_match` (0 to 1).
    """
    import sacrebleu

    trainer, tokenizer = session.trainer, session.tokenizer
    dataset, accelerator = trainer.eval_dataset, trainer.accelerator
    world = accelerator.num_processes
    rows = list(range(accelerator.process_index, len(dataset), world))
    pairs: list[tuple[str, str]] = []
    # Sharded engines need every process in each call: those that have no rows left repeat the first one for nothing.
    for start in range(0, math.ceil(len(dataset) / world), batch_size):
        mine = rows[start : start + batch_size]
        examples = [dataset[row] for row in mine or [0]]
        answers = session_answers(
            session, [example["input_ids"] for example in examples], session.recipe.evaluation.num_beams
        )
        if not mine:
            continue
        references = tokenizer.batch_decode([example["labels"] for example in examples], skip_special_tokens=True)
        pairs += [(given, wanted.strip()) for given, wanted in zip(answers, references, strict=True)]
    pairs = gather_object(pairs)
    given, wanted = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    return {
        "eval_bleu": sacrebleu.corpus_bleu(given, [wanted]).score,
        "eval_chrf": sacrebleu.corpus_chrf(given, [wanted]).score,
        "eval_exact_match": sum(one == other for one, other in pairs) / max(1, len(pairs)),
    }
