"""The hub, played by sockets of this machine: one that never answers, none, and servers that do."""

from __future__ import annotations

import http.server
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from toolkit.common import UserError
from toolkit.data.reading import hub
from toolkit.data.reading.sources import open_source
from toolkit.recipe.data import Source

MODEL = "nobody/nothing"


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    hub.offline.cache_clear()
    yield
    hub.offline.cache_clear()


class Silent(socket.socket):
    """Takes connections and never answers them."""

    def __init__(self) -> None:
        super().__init__()
        self.bind(("127.0.0.1", 0))
        self.listen()

    def connections(self) -> int:
        self.settimeout(0.2)
        count = 0
        try:
            while True:
                self.accept()
                count += 1
        except TimeoutError:
            return count


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Silent]:
    with Silent() as server:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        yield server


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "toolkit.data"]


def test_a_hub_that_never_answers_is_said_once_within_five_seconds(
    silent: Silent, caplog: pytest.LogCaptureFixture
) -> None:
    from toolkit.models.load import ModelSource
    from toolkit.recipe.rules import load_checked

    start = time.monotonic()
    with pytest.raises(UserError, match=f"{MODEL} is neither a folder here nor in the hub's cache") as refused:
        ModelSource.open(load_checked("smollm2_135m_lora_demo", [f"model.path={MODEL}"]).recipe)
    with pytest.raises(UserError, match="not in the cache of hub data sets"):
        open_source(Source(path=MODEL)).fingerprint()
    with pytest.raises(UserError, match="lies on the hub, which is not reached"):
        open_source(Source(path=f"hf://datasets/{MODEL}/a.jsonl"))
    assert time.monotonic() - start < 5
    assert silent.connections() == 1
    (line,) = told(caplog)
    assert "cannot be reached (no answer in 3 s)" in line and "connect" not in refused.value.what
    assert os.environ["HF_HUB_OFFLINE"] == "1"  # For processes that are started from here.


def test_who_says_that_the_hub_is_away_is_believed(silent: Silent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert hub.offline() and silent.connections() == 0


def test_only_the_first_process_says_it(
    silent: Silent, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "0.2")
    hub.ask_for(MODEL)
    assert hub.offline() and told(caplog) == []


def test_a_closed_port_is_not_waited_for(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    with Silent() as server:
        port = server.getsockname()[1]
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{port}")
    start = time.monotonic()
    assert hub.offline() and time.monotonic() - start < 1
    assert "refused" in told(caplog)[0]


@pytest.mark.parametrize(("status", "offline"), [(200, False), (404, False), (503, True)])
def test_whatever_answers_is_a_hub_except_a_gateway_without_one(
    status: int, offline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(status)
            self.end_headers()

    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        assert hub.offline() == offline


def test_what_is_here_does_not_ask(silent: Silent, tmp_path: object) -> None:
    hub.ask_for("builtin:smollm2-135m-instruct", str(tmp_path), "data/*.jsonl", "s3://bucket/a.jsonl", None)
    assert silent.connections() == 0


def test_an_address_that_moved_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it leads is not asked."""

    class Moved(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(302)
            self.send_header("Location", "http://127.0.0.1:1/")
            self.end_headers()

    with http.server.HTTPServer(("127.0.0.1", 0), Moved) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        assert not hub.offline()


@pytest.mark.parametrize(
    ("name", "asks"),
    [
        *(("gpt2", True), ("owner/name", True), ("owner/name-1.5_b", True), ("hf://datasets/owner/name/a.jsonl", True)),
        *(("builtin:smollm2-135m-instruct", False), ("data/more/a.jsonl", False), ("/owner/name", False), ("", False)),
        *(("s3://bucket/a", False), ("https://host/a", False), ("here", False), (None, False)),
    ],
)
def test_only_names_on_the_hub_ask(
    name: str | None, asks: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(hub, "offline", offline := mock.Mock(return_value=False))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    hub.ask_for(name)
    hub.ask_for(None, "", name)
    assert offline.call_count == (2 if asks else 0)


@pytest.mark.parametrize("status", [502, 503, 504, 500])
def test_a_proxy_without_an_answer_says_its_status(
    status: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Answer:
        status_code = status

    class Session:
        def head(self, address: str, **options: Any) -> Answer:
            return Answer()

    monkeypatch.setattr("huggingface_hub.utils.get_session", Session)
    assert hub.offline() == (status != 500)
    assert any(f"HTTP status {status}" in line for line in told(caplog)) == (status != 500)
    datasets = sys.modules["datasets"]
    assert os.environ["HF_HUB_OFFLINE"] == ("1" if status != 500 else "0")
    assert (status != 500) == datasets.config.HF_HUB_OFFLINE
