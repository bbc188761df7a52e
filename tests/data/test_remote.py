"""Files at an address are read as local ones are, copied once for each version, and refused with what is missing."""

from __future__ import annotations

import functools
import gzip
import io
import json
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from email.message import Message
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pytest

from toolkit.common import UserError
from toolkit.data.reading.remote import find
from toolkit.data.reading.sources import open_source
from toolkit.recipe.data import Source

ROWS = [{"text": "one"}, {"text": "two"}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Path, list[str]]]:
    """A web server on this machine: its address, its folder and the requests it got."""
    folder, requests = tmp_path / "www", []
    folder.mkdir()

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            requests.append(str(args[0]))

        def do_HEAD(self) -> None:
            if "signed" in self.path:
                self.send_error(403)
            else:
                super().do_HEAD()

    service = HTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
    threading.Thread(target=service.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{service.server_port}", folder, requests
    service.shutdown()
    service.server_close()


def read(path: str, **settings: Any) -> list[dict[str, Any]]:
    return [row for _, row in open_source(Source(path=path, **settings)).rows()]


def refused(path: str, **settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        read(path, **settings)
    assert caught.value.change
    return str(caught.value)


def write_memory(files: dict[str, bytes]) -> None:
    system = fsspec.filesystem("memory")
    system.store.clear()
    for name, content in files.items():
        system.pipe(name, content)


def test_a_file_a_folder_and_a_glob() -> None:
    write_memory(
        {
            "/data/train.jsonl": LINES,
            "/data/more/validation.jsonl.gz": gzip.compress(LINES[:16], mtime=0),
            "/data/README.md": b"# About",
        }
    )
    assert read("memory://data/train.jsonl") == ROWS
    assert read("memory://data") == ROWS
    assert read("memory://data", split="validation") == ROWS[:1]
    assert read("memory://data/*.jsonl") == ROWS
    assert read("memory://data/*/valid*.jsonl.gz", split="validation") == ROWS[:1]
    write_memory({f"/data/training/{name}.jsonl": LINES for name in ("train", "val")})
    for pattern in ("training", "training/*.jsonl", "training/?*.jsonl", "trainin[g]/*.jsonl"):
        assert read(f"memory://data/{pattern}") == read(f"memory://data/{pattern}", split="val") == ROWS
    assert "no data files" in refused("memory://data/*.csv")
    assert "cannot be read" in refused("memory://data/nothing.jsonl")
    assert "has no split `test`" in refused("memory://data", split="test")


def test_a_protocol_in_upper_case_is_the_same() -> None:
    write_memory({"/data/train.jsonl": LINES})
    assert read("MEMORY://data/train.jsonl") == read("Memory://data") == ROWS


def test_a_host_that_is_not_found_while_connecting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*args: Any, **options: Any) -> None:
        raise OSError(-2, "Name or service not known")

    monkeypatch.setattr("ftplib.FTP.connect", unknown)
    message = refused("ftp://x/y.jsonl")
    assert "data source `ftp://x/y.jsonl` cannot be read" in message and "Name or service not known" in message
    assert "check the address" in message


def test_places_and_problems_name_the_address() -> None:
    write_memory({"/bad.jsonl": LINES + b'{"text": }\n'})
    rows = open_source(Source(path="memory://bad.jsonl")).rows()
    assert next(rows)[0] == "memory:///bad.jsonl:1"
    assert "memory:///bad.jsonl:3 column 10 is not valid JSON" in refused("memory://bad.jsonl")


def test_a_copy_is_made_once_for_each_version(server: tuple[str, Path, list[str]]) -> None:
    address, folder, requests = server
    file = folder / "a.jsonl"
    file.write_bytes(LINES)
    os.utime(file, (1, 1))
    source = Source(path=f"{address}/a.jsonl?download=true")
    before = open_source(source).fingerprint()
    assert read(source.path) == ROWS == read(source.path)
    assert sum(request.startswith("GET") for request in requests) == 1
    file.write_bytes(LINES[:16])
    assert open_source(source).fingerprint() != before
    assert read(source.path) == ROWS[:1]


def test_a_server_that_tells_no_version(server: tuple[str, Path, list[str]]) -> None:
    address, folder, _ = server
    (folder / "signed.jsonl").write_bytes(LINES)
    source = Source(path=f"{address}/signed.jsonl")
    before = open_source(source).fingerprint()
    assert read(source.path) == ROWS and open_source(source).fingerprint() == before
    (folder / "signed.jsonl").write_bytes(LINES[:16])
    assert open_source(source).fingerprint() != before and read(source.path) == ROWS[:1]


def test_what_is_not_there(server: tuple[str, Path, list[str]]) -> None:
    assert "404" in refused(f"{server[0]}/nothing.jsonl")
    assert "unknown extension" in refused("memory://a.xlsx") or "cannot be read" in refused("memory://a.xlsx")
    assert "no file system for `nowhere://`" in refused("nowhere://a.jsonl")
    assert "`http://[::1/a.jsonl` cannot be read: Invalid IPv6" in refused("http://[::1/a.jsonl")
    assert "127.0.0.1:1" in refused("http://127.0.0.1:1/a.jsonl")
    assert "`memory://nothing.jsonl` cannot be read" in refused("memory://nothing.jsonl")


def test_a_file_that_goes_while_it_is_wanted_is_named(server: tuple[str, Path, list[str]]) -> None:
    address, folder, _ = server
    (folder / "a.jsonl").write_bytes(LINES)
    source = open_source(Source(path=f"{address}/a.jsonl"))
    (folder / "a.jsonl").unlink()
    with pytest.raises(UserError, match=f"`{address}/a.jsonl` cannot be read: .*404"):
        list(source.rows())


@pytest.mark.parametrize("name", ["a.jsonl", "signed.jsonl"])
def test_a_download_that_is_cut_is_refused_and_not_kept(name: str, server: tuple[str, Path, list[str]]) -> None:
    """Also where the content itself is the version."""
    address, folder, _ = server
    (folder / name).write_bytes(LINES)
    with pytest.MonkeyPatch.context() as patched:
        half = len(LINES) // 2

        def cut(self: SimpleHTTPRequestHandler, source: Any, target: Any) -> None:
            target.write(source.read(half))

        patched.setattr(SimpleHTTPRequestHandler, "copyfile", cut)
        assert f"`{address}/{name}` cannot be read: the connection ended after {half} of {len(LINES)} bytes" in refused(
            f"{address}/{name}"
        )
    assert read(f"{address}/{name}") == ROWS


def test_a_cloud_that_hands_on_less_than_there_is_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    write_memory({"/a.jsonl": LINES})
    monkeypatch.setattr("fsspec.implementations.memory.MemoryFile.size", len(LINES) + 1)
    assert f"the connection ended after {len(LINES)} of {len(LINES) + 1} bytes" in refused("memory://a.jsonl")


def test_classes_have_the_names_that_a_file_gives_them(tmp_path: Path) -> None:
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    rows = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, 0]}, features)
    rows.to_parquet(tmp_path / "a.parquet")
    write_memory({"/a.parquet": (tmp_path / "a.parquet").read_bytes()})
    assert open_source(Source(path="memory://a.parquet")).class_names("label") == ["no", "yes"]


