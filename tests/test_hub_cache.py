"""A hub's cache that another user made, in every state in which one may find it; the hub is a server of this test."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from second_user import as_nobody, shared

from toolkit import hub_cache

__all__ = ["shared"]
COMMIT, LATER = "c" * 40, "d" * 40
FILES = {"config.json": b'{"model_type": "llama"}', "model.safetensors": b"weights"}
IMPORTS = """
import encodings.idna, json, os, filelock, huggingface_hub.file_download
from pathlib import Path
from toolkit import hub_cache
from toolkit.hub_cache import use_own
"""
# The variables are read at import, but Python may lie where this user may not import anything.
DOWNLOAD = """
use_own(["a/b"])
from huggingface_hub import constants, hf_hub_download
constants.HF_TOKEN_PATH = os.environ.get("HF_TOKEN_PATH", constants.HF_TOKEN_PATH)
for file in ("config.json", "model.safetensors"):
    path = hf_hub_download("a/b", file, cache_dir=os.environ["HF_HUB_CACHE"])
    print(os.path.realpath(path), Path(path).read_bytes().decode())
"""


class Hub(http.server.ThreadingHTTPServer):
    """Serves the files of one model as huggingface.co does, and counts who fetched which."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.commit, self.fetched = COMMIT, list[str]()


class _Answer(http.server.BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self, body: bool = False) -> None:
        name = self.path.rpartition("/")[2]
        content = FILES.get(name)
        self.send_response(404 if content is None else 200)
        self.send_header("X-Repo-Commit", self.server.commit)
        if content is None:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("ETag", f'"{hashlib.sha1(content or b"").hexdigest()}"')
        self.send_header("Content-Length", str(len(content or b"")))
        self.end_headers()
        if body and content is not None:
            self.server.fetched.append(name)
            self.wfile.write(content)

    def do_GET(self) -> None:
        self.do_HEAD(body=True)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def warm(shared: Path) -> Path:
    """The hub's cache with the model, as this user's download leaves it."""
    repository = shared / "hf" / "hub" / "models--a--b"
    for folder in ("blobs", "refs", f"snapshots/{COMMIT}"):
        (repository / folder).mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    locks = repository.parent / ".locks" / repository.name
    locks.mkdir(parents=True)
    for name, content in FILES.items():
        blob = repository / "blobs" / hashlib.sha1(content).hexdigest()
        blob.write_bytes(content)
        (repository / "snapshots" / COMMIT / name).symlink_to(os.path.relpath(blob, repository / "snapshots" / COMMIT))
        (locks / f"{blob.name}.lock").touch()
    for place in (shared / "hf", *(shared / "hf").rglob("*")):
        if not place.is_symlink():
            place.chmod(0o755 if place.is_dir() else 0o644)
    return repository


def everybody(folder: Path) -> None:
    for place in (folder, *(each for each in folder.rglob("*") if each.is_dir())):
        place.chmod(0o777)


def locked_by_another(warm: Path) -> None:
    """A download of theirs was killed: its lock and half a file are left in folders that are everybody's."""
    everybody(warm.parent)
    weights = hashlib.sha1(FILES["model.safetensors"]).hexdigest()
    (warm / "snapshots" / COMMIT / "model.safetensors").unlink()
    (warm / "blobs" / weights).rename(warm / "blobs" / f"{weights}.incomplete")
    (warm / "blobs" / f"{weights}.incomplete").chmod(0o600)


def partly_there(warm: Path) -> None:
    (warm / "snapshots" / COMMIT / "model.safetensors").unlink()


def closed_file(warm: Path) -> None:
    (warm / "blobs" / hashlib.sha1(FILES["model.safetensors"]).hexdigest()).chmod(0o600)


def closed(below: str) -> Callable[[Path], None]:
    return lambda warm: (warm / below).chmod(0o700)


