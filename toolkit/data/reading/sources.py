"""Finds the sources of a recipe and reads them into plain rows, each with the place it came from.

A local path is a file, a folder (also one of `Dataset.save_to_disk`) or a glob of JSON, JSONL, CSV, TSV, Parquet, Arrow
or text files, compressed or not; an address (`s3://`, `https://`) is the same elsewhere. A text file is one document;
line-wise text belongs in JSONL. In a folder with data files of the other kinds, text files are left alone; a README, a
licence and the metadata of `datasets` always are.
"""

from __future__ import annotations

import difflib
import glob
import hashlib
import itertools
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import xxhash

from toolkit.common import UserError, first_line
from toolkit.data.reading import hub, readers, remote
from toolkit.data.reading.readers import RawRow
from toolkit.data.reading.splits import is_of, is_only_split, of_split, split_of
from toolkit.files import below
from toolkit.recipe.data import Source

NOT_DATA = re.compile(
    r"(readme|licen[cs]e|changelog|citation|contributing).*|(dataset_infos?|dataset_dict|state)\.json"
    r"|cache-[0-9a-f]{16}(_\d+_of_\d+)?\.arrow",
    re.IGNORECASE,
)
"""Names of files in a folder that hold no rows, or what `map` and `filter` of `datasets` once gave."""
SHARD = re.compile(r"(.*?)(\d+)-of-(\d+)(?:-[0-9a-f]{16})?(\..+)")
"""Names of the files of a numbered set, as `datasets` writes them, earlier with a hash in each."""


class Reader(ABC):
    """One source, located but not read yet; for the arguments see `open_source`."""

    def __init__(self, source: Source, streaming: bool = False) -> None:
        self.source, self.streaming = source, streaming
        self._versions: dict[Path, tuple[int, int]] = {}

    def rows(self) -> Iterator[RawRow]:
        """The rows in order, at most `max_samples` of them.

        Raises:
            UserError: A file is empty, damaged or not what its name says; or there is not one row.
        """
        rows = itertools.islice(self._rows(), self.source.max_samples)
        first = next(rows, None)
        if first is None:
            raise UserError(f"data source `{self.source.path}` has no rows", "point `data.sources` to data, or fill it")
        yield first
        yield from rows

    def local_files(self) -> list[Path]:
        """Those of a local source."""
        return []

    def set_aside(self) -> list[Path]:
        """Files of a local source that count as held out by a word in a longer name, beside training files without."""
        return []

    def class_names(self, column: str) -> list[str]:
        """What the numbers of a column stand for, where the source says so."""
        return next((names for file in self.local_files() if (names := readers.class_names(file, column))), [])

    @abstractmethod
    def fingerprint(self) -> str:
        """Changes whenever the rows change."""

    def check_unchanged(self) -> None:
        """Refuses rows of a local file that was written since its fingerprint was taken, and may not be those of it."""
        for path, version in self._versions.items():
            status = path.stat() if path.exists() else None
            if status is None or (status.st_size, status.st_mtime_ns) != version:
                raise UserError(f"`{path}` was written while it was read", "start again once nothing writes it")

    @abstractmethod
    def _rows(self) -> Iterator[RawRow]: ...


def open_source(source: Source, streaming: bool = False) -> Reader:
    """Finds the files or the hub data set of `source`.

    Args:
        source: What to read.
        streaming: Whether a hub data set is read over the network instead of downloaded first, and a local one
            recognised by the sizes and times of its files instead of all their content.

    Raises:
        UserError: Nothing is there, or it does not have this split.
    """
    if "://" in source.path:
        return _Remote(source, streaming)
    try:
        files = [] if source.path.startswith("builtin:") else _local_files(source)
    except OSError as error:
        raise UserError(
            f"data source `{source.path}` cannot be read: {error.strerror or error}", "check its path and permissions"
        ) from error
    if files is None:
        return _Hub(source, streaming)
    for key in ("name", "revision"):
        if getattr(source, key) is not None:
            raise UserError(
                f"data source `{source.path}` is local, and only hub data sets have a `{key}`", f"remove `{key}`"
            )
    return _Local(source, streaming, files) if files else _Builtin(source)


