"""Do finite differences agree with the gradients, of first and of second order?

PyTorch's own gradcheck and gradgradcheck: evidence that shares nothing with the oracle.
"""

import pytest
import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from cases.case import Case
from cases.operator import all_operators
from conformance.bench import Bench, expectation_of
from conformance.subject import Subject

# A failing fast check is told in full by the slow one, whose cost grows with the square of this.
LARGEST_INPUT = 600


def asks(case: Case) -> bool:
    """Of small float64 cases that keep clear of every kink, so that finite differences exist."""
    operator = all_operators()[case.operator]
    if operator.is_module or case.dtype != "float64" or not operator.smooth(case):
        return False
    sizes = [tensor.numel() for tensor in expectation_of(case).inputs.values()]
    return min(sizes) > 0 and sum(sizes) <= LARGEST_INPUT


def test_gradcheck(case: Case, bench: Bench) -> None:
    """torch.autograd.gradcheck."""
    if faults := bench.check("gradcheck", case, lambda subject: _fault(torch.autograd.gradcheck, subject)):
        pytest.fail("\n".join(faults), pytrace=False)


def test_gradgradcheck(case: Case, bench: Bench) -> None:
    """torch.autograd.gradgradcheck."""

    def find_fault(subject: Subject) -> str:
        # A provider that refuses second order says so here, in its own words.
        subject.double_backward()
        return _fault(torch.autograd.gradgradcheck, subject)

    if faults := bench.check("gradgradcheck", case, find_fault):
        pytest.fail("\n".join(faults), pytrace=False)


def _fault(check: object, subject: Subject) -> str:
    leaves = subject.leaves()
    names = list(leaves)

    def function(*tensors: Tensor) -> Tensor:
        return subject(subject.expectation.operator.pin(dict(zip(names, tensors, strict=True))))

    try:
        check(function, tuple(leaves.values()), fast_mode=True)  # type: ignore[operator]
    except GradcheckError as error:
        return str(error).strip().split("\n")[0]
    return ""
