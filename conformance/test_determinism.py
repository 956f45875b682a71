"""Are results the same bit for bit whatever the settings, the number of threads, and the rest of the batch?"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from cases.case import Case
from cases.operator import all_operators
from cases.sweep import is_typical, large_cases, long_cases
from conformance.bench import Bench
from conformance.expectation import Gradients
from conformance.subject import Subject


def asks(case: Case) -> bool:
    """Of functions, of cases large enough for several threads and of a few small ones."""
    large = replace(case, device="cpu") in (*large_cases(case.operator)[:1], *long_cases(case.operator))
    return (is_typical(case) or large) and not all_operators()[case.operator].is_module


def test_deterministic_algorithms(case: Case, bench: Bench) -> None:
    """torch.use_deterministic_algorithms(True) changes nothing, and is not refused."""

    def find_fault(subject: Subject) -> str:
        before = subject.forward_and_backward()
        torch.use_deterministic_algorithms(True)
        return _difference(before, subject.forward_and_backward(), "with deterministic algorithms")

    _check(case, bench, find_fault, "deterministic")


def test_threads(case: Case, bench: Bench) -> None:
    """Output and gradients by one thread and by two."""

    def find_fault(subject: Subject) -> str:
        torch.set_num_threads(1)
        alone = subject.forward_and_backward()
        torch.set_num_threads(2)
        return _difference(alone, subject.forward_and_backward(), "with two threads")

    _check(case, bench, find_fault, "threads")


def test_batch(case: Case, bench: Bench) -> None:
    """The output and the gradients of an image's own tensors, alone and among others."""

    def find_fault(subject: Subject) -> str:
        whole = subject.forward_and_backward()
        for image in range(len(subject.expectation.inputs["input"])):
            rows, own = _alone(subject, image)
            among = {
                "output": _rows(whole["output"], rows),
                "grad:input": _rows(whole["grad:input"], [image]),
            }
            if fault := _difference(among, own, f"when image {image} is alone"):
                return fault
        return ""

    _check(case, bench, find_fault, "batch")


def _alone(subject: Subject, image: int) -> tuple[list[int], Gradients]:
    operator, case = subject.expectation.operator, subject.expectation.case
    tensors, rows = operator.image_alone(case, subject.leaves(), image)
    leaves = {name: tensor.detach().requires_grad_(tensor.requires_grad) for name, tensor in tensors.items()}
    output = subject(leaves)
    (gradient,) = torch.autograd.grad(output, [leaves["input"]], subject.cotangent[rows])
    return rows, {"output": output.detach(), "grad:input": gradient}


def _rows(tensor: torch.Tensor | None, rows: list[int]) -> torch.Tensor | None:
    return None if tensor is None else tensor[rows]


def _difference(before: Gradients, after: Gradients, when: str) -> str:
    for name, value in before.items():
        other = after[name]
        if value is None or other is None:
            if value is not other:
                return f"{name}: there is one only sometimes, {when}"
        elif not torch.equal(value, other):
            return f"{name}: differs by up to {float((value - other).abs().max()):.2g} {when}"
    return ""


def _check(case: Case, bench: Bench, find_fault: Callable[[Subject], str], quantity: str) -> None:
    if faults := bench.check("determinism", case, find_fault, quantity=quantity):
        pytest.fail("\n".join(faults), pytrace=False)
