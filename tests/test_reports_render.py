"""The diff report: what it must hold, and that it shows text instead of acting on it."""

from __future__ import annotations

import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from test_reports_sample import description, record, sample

from reports import formats, render
from reports.__main__ import main
from reports.record import Element, Record, Status
from reports.store import RunFolder

HOSTILE = "<script>alert(1)</script> & \"quoted\" 'single' | pipe `tick` *star*\nsecond line"


def reports_of(root: Path, records: list[Record], said: dict[str, Any]) -> tuple[str, str]:
    with RunFolder.create(root) as folder:
        folder.append("all", records)
    folder.tabulate(said)
    render.write_report(folder.path)
    return (folder.path / "report.md").read_text("utf-8"), (folder.path / "index.html").read_text("utf-8")


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return reports_of(tmp_path_factory.mktemp("full"), sample(), description())


class Page(HTMLParser):
    """Collects tags with their attributes, and the text outside of style and script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._silent = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._silent = tag if tag in ("style", "script") else self._silent

    def handle_endtag(self, tag: str) -> None:
        self._silent = "" if tag == self._silent else self._silent

    def handle_data(self, data: str) -> None:
        self.text += "" if self._silent else data

    def values(self, name: str) -> list[str]:
        return [attributes[name] or "" for _, attributes in self.tags if name in attributes]


@pytest.mark.parametrize("kind", [0, 1], ids=["markdown", "html"])
def test_a_report_says_it_all(full: tuple[str, str], kind: int) -> None:
    text = full[0].replace("\\", "") if kind == 0 else Page(full[1]).text.replace("Smallest", "smallest")
    for said in (
        "12 new defects in mmcv 2.2.0",
        "2.14.1",
        "Linux 6.1 x86_64",
        "pytest conformance/ --tier default -n 2",
        "took 4 min 35 s",
        "paddlepaddle is not installed",
        "no CUDA device: nothing was compared on cuda",
        "trying to differentiate twice a function that was marked with @once_differentiable",
        "torchvision-edge-closed",
        "it is the first pixel, not 0.",
        *(["https://github.com/pytorch/vision/issues/6885"] if kind == 0 else ["pytorch/vision#6885"]),
        "the process died with signal 11 (SIGSEGV)",
        "(-1, 0) edge_low",
        "tested nothing but zeros",
        "smallest case",
        "0 where the oracle has NaN | <b>both</b> backends",
        "pytest conformance/ --case 'deform_conv2d-n2c4h5w6-k3x2-s2x1-p1x0-contiguous-bfloat16-non_finite'",
    ):
        assert said in text, said
    order = ["What diverges", "Provider by quantity by boundary class", "Not compared", "Details", "What ran"]
    headed = [text.rindex(f"\n{'## ' * (1 - kind)}{title}\n") for title in order]
    assert headed == sorted(headed)


def test_the_page_needs_nothing_from_outside(full: tuple[str, str]) -> None:
    page = Page(full[1])
    assert not page.values("src")
    assert not {"link", "img", "iframe", "object"} & {tag for tag, _ in page.tags}
    assert "@import" not in full[1]
    assert "url(" not in full[1]
    outside = {link for link in page.values("href") if not link.startswith("#")}
    assert outside == {"https://github.com/pytorch/vision/issues/6885"}
    assert len(full[1]) < 500_000
    assert len(full[0].encode()) < 70_000


def test_every_link_within_the_page_arrives(full: tuple[str, str]) -> None:
    page = Page(full[1])
    names = page.values("id")
    assert len(names) == len(set(names))
    links = {link[1:] for link in page.values("href") if link.startswith("#")}
    assert links <= set(names)
    assert sum(link.startswith("d") for link in links) > 50


def test_tables_have_captions_and_scopes(full: tuple[str, str]) -> None:
    tags = Page(full[1]).tags
    count = sum(tag == "table" for tag, _ in tags)
    assert count == sum(tag == "caption" for tag, _ in tags) > 10
    assert all(attributes.get("scope") for tag, attributes in tags if tag == "th")


def rows_of(markdown: str, start: str) -> list[list[str]]:
    """The cells of the pipe table's rows that start like this."""
    lines = [line for line in markdown.splitlines() if line.startswith(start)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_a_cell_is_readable_without_colour(full: tuple[str, str]) -> None:
    markdown, html = full
    plain, *_ = rows_of(markdown, "| output | mmcv |")
    worst = formats.ratio(max(each.err_over_bound for each in sample() if _is_mmcv_output(each)))
    assert plain[2] == f"3 1\u2717! 1\u2717\u25b2 3\u2021 ({worst})"
    text = " ".join(Page(html).text.split())
    # What diverges has a line of its own.
    assert f"1 new timeout1 new memory limit3 known \u00d7{worst}3 match" in text


def _is_mmcv_output(each: Record) -> bool:
    place = each.provider, each.operator, each.quantity, each.boundary
    return (
        place == ("mmcv", "deform_conv2d", "output", "interior")
        and each.err_over_bound == each.err_over_bound
    )


def test_zeros_are_counted_apart_and_diverge_nowhere(tmp_path: Path) -> None:
    zeros = [record(case=name, status=Status.VACUOUS, err_over_bound=0.0, tested=0) for name in "ab"]
    markdown, html = reports_of(tmp_path, [record(case="c"), *zeros], {})
    assert rows_of(markdown, "| output |") == [["output", "reference", "1 2\u25cb (0.250)"]]
    assert rows_of(markdown, "| reference |") == [
        ["reference", "0.1.0", "1 of 3", "1", "1", "2", "0.250"],
    ]
    assert "1 match \u00d70.250, 2 vacuous" in " ".join(Page(html).text.split())
    for text in (markdown, Page(html).text):
        assert "1 comparison of reference 0.1.0 on 1 case: no new defect; 2 tested nothing but zeros." in text
        assert text.count("None.") == 2


def test_what_is_new_comes_before_what_is_known_and_is_unfolded(full: tuple[str, str]) -> None:
    markdown, html = full
    heads = [line for line in markdown.split("## Provider by")[0].splitlines() if line.startswith("### ")]
    kinds = ("### Defect", "### New crash", "### New timeout", "### New memory limit")
    new = [head for head in heads if head.split(":")[0] in kinds]
    assert heads[: len(new) + 3] == [
        *new,
        "### Drift: composite 0.1.0, deform_conv2d",
        "### Drift: composite 0.1.0, deform_conv2d_pack",
        "### Drift: composite 0.1.0, modulated_deform_conv2d_pack",
    ]
    assert len(new) > 2
    assert any(head.startswith("### torchvision-edge-closed: torchvision 0.29.1") for head in heads)
    findings = [tag for _, tag in Page(html).tags if tag.get("class") == "finding"]
    assert ["open" in tag for tag in findings] == [index < len(new) for index in range(len(findings))]
    assert len(findings) == len(heads)


def test_an_entry_says_where_it_shows_and_how_to_rerun_it(full: tuple[str, str]) -> None:
    entry = (
        full[0].replace("\\", "").split("### mmcv-cpu-layout: mmcv 2.2.0, deform_conv2d")[1].split("###")[0]
    )
    assert "reads strided and channels_last inputs as if they were contiguous" in entry
    assert "known crash on" in entry
    assert "- quantities: output; grad: input, offset, mask, weight" in entry
    assert "- boundary classes: all 11" in entry
    assert "- smallest case: `pytest conformance/ --case 'deform_conv2d_pack-n2c4" in entry


@pytest.mark.parametrize(
    ("hit", "text"),
    [
        ("abcdef", "all 6"),
        ("abcde", "all 6 but f"),
        ("abc", "a, b, c"),
        ("a", "a"),
    ],
)
def test_boundary_classes_are_said_shortly(hit: str, text: str) -> None:
    assert formats.names(list(hit), list("abcdef")) == text
    assert formats.names(["a", "b"], ["a", "b"]) == "a, b"
    assert (
        formats.quantities(["output", "grad:b", "grad:c.d", "gradcheck"]) == "output, gradcheck; grad: b, c.d"
    )


def test_what_is_shown_is_escaped(tmp_path: Path) -> None:
    names = ["case", "operator", "provider", "version", "device", "dtype", "boundary", "question", "quantity"]
    names += ["convention", "message", "ledger"]
    records = [
        record(
            **dict.fromkeys(names, HOSTILE),
            status=status,
            worst=(Element((0,), 1.0, 2.0, 3.0, ((0, 0, HOSTILE),)),),
        )
        for status in Status
    ]
    hostile = {
        "tier": HOSTILE,
        "command": HOSTILE,
        "machine": {HOSTILE: HOSTILE},
        "providers": [{"name": HOSTILE, "available": False, "reason": HOSTILE}],
        "not_compared": [HOSTILE],
        "stale_ledger": [HOSTILE],
        "ledger": {HOSTILE: {"reason": HOSTILE, "link": "javascript:alert(1)"}},
    }
    markdown, html = reports_of(tmp_path, records, hostile)
    page = Page(html)
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert HOSTILE in page.text
    assert {link[:1] for link in page.values("href")} == {"#"}
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert "javascript:" not in html + markdown

    fenced = False
    for line in markdown.splitlines():
        fenced ^= line.startswith("```")
        if not fenced:
            assert "<script>" not in _without_code(line), line


def _without_code(line: str) -> str:
    parts = line.split("``")
    return "".join(parts[::2])


def test_a_pipe_stays_in_its_cell(tmp_path: Path) -> None:
    refused = record(status=Status.UNSUPPORTED, message="shape (2 | 3)", quantity="grad|x")
    markdown, _ = reports_of(tmp_path, [record(), refused], {})
    lines = [line for line in markdown.splitlines() if "2 \\| 3" in line]
    assert len(lines) == 1
    assert all(line.replace("\\|", "").count("|") == 6 for line in lines)
    heads = [line for line in markdown.splitlines() if line.startswith("|")]
    assert any("grad\\|x" in line for line in heads)


def test_what_is_cut_is_counted(tmp_path: Path) -> None:
    worst = tuple(Element((number,), 1.0, 2.0, 9.0) for number in range(render.NEW_ELEMENTS + 3))
    records = [
        record(status=Status.DEFECT, boundary=f"class {number:03}", worst=worst, message="x" * 5000)
        for number in range(render.HTML_GROUPS + 25)
    ]
    records += [
        record(status=Status.DEFECT, operator=f"operator_{number}")
        for number in range(render.MARKDOWN_NEW + 2)
    ]
    markdown, html = reports_of(tmp_path, records, {})
    assert "25 more groups, none worse" in html
    assert "(3 more are in records.parquet)" in html
    assert "5,000 characters" in html
    assert html.count('class="group"') == render.HTML_GROUPS + render.MARKDOWN_NEW + 2
    assert f"{render.HTML_GROUPS + 25 - render.MARKDOWN_ROWS} more such groups" in markdown
    assert "3 more new findings are in index.html" in markdown
    assert markdown.count("- smallest case") == render.MARKDOWN_NEW


@pytest.mark.parametrize("records", [[], [record()]], ids=["nothing", "one match"])
def test_a_run_without_divergences_or_description_has_a_report(tmp_path: Path, records: list[Record]) -> None:
    markdown, html = reports_of(tmp_path, records, {})
    for text in (markdown, html):
        assert "Nothing was left out." in text
        assert "None." in text
        assert ("Nothing was compared." in text) == (not records)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (math.nan, "\u2013"),
        (0.0, "0"),
        (0.31449, "0.314"),
        (0.5, "0.500"),
        (1.0, "1.00"),
        (999.9, "1.00e3"),
        (123.4, "123"),
        (1830.0, "1.83e3"),
        (1e-7, "1.00e-7"),
        (math.inf, "inf"),
    ],
)
def test_three_significant_digits(value: float, text: str) -> None:
    assert formats.ratio(value) == text


