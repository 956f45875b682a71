"""The ledger's file format, and what its entries are about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cases.operator import parse_case
from conformance.ledger import Entry, Ledger, read

SOUND = {
    "id": "some-divergence",
    "provider": "torchvision",
    "versions": ">=0.10,<0.30",
    "operator": "deform_conv2d",
    "quantity": "grad:*",
    "kind": "defect",
    "reason": "It is known.",
    "link": "",
    "case": "deform_conv2d/batch=33",
}


def toml(row: dict[str, Any], condition: str = "") -> str:
    lines = [f"{name} = {value!r}" for name, value in row.items()]
    return "\n".join(["[[divergence]]", *lines, f"condition = {condition}" if condition else "", ""])


def write(folder: Path, *rows: str) -> Path:
    path = folder / "known.toml"
    path.write_text("\n".join(rows), encoding="utf-8")
    return path


def entry(tmp_path: Path, condition: str = "", **changed: str) -> Entry:
    (only,) = read([write(tmp_path, toml({**SOUND, **changed}, condition))]).entries
    return only


def without(name: str) -> dict[str, str]:
    return {key: value for key, value in SOUND.items() if key != name}


def test_a_sound_entry_is_read(tmp_path: Path) -> None:
    only = entry(tmp_path, '{ batch = ["> 32"], dtype = "float32" }')
    assert only == Entry(**SOUND, condition=(("batch", ("> 32",)), ("dtype", ("float32",))))
    assert read([write(tmp_path, "")]).entries == ()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        *((toml(without(name)), f"{name!r} must be a string") for name in SOUND if name != "id"),
        (toml(without("id")), "entry '(without id)': 'id' must be a string"),
        *(
            (toml({**SOUND, name: " "}), f"{name!r} must be a string")
            for name in SOUND
            if name not in ("id", "link")
        ),
        (toml({**SOUND, "link": 3}), "'link' must be a string"),
        (toml({**SOUND, "severity": "low"}), "unknown key 'severity', expected case, condition"),
        (toml({**SOUND, "kind": "rumour"}), "kind is 'rumour', expected one of convention, defect, crash"),
        (toml({**SOUND, "versions": "newest"}), "Invalid specifier: 'newest'"),
        (toml({**SOUND, "case": "deform_conv2d/batch=2"}), "is written deform_conv2d/default"),
        (toml({**SOUND, "case": "conv/default"}), "expected OPERATOR/AXES"),
        (
            toml(SOUND, '{ batch = ["> 33"] }'),
            "its own case deform_conv2d/batch=33 does not meet its condition",
        ),
        (toml(SOUND, '{ batches = ["33"] }'), "does not meet its condition"),
        (toml(SOUND, '{ size = ["> 3"] }'), "does not meet its condition"),
        (toml(SOUND, '{ dtype = ["< 3"] }'), "does not meet its condition"),
        (toml(SOUND, '{ mask = ["no"] }'), "does not meet its condition"),
        (toml({**SOUND, "operator": "roi_*"}), "does not meet its condition"),
        (toml(SOUND, '"batch > 32"'), "condition must be a table"),
        (toml(SOUND, "{ batch = 33 }"), "condition: 'batch' must be"),
        (toml(SOUND, "{ batch = [33] }"), "condition: 'batch' must be"),
    ],
)
def test_errors_name_file_and_entry(text: str, sentence: str, tmp_path: Path) -> None:
    path = write(tmp_path, toml({**SOUND, "id": "another"}), text)
    with pytest.raises(ValueError, match="ledger") as refusal:
        read([path])
    assert str(refusal.value).startswith(f"ledger {path}, entry '")
    assert "another" not in str(refusal.value)
    assert sentence in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[[divergence]", "ledger {path}: Expected"),
        (
            toml(SOUND).replace("[[divergence]]", "[[divergences]]"),
            "ledger {path}: unknown key 'divergences'",
        ),
        ("divergence = 3", "ledger {path}: 'divergence' must be"),
        ('divergence = ["x"]', "ledger {path}: 'divergence' must be"),
        (toml(SOUND) + toml(SOUND), "ledger: the id 'some-divergence' stands twice"),
    ],
)
def test_errors_of_a_file(text: str, sentence: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ValueError, match="ledger") as refusal:
        read([path])
    assert sentence.format(path=path) in str(refusal.value)


def test_a_missing_file_and_an_id_in_two_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ledger .*absent\.toml: .*No such file"):
        read([tmp_path / "absent.toml"])
    first, second = tmp_path / "first.toml", tmp_path / "second.toml"
    for path in (first, second):
        path.write_text(toml(SOUND))
    with pytest.raises(ValueError, match="stands twice"):
        read([first, second])


@pytest.mark.parametrize(
    ("version", "concerned"),
    [
        ("0.29.1", True),
        ("0.29.1+cu130", True),
        ("0.10", True),
        ("0.9.1", False),
        ("0.30.0", False),
        ("0.30.0a0+git123", False),
        ("0.29.2a0", True),
        ("0.29.1 (narrow build)", True),
        ("unknown", False),
        ("", False),
    ],
)
def test_versions(version: str, concerned: bool, tmp_path: Path) -> None:
    only = entry(tmp_path)
    assert only.concerns("torchvision", version) == concerned
    assert not only.concerns("mmcv", version)


@pytest.mark.parametrize(
    ("condition", "case_id", "covered"),
    [
        ("", "deform_conv2d/default", True),
        ('{ batch = ["> 32"] }', "deform_conv2d/batch=33", True),
        ('{ batch = ["> 32"] }', "deform_conv2d/batch=32", False),
        ('{ batch = [">32"] }', "deform_conv2d/batch=64", True),
        ('{ batch = [">= 33"] }', "deform_conv2d/batch=33", True),
        ('{ batch = ["< 34"] }', "deform_conv2d/batch=33", True),
        ('{ batch = ["< 34"] }', "deform_conv2d/batch=34", False),
        ('{ batch = ["<= 33"] }', "deform_conv2d/batch=34", False),
        ('{ batch = ["33", "1"] }', "deform_conv2d/batch=1", True),
        ('{ batch = ["33", "1"] }', "deform_conv2d/batch=3", False),
        ('{ mask = ["yes"] }', "deform_conv2d/mask=no", False),
        ('{ mask = ["yes"] }', "deform_conv2d/default", True),
        ('{ size = ["5x6"] }', "deform_conv2d/size=6x5", False),
        ('{ batch = ["> 32"], dtype = ["float32"] }', "deform_conv2d/dtype=float64,batch=33", False),
        ("", "roi_align/default", False),
        ("", "deform_conv2d_pack/default", False),
    ],
)
def test_conditions(condition: str, case_id: str, covered: bool, tmp_path: Path) -> None:
    only = entry(tmp_path, condition)
    assert only.covers(parse_case(case_id), "grad:input") == covered
    assert not only.covers(parse_case(case_id), "output")


def test_patterns_of_operators_and_quantities(tmp_path: Path) -> None:
    only = entry(
        tmp_path,
        operator="*deform_conv2d_pack",
        quantity="grad:conv_offset.*",
        case="deform_conv2d_pack/default",
    )
    for operator in ("deform_conv2d_pack", "modulated_deform_conv2d_pack"):
        case = parse_case(f"{operator}/default")
        assert only.covers(case, "grad:conv_offset.bias")
        assert not only.covers(case, "grad:weight")
    assert not only.covers(parse_case("deform_conv2d/default"), "grad:conv_offset.bias")


def test_the_first_entry_that_fits_is_found(tmp_path: Path) -> None:
    narrow = toml({**SOUND, "id": "narrow"}, '{ batch = ["> 32"] }')
    ledger = read([write(tmp_path, narrow, toml({**SOUND, "id": "broad"}))])
    found = [
        ledger.find(provider, version, parse_case(case_id), quantity)
        for provider, version, case_id, quantity in (
            ("torchvision", "0.29.1", "deform_conv2d/batch=33", "grad:mask"),
            ("torchvision", "0.29.1", "deform_conv2d/default", "grad:mask"),
            ("torchvision", "0.29.1", "deform_conv2d/default", "output"),
            ("torchvision", "0.31", "deform_conv2d/default", "grad:mask"),
            ("mmcv", "0.29.1", "deform_conv2d/default", "grad:mask"),
        )
    ]
    assert [each and each.id for each in found] == ["narrow", "broad", None, None, None]


def test_only_entries_of_a_wanted_kind_are_found(tmp_path: Path) -> None:
    ledger = Ledger([entry(tmp_path)])
    asked = ("torchvision", "0.29.1", parse_case("deform_conv2d/default"), "grad:mask")
    assert ledger.find(*asked, ("defect", "crash")) is not None
    assert ledger.find(*asked, ("convention",)) is None


def test_an_entry_that_nothing_needed_is_stale_once_its_case_was_asked(tmp_path: Path) -> None:
    ledger = Ledger([entry(tmp_path)])
    case, other = SOUND["case"], "deform_conv2d/default"

    def stale(
        asked: tuple[str, str, str], *hit: tuple[str, str, str], quantity: str = "grad:offset"
    ) -> list[tuple[str, str]]:
        return [(each.id, version) for each, version in ledger.stale({(*asked, quantity)}, set(hit))]

    here = ("torchvision", "0.29.1", case)
    assert stale(here) == [("some-divergence", "0.29.1")]
    assert stale(here, ("some-divergence", "0.29.1", case)) == []
    assert stale(here, ("some-divergence", "0.29.1", other)) == [("some-divergence", "0.29.1")]
    assert stale(here, ("some-divergence", "0.28", case)) == [("some-divergence", "0.29.1")]
    assert stale(("torchvision", "0.29.1", other)) == []
    assert stale(("mmcv", "0.29.1", case)) == []
    assert stale(("torchvision", "0.30", case)) == []
    assert stale(here, quantity="nothing of it") == []


def test_the_smallest_cases_of_present_versions_are_part_of_a_run(tmp_path: Path) -> None:
    ledger = Ledger([entry(tmp_path)])
    assert [case.id for case in ledger.cases([("torchvision", "0.29.1")])] == [SOUND["case"]]
    assert [case.id for case in ledger.cases([("torchvision", "0.30"), ("torchvision", "0.29.1")])] == [
        SOUND["case"]
    ]
    assert ledger.cases([("torchvision", "0.30")]) == []
    assert ledger.cases([("torchvision", "")]) == []
    assert ledger.cases([]) == []


def test_the_project_s_own_ledger_is_sound() -> None:
    entries = read().entries
    assert entries
    assert not [each.id for each in entries if each.provider in ("reference", "composite")]
