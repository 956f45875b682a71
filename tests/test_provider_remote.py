"""A provider in a worker answers as it would here, and whatever happens to the worker is an answer too."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import conformance
from cases.operator import parse_case
from conformance.bench import Bench
from conformance.expectation import Expectation
from conformance.isolation import (
    DEFAULT_LIMITS,
    GIBIBYTE,
    CrashedError,
    Limits,
    OutOfMemoryError,
    RefusedError,
    TimedOutError,
)
from conformance.ledger import LEDGER, read
from conformance.providers import registry, remote, torchvision
from conformance.subject import Subject
from reports.record import Record

TESTS = Path(__file__).parent
CONFORMANCE = Path(conformance.__path__[0])
BOX = {"rois": torch.zeros(1, 5), "output_size": (1, 1), "spatial_scale": 1.0, "aligned": True}


@pytest.fixture(scope="module", autouse=True)
def workers_find_the_strange_providers() -> Iterator[None]:
    path = os.pathsep.join(filter(None, (str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH"))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        yield


@pytest.fixture(scope="module")
def strange() -> remote.Remote:
    provider = start("strange_providers:Strange", Limits(time_s=2, memory=GIBIBYTE // 2))
    assert provider.load().startswith("1.0 (torch ")
    return provider


@pytest.fixture(scope="module")
def there() -> registry.Loaded:
    return registry.load(start("torchvision"))


def start(kind: str, limits: Limits = DEFAULT_LIMITS) -> remote.Remote:
    return remote.from_option(f"there=python:{sys.executable},kind={kind}", limits)


def ask(provider: remote.Remote, ratio: int = 0, input: Tensor | None = None) -> Tensor:
    result: Tensor = provider.roi_align(
        input=torch.ones(2, 3) if input is None else input, sampling_ratio=ratio, **BOX
    )
    return result


@pytest.mark.parametrize(
    "case_id",
    [
        "deform_conv2d/dtype=float64,groups=2,offset_groups=2,offsets=mixed,layout=channels_last,grad_layout=transposed",
        "deform_conv2d/dtype=bfloat16,batch=3,mask=no,bias=no",
        "roi_align/dtype=float16,boxes=rim",
        "roi_pool/rois=0",
        "modulated_deform_conv2d_pack/data=ramp,batch=1,in_channels=1,out_channels=1,size=3x3,kernel=2x2",
        "deform_conv2d_pack/groups=2",
    ],
)
def test_it_is_judged_as_it_would_be_here(case_id: str, there: registry.Loaded) -> None:
    """The same statuses, errors and ledger entries, to the last bit."""
    records: list[Record] = []
    bench = Bench([registry.load(torchvision.PROVIDER), there], read([LEDGER]), records.append)
    case = parse_case(case_id)
    bench.compare("output", case, Subject.output, Expectation.output)
    bench.compare("gradients", case, Subject.gradients, Expectation.gradients)
    half = len({(record.question, record.quantity) for record in records})
    assert len(records) == 2 * half

    def essence(record: Record) -> tuple[Any, ...]:
        status = (record.status, record.convention, record.ledger, record.tested, record.worst)
        return (record.question, record.quantity, *status)

    def of(name: str) -> list[tuple[Any, ...]]:
        return sorted((essence(record) for record in records if record.provider == name), key=repr)

    assert list(map(repr, of("there"))) == list(map(repr, of("torchvision")))
    assert there.version.startswith(f"{torchvision.PROVIDER.load()} (torch {torch.__version__}, Python ")


def test_second_order_comes_from_the_worker() -> None:
    case = parse_case("deform_conv2d/dtype=float64,batch=1,in_channels=2,out_channels=2,size=3x4,kernel=1x2")
    provider = start("conformance.providers.composite:PROVIDER")
    provider.load()
    subject = Subject(provider, Expectation(case))  # type: ignore[arg-type]
    from conformance.providers.composite import PROVIDER

    here = Subject(PROVIDER, subject.expectation)
    for got, expected in (
        (subject.double_backward(), here.double_backward()),
        (subject.gradients(), here.gradients()),
    ):
        assert got.keys() == expected.keys()
        for name, tensor in expected.items():
            assert tensor is not None
            assert torch.equal(got[name], tensor), name  # type: ignore[arg-type]


def test_layouts_survive_the_way(strange: remote.Remote) -> None:
    plane = torch.rand(4, 6)
    for tensor in (plane.t(), plane[::2, 1::3], plane[:1].expand(4, 6), torch.rand(1).expand(4, 6)):
        assert ask(strange, 6, tensor)[:2].tolist() == list(tensor.stride())
        assert torch.equal(ask(strange, 0, tensor), 2 * tensor)
    assert ask(strange, 0, torch.zeros(0, 3)).shape == (0, 3)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        tensor = torch.tensor([1 / 3, -0.0, torch.inf], dtype=dtype)
        assert torch.equal(ask(strange, 0, tensor), 2 * tensor)


def test_every_end_is_told_and_the_next_request_is_answered(strange: remote.Remote) -> None:
    for ratio, error, message in (
        (1, CrashedError, "the process died of SIGSEGV"),
        (2, TimedOutError, "the process did not finish within 2 s"),
        (3, OutOfMemoryError, r"the process wanted more than 0\.5 GiB of memory"),
        (4, CrashedError, "the process left with status 3"),
        (5, RefusedError, "ValueError: not today"),
    ):
        with pytest.raises(error, match=f"^{message}$"):
            ask(strange, ratio)
        assert ask(strange).tolist() == [[2.0] * 3] * 2


def test_the_process_lives_on_but_after_a_hostile_case(strange: remote.Remote) -> None:
    def process() -> float:
        return ask(strange, 6)[-1].item()

    first = process()
    assert process() == first
    strange.is_hostile = True
    assert process() == first
    strange.is_hostile = False
    assert process() != first


def test_a_killed_worker_is_started_again(strange: remote.Remote) -> None:
    ask(strange)
    os.kill(strange._worker._process.pid, signal.SIGKILL)
    with pytest.raises(CrashedError, match="the worker died of SIGKILL"):
        ask(strange)
    assert ask(strange).tolist() == [[2.0] * 3] * 2


def test_a_provider_without_torch_computes_what_it_can() -> None:
    provider = start("strange_providers:OneGradient")
    assert provider.load().startswith("2.0 (")
    input = torch.ones(2, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad(
        ask(provider, input=input), input, torch.full((2, 3), 2.0), create_graph=True
    )
    assert gradient.tolist() == [[6.0] * 3] * 2
    with pytest.raises(RefusedError, match="there computes no double backward"):
        gradient.sum().backward()
    assert {"*/double_backward", "*/gradgradcheck"} <= provider.not_promised.keys()
    assert not {"*/gradients", "*/output"} & provider.not_promised.keys()
    with pytest.raises(RefusedError, match="numpy has no bfloat16"):
        ask(provider, input=torch.ones(1, dtype=torch.bfloat16))
    with pytest.raises(AttributeError, match="the provider there has no roi_pool"):
        _ = provider.roi_pool


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        (
            "x=python:/no/such/python,kind=torchvision",
            "/no/such/python can't be run: No such file or directory",
        ),
        (f"x=python:{sys.executable},kind=strange_providers:NotHere", "the strange library is not installed"),
        (
            f"x=python:{sys.executable},kind=strange_providers:DiesAtLoad",
            "its worker did not start: .*SIGSEGV: last words",
        ),
        (f"x=python:{sys.executable},kind=no_such_module:X", "No module named 'no_such_module'"),
        (f"x=python:{sys.executable},kind=math:nothing", "AttributeError"),
        ("x=python:/bin/true,kind=torchvision", "its worker did not start: the worker left with status 0"),
        ("x=python:/bin/echo,kind=torchvision", "its worker did not start: the worker answered '.*worker.py"),
    ],
)
def test_what_can_not_be_used_says_why(option: str, reason: str) -> None:
    loaded = registry.load(registry.from_spec(option))
    assert re.search(reason, loaded.unavailable), loaded.unavailable


@pytest.mark.parametrize(
    "option",
    [
        "x=",
        "=python:p",
        "x=python:",
        "x=p",
        "x=python:p,torchvision",
        "x=python:p,kind=a,kind=b",
        "x=python:p,kind=",
        "x=python:p,kind=zzz",
    ],
)
def test_a_wrong_option_is_refused(option: str) -> None:
    with pytest.raises(ValueError, match=r"^--provider: (got|kind is) .*expected "):
        registry.from_spec(option)


def test_a_worker_ends_with_its_harness() -> None:
    script = (
        "import sys, time; from conformance.providers import remote\n"
        f"p = remote.from_option('x=python:{sys.executable},kind=strange_providers:Strange', remote.DEFAULT_LIMITS)\n"
        "p.load(); print(p._worker._process.pid, p._worker.folder, flush=True); time.sleep(60)"
    )
    harness = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert harness.stdout is not None
    pid, folder = harness.stdout.readline().split()
    harness.kill()
    harness.wait()
    deadline = time.monotonic() + 10
    while (os.path.exists(folder) or os.path.exists(f"/proc/{pid}")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not os.path.exists(folder)


@pytest.mark.parametrize("file", ["worker.py", "providers/torchvision.py", "providers/mmcv/operators.py"])
def test_what_workers_load_is_python_36_and_knows_nothing_of_the_project(file: str) -> None:
    tree = ast.parse((CONFORMANCE / file).read_text(), feature_version=(3, 6))
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in (
            [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        )
    }
    assert not imported & {"cases", "conformance", "kernels", "reports", "__future__", "dataclasses"}
