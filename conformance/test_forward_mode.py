"""Is the forward-mode derivative right?"""

import pytest
from torch.autograd import forward_ad

from cases.case import Case
from cases.operator import Tensors
from conformance.bench import Bench
from conformance.expectation import Expectation, Gradients
from conformance.subject import Subject
from conformance.test_gradcheck import asks

__all__ = ["asks"]


def test_forward_mode(case: Case, bench: Bench) -> None:
    """The tangent of the output by dual numbers, against the float64 oracle, whose double backward knows it."""
    if faults := bench.compare("forward_mode", case, jvp, Expectation.forward_mode):
        pytest.fail("\n".join(faults), pytrace=False)


def jvp(subject: Subject) -> Gradients:
    """The output's tangent; None when it has lost it."""
    values, others = subject.split()
    with forward_ad.dual_level():
        duals: Tensors = {
            name: forward_ad.make_dual(values[name], tangent)  # type: ignore[no-untyped-call]
            for name, tangent in subject.tangents.items()
        }
        output = subject({**duals, **others})
        return {"jvp": forward_ad.unpack_dual(output).tangent}  # type: ignore[no-untyped-call]
