"""What a checkpoint holds of each trained parameter, whichever engine wrote it, on however many processes.

However an engine divides a parameter, each process holds ranges of its numbers in row-major order: ZeRO-1 and 2 divide
all parameters laid end to end, ZeRO-3 each by itself, FSDP by rows. So a parameter's master, and each tensor of its
optimizer state, is a list of ranges. They are mapped from the files or read when they are copied, one at a time: no
file is written again, and no process holds more than what it keeps and the range that it copies. Of layers that
processes divide beside ZeRO such ranges are of a part, and the parts are put together when they are copied.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import math
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from toolkit.common import UserError, first_line
from toolkit.models.parallel.tensor_parallel import Share

PARTS = "parts.json"
"""File of a checkpoint of ZeRO's that says how layers were divided, see `divided.divisions`."""
MASTER = "master"
"""The kind of state that is the parameter itself, in the precision in which it is updated."""
OVERFLOWS = ("cur_iter", "last_overflow_iter", "cur_hysteresis")
"""What DeepSpeed counts of fp16, by which it says when the scale of losses falls or rises."""
_Range = tuple[int, int, Callable[[], Any]]
_Ranges = dict[str, dict[str, list[_Range]]]


class SavedState:
    """Masters and optimizer state by the names of parameters.

    Args:
        checkpoint: One that has been compared with its seal.
        sizes: Numbers of each trained parameter, in the order of the optimizer's groups. What one process writes, or
            DDP, is numbered so.
        aliases: How PEFT names those of adapters when it saves them.

    Raises:
        UserError: If it holds other parameters, or a file of it names what checkpoints are not made of.
    """

    def __init__(self, checkpoint: Path, sizes: Mapping[str, int], aliases: Mapping[str, str]) -> None:
        self._checkpoint, self._aliases = checkpoint, aliases
        self._ranges = _no_ranges()
        self._rest: dict[str, dict[str, Any]] = defaultdict(dict)
        self._groups: list[tuple[set[str], dict[str, Any]]] = []
        self.loss_scale: float | None = None
        """Of fp16; None in other precisions."""
        self.overflows: dict[str, int] = {}
        """What DeepSpeed counts besides, by which it says when that scale falls or rises; empty of other engines."""
        files = sorted(checkpoint.glob("*/*_optim_states.pt"), key=_ranks)
        if files:
            self._add_zero(files)
        elif (checkpoint / "optimizer_0").is_dir():
            self._add_sharded(checkpoint / "pytorch_model_fsdp_0", checkpoint / "optimizer_0")
        else:
            self._add_whole(list(sizes))
        with contextlib.suppress(FileNotFoundError):
            self.loss_scale = float(load_saved(checkpoint / "scaler.pt")["scale"])
        trained = set[str]().union(*(names for names, _ in self._groups))
        saved = {name: sum(count for _, count, _ in self._ranges[name][MASTER]) for name in trained}
        if differing := [name for name in {**saved, **sizes} if saved.get(name) != sizes.get(name)]:
            raise UserError(
                f"{checkpoint} holds other trained parameters than the recipe trains, {differing[0]} among them: "
                f"{saved.get(differing[0], 0):,} numbers there, {sizes.get(differing[0], 0):,} here",
                "continue with the model and the method that saved it",
            )

    def copy(self, name: str, kind: str, start: int, into: torch.Tensor) -> None:
        """Fills (numbers,) with those of a parameter from a position on.

        Raises:
            UserError: If the checkpoint lacks some of them.
        """
        if kind != MASTER and not self.kinds(name):
            into.zero_()  # It never had a gradient.
            return
        missing, end = into.numel(), start + into.numel()
        for first, count, read in self._ranges[name][kind]:
            low, high = max(start, first), min(end, first + count)
            if low < high:
                into[low - start : high - start].copy_(read()[low - first : high - first])
                missing -= high - low
        _newest.cache_clear()  # It would stay in memory for as long as the training.
        if missing:
            raise UserError(
                f"{self._checkpoint} lacks {missing:,} numbers of {name}'s {kind}",
                "continue with the recipe, the strategy and the number of processes that saved it",
            )

    def kinds(self, name: str) -> list[str]:
        """What the optimizer keeps of a parameter's shape."""
        return [kind for kind in self._ranges[name] if kind != MASTER]

    def rest(self, name: str) -> dict[str, Any]:
        """What the optimizer keeps of a parameter beside that, such as the number of its steps."""
        # Of what ZeRO updates as one parameter they are one tensor, which an optimizer adds to in place.
        return {key: value.clone() if torch.is_tensor(value) else value for key, value in self._rest[name].items()}

    def group(self, name: str | None) -> int:
        """Number of the group in which the optimizer had a parameter; the first one for None."""
        return next((number for number, (names, _) in enumerate(self._groups) if name in names), 0)

    def settings(self, group: int) -> dict[str, Any]:
        """The optimizer's settings for a group, less its parameters."""
        return {key: value for key, value in self._groups[group][1].items() if key != "params"}

    def __len__(self) -> int:
        """Groups of the optimizer."""
        return len(self._groups)

    def _add(
        self, into: _Ranges, name: str, kind: str, value: Any, start: int = 0, at: int = 0, count: int | None = None
    ) -> None:
        """Adds `count` numbers (all, if None) of a tensor from position `at` on, which are a parameter's from `start`
        on; or what is no tensor of numbers."""
        if isinstance(value, dict):
            # So bitsandbytes saves its tensors.
            for inner, each in value.items():
                self._add(into, name, inner, each, start, at, count)
            return
        if not torch.is_tensor(value) or value.ndim == 0:
            self._rest[name][kind] = value
            return
        flat = value.reshape(-1)
        part = flat if count is None else flat[at : at + count]
        into[name][kind].append((start, part.numel(), lambda: part))

    def _add_zero(self, files: Sequence[Path]) -> None:
        parts = [self._of_part(list(own)) for _, own in itertools.groupby(files, lambda file: _ranks(file)[0])]
        self._ranges |= parts[0]
        if len(parts) > 1:
            for name, how in json.loads((self._checkpoint / PARTS).read_text(encoding="utf-8")).items():
                share = Share(how["dimension"], len(parts), 0, tuple(how["blocks"]))
                shape = torch.Size(how["shape"])
                for kind in list(parts[0][name]):
                    self._ranges[name][kind] = [_joined(share, shape, [part[name][kind] for part in parts])]

    def _of_part(self, files: Sequence[Path]) -> _Ranges:
        """What the processes wrote that have the same part of divided layers."""
        ranges = _no_ranges()
        shapes: list[dict[str, torch.Size]] = []
        seen: dict[str, int] = defaultdict(int)
        numbered: dict[int, set[str]] = defaultdict(set)
        for rank, file in enumerate(files):
            saved = load_saved(file)["optimizer_state_dict"]
            stage3 = "fp32_flat_groups" in saved
            masters = saved["fp32_flat_groups" if stage3 else "single_partition_of_fp32_groups"]
            optimizer = saved["optimizer_state_dict" if stage3 else "base_optimizer_state"]
            if stage3:
                of_model = next(file.parent.glob("*zero_pp_rank_0_*_model_states.pt"))
                shapes = shapes or load_saved(of_model)["param_shapes"]
                parts = [list(equal_parts(group, rank, len(files))) for group in shapes]
            else:
                parts = [[(name, seen[name], each.start, each.numel) for name, each in group.items()]
                         for group in saved["param_slice_mappings"]]  # fmt: skip
            for number, (master, group) in enumerate(zip(masters, parts, strict=True)):
                held = {MASTER: master, **optimizer["state"].get(number, {})}
                for name, start, at, count in group:
                    seen[name] += count
                    numbered[number].add(name)
                    for kind, value in held.items():
                        self._add(ranges, name, kind, value, start, at, count)
            if rank == 0:
                settings = optimizer["param_groups"]
                if saved.get("dynamic_loss_scale"):
                    scaler = saved["loss_scaler"]
                    self.loss_scale = float(scaler.cur_scale)
                    self.overflows = {name: getattr(scaler, name) for name in OVERFLOWS}
        self._groups = [(set().union(*(numbered[number] for number in each["params"])), each) for each in settings]
        return ranges

    def _add_sharded(self, model: Path, optimizer: Path) -> None:
        named = {self._aliases.get(name, name): name for name in self._aliases}
        for path, pieces in _sharded(model):
            name = named.get(path[1], path[1])
            self._ranges[name][MASTER] += pieces
        groups: dict[int, dict[str, Any]] = defaultdict(dict)
        for (_, section, item, kind), pieces in _sharded(optimizer):
            if section == "param_groups":
                groups[int(item)][kind] = pieces[0][2]()
            elif pieces[0][1]:
                self._ranges[item][kind] += pieces
            else:
                self._rest[item][kind] = pieces[0][2]()
        self._groups = [(set(groups[number]["params"]), groups[number]) for number in sorted(groups)]

    def _add_whole(self, order: Sequence[str]) -> None:
        """What one process wrote: of itself, under DDP or of FSDP's shards."""
        full = self._checkpoint / "pytorch_model_fsdp.bin"
        if full.is_file():
            optimizer = load_saved(self._checkpoint / "optimizer.bin")
            named = {name: name for group in optimizer["param_groups"] for name in group["params"]}
            weights = {name: _whole(value) for name, value in load_saved(full).items()}
        else:
            optimizer = load_saved(self._checkpoint / "optimizer.pt")
            # Where there are more of one than of the other, they are not the same parameters.
            numbers = itertools.chain.from_iterable(group["params"] for group in optimizer["param_groups"])
            named = dict(itertools.zip_longest(numbers, order, fillvalue=""))
            opened = [safe_open(file, "pt") for file in self._checkpoint.glob("*.safetensors")]
            weights = {name: _stored(file, name) for file in opened for name in file.keys()}  # noqa: SIM118
        for name in order:
            saved = name if name in weights else self._aliases.get(name, name)
            self._ranges[name][MASTER] += [weights[saved]] if saved in weights else []
        for number, held in optimizer["state"].items():
            for kind, value in held.items():
                self._add(self._ranges, named[number], kind, value)
        self._groups = [({named[number] for number in each["params"]}, each) for each in optimizer["param_groups"]]


