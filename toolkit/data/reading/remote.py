"""Files at an address (`s3://`, `gs://`, `hf://`, `https://` and what else fsspec reaches), copied here once.

They are read from local copies, so that everything works as with local files: splits, compression, `file:line`. A copy
lies in the cache under its address and version (ETag, modification time or checksum); where a server tells none, the
file is downloaded anew and its content decides. Plain HTTP goes through the standard library, because fsspec would need
another package for it.
"""

from __future__ import annotations

import contextlib
import glob
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any
from urllib.parse import unquote, urlsplit

import xxhash

from toolkit.cache import cache_dir
from toolkit.common import UserError, first_line
from toolkit.data.reading import hub
from toolkit.seal import build_sealed

PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
}
"""Protocol to the package that fsspec needs for it."""
_VERSION_KEYS = ("ETag", "etag", "blob_id", "md5Hash", "content_md5", "checksum", "LastModified", "mtime", "created")
"""What file systems call that which changes with a file."""
_TIMEOUT_SECONDS = 30


@dataclass(frozen=True)
class RemoteFile:
    """One file at an address.

    Attributes:
        url: Its whole address.
        name: Its path below the address of the source, with `/`.
        version: Changes with its content; None if the server does not say.
    """

    url: str
    name: str
    version: str | None

    def fetch(self) -> Path:
        """A local copy.

        Raises:
            UserError: It cannot be read.
        """
        root = cache_dir() / "downloads"
        version = self.version or self._content_hash()
        key = xxhash.xxh3_128_hexdigest(f"{self.url}\n{version}\n{self._local_name}".encode())
        return build_sealed(root / key, self._download) / self._local_name

    @property
    def _local_name(self) -> str:
        # Only what says the kind: the name may be a secret.
        return "rows" + "".join(PurePosixPath(self.name).suffixes[-2:])

    def fingerprint(self) -> str:
        """Changes with the content."""
        return f"{self.name}\n{self.version or self._content_hash()}\n"

    def _download(self, folder: Path) -> None:
        with (folder / self._local_name).open("wb") as local:
            self._read(local.write)

    def _content_hash(self) -> str:
        digest = xxhash.xxh3_128()
        self._read(digest.update)
        return digest.hexdigest()

    def _read(self, take: Callable[[bytes], object]) -> None:
        """Hands on all of its content; a connection that ends early looks like the end of a file."""
        count = 0
        with _reading(self.url) as (remote, size):
            while block := remote.read(1 << 20):
                take(block)
                count += len(block)
            if size is not None and count < size:
                raise OSError(f"the connection ended after {count:,} of {size:,} bytes")


def find(address: str) -> list[RemoteFile]:
    """The files at an address: one, those of a folder, or those of a glob.

    Raises:
        UserError: There is nothing, the protocol is unknown, or its package is not installed.
    """
    with _errors(address):
        if urlsplit(address).scheme in ("http", "https"):
            return [RemoteFile(address, unquote(urlsplit(address).path).rpartition("/")[2], _http_version(address))]
        system, root = _file_system(address)
        if system.isdir(root):
            paths = system.find(root)
        else:
            paths = system.glob(root) if glob.has_magic(root) else [root]
            root = re.split(r"[*?[]", root, maxsplit=1)[0].rpartition("/")[0]
        files = [(path, system.info(path)) for path in sorted(paths)]
    found = []
    for path, info in files:
        version = next((info[key] for key in _VERSION_KEYS if info.get(key)), None)
        name = path.removeprefix(root).lstrip("/")
        tag = None if version is None else f"{version} {info.get('size')}"
        found.append(RemoteFile(system.unstrip_protocol(path), name, tag))
    return found


def require_known(address: str) -> None:
    """Refuses an address of a kind that no file system is for; that of a known one may need a package still.

    Raises:
        UserError: With the kinds that are known best.
    """
    protocol = urlsplit(address).scheme or address.partition("://")[0]
    if protocol in ("http", "https"):
        return
    from fsspec.registry import known_implementations, registry

    if protocol not in {*known_implementations, *registry, *PACKAGES}:
        raise UserError(
            f"data source `{address}`: there is no file system for `{protocol}://`",
            f"use https, hf, or one of {', '.join(PACKAGES)}, or download the file and name its local path",
        )


def _http_version(url: str) -> str | None:
    with _errors(url):
        try:
            with urllib.request.urlopen(_request(url, "HEAD"), timeout=_TIMEOUT_SECONDS) as reply:
                return reply.headers["ETag"] or reply.headers["Last-Modified"]
        except urllib.error.HTTPError as error:
            if error.code in (403, 405, 501):  # signed addresses and small servers answer to GET alone
                return None
            raise


def _file_system(address: str) -> tuple[Any, str]:
    import fsspec

    protocol = urlsplit(address).scheme
    if protocol == "hf" and hub.offline():
        raise UserError(
            f"data source `{address}` lies on the hub, which is not reached",
            "check the network and HF_ENDPOINT, or download the file and name its local path",
        )
    require_known(address)
    try:
        system, root = fsspec.core.url_to_fs(protocol + address[len(protocol) :])  # `S3://` is `s3://`
    except (ImportError, ValueError) as error:  # A kind of address may come with its package.
        if isinstance(error, ValueError) and "Protocol not known" not in str(error):
            raise
        package = PACKAGES.get(protocol)
        change = f"pip install {package}" if package else first_line(error)
        raise UserError(
            f"data source `{address}`: `{protocol}://` needs a package that is not installed", change
        ) from error
    return system, root


@contextlib.contextmanager
def _reading(url: str) -> Iterator[tuple[IO[bytes], int | None]]:
    """An open file and its bytes, where the server says how many."""
    with _errors(url):
        if urlsplit(url).scheme in ("http", "https"):
            opened: Any = urllib.request.urlopen(_request(url, "GET"), timeout=_TIMEOUT_SECONDS)
            size = getattr(opened, "length", None)
        else:
            system, path = _file_system(url)
            opened = system.open(path, "rb")
            size = getattr(opened, "size", None)
        with opened as file:
            yield file, size


def _request(url: str, method: str) -> urllib.request.Request:
    return urllib.request.Request(url, method=method, headers={"User-Agent": "accelerate-toolkit"})


@contextlib.contextmanager
def _errors(address: str) -> Iterator[None]:
    """Turns what file systems raise about missing or unreachable files into a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # OSError and errors of the clouds' own: there is no common parent
        raise UserError(
            f"data source `{address}` cannot be read: {first_line(error)}",
            "check the address, the network and your credentials for it, or download the file and name its local path",
        ) from error