def test_no_copy_is_made_to_find_that_a_file_names_no_classes(tmp_path: Path) -> None:
    write_memory({"/a.jsonl.gz": gzip.compress(LINES)})
    assert open_source(Source(path="memory://a.jsonl.gz")).class_names("label") == []
    assert not (tmp_path / "cache").exists()


OF_CLOUDS = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"} | dict.fromkeys(
    ("az", "abfs", "abfss"), "adlfs"
)


@pytest.mark.parametrize("protocol", OF_CLOUDS)
def test_a_missing_package_is_named_with_its_command(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: Any, **options: Any) -> None:
        raise ImportError("not installed")

    monkeypatch.setattr(fsspec.core, "get_filesystem_class", missing)
    message = refused(f"{protocol}://bucket/a.jsonl")
    assert f"`{protocol}://` needs a package" in message and f"pip install {OF_CLOUDS[protocol]}" in message


def test_a_protocol_of_another_package_says_what_fsspec_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: Any, **options: Any) -> None:
        raise ImportError("Install paramiko\nby pip")

    monkeypatch.setattr(fsspec.core, "get_filesystem_class", missing)
    message = refused("sftp://host/a.jsonl")
    assert "`sftp://` needs a package" in message and "Install paramiko" in message and "by pip" not in message


def test_an_unknown_protocol_is_refused_with_those_there_are() -> None:
    message = refused("nowhere://a.jsonl")
    assert "use https, hf, or one of " in message and all(protocol in message for protocol in OF_CLOUDS)


@pytest.mark.parametrize("status", [403, 405, 501, 404, 500])
def test_a_server_that_answers_to_get_alone_is_read(
    status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signed addresses forbid HEAD, small servers do not know it; any other error is one."""
    asked: list[tuple[str, str]] = []

    def urlopen(request: urllib.request.Request, timeout: float) -> Any:
        asked.append((request.get_method(), str(request.get_header("User-agent"))))
        assert 0 < timeout < 120
        if request.get_method() == "HEAD":
            raise urllib.error.HTTPError(request.full_url, status, "no", Message(), None)
        return io.BytesIO(LINES)

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    if status in (404, 500):
        assert f"HTTP Error {status}" in refused("https://host/a.jsonl")
        assert [method for method, _ in asked] == ["HEAD"]
    else:
        assert read("https://host/a%20b.jsonl?key=1") == ROWS
        assert {method for method, _ in asked} == {"HEAD", "GET"} and {agent for _, agent in asked} == {
            "accelerate-toolkit"
        }


@pytest.mark.parametrize(
    "key", ["ETag", "etag", "blob_id", "md5Hash", "content_md5", "checksum", "LastModified", "mtime", "created"]
)
def test_a_version_is_what_a_file_system_calls_it(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_memory({"/data/a.jsonl": LINES})
    info: dict[str, Any] = {"type": "file", key: "one", "size": 3}
    monkeypatch.setattr(type(fsspec.filesystem("memory")), "info", lambda self, path, **_: info)
    versions = []
    for change in ({}, {key: "two"}, {"size": 4}):
        info.update(change)
        (file,) = find("memory://data/a.jsonl")
        assert (file.url, file.name) == ("memory:///data/a.jsonl", "a.jsonl")
        versions.append(file.version)
    assert len(set(versions)) == 3 and None not in versions
    del info[key]
    assert find("memory://data/a.jsonl")[0].version is None
