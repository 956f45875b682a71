"""Does the code that torch.compile's default backend generates give what it should?"""

import pytest

from cases.case import Case
from cases.operator import all_operators
from cases.sweep import is_costly
from conformance.bench import Bench
from conformance.expectation import Expectation, Gradients
from conformance.subject import Subject
from conformance.test_compile import compiled


def asks(case: Case) -> bool:
    """Of one case of every function, outside of smoke, because a graph takes up to 20 seconds."""
    return is_costly(case) and not all_operators()[case.operator].is_module


def test_inductor(case: Case, bench: Bench) -> None:
    """Output and gradients; generated code may add up in another order than eager execution does."""

    def compute(subject: Subject) -> Gradients:
        with compiled(subject, "inductor") as (function, _):
            return subject.forward_and_backward(function)

    expect = Expectation.output_and_gradients
    if faults := bench.compare("compile_inductor", case, compute, expect, together="compile:inductor"):
        pytest.fail("\n".join(faults), pytrace=False)
