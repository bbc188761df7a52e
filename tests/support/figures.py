"""Tables of figures that tests measured, printed at the end of a test session, whichever process ran them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_KEY = "figures"


def record(record_property: Callable[[str, object], None], table: str, **figures: str) -> None:
    """Adds a row to a table, given pytest's fixture `record_property`.

    Args:
        table: Heading of the table; rows with the same heading stand together.
        figures: Column to text.
    """
    record_property(_KEY, {"table": table, "row": figures})


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """pytest's hook: prints the tables."""
    reports = [report for outcome in ("passed", "failed") for report in terminalreporter.stats.get(outcome, [])]
    tables: dict[str, list[dict[str, str]]] = {}
    for report in sorted(reports, key=lambda report: report.nodeid):
        for key, value in getattr(report, "user_properties", []):
            if key == _KEY and report.when == "call":
                tables.setdefault(value["table"], []).append(value["row"])
    for title, rows in tables.items():
        terminalreporter.section(title)
        columns = list(rows[0])
        widths = [max(len(row.get(column, "")) for row in [{column: column}, *rows]) for column in columns]
        for row in [{column: column for column in columns}, *rows]:
            cells = (row.get(column, "").ljust(width) for column, width in zip(columns, widths, strict=True))
            terminalreporter.line("  ".join(cells).rstrip())
