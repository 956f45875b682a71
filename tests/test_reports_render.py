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
        for each in records:
            folder.append(each)
    folder.merge(said)
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
    text = full[0].replace("\\", "") if kind == 0 else Page(full[1]).text
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
        "https://github.com/pytorch/vision/issues/6885",
        "the process died with signal 11 (SIGSEGV)",
        "(-1, 0) edge",
        "0 where the oracle has NaN | <b>both</b> backends",
        "pytest conformance/ --case 'deform_conv2d-n2c4h5w6-k3x2-s2x1-p1x0-contiguous-bfloat16-non_finite'",
    ):
        assert said in text, said
    order = ["What ran", "Provider by quantity by boundary class", "Not compared", "Divergences"]
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
    assert len(full[1]) < 1_500_000


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


def test_a_cell_is_readable_without_colour(full: tuple[str, str]) -> None:
    markdown, html = full
    row = next(line for line in markdown.splitlines() if line.startswith("| output") and "| mmcv" in line)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert "1 timed out, 3 known, 3 match" in cells[2]
    assert "3 defect, 3 known (inf)" in cells[-1]
    assert "3 defect" in " ".join(Page(html).text.split())


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
    assert lines[0].replace("\\|", "").count("|") == 6
    heads = [line for line in markdown.splitlines() if line.startswith("|")]
    assert any("grad\\|x" in line for line in heads)


def test_what_is_cut_is_counted(tmp_path: Path) -> None:
    worst = tuple(Element((number,), 1.0, 2.0, 9.0) for number in range(render.ELEMENTS + 3))
    records = [
        record(status=Status.DEFECT, boundary=f"class {number:03}", worst=worst, message="x" * 5000)
        for number in range(render.HTML_GROUPS + 25)
    ]
    markdown, html = reports_of(tmp_path, records, {})
    assert "25 more groups, none worse" in html
    assert "(3 more are in records.parquet)" in html
    assert "5,000 characters" in html
    assert html.count("<details ") == render.HTML_GROUPS
    assert f"{len(records) - render.MARKDOWN_ROWS} more such groups" in markdown
    assert markdown.count("pytest conformance/") == render.MARKDOWN_GROUPS


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
        folder.append(record())
        folder.append(record(provider="mmcv", version="2.2.0", status=Status.DEFECT))
    # The run was interrupted: nobody merged its records.
    shown = CliRunner().invoke(main, ["show", "--root", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert "1 new defect in mmcv 2.2.0" in " ".join(shown.output.split())
    made = CliRunner().invoke(main, ["render", folder.run, "--root", str(tmp_path)])
    assert made.exit_code == 0, made.output
    before = (folder.path / "index.html").read_text()
    (folder.path / "index.html").unlink()
    assert CliRunner().invoke(main, ["render", "--root", str(tmp_path)]).exit_code == 0
    assert (folder.path / "index.html").read_text() == before
    wrong = CliRunner().invoke(main, ["render", "nope", "--root", str(tmp_path)])
    assert wrong.exit_code == 1
    assert "run must be an id" in wrong.output