def lacks_state(checkpoint: Path) -> bool:
    """Whether FSDP's optimizer had state of some of its parameters and none of others, which never got a gradient: what
    torch does not read."""
    if (checkpoint / "optimizer_0").is_dir():
        saved = [(*path[1:], pieces) for path, pieces in _sharded(checkpoint / "optimizer_0")]
        held = {item for section, item, _, _ in saved if section == "state"}
        named = [name for section, _, kind, pieces in saved if (section, kind) == ("param_groups", "params")
                 for name in pieces[0][2]()]  # fmt: skip
    else:
        optimizer = load_saved(checkpoint / "optimizer.bin")
        held, named = {*optimizer["state"]}, [name for group in optimizer["param_groups"] for name in group["params"]]
    return bool(held) and not held.issuperset(named)


def _no_ranges() -> _Ranges:
    return defaultdict(lambda: defaultdict(list))


def _joined(share: Share, shape: torch.Size, parts: Sequence[list[_Range]]) -> _Range:
    """All numbers of a parameter of this shape that processes divide, of the ranges of each part, in order."""
    own = torch.Size(width // share.size if each == share.dimension else width for each, width in enumerate(shape))

    def whole() -> torch.Tensor:
        return share.join([torch.cat([read() for _, _, read in part]).view(own) for part in parts]).reshape(-1)

    return 0, shape.numel(), whole


def _whole(tensor: torch.Tensor) -> _Range:
    return 0, tensor.numel(), lambda: tensor.reshape(-1)


def _stored(opened: Any, name: str) -> _Range:
    size = math.prod(opened.get_slice(name).get_shape())
    return 0, size, lambda: opened.get_tensor(name).reshape(-1)


def equal_parts(shapes: Mapping[str, torch.Size], rank: int, processes: int) -> Iterator[tuple[str, int, int, int]]:
    """Of the parameters that ZeRO-3 divides one by one and keeps end to end: the name, the first number that a process
    has of it, where that lies, and how many there are. Parts are equal, the last ones filled up with zeros."""
    at = 0
    for name, shape in shapes.items():
        numbers = math.prod(shape)
        size = -(-numbers // processes)
        start = min(rank * size, numbers)
        yield name, start, at, min(size, numbers - start)
        at += size


def _sharded(folder: Path) -> Iterator[tuple[tuple[Any, ...], list[_Range]]]:
    """What torch's distributed checkpoint holds: the keys that lead to a value, and its ranges."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

    metadata = FileSystemReader(folder).read_metadata()
    for name, path in metadata.planner_data.items():
        about = metadata.state_dict_metadata[name]
        pieces: list[_Range] = []
        size = about.size if isinstance(about, TensorStorageMetadata) else torch.Size()
        for chunk in about.chunks if isinstance(about, TensorStorageMetadata) else [None]:
            stored = metadata.storage_data[MetadataIndex(name, chunk.offsets if chunk else None)]
            read = functools.partial(_read_stored, folder / stored.relative_path, stored.offset, stored.length)
            pieces += [(0, 0, read)] if chunk is None or not chunk.sizes else _ranges(chunk, size, read)
        yield path, pieces


def _ranges(chunk: Any, size: Sequence[int], read: Callable[[], Any]) -> Iterator[_Range]:
    """Of a chunk of a tensor: rows, or of divided layers some columns of them, which are a range for each row."""
    row = math.prod(size[1:])
    if chunk.sizes[1:] == size[1:]:
        yield chunk.offsets[0] * row, math.prod(chunk.sizes), read
        return
    (rows, columns), (first, column) = chunk.sizes, chunk.offsets

    for number in range(rows):
        each = functools.partial(lambda at: _newest(read).view(rows, columns)[at], number)
        yield (first + number) * row + column, columns, each


@functools.lru_cache(maxsize=1)
def _newest(read: Callable[[], Any]) -> Any:
    """A chunk, whose rows are asked for one after the other. None before it is kept: together they are this process's
    share of the checkpoint once more."""
    return read()


def _read_stored(file: Path, offset: int, length: int) -> Any:
    with file.open("rb") as stream:
        stream.seek(offset)
        value = torch.load(io.BytesIO(stream.read(length)), map_location="cpu", weights_only=True)
    return value.reshape(-1) if torch.is_tensor(value) and value.ndim else value


def load_saved(file: Path) -> Any:
    """A file of torch's, mapped into memory. It may name plain data and what DeepSpeed adds to that, nothing else."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    try:
        with torch.serialization.safe_globals([DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]):
            return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{file} names what no checkpoint of this toolkit is made of: {first_line(error)}",
            "continue from a checkpoint that was made by a run of this toolkit",
        ) from error


def _ranks(file: Path) -> tuple[int, int]:
    """Of the process that wrote a file of ZeRO's: which part of divided layers it has, and which place among those that
    have the same."""
    _, _, numbers = file.name.partition("zero_pp_rank_")
    place, _, part = numbers.removesuffix("_optim_states.pt").partition("_mp_rank_")
    return int(part), int(place)