def open_sources(sources: list[Source], streaming: bool, max_samples: int | None = None) -> list[Reader]:
    """Locates all sources; `max_samples` limits every one that is streamed, so that no more is read than is used."""
    if streaming and max_samples is not None:
        sources = [
            source.model_copy(update={"max_samples": min(source.max_samples or max_samples, max_samples)})
            for source in sources
        ]
    return [open_source(source, streaming) for source in sources]


def set_aside(train: list[Reader], held_out: list[Reader]) -> list[list[str]]:
    """Names of the files that each source for training sets aside and no source reads."""
    read = {path.resolve() for reader in train + held_out for path in reader.local_files()}
    return [[path.name for path in reader.set_aside() if path.resolve() not in read] for reader in train]


class _Local(Reader):
    def __init__(self, source: Source, streaming: bool, paths: list[Path]) -> None:
        super().__init__(source, streaming)
        self.paths = paths

    def local_files(self) -> list[Path]:
        return self.paths

    def set_aside(self) -> list[Path]:
        root = _root(self.source.path)
        if self.source.split != "train" or any(split_of(str(path.relative_to(root))) for path in self.paths):
            return []
        found: list[Path] = []
        for split in ("validation", "test"):
            with suppress(UserError):
                found += _local_files(self.source.model_copy(update={"split": split})) or []
        names = [path.name for path in self.paths]
        by_words = (path for path in found if not is_only_split(path.name, names))
        return [path for path in by_words if split_of(str(path.parent.relative_to(root))) is None]

    def fingerprint(self) -> str:
        digest = xxhash.xxh3_128()
        for path in self.paths:
            try:
                status = path.stat()
                self._versions[path] = status.st_size, status.st_mtime_ns
                digest.update(os.fsencode(path.name) + f"\n{status.st_size}\n".encode())
                if self.streaming:
                    digest.update(f"{status.st_mtime_ns}\n".encode())
                    continue
                with path.open("rb") as file:
                    hashlib.file_digest(file, lambda: digest)
            except OSError as error:
                raise UserError(f"`{path}` cannot be read: {error}", "check the file and its permissions") from error
        return digest.hexdigest()

    def _rows(self) -> Iterator[RawRow]:
        return itertools.chain.from_iterable(map(readers.read, self.paths))


class _Remote(Reader):
    def __init__(self, source: Source, streaming: bool) -> None:
        super().__init__(source, streaming)
        for key in ("name", "revision"):
            if getattr(source, key) is not None:
                raise UserError(
                    f"data source `{source.path}` is an address, and only hub data sets have a `{key}`",
                    f"remove `{key}`",
                )
        files = {Path(file.name): file for file in remote.find(source.path)}
        is_one = len(files) == 1 and readers.kind(Path(source.path.partition("?")[0])) is not None
        chosen = _one_file(source, *files) if is_one else _of_many(source, list(files), Path())
        self.files = [files[path] for path in chosen]

    def class_names(self, column: str) -> list[str]:
        if readers.kind(Path(self.files[0].name)) not in readers.TYPED:
            return []
        return readers.class_names(self.files[0].fetch(), column)  # Rows are read from this copy first.

    def fingerprint(self) -> str:
        return xxhash.xxh3_128_hexdigest("".join(file.fingerprint() for file in self.files).encode())

    def _rows(self) -> Iterator[RawRow]:
        for file in self.files:
            local = file.fetch()
            try:
                yield from ((where.replace(str(local), file.url), row) for where, row in readers.read(local))
            except UserError as error:
                raise UserError(error.what.replace(str(local), file.url), error.change) from error


