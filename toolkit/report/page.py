"""What all pages share: the templates, and the headline figures.

Python computes what is shown, the templates in `templates/` say how. They escape everything they are given, and put
style and script into the page itself, so that it is one file that needs nothing from outside and can be mailed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from toolkit.common import printable


def _shown(value: Any) -> Any:
    # Markup was made of texts that were shown so already.
    return printable(value) if type(value) is str else value


TEMPLATES = Environment(
    loader=PackageLoader("toolkit.report"),
    autoescape=select_autoescape(["html.j2"]),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    finalize=_shown,
)


def render(template: str, **values: Any) -> str:
    """Fills a template of `templates/`; in those named `.html.j2` every value is escaped."""
    return TEMPLATES.get_template(template).render(values)


@dataclass(frozen=True)
class Tile:
    """A headline figure, with lines of small print.

    Attributes:
        change: What has changed, at the start of the first line.
        good: Whether it has for the better; None where that is not known.
        main: Whether it is as wide as two.
    """

    title: str
    value: str
    notes: tuple[str, ...] = ()
    change: str = ""
    good: bool | None = None
    main: bool = False
