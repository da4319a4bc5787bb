"""`isthmus bench`: what is asked, and what the figures are made of."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from isthmus_client import cli
from isthmus_client.load.measure import Measured
from isthmus_client.load.page import cumulative_svg, html_report
from isthmus_client.load.report import render_summary
from isthmus_client.load.saved import Run
from isthmus_client.load.summary import Targets, percentile, summarise
from isthmus_client.load.workload import parse_length, plan_workload
from isthmus_core.errors import ConfigError


def _plan(**changes: object):
    options = {
        "requests": 2000,
        "rate": 50.0,
        "prompt": parse_length("uniform:10-30", "--isl"),
        "vocabulary": range(5, 9),
    }
    return plan_workload(output=parse_length("7", "--osl"), **{**options, **changes})  # pyright: ignore[reportArgumentType]


def test_arrivals_are_poisson_and_repeatable():
    planned = _plan()
    assert planned == _plan()
    assert planned != _plan(seed=1)
    gaps = [later.at - earlier.at for earlier, later in pairwise(planned)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.1)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation == pytest.approx(mean, rel=0.15), "exponential gaps have a deviation like their mean"
    assert {one.at for one in _plan(rate=0.0)} == {0.0}


def test_prompts_have_the_length_and_the_prefix_that_was_asked_for():
    planned = _plan(shared_prefix=12)
    lengths = [len(one.prompt) for one in planned]
    assert (min(lengths), max(lengths)) == (10, 30)
    assert len({one.prompt[:10] for one in planned}) == 1
    assert len({one.prompt for one in planned if len(one.prompt) == 30}) > 1
    assert {token for one in planned for token in one.prompt} == {5, 6, 7, 8}
    assert {one.max_tokens for one in planned} == {7}


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "x", "uniform:5", "uniform:9-5", "normal:0,1", "lognormal:5", "beta:1,2"]
)
def test_lengths_that_mean_nothing_are_refused(text: str):
    with pytest.raises(ConfigError, match=re.escape(f"--isl {text}")):
        parse_length(text, "--isl")


@pytest.mark.parametrize(("share", "right"), [(50, 5), (90, 9), (99, 10), (100, 10), (1, 1)])
def test_percentiles_are_by_nearest_rank(share: float, right: int):
    assert percentile([7, 1, 9, 2, 10, 3, 8, 4, 6, 5], share) == right


def _measured(sent: float, first: float, total: float, tokens: int = 11, error: str = "") -> Measured:
    return Measured(sent, first, total, 100, tokens, (), error)


def test_figures_of_a_run():
    run = [_measured(0, 0.1, 1.1), _measured(1, 0.3, 1.3), _measured(2, 9, 9, 0, "UNAVAILABLE: gone")]
    summary = summarise(run, Targets(first_token=0.2, per_token=0.2))
    assert summary["failed"] == 1
    assert summary["errors"] == {"UNAVAILABLE": 1}
    assert summary["seconds"] == pytest.approx(2.3)
    assert summary["output_tokens_per_s"] == pytest.approx(22 / 2.3)
    assert summary["ttft"]["p50"] == 0.1
    assert summary["tpot"]["p99"] == pytest.approx(0.1)
    assert summary["attainment"] == pytest.approx(1 / 3), "one was late, one failed"
    assert summary["goodput"] == pytest.approx(1 / 2.3)


def test_two_runs_side_by_side():
    slow, fast = ([_measured(0, first, 1.0)] for first in (0.4, 0.2))
    before, now = summarise(slow, Targets()), summarise(fast, Targets())
    console = Console(record=True, width=100)
    console.print(render_summary(now, before))
    (line,) = [line for line in console.export_text().splitlines() if "TTFT p50" in line]
    assert "200.00 ms" in line
    assert "400.00 ms" in line
    assert "-50.0%" in line


def _run(first: float, **options: object) -> Run:
    measured = [_measured(0, first, 1.1), _measured(0, 2 * first, 1.5)]
    return Run(options, summarise(measured, Targets()), measured)


def test_the_page_is_whole_and_escapes():
    page = html_report("<b>", _run(0.1, isl="a<b"))
    assert "<b>" not in page.replace("<body", "")
    assert "a&lt;b" in page
    assert page.count("<svg") == 3, "TTFT, TPOT, whole answer; these requests have no gaps"
    assert page.count("nothing to show") == 1
    assert "before" not in page.partition("</style>")[2]
    assert "http" not in page, "it needs nothing from elsewhere"


def test_the_page_of_two_runs_has_both_in_every_table_and_plot(tmp_path: Path):
    _run(0.4, isl="512").write(tmp_path / "before.json")
    page = html_report("two", _run(0.2, isl="1024"), Run.read(tmp_path / "before.json"))
    assert page.count("<polyline") == 6
    assert "<td>isl<td>1024<td>512" in page
    assert '<td>TTFT p50<td>200.00 ms<td>400.00 ms<td><span class="good">-50.0%</span>' in page


def test_a_plot_of_many_values_stays_small_and_ends_where_they_do():
    drawing = cumulative_svg([number / 1e4 for number in range(100_000)])
    assert len(drawing) < 30_000
    assert drawing.count(",0.0") == 1


def test_a_file_that_is_no_saved_run(tmp_path: Path):
    (tmp_path / "old.json").write_text(json.dumps({"other": 1}))
    for name in ("old.json", "absent.json"):
        result = CliRunner().invoke(cli.app, ["bench", "--compare", str(tmp_path / name)])
        assert result.exit_code == 2
        assert name in result.output
