"""Rules on precision, optimizer, recomputation, schedule and batch: how it is trained."""

from __future__ import annotations

from toolkit.recipe import model_configs
from toolkit.recipe.arguments import wrong
from toolkit.recipe.compilation import unfit
from toolkit.recipe.errors import Rule
from toolkit.recipe.precisions import FP8_SCALING, PURE
from toolkit.recipe.schema import Recipe
from toolkit.recipe.sections import SCHEDULES


def _tiled(recipe: Recipe) -> bool:
    return recipe.activation_checkpointing.mlp_tiles > 1


def _elementwise(recipe: Recipe) -> bool:
    return recipe.activation_checkpointing.mode == "elementwise"


def own_keys(recipe: Recipe) -> dict[str, str]:
    """Entries of `optimizer.args` to the keys that stand for them."""
    keys = {argument: recipe.optimizer.traits.key_of(argument) for argument in recipe.optimizer.args}
    return {argument: key for argument, key in keys.items() if key}


def unknown_arguments(recipe: Recipe) -> list[str]:
    """Entries of `optimizer.args` that the optimizer does not take, as far as the table of optimizers knows."""
    traits = recipe.optimizer.traits
    given = [argument for argument in recipe.optimizer.args if argument not in own_keys(recipe)]
    return [f"optimizer.args.{each}" for each in given if traits.knows_arguments and each not in traits.arguments]


def wrong_arguments(recipe: Recipe, section: str) -> dict[str, str]:
    """Entries of a section's `args` whose values cannot be, to what is allowed."""
    known = {"optimizer": recipe.optimizer.traits.arguments, "schedule": SCHEDULES[recipe.schedule.name]}
    return wrong(getattr(recipe, section).args, known[section])


def not_below_the_peak(recipe: Recipe) -> list[str]:
    """Entries of `schedule.args` that state a lowest learning rate as high as the peak, or higher."""
    given, peak = recipe.schedule.args, recipe.optimizer.learning_rate
    known = SCHEDULES[recipe.schedule.name].keys() - wrong_arguments(recipe, "schedule").keys()
    sound = {"min_lr", "lr_end"} & given.keys() & known
    return sorted(f"{key}={given[key]:g}" for key in sound if float(given[key]) >= peak)


def _nesterov_in_vain(recipe: Recipe) -> bool:
    args = recipe.optimizer.args
    still = recipe.optimizer.stated_momentum == 0 or args.get("dampening", 0) != 0
    return recipe.optimizer.traits.family == "sgd" and args.get("nesterov") is True and still


def _fused_and_foreach(recipe: Recipe) -> bool:
    args, by_name = recipe.optimizer.args, recipe.optimizer.name in ("adamw", "adamw_torch_fused")
    return args.get("foreach") is True and args.get("fused", by_name) is True


def micro_batch(recipe: Recipe) -> int:
    """The micro-batch as far as the recipe states one."""
    size = recipe.batch.micro_batch_size
    return size if isinstance(size, int) else 1


def masters_figures(recipe: Recipe) -> dict[str, str]:
    """What the texts of the rules may name: the precision with fp32 masters, and without."""
    with_masters = {pure: precision for precision, pure in PURE.items()}
    accepting = f", or set precision={PURE.get(recipe.precision, 'pure_bf16')} to accept it"
    return {
        "with_masters": with_masters.get(recipe.precision, "bf16"),
        "accepting_low_masters": accepting if recipe.model.dtype == "bf16" else "",
    }


_MOST_SEQUENCES = 2**20
"""Most sequences per step: many times what the largest models were trained with; a plan draws and sorts them."""

