"""`toolkit push`: what reaches the Hub, and what is refused before anything does."""

from __future__ import annotations

import base64
import json
import resource
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from huggingface_hub import constants
from small import LORA, place_with, trained
from snippets import run_snippet

from toolkit.cli.main import main

place = place_with("llama")
_QUOTA = "Private repository storage limit reached"


class Hub(ThreadingHTTPServer):
    """What of the Hub's API a push talks to.

    Attributes:
        asked: Method and path of every request.
        files: Content of what was committed.
        made: What was asked for when a repository was made.
        large: What refuses large files: `xet`, `batch` or `upload`; empty if none counts as large.
        swallows: What of a method and path is never answered; empty if all is.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[str] = []
        self.files: dict[str, bytes] = {}
        self.made: list[dict[str, Any]] = []
        self.refuses = False
        self.large = self.swallows = ""
        self.ends = Event()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args: Any) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        self.server.asked.append(f"GET {self.path}")
        if "/xet-write-token/" in self.path:
            self._answer({"error": _QUOTA})
        elif self.path.startswith("/api/models/"):
            owner, name = self.path.split("/")[3:5]
            self._answer({"id": f"{owner}/{name}", "cardData": {"license": "mit"}, "siblings": [], "tags": []})
        else:
            self._answer({"name": "me", "type": "user", "orgs": [], "auth": {}})

    def do_POST(self) -> None:
        self.server.asked.append(f"POST {self.path}")
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif self.path == "/api/repos/create":
            self.server.made.append(json.loads(content))
            self._answer({"url": f"{self.server.address}/me/x"})
        elif self.server.refuses:
            self._answer({"error": _QUOTA})
        elif "/preupload/" in self.path:
            asked = json.loads(content)["files"]
            modes = [
                {
                    "path": each["path"],
                    "uploadMode": "lfs" if self.server.large and each["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for each in asked
            ]
            self._answer({"files": modes})
        elif self.path.endswith("/info/lfs/objects/batch"):
            (asked,) = json.loads(content)["objects"]
            upload = {"actions": {"upload": {"href": f"{self.server.address}/storage"}}}
            refused = {"error": {"code": 422, "message": _QUOTA}}
            self._answer({"objects": [asked | (refused if self.server.large == "batch" else upload)]})
        else:
            for line in content.decode().splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    self.server.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            url = f"{self.server.address}/me/x/commit/1"
            self._answer({"success": True, "commitUrl": url, "commitOid": "1" * 40})

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer({"error": _QUOTA})

    def do_HEAD(self) -> None:
        self._answer({})

    def _answer(self, content: dict[str, Any]) -> None:
        if self.server.swallows and self.server.swallows in f"{self.command} {self.path}":
            self.server.ends.wait()
        body = json.dumps(content).encode()
        self.send_response(403 if "error" in content else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.ends.set()
        server.shutdown()


@pytest.fixture(scope="module")
def full(place: Path) -> Path:
    return trained("pushed")


@pytest.fixture(scope="module")
def adapter(place: Path) -> Path:
    return trained("pushed-lora", *LORA, "data.eval_split=0.2")


@pytest.fixture(autouse=True)
def reachable(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    # Read from the environment when the library is imported.
    monkeypatch.setattr(constants, "ENDPOINT", hub.address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_test")


def test_a_run_is_sent_with_its_licence_to_a_private_repository(
    full: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", str(full), "me/x", "license=apache-2.0"]) == 0
    told = capsys.readouterr().out
    assert told.splitlines()[-1] == f"{hub.address}/me/x/commit/1"
    sent = {str(file.relative_to(full / "final")) for file in (full / "final").rglob("*") if file.is_file()}
    assert hub.files.keys() == sent and "model.safetensors" in sent
    assert hub.files["model.safetensors"] == (full / "final" / "model.safetensors").read_bytes()
    assert b"license: apache-2.0" in hub.files["README.md"]
    assert hub.made[0]["visibility"] == "private"
    assert "under apache-2.0, as me to me/x" in told
    # The card is checked by the Hub before a repository is made.
    checked, made = (next(at for at, each in enumerate(hub.asked) if word in each) for word in ("yaml", "create"))
    assert checked < made


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["me/x"], ["under which licence", "license=NAME"]),
        (["me/x", "license=Apache 2"], ["none of the Hub's names"]),
        (["x", "license=mit"], ["names no owner", "OWNER/x"]),
        (["me/x", "licence=mit"], ["unknown key `licence`", "did you mean `license`"]),
    ],
)
def test_what_is_not_in_order_is_said_before_anything_is_sent(
    arguments: list[str], words: list[str], full: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", str(full), *arguments]) == 1
    told = capsys.readouterr().err
    assert all(word in told for word in words), told
    assert not any(each.startswith("POST") for each in hub.asked)


def test_an_adapter_takes_its_bases_licence_and_goes_nowhere_without_a_base_on_the_hub(
    adapter: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", str(adapter), "me/x"]) == 1
    assert "nobody else could load it" in capsys.readouterr().err and not hub.asked

    recipe = adapter / "recipe.yaml"
    local = recipe.read_text()
    recipe.write_text(local.replace("path: llama", "path: builtin:smollm2-135m-instruct"))
    assert main(["push", str(adapter), "me/x"]) == 1
    told = capsys.readouterr().err
    assert "in 4 bits, which is not on the Hub" in told and "model.path=HuggingFaceTB/SmolLM2-135M-Instruct" in told
    recipe.write_text(local.replace("path: llama", "path: a/base"))
    assert main(["push", str(adapter), "me/x", "public=true"]) == 0
    assert b"license: mit" in hub.files["README.md"] and hub.made[0]["visibility"] == "public"
    recipe.write_text(local)


def test_what_was_merged_or_exported_is_sent_with_the_runs_figures(
    adapter: Path, full: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", str(adapter), "me/x", "license=mit"]) == 1
    assert f"add folder={adapter}/merged" in capsys.readouterr().err
    assert main(["merge", str(adapter)]) == 0 and main(["export", str(adapter), "format=int8"]) == 0
    for made, said in {"merged": "is merged into it", "int8": "exported as int8"}.items():
        assert main(["push", str(adapter), "me/x", "license=mit", f"folder={adapter / made}"]) == 0
        sent, card = hub.files.copy(), hub.files["README.md"].decode()
        assert sent.keys() == {file.name for file in (adapter / made).iterdir()}
        assert sent["model.safetensors"] == (adapter / made / "model.safetensors").read_bytes()
        assert said in card and "library_name: transformers" in card and "license: mit" in card
        assert "held-out rows, by the model in training" in card
        with monkeypatch.context() as patch:
            assert "output" in run_snippet(card, adapter / made, patch)
        hub.files.clear()


def test_a_folder_that_the_run_was_not_made_into_is_not_sent(
    adapter: Path, full: Path, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["merge", str(adapter), "--weights", "0.5", "--output", str(tmp_path / "half")]) == 0
    assert main(["export", str(full), "format=int8", f"output={tmp_path / 'other'}"]) == 0
    for folder, why in {
        full / "final": "nothing that was merged or exported",
        tmp_path / "half": "a weighted sum of adapters",
        tmp_path / "other": f"made of the run {full.name}, not of {adapter.name}",
    }.items():
        capsys.readouterr()
        assert main(["push", str(adapter), "me/x", "license=mit", f"folder={folder}"]) == 1
        assert why in capsys.readouterr().err
    assert not hub.asked


def test_a_full_disk_leaves_the_card_whole_and_no_part_of_a_file_is_sent(
    full: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    card = full / "final" / "README.md"
    before, limits = card.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
    try:
        assert main(["push", str(full), "me/x", "license=bsd-3-clause"]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"cannot use {card}: File too large" in capsys.readouterr().err
    assert card.read_bytes() == before and not hub.files

    # A process was killed, or has not written it to its end yet.
    (partial := full / "final" / ".README.md.1.ab.partial").write_bytes(before[:9])
    capsys.readouterr()
    assert main(["push", str(full), "me/x", "license=bsd-3-clause"]) == 0
    assert not any(name.endswith(".partial") for name in hub.files) and ".partial" not in capsys.readouterr().out
    assert partial.exists()
    partial.unlink()


def test_a_damaged_model_is_not_sent(full: Path, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    weights = full / "final" / "model.safetensors"
    before = weights.read_bytes()
    weights.write_bytes(before[:-1])
    assert main(["push", str(full), "me/x", "license=mit"]) == 1
    weights.write_bytes(before)
    assert "model.safetensors" in capsys.readouterr().err and not hub.asked


def test_what_the_hub_refuses_is_said(
    full: Path, hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.refuses = True
    assert main(["push", str(full), "me/x", "license=mit"]) == 1
    told = " ".join(capsys.readouterr().err.split())
    assert "hf auth login" in told and _QUOTA in told and not hub.files
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(full / "none"))
    assert main(["push", str(full), "me/x", "license=mit"]) == 1
    assert "nobody is logged in" in capsys.readouterr().err


@pytest.mark.parametrize("large", ["xet", "batch", "upload"])
def test_what_ends_the_sending_of_a_large_file_is_said(
    full: Path, hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, large: str
) -> None:
    hub.large = large
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", large != "xet")
    assert main(["push", str(full), "me/x", "license=mit"]) == 1
    told = " ".join(capsys.readouterr().err.split())
    # The text of a refusal does not get through `hf_xet`.
    assert ("403 Forbidden" if large == "xet" else _QUOTA) in told and not hub.files, told
    assert "did not all reach me/x" in told and "storage is used up" in told and "README.md" not in told, told
    hub.large = ""
    assert main(["push", str(full), "me/x", "license=mit"]) == 0


@pytest.mark.parametrize("swallows", ["HEAD /", "POST /api/models/me/x/commit", "PUT /storage"])
def test_a_hub_that_stops_answering_ends_a_push_in_one_message(
    full: Path, hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, swallows: str
) -> None:
    monkeypatch.setattr("toolkit.train.finished.push._PATIENCE", 0.2)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)  # Between its attempts.
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "0.5")
    hub.swallows, hub.large = swallows, "upload" if "storage" in swallows else ""
    assert main(["push", str(full), "me/x", "license=mit"]) == 1
    told = capsys.readouterr().err.splitlines()[-2:]
    assert told[0].startswith("error: ") and ("timed out" in told[0] or "no answer in 0.5 s" in told[0]), told
    assert not any("POST" in each for each in hub.asked) or "HEAD" not in swallows


def test_a_card_that_was_deleted_is_written_again(full: Path, hub: Hub) -> None:
    before = (full / "final" / "README.md").read_bytes()
    (full / "final" / "README.md").unlink()
    assert main(["push", str(full), "me/x", "license=mit"]) == 0
    assert hub.files["README.md"] == (full / "final" / "README.md").read_bytes()
    assert before.splitlines()[-5:] == hub.files["README.md"].splitlines()[-5:]