def test_a_coordinate_shows_its_side_of_an_integer() -> None:
    assert formats.coordinate(-1.0) == "-1"
    assert formats.coordinate(2 - 1e-13) == "1.9999999999999"
    assert formats.coordinate(0.30000001192092896) == "0.3000000119"
    assert formats.coordinate(1e30) == "1e+30"
    assert formats.coordinate(math.nan) == "nan"
    assert formats.coordinate(math.inf) == "inf"


def test_values_that_differ_look_different() -> None:
    assert formats.pair(1.0, 1 + 2**-52) == ("1", "1.0000000000000002")
    assert formats.pair(1.0, 2.0) == ("1", "2")


def test_the_command_quotes_the_case() -> None:
    assert formats.command("a b|c") == "pytest conformance/ --case 'a b|c'"
    assert formats.command("it's") == "pytest conformance/ --case 'it'\\''s'"


def test_render_and_show_from_the_command_line(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path) as folder:
        folder.append("item", [record(), record(provider="mmcv", version="2.2.0", status=Status.DEFECT)])
    # The run was interrupted: nobody merged its records.
    shown = CliRunner().invoke(main, ["show", "--root", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    said = " ".join(shown.output.split())
    assert "1 new defect in mmcv 2.2.0" in said
    assert "defect mmcv 2.2.0, deform_conv2d" in said
    assert formats.command(record().case) in said
    made = CliRunner().invoke(main, ["render", folder.run, "--root", str(tmp_path)])
    assert made.exit_code == 0, made.output
    before = (folder.path / "index.html").read_text()
    (folder.path / "index.html").unlink()
    assert CliRunner().invoke(main, ["render", "--root", str(tmp_path)]).exit_code == 0
    assert (folder.path / "index.html").read_text() == before
    wrong = CliRunner().invoke(main, ["render", "nope", "--root", str(tmp_path)])
    assert wrong.exit_code == 1
    assert "run must be an id" in wrong.output
