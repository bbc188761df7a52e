"""Runs a shallow model in several shapes, and fits what was seen to amounts that hold for all shapes and depths."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import bitsandbytes as bnb
import numpy as np
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import get_nop_func
from torch._subclasses.fake_tensor import FakeTensorMode

from toolkit.common import UserError
from toolkit.models.compiled_layers import CompiledLayers
from toolkit.models.heads import head_modules
from toolkit.models.output_heads.head_choice import choose
from toolkit.models.output_heads.output_head import HeadChoice
from toolkit.models.parallel.parts import parts_of
from toolkit.models.quantization.stored import StoredWeight
from toolkit.planner.trace import fake_kernels
from toolkit.planner.trace.generation import kept
from toolkit.planner.trace.passes import ENCODER_PLACES, Micro, chunk_of, run
from toolkit.planner.trace.setting import Setting
from toolkit.planner.trace.shallow import build, depth_of, depths, load_config, pattern
from toolkit.planner.trace.tracker import CATEGORIES, Timeline
from toolkit.planner.trace.types import CHUNK, Amount, Cache, Moment, Pass, Shape, Tensors, Trace
from toolkit.recipe.heads import HEADED

_ALWAYS = 4
"""Kinds of work that every pass has; the others are of processes that divide something."""
_LIMIT = 60
"""Seconds of processor time; models of 70 billion parameters take 20."""
_DIVIDES = "aot_eager_decomp_partition"
"""The torch backend that keeps for the backward pass what Inductor keeps, and compiles nothing."""
_SHORT = 24
"""Tokens of a row that is shorter than the blocks of any model."""
_ACTIVATIONS, _CHUNKS, _GRADIENTS = map(CATEGORIES.index, ("activations", "chunks", "gradients"))
NO_VOCABULARY = HeadChoice()
"""The choice for models without an output head."""
_caches_before: dict[tuple[str, str], tuple[Cache, ...] | None] = {}
# Of micro-batches for which the peak is looked for; each is some operation's, and that operation's amounts are kept.
_SHAPES = [(batch, length) for batch in (1, 8, 64, 512) for length in (16, 128, 1024, 8192, 65536)]


def trace(setting: Setting) -> Trace:
    """Measures one setting.

    Raises:
        UserError: If the method names modules or parameters that the model does not have.
        Exception: Whatever the model's own code raises when it cannot run on fake tensors.
    """
    deadline = time.process_time() + _LIMIT
    config = load_config(setting)
    headed = setting.objective in HEADED
    choice = NO_VOCABULARY if headed else choose(config, setting.trust_remote_code, setting.objective)
    shapes = _shapes(setting)
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(fake_kernels.installed(setting))
        warnings.simplefilter("ignore")
        compiled = None
        if setting.compiled:
            elementwise = setting.checkpointing == "elementwise"
            # Without Inductor's own passes copies of weights in fp8 would be kept.
            divides = _as_inductor if elementwise or setting.products else _DIVIDES
            compiled = CompiledLayers(backend=divides, elementwise=elementwise)
            # Graphs of fake tensors serve nobody else, and only so many are made of one layer's code.
            stack.callback(torch._dynamo.reset)
        inventory = build(setting, None, FakeTensorMode())
        layers = depth_of(config)
        once, period = pattern(inventory.layers, setting.every_n_layers)
        small, large = depths(layers, once + 2 * bool(setting.products), period)
        runs: list[list[Micro]] = []
        block = 1
        # One for both depths, which share graphs then.
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        for depth in (small, large):
            try:
                shallow = build(setting, depth, fake, bool(inventory.encoder))
            except UserError as error:  # The whole model has what is named, in a layer that this one lacks.
                raise RuntimeError(error.what) from error
            measure = functools.partial(
                run, shallow, setting, choice, fake, period=period, deadline=deadline, compiled=compiled
            )
            row = [measure(*shape) for shape in shapes]
            if row[0].timelines["forward"].names != row[0].timelines["forward+"].names:
                # Layers do something once (those in 4 bits convert their bias), which later micro-batches do not meet.
                row[0] = measure(*shapes[0])
            runs.append(row)
            if depth == small and setting.layout != "flat":
                block = _lengthen(shapes, runs[0], measure)
    fit = _Fit(shapes, small, large, block)
    tensors, buffers = _inventory(inventory, setting)
    return Trace(
        layers=layers,
        tensors=tensors,
        moments=tuple(_moments(runs, fit, layers, chunk_of(inventory, setting))),
        passes=_passes(runs, fit),
        boundary=fit.amount([[[micro.boundary] for micro in row] for row in runs])[0],
        buffers=buffers,
        caches=_caches(setting, config),
        fused_head=choice.fused,
    )


def _as_inductor(graph: Any, inputs: Any) -> Any:
    """As `_DIVIDES`, after Inductor's own passes over the whole graph: of a chain of element-wise work no more than so
    many operations are computed again, and some are taken out by these."""
    from torch._inductor import compile_fx, config  # As heavy as a compiler.

    # Its own random numbers, which these passes bring in, its kernels alone can draw.
    divide, nothing = config.patch(fallback_random=True)(compile_fx.partition_fn), get_nop_func()
    compiler = aot_autograd(
        fw_compiler=nothing, bw_compiler=nothing, decompositions=compile_fx.select_decomp_table, partition_fn=divide
    )
    return compiler(graph, inputs)


def _caches(setting: Setting, config: Any) -> tuple[Cache, ...] | None:
    """The same in every setting of an architecture."""
    if setting.objective in HEADED:
        return None
    key = setting.architecture(), setting.objective
    if key not in _caches_before:
        _caches_before[key] = kept(config, setting.objective, setting.trust_remote_code)
    return _caches_before[key]


def _shapes(setting: Setting) -> list[tuple[int, int]]:
    """Shapes (batch, length) that tell apart what grows with 1, tokens, tokens x length and, by the fourth, length."""
    length = CHUNK if setting.long else CHUNK // 16
    shapes = [(2, length), (4, length), (2, 2 * length), (4, 2 * length)]
    if setting.layout != "flat":
        return shapes
    # Documents end to end have no tensor that is as long as one of them. They are one row: of several, compiled layers
    # keep inputs in fp8 that of one they round again.
    return [(1, 2 * length), (1, 4 * length), (1, 8 * length)] if setting.products else shapes[:3]


def _lengthen(shapes: list[tuple[int, int]], row: list[Micro], measure: Callable[..., Micro]) -> int:
    """Adds shapes of short rows, and what is seen in them, where a model needs them: one for what grows with the square
    of the length alone, three for layers that pad rows to whole blocks. Returns the tokens of a block."""
    # Where layers take a turn for each block, the turns of short rows are none of those of long ones.
    turns = [each.timelines["forward"].places.count("first_layer") for each in row]
    pads = any(each.paddings for each in row) and max(turns) < 1.05 * min(turns)
    if not pads and not _shared_pairs(row, shapes):
        return 1
    rows = shapes[0][1] // 8
    more = [(rows, _SHORT), (rows // 2, _SHORT), (rows // 4, 5 * _SHORT)]
    seen = [measure(*shape) for shape in (more if pads else more[:1])]
    # A convolution pads by its width, which is less than a row.
    block = max((after for before, after in seen[0].paddings if before == _SHORT and after >= 2 * _SHORT), default=1)
    needed = 3 if block > 1 else 1
    shapes += more[:needed]
    row += seen[:needed]
    return block


def _shared_pairs(row: list[Micro], shapes: list[tuple[int, int]]) -> bool:
    """Whether something grows with the square of the length alone, such as biases of positions, while most is live.

    A line through two lengths says that it is less than nothing for a row of no tokens.
    """
    fit = _Fit(shapes, 0, 1)
    for place in ("last_layer", "head"):
        parts = _same_turns([_at(micro.timelines["forward+"], place) for micro in row])
        if parts[0][0] and all(names == parts[0][0] for names, _ in parts):
            fullest = np.argmax(parts[0][1][:, _ACTIVATIONS])
            live = [part[fullest, _ACTIVATIONS] for _, part in parts]
            if fit.coefficients([live, live])[0][0] < -(shapes[0][1] ** 2):
                return True
    return False


class _Fit:
    """Solves for the coefficients of `Amount` from a few shapes at two depths."""

    def __init__(self, shapes: list[tuple[int, int]], small: int, large: int, block: int = 1) -> None:
        self._inverse = np.linalg.inv(np.array([_terms(*shape, block)[: len(shapes)] for shape in shapes]))
        self._small, self.large, self.block = small, large, block

    def coefficients(self, values: Any) -> tuple[np.ndarray, np.ndarray]:
        """Fixed and per-layer coefficients, each (shapes, …), of values (2 depths, shapes, …)."""
        low, high = (np.tensordot(self._inverse, np.asarray(each, dtype=float), 1) for each in values)
        per_layer = (high - low) / (self.large - self._small)
        return low - self._small * per_layer, per_layer

    def amount(self, values: Any) -> list[Amount]:
        """One amount for each of the last dimension of values (2 depths, shapes, amounts)."""
        fixed, per_layer = self.coefficients(values)
        return [self.as_amount(fixed[:, index], per_layer[:, index]) for index in range(fixed.shape[1])]

    def as_amount(self, fixed: np.ndarray, per_layer: np.ndarray) -> Amount:
        """Of the coefficients of one quantity."""

        def clean(values: np.ndarray) -> tuple[float, ...]:
            # Rounding left over from solving; a byte for every 100,000 pairs of positions is none.
            kept = [float(f"{value:.9g}") if abs(value) > 1e-5 else 0.0 for value in values]
            while kept and kept[-1] == 0.0:
                kept.pop()
            return tuple(kept)

        return Amount(clean(fixed), clean(per_layer), block=self.block)


def _terms(batch: int, length: int, block: int = 1) -> list[float]:
    """What the coefficients of `Amount` stand for, in their order."""
    padded = math.ceil(length / block) * block
    return [1.0, batch * length, batch * length**2, length, length**2, batch * padded, batch]


def _moments(runs: list[list[Micro]], fit: _Fit, layers: int, chunk: int) -> Iterable[Moment]:
    """For every pass and place the operations at which some shape has its peak."""
    moments: dict[Any, Moment] = {}
    for name in runs[0][0].timelines:
        phase = name.removesuffix("+")
        timelines = [[micro.timelines[name] for micro in row] for row in runs]
        for place in (*ENCODER_PLACES, "embeddings", "first_layer", "last_layer", "head"):
            turns = [_same_turns([_at(timeline, place) for timeline in row]) for row in timelines]
            seen = [row for row in turns if all(names for names, _ in row)]
            # Of one layer none is the last: of a model of two the deeper one says all.
            if len(seen) < 2 and not (seen and layers == fit.large):
                continue
            parts = _same_depth([seen[0], seen[-1]])
            for amounts in _peaks(parts, fit, layers, chunk):
                where = "embeddings" if place in ENCODER_PLACES else place
                moment = Moment(phase, where, name.endswith("+"), **amounts)  # type: ignore[arg-type]
                moments[moment] = moment
    return _undominated(list(moments))


def _at(timeline: Timeline, place: str) -> tuple[list[str], np.ndarray]:
    """Names of the operations while a pass is at a place, and (operations, categories) bytes live then."""
    indices = [index for index, where in enumerate(timeline.places) if where == place]
    live = np.array([timeline.live[index] for index in indices], dtype=float)
    return [timeline.names[index] for index in indices], live.reshape(len(indices), len(CATEGORIES))


def _same_turns(parts: list[tuple[list[str], np.ndarray]]) -> list[tuple[list[str], np.ndarray]]:
    """The operations of a place, the same ones for each shape.

    The loss takes a turn for each chunk of tokens, so longer batches take more of them. Its turns are alike: those that
    the shortest takes are the first of the others', whose rest is left out up to what comes after the last.
    """
    shortest = min((names for names, _ in parts), key=len)
    cut = []
    for names, live in parts:
        start = next((i for i, (a, b) in enumerate(zip(shortest, names, strict=False)) if a != b), len(shortest))
        rest = len(shortest) - start
        cut.append((names[:start] + names[len(names) - rest :], _ends(live, start, rest)))
    return cut


def _same_depth(parts: list[list[tuple[list[str], np.ndarray]]]) -> list[list[np.ndarray]]:
    """The operations of a place, the same ones for both depths.

    The loss of a mixture of experts takes a turn for each layer, after the loss of the tokens in the forward pass and
    before it in the backward pass: those of the deeper model that the other one lacks are left out.
    """
    pairs = []
    for (low_names, low), (high_names, high) in zip(*parts, strict=True):
        if len(low) != len(high):
            common = (index for index, (a, b) in enumerate(zip(low_names, high_names, strict=False)) if a != b)
            start = next(common, min(len(low), len(high)))
            low, high = (_ends(each, start, min(len(low), len(high)) - start) for each in (low, high))
        pairs.append((low, high))
    return [[low for low, _ in pairs], [high for _, high in pairs]]


def _ends(rows: np.ndarray, first: int, last: int) -> np.ndarray:
    """So many rows of the start, and so many of the end."""
    return np.concatenate([rows[:first], rows[len(rows) - last :]])


def _peaks(parts: list[list[np.ndarray]], fit: _Fit, layers: int, chunk: int) -> list[dict[str, Amount]]:
    """Amounts by category at the peaks of one place."""
    fixed, per_layer = fit.coefficients(parts)
    whole = fixed + layers * per_layer
    peaks = set()
    for batch, length in _SHAPES:
        live = np.tensordot(_terms(batch, length, fit.block)[: len(whole)], whole, 1)
        live[:, _CHUNKS] *= min(1.0, batch * length / chunk)
        peaks |= {int(np.argmax(live.sum(1))), int(np.argmax(live.sum(1) - live[:, _GRADIENTS]))}
    return [_amounts(fixed[:, peak], per_layer[:, peak], fit, chunk) for peak in sorted(peaks)]


def _amounts(fixed: np.ndarray, per_layer: np.ndarray, fit: _Fit, chunk: int) -> dict[str, Amount]:
    """The amounts of a moment, from coefficients (terms, categories)."""
    amounts = {name: fit.as_amount(fixed[:, index], per_layer[:, index]) for index, name in enumerate(CATEGORIES)}
    chunks = amounts.pop("chunks")
    each = chunks.at(Shape(0, 1, chunk))
    return amounts | {"logits": dataclasses.replace(amounts["logits"], chunk=each, tokens=chunk)}


def _undominated(moments: list[Moment]) -> Iterable[Moment]:
    """Leaves out moments that others of the same kind exceed in every coefficient of every amount."""

    def vector(moment: Moment) -> np.ndarray:
        amounts = (moment.activations, moment.casts, moment.logits, moment.gradients)
        parts = [values for amount in amounts for values in (amount.fixed, amount.per_layer, (amount.chunk,))]
        return np.array([(*values, *[0.0] * (7 - len(values))) for values in parts])

    def kind(moment: Moment) -> tuple[Any, ...]:
        return moment.phase, moment.accumulating, moment.place

    vectors = [vector(moment) for moment in moments]
    for index, moment in enumerate(moments):
        rivals = (other for other, rival in enumerate(moments) if other != index and kind(rival) == kind(moment))
        if not any((vectors[other] >= vectors[index]).all() for other in rivals):
            yield moment


def _passes(runs: list[list[Micro]], fit: _Fit) -> dict[str, Pass]:
    """What each pass does."""

    def fitted(name: str, kind: str = "work") -> Pass:
        amounts = fit.amount([[[*getattr(micro.timelines[name], kind).values()] for micro in row] for row in runs])
        while len(amounts) > _ALWAYS and not amounts[-1].per_layer:
            amounts.pop()
        return Pass(*amounts)

    passes = {name: fitted(name) for name in ("forward", "backward", "evaluation")}
    return passes | {"recompute": fitted("backward", "recomputed")}


def _inventory(shallow: Any, setting: Setting) -> tuple[tuple[Tensors, ...], int]:
    """Parameters of the whole model, and bytes of buffers."""
    base = shallow.base
    place: dict[int, Any] = {}
    heads = [base.get_output_embeddings()]
    if setting.objective in HEADED:
        heads = [base.get_submodule(name) for name in head_modules(base)]
    for module, name in (*((each, "head") for each in heads), (base.get_input_embeddings(), "embeddings")):
        for parameter in module.parameters() if module is not None else ():
            place[id(parameter)] = name
    place |= {id(parameter): "layer" for layer in shallow.layers for parameter in layer.parameters()}
    counts = Counter(
        (
            place.get(id(each), "other"),
            tuple(each.shape),
            each.requires_grad,
            _kind(each, setting),
            parts_of(each),
        )
        for each in shallow.model.parameters()
    )
    tensors = tuple(
        Tensors(where, shape, count, trained, kind, parts)
        for (where, shape, trained, kind, parts), count in counts.items()
    )
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in shallow.model.buffers())
    return tensors, buffers


def _kind(parameter: torch.nn.Parameter, setting: Setting) -> Any:
    if isinstance(parameter, bnb.nn.Params4bit):
        return "nf4"
    if isinstance(parameter, bnb.nn.Int8Params):
        return "int8"
    if isinstance(parameter, StoredWeight):
        return parameter.form
    return "adapter" if parameter.requires_grad and setting.method["name"] == "lora" else "base"
