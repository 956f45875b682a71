"""Are the second-order gradients right?"""

import pytest

from cases.case import Case
from cases.dtypes import DTYPES
from cases.operator import all_operators
from conformance.bench import Bench
from conformance.expectation import Expectation
from conformance.subject import Subject


def asks(case: Case) -> bool:
    """Of functions in the dtypes whose first-order gradients are not rounded on the way."""
    return not all_operators()[case.operator].is_module and DTYPES[case.dtype].itemsize > 2


def test_double_backward(case: Case, bench: Bench) -> None:
    """Double backward by every input and by grad_output, against the float64 oracle."""
    if faults := bench.compare("double_backward", case, Subject.double_backward, Expectation.double_backward):
        pytest.fail("\n".join(faults), pytrace=False)
