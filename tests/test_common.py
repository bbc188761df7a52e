"""Values as people read them."""

from __future__ import annotations

import pytest

from toolkit.common import bytes_text, compact, duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.4, "59s"), (59.6, "1m 00s"), (3599.7, "1h 00m"), (86400, "1d 00h"), (float("nan"), "?")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (857, "857"), (999.7, "1k"), (51_700, "51.7k"), (134_515_008, "135M"), (8.03e9, "8.03B")],
)
def test_compact_numbers(value: float, text: str) -> None:
    assert compact(value) == text


def test_bytes() -> None:
    assert [bytes_text(value) for value in (0, 512, 3.6 * 2**30, 141 * 2**30)] == [
        "0 bytes",
        "512 bytes",
        "3.6 GiB",
        "141 GiB",
    ]