TRAINING_RULES = {
    "full-low-masters": Rule(
        "model.dtype",
        lambda r, _: r.method.name == "full" and r.model.dtype in ("bf16", "fp16") and not r.pure,
        "16-bit masters lose most updates of a small learning rate: at 1e-5 only 16% of the weights move in 50 steps",
        "remove model.dtype{accepting_low_masters}",
    ),
    "pure-bf16-dtype": Rule(
        "model.dtype",
        lambda r, _: r.pure and r.model.dtype not in ("auto", "bf16"),
        "{r.precision} means that weights are stored in bf16",
        "remove model.dtype, or set precision={with_masters}",
    ),
    "fp32-stored-low": Rule(
        "model.dtype",
        lambda r, _: r.method.name == "lora" and r.precision == "fp32" and r.model.dtype in ("bf16", "fp16"),
        "a base stored in 16 bits computes in 16 bits, not in fp32",
        "remove model.dtype, or set precision={r.model.dtype}",
    ),
    "mixed-16-bit": Rule(
        "model.dtype",
        lambda r, _: r.method.name == "lora" and {r.precision, r.model.dtype} == {"bf16", "fp16"},
        "a base in one 16-bit type, computed with in the other, is rounded twice",
        "remove model.dtype, or set precision={r.model.dtype}",
    ),
    "fp8-adapters": Rule(
        "precision",
        lambda r, _: r.precision in FP8_SCALING and r.method.name == "lora",
        "fp8 is for weights that are trained; under adapters the frozen base is stored and multiplied in fp8 by "
        "method.quantization=fp8",
        "set precision={r.in_bf16} and method=lora_fp8",
    ),
    "fp8-nothing": Rule(
        "precision",
        lambda r, c: r.precision in FP8_SCALING and c and not model_configs.multiplies_in_fp8(c),
        "the first and the last layer stay in bf16, and between them {model_type} has no linear layer of torch's own "
        "with sides that are multiples of 16",
        "set precision={r.in_bf16}",
    ),
    "optimizer-own-keys": Rule(
        "optimizer.args",
        lambda r, _: own_keys(r),
        "these have keys of their own: {own_arguments}",
        "set {own_keys} instead",
    ),
    "optimizer-args": Rule(
        "optimizer.args",
        lambda r, _: unknown_arguments(r),
        "optimizer {r.optimizer.name} has no such argument: {unknown_arguments}",
        "remove it, or use one of: {optimizer_arguments}",
    ),
    "optimizer-values": Rule(
        "optimizer.args",
        lambda r, _: wrong_arguments(r, "optimizer"),
        "optimizer {r.optimizer.name} does not work with these values: {wrong_optimizer}",
        "set {right_optimizer}",
    ),
    "optimizer-nesterov": Rule(
        "optimizer.args",
        lambda r, _: _nesterov_in_vain(r),
        "Nesterov's step needs momentum, and takes no dampening",
        "set optimizer.momentum=0.9 and no dampening, or remove optimizer.args.nesterov",
    ),
    "optimizer-fused-foreach": Rule(
        "optimizer.args",
        lambda r, _: _fused_and_foreach(r),
        "a step is made either by one fused kernel or by operations on many tensors (foreach)",
        "set optimizer.args.fused=false too, or remove optimizer.args.foreach",
    ),
    "optimizer-no-decay": Rule(
        "optimizer.weight_decay",
        lambda r, _: r.optimizer.weight_decay and not r.optimizer.traits.decays,
        "optimizer {r.optimizer.name} would not apply it",
        "set optimizer.weight_decay=0",
    ),
    "optimizer-no-clipping": Rule(
        "optimizer.max_grad_norm",
        lambda r, _: r.optimizer.max_grad_norm and r.optimizer.traits.in_backward,
        "optimizer {r.optimizer.name} updates during the backward pass, so gradients cannot be clipped",
        "set optimizer.max_grad_norm=0",
    ),
    "faults-in-backward": Rule(
        "faults.on_nan",
        lambda r, _: r.faults.skips and r.optimizer.traits.in_backward,
        "optimizer {r.optimizer.name} updates during the backward pass, so no update can be left out",
        "set faults.on_nan=stop and faults.on_spike=ignore, or another optimizer.name",
    ),
    "fp16-in-backward": Rule(
        "precision",
        lambda r, _: r.precision == "fp16" and r.optimizer.traits.in_backward,
        "optimizer {r.optimizer.name} updates during the backward pass, by gradients of the loss as fp16 scales it",
        "set precision=bf16, or another optimizer.name",
    ),
    "faults-fp16": Rule(
        "faults.on_nan",
        lambda r, _: r.faults.skips and r.precision == "fp16",
        "fp16 leaves out the updates of gradients that are not finite by itself, and lowers the loss's scale for it",
        "set faults.on_nan=stop and faults.on_spike=ignore, or precision=bf16",
    ),
    "checkpointing-interval": Rule(
        "activation_checkpointing.every_n_layers",
        lambda r, _: (
            r.activation_checkpointing.every_n_layers > 1 and r.activation_checkpointing.mode not in ("full", "offload")
        ),
        "only modes full and offload can leave layers out",
        "set activation_checkpointing.mode=full, or remove every_n_layers",
    ),
    "checkpointing-architecture": Rule(
        "activation_checkpointing.mode",
        lambda r, c: (
            r.activation_checkpointing.mode in ("full", "selective", "offload") and model_configs.keeps_activations(c)
        ),
        "Transformers does not compute layers of a {model_type} again",
        "set activation_checkpointing.mode=none; a smaller batch.micro_batch_size keeps less",
    ),
    "elementwise-off": Rule(
        "activation_checkpointing.mode",
        lambda r, _: _elementwise(r) and r.compile == "off",
        "element-wise work is computed again by compiled layers alone, and compile=off leaves layers as they are",
        "set compile=auto, or activation_checkpointing.mode=full",
    ),
    "elementwise-unfit": Rule(
        "activation_checkpointing.mode",
        lambda r, c: _elementwise(r) and bool(unfit(r, c)),
        "element-wise work is computed again by compiled layers alone, and {unfit_to_compile}",
        "set activation_checkpointing.mode=full",
    ),
    "mlp-tiles-experts": Rule(
        "activation_checkpointing.mlp_tiles",
        lambda r, c: _tiled(r) and model_configs.experts(c)[0] > 1,
        "the MLPs of this model are mixtures of experts, whose routers look at all tokens of a micro-batch",
        "remove activation_checkpointing.mlp_tiles",
    ),
    "mlp-tiles-seq2seq": Rule(
        "activation_checkpointing.mlp_tiles",
        lambda r, _: _tiled(r) and r.objective == "seq2seq",
        "MLPs of encoder-decoders have not been computed in tiles",
        "remove activation_checkpointing.mlp_tiles",
    ),
    "mlp-tiles-selective": Rule(
        "activation_checkpointing.mode",
        lambda r, _: _tiled(r) and r.activation_checkpointing.mode == "selective",
        "what selective checkpointing keeps of a layer has not been tried with MLPs in tiles",
        "set activation_checkpointing.mode=full, or remove activation_checkpointing.mlp_tiles",
    ),
    "mlp-tiles-parallel": Rule(
        "activation_checkpointing.mlp_tiles",
        lambda r, _: _tiled(r) and (r.parallel.tensor > 1 or r.parallel.pipeline > 1),
        "MLPs that processes divide, or of layers that follow each other on several, have not been computed in tiles",
        "remove activation_checkpointing.mlp_tiles; parallel.sequence and parallel.context go with it",
    ),
    "mlp-tiles-zero3": Rule(
        "activation_checkpointing.mlp_tiles",
        lambda r, _: _tiled(r) and r.strategy.zero_stage == 3,
        "zero3 would gather the weights of an MLP once for each tile",
        "set strategy.name=fsdp, or remove activation_checkpointing.mlp_tiles",
    ),
    "mlp-tiles-compile": Rule(
        "compile",
        lambda r, _: _tiled(r) and r.compile == "layers",
        "layers with MLPs in tiles have not been compiled",
        "set compile=auto, or remove activation_checkpointing.mlp_tiles",
    ),
    "schedule-both-lengths": Rule(
        "schedule.max_steps",
        lambda r, _: r.schedule.max_steps and r.schedule.num_epochs,
        "max_steps and num_epochs state the length twice",
        "keep one; on the command line schedule.num_epochs=null removes the other",
    ),
    "schedule-both-warmups": Rule(
        "schedule.warmup_ratio",
        lambda r, _: r.schedule.warmup_ratio is not None and r.schedule.warmup_steps is not None,
        "warmup_ratio and warmup_steps state the warm-up twice",
        "keep one; on the command line schedule.warmup_ratio=null removes the other",
    ),
    "schedule-constant-warmup": Rule(
        "schedule.name",
        lambda r, _: (
            r.schedule.name == "constant"
            and (r.schedule.warmup_steps or r.schedule.warmup_ratio)
            and r.optimizer.traits.family != "schedule_free"
        ),
        "a constant learning rate has no warm-up",
        "set schedule.name=constant_with_warmup",
    ),
    "schedule-unknown-args": Rule(
        "schedule.args",
        lambda r, _: not r.schedule.args.keys() <= SCHEDULES[r.schedule.name].keys(),
        "schedule {r.schedule.name} takes these arguments: {schedule_args}",
        "remove the others",
    ),
    "schedule-values": Rule(
        "schedule.args",
        lambda r, _: wrong_arguments(r, "schedule"),
        "schedule {r.schedule.name} does not work with these values: {wrong_schedule}",
        "set {right_schedule}",
    ),
    "schedule-not-below-peak": Rule(
        "schedule.args",
        lambda r, _: not_below_the_peak(r),
        "the lowest learning rate is not below optimizer.learning_rate={r.optimizer.learning_rate:g}: {not_below}",
        "set min_lr and lr_end to less, or optimizer.learning_rate to more",
    ),
    "schedule-min-lr": Rule(
        "schedule.args",
        lambda r, _: r.schedule.name.endswith("with_min_lr") and not {"min_lr", "min_lr_rate"} & set(r.schedule.args),
        "schedule {r.schedule.name} needs its lowest learning rate: min_lr, or min_lr_rate as a share of the peak",
        "set schedule.args.min_lr_rate=0.1",
    ),
    "schedule-min-lr-twice": Rule(
        "schedule.args",
        lambda r, _: r.schedule.name.endswith("with_min_lr") and {"min_lr", "min_lr_rate"} <= set(r.schedule.args),
        "min_lr and min_lr_rate both say the lowest learning rate, one as it is and one as a share of the peak",
        "remove schedule.args.min_lr or schedule.args.min_lr_rate",
    ),
    "schedule-decay-steps": Rule(
        "schedule.args",
        lambda r, _: r.schedule.name == "warmup_stable_decay" and "num_decay_steps" not in r.schedule.args,
        "warmup_stable_decay must know how many steps the decay at the end takes",
        "set schedule.args.num_decay_steps",
    ),
    "schedule-free": Rule(
        "schedule.name",
        lambda r, _: r.optimizer.traits.family == "schedule_free" and r.schedule.name != "constant",
        "this optimizer replaces the schedule; a second one would fight it",
        "set schedule.name=constant; schedule.warmup_steps is then the optimizer's own",
    ),
    "batch-both-sizes": Rule(
        "batch.tokens_per_step",
        lambda r, _: r.batch.tokens_per_step and r.batch.global_batch_size,
        "global_batch_size and tokens_per_step state the same thing twice",
        "keep one of them; on the command line batch.global_batch_size=null removes the other",
    ),
    "batch-tokens-division": Rule(
        "batch.tokens_per_step",
        lambda r, _: r.batch.tokens_per_step and r.batch.tokens_per_step % r.batch.seq_len,
        "tokens_per_step must be a multiple of batch.seq_len",
        "set batch.tokens_per_step={nearest_tokens}",
    ),
    "batch-far-too-large": Rule(
        "batch.global_batch_size",
        lambda r, _: r.batch.sequences_per_step > _MOST_SEQUENCES,
        f"a step has {{r.batch.sequences_per_step:,}} sequences; {_MOST_SEQUENCES:,} are the most that are dealt",
        "lower batch.global_batch_size or batch.tokens_per_step",
    ),
    "batch-micro-over-global": Rule(
        "batch.micro_batch_size",
        lambda r, _: micro_batch(r) > r.batch.sequences_per_step,
        "a micro-batch cannot be larger than the global batch, which has {r.batch.sequences_per_step} sequences",
        "set batch.micro_batch_size={r.batch.sequences_per_step} or less",
    ),
    "batch-micro-division": Rule(
        "batch.micro_batch_size",
        lambda r, _: micro_batch(r) <= r.batch.sequences_per_step and r.batch.sequences_per_step % micro_batch(r),
        "the global batch of {r.batch.sequences_per_step} sequences does not divide into micro-batches of this size",
        "set batch.micro_batch_size={nearest_micro}",
    ),
}
