"""Are a layer's output and gradients right, those of its conv_offset included?"""

import pytest

from cases.case import Case
from cases.operator import all_operators
from conformance.bench import Bench
from conformance.expectation import Expectation
from conformance.subject import Subject


def asks(case: Case) -> bool:
    """Of the layers that predict their own offsets."""
    return all_operators()[case.operator].is_module


def test_module_output(case: Case, bench: Bench) -> None:
    """The layer's output."""
    if faults := bench.compare("modules", case, Subject.output, Expectation.output):
        pytest.fail("\n".join(faults), pytrace=False)


def test_module_gradients(case: Case, bench: Bench) -> None:
    """The gradients of the layer's input and of each parameter."""
    if faults := bench.compare("modules", case, Subject.gradients, Expectation.gradients):
        pytest.fail("\n".join(faults), pytrace=False)
