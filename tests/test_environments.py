"""Environments of other releases: what is asked for wrongly is refused, and what was made is as it was reported."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from cases.operator import parse_case
from conformance import environments
from conformance.__main__ import main
from conformance.environments import CannotMakeError, create
from conformance.expectation import Expectation
from conformance.isolation import DEFAULT_LIMITS
from conformance.providers import remote
from conformance.subject import Subject
from kernels.build import cache_dir

REPORTED = "modulated_deform_conv2d_pack/data=ramp,batch=1,in_channels=1,out_channels=1,size=3x3,kernel=2x2"
OLD = cache_dir() / "environments" / "py3.6-torchvision-0.10.0-mmcv-full-1.6.2" / "bin" / "python"


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package index with wheels of torchvision 0.10.0 for Python 3.6 to 3.9, and Pythons 3.8 and 3.11 here."""
    monkeypatch.setattr(
        environments, "interpreters", lambda: {"3.11": sys.executable, "3.8": "/usr/bin/python3.8"}
    )
    monkeypatch.setattr(
        environments,
        "_has_wheel",
        lambda requirement, version: str(requirement) == "torchvision==0.10.0" and 6 <= int(version[2:]) <= 9,
    )


@pytest.mark.usefixtures("index")
@pytest.mark.parametrize(
    ("requirements", "python", "sentence"),
    [
        ([], None, "requirements: got none, expected some such as torchvision==0.10.0"),
        (["a=b"], None, "requirements: got 'a=b', expected NAME==VERSION"),
        (
            ["mmcv-full==1.6.2"],
            None,
            "requirements: mmcv-full==1.6.2 is built against a torch: name torch or torchvision",
        ),
        (["torchvision==0.10.0"], "3.7", "python: there is no Python 3.7 here, there are 3.8, 3.11"),
        (
            ["torchvision==0.10.0"],
            "3.11",
            "python: pip finds no wheels of torchvision==0.10.0 for Python 3.11",
        ),
        (
            ["torchvision==9"],
            None,
            "torchvision==9 has no wheels that pip can find for any Python, and here are 3.8, 3.11",
        ),
    ],
)
def test_what_is_missing_is_said(
    requirements: list[str], python: str | None, sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(CannotMakeError, match="^" + sentence.replace(".", r"\.")):
        create(requirements, python, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_which_python_would_do_is_said(index: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "interpreters", lambda: {"3.11": sys.executable})
    done = CliRunner().invoke(main, ["env", "create", "torchvision==0.10.0"])
    assert done.exit_code == 1
    assert "torchvision==0.10.0 needs Python 3.6, 3.7, 3.8, 3.9, and here are 3.11" in done.output


@pytest.mark.usefixtures("index")
def test_other_things_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    with pytest.raises(CannotMakeError, match="is not empty, and no virtual environment"):
        create(["torchvision==0.10.0"], "3.8", tmp_path)
    made = {"requirements": ["torchvision==0.10.0"], "python": "3.8"}
    (tmp_path / "gradparity-environment.json").write_text(json.dumps(made))
    assert create(["torchvision==0.10.0"], "3.8", tmp_path) == tmp_path / "bin" / "python"
    (tmp_path / "gradparity-environment.json").write_text(json.dumps({**made, "python": "3.9"}))
    with pytest.raises(CannotMakeError, match="holds an environment of something else"):
        create(["torchvision==0.10.0"], "3.8", tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".json"] == ["precious"]


def test_a_failing_command_says_its_error(tmp_path: Path) -> None:
    with pytest.raises(CannotMakeError, match="No module named no_such_module"):
        environments._output([sys.executable, "-m", "no_such_module"])
    with pytest.raises(CannotMakeError, match="/no/such/python can't be run"):
        environments._output(["/no/such/python"])


def test_the_pythons_here_work() -> None:
    here = environments.interpreters()
    assert here[f"{sys.version_info.major}.{sys.version_info.minor}"] == sys.executable
    assert list(here) == sorted(here, key=lambda version: -int(version.split(".")[1]))


@pytest.mark.skipif(
    not OLD.is_file(), reason="`env create torchvision==0.10.0 mmcv-full==1.6.2 --python 3.6` was not run"
)
@pytest.mark.parametrize(
    ("kind", "published"),
    [
        ("mmcv", [-3, -1.5, -3, -1.5, -3, -1.5, -3, -1.5, 4.5, 4.5, 4.5, 4.5]),
        ("torchvision", [0, 0, 0, -1.5, -3, 0, -3, -1.5, 4.5, 4.5, 4.5, 4.5]),
    ],
)
def test_issue_6885_is_there_as_it_was_reported(kind: str, published: list[float]) -> None:
    """The gradients of conv_offset.bias that pytorch/vision#6885 prints, by the releases that it names."""
    provider = remote.from_option(f"old=python:{OLD},kind={kind}", DEFAULT_LIMITS)
    assert "torch 1.9.0" in provider.load()
    subject = Subject(provider, Expectation(parse_case(REPORTED)))  # type: ignore[arg-type]
    leaves = subject.leaves()
    for name, leaf in leaves.items():
        leaf.data.fill_(float(name == "weight"))
    leaves["input"].data.copy_(torch.tensor([1.0, 2, 3]).expand(1, 1, 3, 3))
    (gradient,) = torch.autograd.grad(subject(leaves).sum(), [leaves["conv_offset.bias"]])
    assert gradient.tolist() == published
