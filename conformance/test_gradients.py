"""Is the gradient of every input right, under a grad_output that is not constant?"""

import pytest

from cases.case import Case
from cases.operator import all_operators
from conformance.bench import Bench
from conformance.expectation import Expectation
from conformance.subject import Subject


def asks(case: Case) -> bool:
    """Of every operator that is a function; modules have a question of their own."""
    return not all_operators()[case.operator].is_module


def test_gradients(case: Case, bench: Bench) -> None:
    """The first-order gradients, against autograd through the float64 oracle."""
    if faults := bench.compare("gradients", case, Subject.gradients, Expectation.gradients):
        pytest.fail("\n".join(faults), pytrace=False)