class _Builtin(Reader):
    def fingerprint(self) -> str:
        return xxhash.xxh3_128_hexdigest(json.dumps(self._load()).encode())

    def _rows(self) -> Iterator[RawRow]:
        yield from ((f"{self.source.path} row {n}", row) for n, row in enumerate(self._load(), 1))

    def _load(self) -> list[dict[str, Any]]:
        from toolkit.data.reading import builtin

        known = {
            "stdlib-docstrings": builtin.docstring_rows,
            "stdlib-docstring-pairs": builtin.docstring_pairs,
            "stdlib-docstrings-judged": builtin.judged_docstrings,
            "stdlib-docstrings-kinds": builtin.docstring_kinds,
            "stdlib-docstrings-names": builtin.docstring_names,
            "stdlib-docstrings-answers": builtin.docstring_answers,
            "arithmetic": builtin.arithmetic,
        }
        load = known.get(self.source.path.removeprefix("builtin:"))
        if load is None:
            raise UserError(
                f"data source `{self.source.path}` does not exist",
                f"the built-in ones are {' and '.join(f'`builtin:{name}`' for name in known)}",
            )
        if self.source.split != "train":
            raise UserError(
                f"`{self.source.path}` has only the split `train`, not `{self.source.split}`",
                "hold a fraction out with `data.eval_split: 0.1`",
            )
        return load()


class _Hub(Reader):
    def fingerprint(self) -> str:
        import datasets  # Takes a second, and only hub data sets need it.

        source = self.source
        with _hub_errors(source):
            builder = datasets.load_dataset_builder(source.path, source.name, revision=source.revision)
        return f"{source.path}/{source.name}/{builder.hash}"

    def class_names(self, column: str) -> list[str]:
        # A builder knows features only where a card states them; Parquet has them in its files.
        with _hub_errors(self.source):
            feature = (self._loaded().features or {}).get(column)
        return [*getattr(getattr(feature, "feature", feature), "names", ())]

    def _rows(self) -> Iterator[RawRow]:
        source = self.source
        with _hub_errors(source):
            rows = enumerate(self._loaded(), 1)
            yield from ((f"{source.path} row {n}", readers.without_nulls(row)) for n, row in rows)

    def _loaded(self) -> Any:
        import datasets

        source = self.source
        options: dict[str, Any] = {"split": source.split, "revision": source.revision, "streaming": self.streaming}
        return datasets.load_dataset(source.path, source.name, **options)


@contextmanager
def _hub_errors(source: Source) -> Iterator[None]:
    """Turns what `datasets` raises about a missing or unreachable data set into a UserError."""
    offline = hub.offline()
    try:
        yield
    except Exception as error:  # OSError, ValueError, RuntimeError and errors of its own: there is no common parent
        failed = f"reading it from the hub failed: {first_line(error)}"
        raise UserError(
            f"data source `{source.path}` (split `{source.split}`) is no local file or folder, and "
            f"{'it is not in the cache of hub data sets' if offline else failed}",
            "check `path`, `name`, `split` and `revision` of the source, the network, and HF_TOKEN for gated data",
        ) from error


def _local_files(source: Source) -> list[Path] | None:
    """The files of a local source, or None if the path can only mean a hub data set."""
    path = Path(source.path)
    if path.is_file():
        return _one_file(source, path)
    if path.is_dir():
        candidates = [*below(path)]
    elif glob.has_magic(source.path):
        candidates = [Path(p) for p in glob.glob(str(path), recursive=True)]
    elif _names_hub_data(source, path):
        return None
    else:
        raise _missing(source, path)
    broken = next((p for p in candidates if _leads_nowhere(p) and _may_be_data(p)), None)
    if broken is not None:
        raise _missing(source, broken)
    return _of_many(source, [p for p in candidates if p.is_file()], _root(source.path))


def _root(path: str) -> Path:
    """The folder of a local source, or that in which its pattern begins: names below it say splits."""
    if Path(path).is_dir():
        return Path(path)
    return Path(os.path.dirname(re.split(r"[*?[]", str(Path(path)), maxsplit=1)[0]))


