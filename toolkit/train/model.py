"""The model of a training, before a trainer has it: loaded, adapted, and divided among the processes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainingArguments, set_seed

from toolkit.common import in_background
from toolkit.models import dropout
from toolkit.models.adapter_init import begin_with_base
from toolkit.models.adapters import add_method, cast_buffers, cast_parameters
from toolkit.models.coverage import parameter_counts, require_quantized
from toolkit.models.load import ModelSource
from toolkit.models.parallel.parts import divide_model
from toolkit.models.parallel.pipeline import elsewhere, split_layers
from toolkit.models.special_tokens import take_tokens
from toolkit.models.tiled_mlp import tile_mlps
from toolkit.recipe.precisions import FP8_SCALING
from toolkit.report.manifest import Parameters
from toolkit.report.terminal import Progress
from toolkit.train import agreed
from toolkit.train.batching import share
from toolkit.train.completion import source_of
from toolkit.train.run_folder import hash_files
from toolkit.train.session import Decided


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A model that is to be trained.

    Args:
        model: Of Transformers or PEFT.
        start: See `adapter_init.begin_with_base`.
        parameters: How many there are, and how many are trained.
        in_fp8: How many of them are multiplied in fp8.
        hashes: Of the files it was read from, on the first process; they take minutes of a large model.
    """

    model: Any
    start: dict[str, torch.Tensor]
    parameters: Parameters
    in_fp8: int
    hashes: Future[dict[str, str]] | None


def load_model(decided: Decided, arguments: TrainingArguments, progress: Progress) -> TrainedModel:
    """Loads the model, and does to it what the recipe says.

    Args:
        arguments: They exist before it, because ZeRO-3 and FSDP need them.

    Raises:
        UserError: Any error the user can fix.
    """
    recipe, types, layout, split = decided.recipe, decided.dtypes, decided.layout, decided.split
    world, reach = decided.world, decided.reach
    # Adapters are initialised at random before the trainer sets its own seed.
    set_seed(recipe.seed)
    begins, apart = source_of(decided.source, decided.folder), world.world_size // layout.pipeline
    away: Sequence[str] = ()
    if split:
        trusted = recipe.model.trust_remote_code
        away = elsewhere(recipe.objective, begins.config, split, world.rank // apart, trusted)
    base = begins.load(types, decided.attention, away)
    take_tokens(base, decided.tokenizer)  # Trainers would do so later, and leave what cannot be saved.
    dropout.install()
    share(layout)
    # Now all files are there. Beside all that follows: to hash gigabytes takes minutes, in which the others would wait.
    hashes = in_background(lambda: _hashes(decided.source, decided.teacher)) if decided.leads else None
    require_quantized(base, recipe)
    if recipe.strategy.name == "fsdp" and types.compute != types.load:
        cast_buffers(base, types.compute)  # FSDP gathers parameters in this type, and leaves these as they are.
    if decided.liger:
        agreed.use_liger(base, arguments.device, progress)
    new_tokens: Any = decided.tokenizer.convert_tokens_to_ids(recipe.model.new_tokens)
    set_seed(recipe.seed)  # Some models draw numbers while they are loaded, as many as the engine lets them.
    model = add_method(base, begins.recipe, types, new_tokens=new_tokens, reach=reach)
    if reach.outside:
        progress.remark(f"No text reaches {', '.join(reach.outside)}, which are not trained")
    start = begin_with_base(model, begins.recipe)
    divide_model(model, layout.tensor, layout.expert, world.rank)
    if layout.tensor > 1 and types.load == "float32":
        cast_parameters(model.parameters(), types.load)  # They may have been read as they lie in their files.
    tile_mlps(model, recipe.activation_checkpointing.mlp_tiles)
    parameters, in_fp8 = Parameters(**parameter_counts(model)), 0
    if split:
        split_layers(model, split)
    if scaling := FP8_SCALING.get(recipe.precision):
        # torchao takes a second to import.
        from toolkit.models.quantization.fp8_products import multiply_in_fp8

        in_fp8 = multiply_in_fp8(model, scaling)
    return TrainedModel(model=model, start=start, parameters=parameters, in_fp8=in_fp8, hashes=hashes)


def _hashes(source: ModelSource, teacher: ModelSource | None) -> dict[str, str]:
    """Of the files of the model and of its teacher, which must be the same when the run is continued."""
    hashes = {"model": hash_files(source.weight_files())}
    return hashes | ({"teacher": hash_files(teacher.weight_files())} if teacher else {})
