"""Does torch.export make a program of the operator that gives the same output?"""

import warnings

import pytest
import torch
from torch import Tensor, nn

from cases.case import Case
from cases.operator import all_operators
from cases.sweep import is_one_of_few
from conformance.bench import Bench
from conformance.expectation import Expectation, Gradients
from conformance.subject import Subject


class _Layer(nn.Module):
    """The operator as the module that torch.export wants."""

    def __init__(self, subject: Subject, names: list[str]) -> None:
        super().__init__()
        self._subject, self._names = subject, names

    def forward(self, *tensors: Tensor) -> Tensor:
        """The operator on the tensors in the order of the names."""
        return self._subject(dict(zip(self._names, tensors, strict=True)))


def asks(case: Case) -> bool:
    """Of a few small cases of every operator, the layers included."""
    return is_one_of_few(case)


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
def test_export(case: Case, bench: Bench, strict: bool) -> None:
    """The output of the exported program; strict is with Dynamo, the other by tracing Python."""

    def compute(subject: Subject) -> Gradients:
        warnings.simplefilter("ignore")
        tensors = {name: leaf.detach() for name, leaf in subject.leaves().items()}
        layer: nn.Module = _Layer(subject, list(tensors))
        given = tuple(tensors.values())
        if all_operators()[case.operator].is_module:
            layer, given = subject.loaded_module(), (tensors["input"],)
        torch._dynamo.reset()
        program = torch.export.export(layer, given, strict=strict)
        return {"output": program.module()(*given).detach()}

    quantity = "export:strict" if strict else "export"
    if faults := bench.compare("export", case, compute, Expectation.output, together=quantity):
        pytest.fail("\n".join(faults), pytrace=False)
