"""Is the output right?"""

import pytest

from cases.case import Case
from cases.operator import all_operators
from conformance.bench import Bench
from conformance.expectation import Expectation
from conformance.subject import Subject


def asks(case: Case) -> bool:
    """Of every operator that is a function; modules have a question of their own."""
    return not all_operators()[case.operator].is_module


def test_output(case: Case, bench: Bench) -> None:
    """The forward result, against the float64 oracle."""
    if faults := bench.compare("output", case, Subject.output, Expectation.output):
        pytest.fail("\n".join(faults), pytrace=False)
