"""What happens to a child process is told to its parent, whatever it is."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from conformance.isolation import (
    GIBIBYTE,
    CrashedError,
    Limits,
    OutOfMemoryError,
    RefusedError,
    TimedOutError,
    run_isolated,
)

Tensors = dict[str, Tensor | None]


def no_child_is_left() -> bool:
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
    return True


def test_tensors_come_back_as_they_are() -> None:
    sent: Tensors = {
        "bfloat16": torch.tensor([1.0, -0.0, 3.390625, float("nan")], dtype=torch.bfloat16),
        "float16": torch.tensor([[65504.0], [6e-8], [float("inf")]], dtype=torch.float16),
        "float32": torch.arange(6.0).reshape(2, 3).t(),
        "grad:none": None,
        "float64": torch.tensor([0.1, 5e-324], dtype=torch.float64, requires_grad=True),
        "empty": torch.zeros(0, 3, 2),
        "scalar": torch.tensor(2.5),
    }
    got = run_isolated(lambda: sent)
    assert list(got) == list(sent)
    for name, tensor in sent.items():
        came = got[name]
        if tensor is None:
            assert came is None
            continue
        assert came is not None
        assert (came.dtype, came.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(came.nan_to_num(-1), tensor.detach().nan_to_num(-1))
        assert torch.equal(came.signbit(), tensor.detach().signbit())
    assert no_child_is_left()


def test_it_is_another_process() -> None:
    changed = []

    def compute() -> Tensors:
        changed.append(1)
        return {"pid": torch.tensor(float(os.getpid()), dtype=torch.float64)}

    pid = run_isolated(compute)["pid"]
    assert pid is not None
    assert pid.item() != os.getpid()
    assert changed == []


def segfault() -> Tensors:
    ctypes.string_at(0)
    return {}


def abort() -> Tensors:
    os.abort()


def leave() -> Tensors:
    os._exit(3)


def leave_quietly() -> Tensors:
    os._exit(0)


def sys_exit() -> Tensors:
    sys.exit(0)


def interrupt() -> Tensors:
    raise KeyboardInterrupt


def killed() -> Tensors:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30)
    return {}


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        (segfault, "the process died of SIGSEGV"),
        (abort, "the process died of SIGABRT"),
        (killed, "the process died of SIGKILL"),
        (leave, "the process left with status 3"),
        (leave_quietly, "the process left with status 0"),
        (sys_exit, "the process left with status 1"),
        (interrupt, "the process left with status 1"),
    ],
)
def test_deaths_are_crashes(compute: object, message: str) -> None:
    with pytest.raises(CrashedError, match=f"^{message}$"):
        run_isolated(compute)  # type: ignore[arg-type]
    assert no_child_is_left()


def test_an_exception_is_a_refusal_with_its_type_and_text() -> None:
    def refuse() -> Tensors:
        raise NotImplementedError("no second order\nhere")

    with pytest.raises(RefusedError, match=r"^NotImplementedError: no second order\nhere$"):
        run_isolated(refuse)


def test_what_can_not_be_sent_is_a_refusal() -> None:
    with pytest.raises(RefusedError, match="AttributeError: 'int' object has no attribute"):
        run_isolated(lambda: {"output": 3})  # type: ignore[dict-item]


@pytest.mark.parametrize("stubborn", [False, True])
def test_a_hang_ends_at_the_limit(stubborn: bool) -> None:
    def hang() -> Tensors:
        if stubborn:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        time.sleep(60)
        return {}

    started = time.monotonic()
    with pytest.raises(TimedOutError, match=r"^the process did not finish within 0\.3 s$"):
        run_isolated(hang, Limits(time_s=0.3))
    assert 0.3 <= time.monotonic() - started < 5
    assert no_child_is_left()


def test_operators_with_threads_run_in_the_child() -> None:
    image = torch.rand(4, 8, 64, 64)
    weight = torch.rand(8, 8, 3, 3)
    torch.nn.functional.conv2d(image, weight)
    got = run_isolated(lambda: {"output": torch.nn.functional.conv2d(image, weight)}, Limits(time_s=30))[
        "output"
    ]
    assert got is not None
    assert torch.allclose(got, torch.nn.functional.conv2d(image, weight), rtol=1e-4)


def test_the_child_uses_as_many_threads_as_its_parent() -> None:
    work = torch.rand(2**20)  # enough for two threads, which the parent starts here
    torch.set_num_threads(2)
    work.exp()

    def threads() -> Tensors:
        work.exp()
        return {"threads": torch.tensor(len(os.listdir("/proc/self/task")))}

    threads_there = run_isolated(threads, Limits(time_s=10))["threads"]
    assert threads_there is not None
    assert threads_there >= 3  # its first, the one that computes, and OpenMP's second


def test_wanting_too_much_memory_is_told_apart() -> None:
    def allocate(gibibytes: float) -> Tensors:
        return {"output": torch.ones(int(gibibytes * GIBIBYTE / 4))[:1]}

    limits = Limits(memory=GIBIBYTE // 2)
    assert run_isolated(lambda: allocate(0.1), limits)["output"] == 1
    with pytest.raises(OutOfMemoryError, match=r"^the process wanted more than 0\.5 GiB of memory$"):
        run_isolated(lambda: allocate(1), limits)
    with pytest.raises(OutOfMemoryError):
        run_isolated(lambda: {"output": torch.frombuffer(bytearray(GIBIBYTE), dtype=torch.uint8)}, limits)
    assert run_isolated(lambda: allocate(1), Limits(memory=None))["output"] == 1
    assert no_child_is_left()


def test_nothing_is_left_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run_isolated(lambda: {"output": torch.ones(3)})
    with pytest.raises(CrashedError):
        run_isolated(segfault)
    assert list(tmp_path.iterdir()) == []


SEGFAULT = """
import ctypes, sys
from conformance.isolation import CrashedError, run_isolated
try:
    run_isolated(lambda: {"output": ctypes.string_at(0)})
except CrashedError as error:
    print(error)
"""


def test_a_crash_is_not_told_on_the_terminal() -> None:
    command = [sys.executable, "-X", "faulthandler", "-c", SEGFAULT]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == "the process died of SIGSEGV\n"
    assert "Fatal Python error" not in done.stderr


@pytest.mark.parametrize("compute", [sys_exit, interrupt])
def test_the_child_never_runs_its_parent_s_code(compute: object, tmp_path: Path) -> None:
    try:
        run_isolated(compute)  # type: ignore[arg-type]
    except CrashedError:
        pass
    finally:
        (tmp_path / str(os.getpid())).touch()
    assert [path.name for path in tmp_path.iterdir()] == [str(os.getpid())]


def test_autograd_works_in_a_child_after_a_strict_export() -> None:
    script = """
import torch
from conformance.isolation import run_isolated

class Double(torch.nn.Module):
    def forward(self, x):
        return 2 * x

def gradient():
    x = torch.ones(2, requires_grad=True)
    Double()(x).sum().backward()
    return {"grad": x.grad}

torch.export.export(Double(), (torch.ones(2),), strict=True)
gradient()
print(run_isolated(gradient)["grad"].tolist())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == "[2.0, 2.0]\n", done.stderr
