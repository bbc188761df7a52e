"""How rows reach a model: as which tensors, and which of them make a micro-batch."""

from __future__ import annotations

import math
from typing import Any

from toolkit.data.batching.answer_batches import AnswerCollator, JudgedCollator, PromptCollator
from toolkit.data.batching.batches import ALIGNED, FixedOrder, MicroBatches, Repeated
from toolkit.data.batching.collate import Collator, Layout
from toolkit.data.batching.head_batches import HeadCollator
from toolkit.data.batching.part_batches import PartCollator
from toolkit.data.own_answers import longest_rows, prompts_of
from toolkit.data.prepare import answer_lengths, sequence_lengths
from toolkit.distributed.layout import BatchLayout
from toolkit.models import device
from toolkit.models.attention import backends
from toolkit.models.parallel.context_parallel import gather
from toolkit.models.parallel.sequence_parallel import exchange
from toolkit.models.parallel.shared_rows import share_balance, share_rows
from toolkit.recipe import Recipe
from toolkit.recipe.precisions import FP8_SCALING

Collates = Collator | PartCollator | AnswerCollator | JudgedCollator | PromptCollator | HeadCollator


def collator(
    recipe: Recipe, backend: str, tokenizer: Any, compiles: bool, part: int = 0, shares: bool = False
) -> Collates:
    """What lays out the rows of a micro-batch.

    Args:
        backend: Attention, a key of `attention.IMPLEMENTATIONS`.
        compiles: Whether the layers are compiled.
        part: Which part of each row this process has, where several share them.
        shares: See `prefixes.are_shared`.
    """
    if recipe.headed:
        texts = Collator(tokenizer.pad_token_id, "padded", ALIGNED, longest=recipe.batch.seq_len)
        if backend in backends.VARLEN:
            texts = Collator(tokenizer.pad_token_id, "flat", ALIGNED if device.kind() == "cpu" else 1)
        return HeadCollator(texts, recipe.objective, "token_type_ids" in tokenizer.model_input_names)
    if recipe.prefers or recipe.reinforces:
        rows = collator(recipe.with_values({"objective": "sft"}), backend, tokenizer, compiles, shares=shares)
        assert isinstance(rows, Collator), "whole answers are compared"
        if recipe.reinforces:
            return PromptCollator(rows, recipe.rollout.max_completion_tokens)
        return JudgedCollator(rows) if recipe.judges else AnswerCollator(rows)
    if recipe.objective == "seq2seq":
        return Collator(tokenizer.pad_token_id, "pairs", ALIGNED, longest=recipe.batch.seq_len)
    layout: Layout = "packed" if recipe.data.packing else "padded"
    on_cpu = device.kind() == "cpu"
    if backend in backends.VARLEN:
        parts, chunks = recipe.parallel.sharing, 2 if recipe.parallel.context > 1 else 1
        # Gradients of weights in fp8 are summed over units of 16 tokens, to which torchao would copy all that is fewer.
        unit = ALIGNED if on_cpu else 16 if recipe.precision in FP8_SCALING else 1
        flat = Collator(tokenizer.pad_token_id, "flat", math.lcm(parts * chunks, unit), shares=shares)
        return flat if parts == 1 else PartCollator(flat, part, parts, chunks)
    if backend == "flex":
        return Collator(tokenizer.pad_token_id, layout, backends.FLEX_BLOCK)
    # By itself a row that is packed has a mask all the same.
    lone = compiles or recipe.data.packing or on_cpu
    return Collator(tokenizer.pad_token_id, layout, ALIGNED, longest=recipe.batch.seq_len, lone=lone)


def share(layout: BatchLayout) -> None:
    """Has attention see whole rows where processes have parts of them."""
    if layout.sharing > 1:
        share_rows(gather if layout.context > 1 else exchange)


def score_parts(trainer: Any, shares_by: str) -> None:
    """Has a trainer take each label for that of the token before it in the part, and routers be balanced by whole rows.

    Args:
        shares_by: The key of the recipe by which rows are shared.
    """
    # The first label of a part is that of its last token.
    trainer._loss_shifts_labels = False
    if trainer.aux_loss_enabled:
        wrapped = hasattr(trainer.model, "get_base_model")
        share_balance(trainer.model.get_base_model() if wrapped else trainer.model, shares_by)


def micro_batches(recipe: Recipe, train: Any, collates: Collates, layout: BatchLayout, steps: int) -> MicroBatches:
    """The micro-batches of a run of so many steps over rows that are tokenised already."""
    several = recipe.prefers or recipe.embeds
    lengths = answer_lengths(train) if several else sequence_lengths(train, recipe.objective == "seq2seq")
    if recipe.on_policy:
        lengths = longest_rows(recipe, lengths[:, 0], prompts_of(train))[:, None]
    # The answers of other rows are scored before, without gradients.
    lengths = lengths[:, :1] if recipe.judges else lengths
    order: Any = FixedOrder(len(lengths), recipe.seed, recipe.data.shuffle)
    if recipe.reinforces and recipe.policy.num_iterations > 1:
        order = Repeated(order, layout.global_batch_size, recipe.policy.num_iterations)
    return MicroBatches(
        order=order,
        lengths=lengths,
        widths=collates.width(lengths),
        steps=steps,
        global_batch_size=layout.global_batch_size,
        accumulation=layout.gradient_accumulation_steps,
        world_size=layout.data_parallel_size,
        flat=collates.layout == "flat",
        sharing=layout.together,
        stages=layout.pipeline,
    )
