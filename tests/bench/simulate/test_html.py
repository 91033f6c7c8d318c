from __future__ import annotations

import dataclasses
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from html.parser import HTMLParser

import pytest

from deepinfra.bench.simulate.compare import compare, summaries
from deepinfra.bench.simulate.html import figure_text, page
from deepinfra.bench.simulate.results import SimulationResult

Make = Callable[..., SimulationResult]

EVIL = '<script>alert("x")</script>&amp;\'"'
VOID = {"meta", "br", "hr"}


class Reader(HTMLParser):
    """Checks that every element is closed in order; collects captions, texts and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def captions(text: str) -> list[str]:
    return re.findall(r"<figcaption>(.*?)</figcaption>", text)


@pytest.fixture
def two(make_result: Make) -> list[SimulationResult]:
    pools = ("prefill-0", "prefill-1", "decode")
    return [make_result("in order", pools=pools), make_result("shortest", pools=pools, shortest_first=True)]


def test_the_file_is_well_formed(two: list[SimulationResult]) -> None:
    text = page(two, price=2.0)
    Reader(text)
    ET.fromstring(text.removeprefix("<!doctype html>\n"))


def test_it_needs_nothing_else(two: list[SimulationResult]) -> None:
    text = page(two)
    reader = Reader(text)
    assert not {tag for tag, _, _ in reader.attributes} & {"script", "link", "img", "iframe", "object", "a", "use"}
    assert not {name for _, name, _ in reader.attributes} & {"src", "href", "xlink:href", "action", "onclick", "onload"}
    assert not re.search(r"https?:|//[a-z]|@import|url\(", text)
    assert len(text) < 400_000


def test_names_and_settings_are_escaped(make_result: Make) -> None:
    result = make_result(pools=(EVIL,))
    object.__setattr__(result, "name", EVIL)
    object.__setattr__(result, "settings", {EVIL: EVIL})
    rows = [row._replace(outcome=EVIL, cached={EVIL: 10}) for row in result.requests]
    object.__setattr__(result, "requests", rows)
    text = page([result])
    reader = Reader(text)
    assert "<script" not in text
    assert "script" not in {tag for tag, _, _ in reader.attributes}
    shown = [each for each in reader.texts if "alert(" in each]
    assert len(shown) > 5
    assert all(EVIL in each for each in shown)


def test_every_plot_is_there(two: list[SimulationResult]) -> None:
    by_length = [
        f"{what}, by uncached prompt tokens"
        for what in ("Time to first token", "Time between tokens", "Time from arrival to the first step")
    ]
    shares = [
        f"Time to first token, {name} uncached tokens"
        for name in ("0–511", "512–4,095", "4,096–32,767", "32,768 or more")
    ]
    whole = ("sequences waiting", "sequences running", "time in steps", "blocks used")
    added = ("prompt tokens/s", "output tokens/s")
    over_time = [f"prefill: {what}" for what in whole]
    over_time += [f"prefill: {what}, all pools together" for what in added]
    over_time += [f"decode: {what}" for what in whole + added]
    rest = ["Prompt tokens from a cache", "Times overtaken, by uncached prompt tokens"]
    assert captions(page(two)) == by_length + shares + over_time + rest


def test_every_plot_has_both_lines_and_numbers_that_are_numbers(two: list[SimulationResult]) -> None:
    tree = ET.fromstring(page(two).removeprefix("<!doctype html>\n"))
    figures = tree.findall(".//figure")
    assert len(figures) == 21
    for figure in figures:
        (svg,) = figure.findall("svg")
        assert svg.get("aria-label") == figure.findtext("figcaption") == svg.findtext("title")
        _, _, wide, high = map(float, (svg.get("viewBox") or "").split())
        styles = {each for node in svg.iter() for each in (node.get("class") or "").split() if each in ("c0", "c1")}
        assert styles == {"c0", "c1"} or "cache" in (svg.get("aria-label") or "")
        for node in svg.iter("polyline"):
            for point in (node.get("points") or "").split():
                x, y = map(float, point.split(","))
                assert 0 <= x <= wide
                assert 0 <= y <= high


def test_marks_tell_the_same_numbers_as_the_table(two: list[SimulationResult]) -> None:
    text = page(two)
    for result, summary in zip(two, summaries(two), strict=True):
        bucket = summary.buckets[1]
        assert bucket.first_token_s is not None
        n = bucket.first_token_s.n
        marks = (
            f"p50 {figure_text(bucket.first_token_s.p50, 's')}, p90 {figure_text(bucket.first_token_s.p90, 's')}, "
            f"p99 {figure_text(bucket.first_token_s.p99, 's')}"
        )
        assert f"<title>{result.name} (n={n}): {marks}</title>" in text
        assert text.count(f"<td>{figure_text(bucket.first_token_s.p99, 's')}</td>") >= 1


def test_ratios_say_which_is_better_in_words(two: list[SimulationResult]) -> None:
    text = page(two)
    verdicts = [row.figures[1].verdict for row in compare(summaries(two))]
    assert text.count("▲ better</span>") == verdicts.count("better") > 3
    assert text.count("▼ worse</span>") == verdicts.count("worse")


def test_tenants_have_a_table_where_there_are_several(make_result: Make) -> None:
    result = make_result(requests=20)
    assert "By tenant" not in page([result])
    rows = [row._replace(tenant=f"<{index % 2}>") for index, row in enumerate(result.requests)]
    text = page([dataclasses.replace(result, requests=rows)])
    assert "<h2>By tenant</h2>" in text
    assert "<td>&lt;1&gt;</td><td>10</td>" in text


def test_few_values_are_told_by_their_number(make_result: Make) -> None:
    assert "<small>n=" in page([make_result(requests=30)])
    assert "<small>n=" not in page([make_result(requests=1500, pools=tuple("abcd"))])


def test_it_follows_dark_mode_and_narrow_screens(make_result: Make) -> None:
    text = page([make_result(requests=20)])
    assert "prefers-color-scheme: dark" in text
    assert '<meta name="viewport" content="width=device-width, initial-scale=1"/>' in text
    used = set(re.findall(r"var\((--\w+)\)", text))
    assert used <= set(re.findall(r"(--\w+):", text))


def test_a_simulation_without_samples_or_tokens_has_a_report(make_result: Make) -> None:
    Reader(page([SimulationResult(name="nothing", settings={})]))
    refused = make_result(requests=20, refuse_over=-1)
    assert {row.outcome for row in refused.requests} == {"overloaded"}
    text = page([refused])
    Reader(text)
    assert "overloaded" in text


def test_hours_are_told_in_hours(make_result: Make) -> None:
    result = make_result(requests=20)
    samples = [sample._replace(at_s=3600.0 * sample.at_s) for sample in result.samples]
    text = page([dataclasses.replace(result, samples=samples, interval_s=3600.0)])
    assert "virtual time (h)" in text
    last = samples[-1].at_s / 3600.0
    ends = [float(line.split()[-1].split(",")[0]) for line in re.findall(r'class="line c0" points="([^"]+)"', text)]
    assert last > 4
    assert max(ends) <= 346.0
    assert "virtual time (s)" in page([result])