def _may_be_data(path: Path) -> bool:
    return readers.kind(path) is not None and not NOT_DATA.fullmatch(path.name)


def _leads_nowhere(path: Path) -> bool:
    return path.is_symlink() and not path.exists()


def _one_file(source: Source, path: Path) -> list[Path]:
    if readers.kind(path) is None:
        raise UserError(f"`{path}` has an unknown extension `{path.suffix}`", readers.change_of([path.name]))
    if source.split != "train" and not is_of(path.name, source.split):
        raise UserError(
            f"data source `{source.path}` is one file and has no split `{source.split}`",
            "hold a fraction out with `data.eval_split: 0.05`, or name a file in `data.eval_sources`",
        )
    return [path]


def _of_many(source: Source, candidates: list[Path], root: Path) -> list[Path]:
    """Those of a folder's or a glob's files that are data of the split."""
    files = sorted(filter(_may_be_data, candidates))
    if not files:
        change = readers.change_of(sorted(path.name for path in candidates))
        raise UserError(f"no data files at `{source.path}`", change)
    files = [p for p in files if readers.kind(p) != "text"] or files
    files = of_split(source, files, root)
    if not glob.has_magic(source.path):  # A pattern may ask for some of them.
        _check_shards(source, files)
    return files


def _check_shards(source: Source, files: list[Path]) -> None:
    """Refuses a folder that lacks some files of a numbered set, as after a download that was interrupted, or that has
    files of two sets."""
    sets: dict[tuple[Path, str, str], dict[int, set[int]]] = {}
    for path in files:
        if named := SHARD.fullmatch(path.name):
            begin, number, count, end = named.groups()
            sets.setdefault((path.parent, begin, end), {}).setdefault(int(count), set()).add(int(number))
    for (folder, begin, end), by_count in sets.items():
        if len(by_count) > 1:
            counts = " and of ".join(map(str, sorted(by_count)))
            raise UserError(
                f"data source `{source.path}`: `{folder}` holds `{begin}N-of-M{end}` of sets of {counts} files",
                "remove the set that is not meant: many of its rows are likely to be in the other, too",
            )
        ((count, numbers),) = by_count.items()
        first = int(count in numbers)  # Some count from one.
        if lacking := [number for number in range(first, first + count) if number not in numbers]:
            raise UserError(
                f"data source `{source.path}`: `{folder}` holds {len(numbers)} of {count} files "
                f"`{begin}N-of-{count}{end}`; the first that it lacks has the number {lacking[0]}",
                f"fetch or write the rest; to train on these alone name them with a pattern: {folder / f'*{end}'}",
            )


def _names_hub_data(source: Source, path: Path) -> bool:
    """Whether a path where nothing is can be the id of a hub data set, and not a mistyped file."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", source.path):
        return False
    # `data/train.jsonl` is a file wherever one stands; only the hub's data have names and revisions.
    if readers.kind(path) is not None and (len(path.parts) == 1 or not (source.name or source.revision)):
        return False
    return len(path.parts) == 1 or not path.parent.is_dir()


def _missing(source: Source, path: Path) -> UserError:
    if path.exists():
        return UserError(f"data source `{source.path}` is no file or folder", "write its content to a file first")
    if path.is_symlink():
        return UserError(
            f"data source `{source.path}`: `{path}` is a link to {os.readlink(path)}, which is not there",
            "put its target back, or remove the link",
        )
    message = f"data source `{source.path}` does not exist"
    if not path.parent.is_dir():
        hub = "; one of the hub that is called so needs its `revision`" if readers.kind(path) else ""
        return UserError(f"{message}: there is no folder `{path.parent}`", f"check `path` in `data.sources`{hub}")
    entries = sorted(p.name for p in path.parent.iterdir())
    if near := difflib.get_close_matches(path.name, entries, n=1):
        return UserError(message, f"did you mean `{path.parent / near[0]}`?")
    return UserError(message, f"`{path.parent}` holds {', '.join(entries[:8]) or 'nothing'}")
