"""Does memory stay the same over hundreds of forward and backward passes?

What counts is the heap in use, which glibc's mallinfo2 says to the byte; a leak hides among the pages of a process.
"""

import ctypes
import functools
import gc

import pytest
import torch

from cases.case import Case
from cases.operator import all_operators
from cases.sweep import is_one_of_few
from conformance.bench import Bench
from conformance.isolation import run_isolated
from conformance.subject import Subject

ITERATIONS = 500
# Caches of the allocators and of autograd fill during the first ones.
WARM_UP = 50


_FIELDS = (
    "arena",
    "ordblks",
    "smblks",
    "hblks",
    "hblkhd",
    "usmblks",
    "fsmblks",
    "uordblks",
    "fordblks",
    "keepcost",
)


class _MallInfo2(ctypes.Structure):
    """struct mallinfo2 of malloc.h."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _FIELDS)


@functools.cache
def _mallinfo2() -> object:
    """The function of glibc 2.33 and later; None elsewhere."""
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is not None:
        function.restype = _MallInfo2
    return function


def heap_in_use() -> int:
    """Bytes that were allocated and not freed."""
    gc.collect()
    info = _mallinfo2()()  # type: ignore[operator]
    return int(info.uordblks + info.hblkhd)


def asks(case: Case) -> bool:
    """Of one or two small cases of every function."""
    return is_one_of_few(case) and not all_operators()[case.operator].is_module and case.device == "cpu"


def test_memory(case: Case, bench: Bench) -> None:
    """What is in use grows by less than a leak of the smallest tensor in every pass would make it."""
    if _mallinfo2() is None:
        pytest.skip("there is no mallinfo2 here, which glibc has")
    if faults := bench.check("memory", case, find_fault):
        pytest.fail("\n".join(faults), pytrace=False)


def find_fault(subject: Subject) -> str:
    """The growth, if it is too much, of a process that does nothing else."""

    def grow() -> dict[str, torch.Tensor | None]:
        for _ in range(WARM_UP):
            subject.forward_and_backward()
        before = heap_in_use()
        for _ in range(ITERATIONS):
            subject.forward_and_backward()
        return {"growth": torch.tensor(heap_in_use() - before)}

    growth = int(run_isolated(grow)["growth"])  # type: ignore[arg-type]
    smallest = min(tensor.nbytes for tensor in subject.expectation.inputs.values())
    if growth < ITERATIONS * smallest:
        return ""
    return f"{growth} bytes more are in use after {ITERATIONS} passes; the smallest tensor has {smallest}"