@pytest.mark.parametrize(
    ("left", "fetched", "says_closed"),
    [
        (lambda warm: None, [], False),
        (partly_there, ["model.safetensors"], False),
        (locked_by_another, ["model.safetensors"], False),
        (closed_file, list(FILES), True),
        (closed("refs"), [], True),
        (closed(f"snapshots/{COMMIT}"), list(FILES), True),
        (closed("."), list(FILES), True),
        (closed(".."), list(FILES), True),
        (closed("../.."), list(FILES), True),
        (lambda warm: shutil.rmtree(warm), list(FILES), False),
    ],
    ids=[
        *("warm", "partly_there", "locked_by_another", "closed_file", "closed_refs", "closed_snapshot"),
        *("closed_repository", "closed_cache", "closed_home", "another_model"),
    ],
)
def test_what_can_be_read_is_used_and_the_rest_kept_in_the_users_own(
    left: Callable[[Path], None], fetched: list[str], says_closed: bool, warm: Path, shared: Path, hub: Hub
) -> None:
    left(warm)
    variables = {"HF_HOME": str(shared / "hf"), "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.address}
    own = shared / "home" / ".cache" / "accelerate-toolkit" / "huggingface"
    for again in (False, True):
        done = as_nobody(shared, IMPORTS, DOWNLOAD, **variables)
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert [line.partition(" ")[2] for line in lines] == [content.decode() for content in FILES.values()]
        assert hub.fetched == fetched  # Once, not again at the second start.
        for line, name in zip(lines, FILES, strict=True):
            assert line.startswith(str(own if name in fetched else warm))
        (line,) = [line for line in done.stderr.splitlines() if "this user's" in line]
        assert f"what is missing there is kept in {own}" in line and ("chmod -R a+rX" in line) == says_closed, again


def test_a_model_that_moved_on_is_fetched_anew(warm: Path, shared: Path, hub: Hub) -> None:
    hub.commit = LATER
    variables = {"HF_HOME": str(shared / "hf"), "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.address}
    for _ in range(2):
        done = as_nobody(shared, IMPORTS, DOWNLOAD, **variables)
        assert done.returncode == 0 and hub.fetched == list(FILES), done.stderr
    own = shared / "home/.cache/accelerate-toolkit/huggingface/hub/models--a--b"
    assert (own / "refs/main").read_text() == LATER
    # The owner of the other has fetched it later: the newer of the two counts, without a network too.
    (warm / "refs" / "main").write_text("e" * 40)
    as_nobody(shared, IMPORTS, "use_own(['a/b'])", **variables)
    assert (own / "refs/main").read_text() == "e" * 40


def test_a_cache_that_this_user_can_write_stays(warm: Path, shared: Path, hub: Hub) -> None:
    everybody(shared / "hf")
    for lock in (warm.parent / ".locks").rglob("*.lock"):
        lock.chmod(0o666)
    code = "use_own(['a/b', 'c/d']); print('HF_HUB_CACHE' in os.environ, 'HF_DATASETS_CACHE' in os.environ)"
    done = as_nobody(shared, IMPORTS, code, HF_HOME=str(shared / "hf"))
    assert done.stdout == "False False\n" and not done.stderr


def test_nothing_is_done_where_nothing_is_on_the_hub(warm: Path, shared: Path) -> None:
    code = "Path('here').mkdir(); use_own(['here', 'builtin:x', 's3://a/b']); print(os.environ.get('HF_HUB_CACHE'))"
    done = as_nobody(shared, IMPORTS, code, HF_HOME=str(shared / "hf"))
    assert done.stdout == "None\n" and not done.stderr


def test_a_model_in_a_cache_of_another_user_is_found_without_a_network(warm: Path, shared: Path) -> None:
    """Before and after the libraries are told, by what answers at once and by the libraries."""
    (warm.parent / "models--c--d" / "snapshots" / COMMIT).mkdir(parents=True)
    (warm.parent / "models--c--d" / "snapshots" / COMMIT / "x").write_text("other")
    imports = f"{IMPORTS}\nfrom toolkit.recipe import model_configs, schema"
    code = """
def known():
    model_configs._as_of.cache_clear()
    return (model_configs.config_of(schema.Model(path="a/b")) or {}).get("model_type")
print(known())
use_own(["a/b"])
from huggingface_hub import hf_hub_download
print(known(), Path(hf_hub_download("a/b", "config.json", cache_dir=os.environ["HF_HUB_CACHE"])).exists())
print(Path(hf_hub_download("c/d", "x", revision="c" * 40, cache_dir=os.environ["HF_HUB_CACHE"])).read_text())
"""
    variables = {"HF_HUB_CACHE": str(warm.parent), "HF_HUB_OFFLINE": "1"}
    done = as_nobody(shared, imports, code, **variables)
    assert done.stdout == "llama\nllama True\nother\n", done.stderr
    closed_file(warm)
    shutil.rmtree(shared / "home" / ".cache")
    done = as_nobody(shared, imports, code.partition("use_own")[0], **variables)
    assert done.stdout == "None\n", done.stderr


def test_data_that_another_user_prepared_is_read(shared: Path) -> None:
    """`datasets` takes a lock beside it even for what is there."""
    import datasets

    rows = shared / "rows.jsonl"
    rows.write_text('{"text": "one"}\n{"text": "two"}\n')
    cache = shared / "hf" / "datasets"
    datasets.load_dataset("json", data_files=str(rows), cache_dir=str(shared / "made"))
    (made,) = (shared / "made" / "json").glob("*/*/*/json-train.arrow")
    place = cache / "a___my_data" / "default" / "0.0.0" / ("f" * 40)
    shutil.copytree(made.parent, place)
    (place / "json-train.arrow").rename(place / "my_data-train.arrow")
    info = json.loads((place / "dataset_info.json").read_text())
    (place / "dataset_info.json").write_text(json.dumps({**info, "config_name": "default", "dataset_name": "my_data"}))
    for folder in (cache.parent, *cache.parent.rglob("*")):
        folder.chmod(0o755 if folder.is_dir() else 0o644)
    imports = f"{IMPORTS}\nimport datasets.packaged_modules.cache.cache"
    code = """
use_own(["a/MyData"])
import datasets
where = os.environ["HF_DATASETS_CACHE"]
print([row["text"] for row in datasets.load_dataset("a/MyData", split="train", cache_dir=where)])
"""
    done = as_nobody(shared, imports, code, HF_HOME=str(shared / "hf"), HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    assert done.stdout == "['one', 'two']\n", done.stderr
    assert sum("this user's" in line for line in done.stderr.splitlines()) == 1


def test_a_token_in_a_folder_that_is_closed_is_not_asked_for(shared: Path) -> None:
    (shared / "hf").mkdir()
    (shared / "hf" / "token").write_text("theirs")
    (shared / "hf").chmod(0o700)
    code = "use_own(['a/b']); print(os.environ['HF_TOKEN_PATH'], os.environ['HF_MODULES_CACHE'])"
    done = as_nobody(shared, IMPORTS, code, HF_HOME=str(shared / "hf"))
    own = shared / "home" / ".cache" / "accelerate-toolkit" / "huggingface"
    assert done.stdout == f"{own / 'token'} {own / 'modules'}\n"


def test_names_of_folders_and_locks() -> None:
    named = {"My-Org/Data_Set.v2"}
    for entry in ("models--My-Org--Data_Set.v2", "datasets--My-Org--Data_Set.v2", "My-Org___data_set.v2"):
        assert hub_cache._of(entry, named)
    assert hub_cache._of("_shared_My-Org___data_set.v2_default_0.0.0_ab.lock", named)
    assert not hub_cache._of("models--My-Org--Data_Set.v3", named) and not hub_cache._of("downloads", named)
