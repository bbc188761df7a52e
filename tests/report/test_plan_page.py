"""A plan's page: one scale for all bars, nothing from outside, no markup of others."""

from __future__ import annotations

import re

import pytest
from example_plan import FITS, REFUSED, TIGHT, TOO_LARGE
from pages import Page

from toolkit.planner.plan import Plan, Refused
from toolkit.report.plan_page import plan_page


@pytest.mark.parametrize("rows", [[FITS], [FITS, TIGHT, TOO_LARGE, REFUSED], [REFUSED]], ids=["one", "many", "refused"])
def test_the_page_needs_nothing_from_outside_and_shows_no_markup_of_others(rows: list[Plan | Refused]) -> None:
    html = plan_page(rows)
    page = Page(html)
    assert page.addresses == [] and not re.search(r"https?://|@import|url\(", html)
    assert "<b>no</b>" not in html
    assert "b" not in page.tags or "<b style" in html


def test_what_is_not_known_of_a_plan_leaves_its_cell_empty() -> None:
    """The price of a million tokens of an endless plan is not what another one costs."""
    work = FITS.work.model_dump() | {"total_seconds": None, "cost": None, "cost_per_million_tokens": 0.25}
    html = plan_page([FITS, FITS.model_copy(update={"work": type(FITS.work).model_validate(work)})])
    table = html.partition("<h2>Figures</h2>")[2].partition("</table>")[0]
    heads = re.findall(r"<th[^>]*>([^<]*)</th>", table.partition("</tr>")[0])
    rows = [re.findall(r"<td[^>]*>([^<]*)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL)[1:]]
    cells = [dict(zip(heads[-len(row) :], row, strict=True)) for row in rows]
    assert [(each["costs"], each["cost/1M"]) for each in cells] == [("6.10", ""), ("", "0.25")]


def test_the_pages_bars_and_line_stand_at_the_same_scale() -> None:
    html = plan_page([FITS, TIGHT, TOO_LARGE])
    tracks = re.findall(r'<div class="track".*?</div>', html, flags=re.DOTALL)
    assert len(tracks) == 3
    for plan, track in zip((FITS, TIGHT, TOO_LARGE), tracks, strict=True):
        line = float(re.search(r'<b style="left:([\d.]+)%', track)[1])  # type: ignore[index]
        widths = [float(width) for width in re.findall(r"<i [^>]*width:([\d.]+)%", track)]
        assert sum(widths) / line == pytest.approx(plan.memory[0].total.value / plan.device_memory, rel=0.001)
