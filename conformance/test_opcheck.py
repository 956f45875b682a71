"""Is each custom operator behind a call registered as torch.library wants it?"""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cases.case import Case
from cases.operator import all_operators
from cases.sweep import is_one_of_few
from conformance.bench import Bench
from conformance.subject import MissingOperatorError, Subject

OF_TORCH = ("aten", "prim", "prims")

Call = tuple[tuple[Any, ...], dict[str, Any]]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the first call of each operator that isn't torch's own, with copies of its arguments."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: dict[Any, Call] = {}
        self.keeps_graph = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace not in OF_TORCH and func not in self.calls:
            self.calls[func] = torch.utils._pytree.tree_map_only(Tensor, self._copy, (args, kwargs))
        return func(*args, **kwargs)

    def _copy(self, tensor: Tensor) -> Tensor:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad and self.keeps_graph)


def _is_twice_differentiable(subject: Subject) -> bool:
    try:
        subject.double_backward()
    except Exception:
        return False
    return True


def asks(case: Case) -> bool:
    """Of one or two small cases of every function."""
    return is_one_of_few(case) and not all_operators()[case.operator].is_module


def test_opcheck(case: Case, bench: Bench) -> None:
    """torch.library.opcheck in full, of every operator that forward, backward and double backward dispatch to."""
    if faults := bench.check("opcheck", case, find_fault):
        pytest.fail("\n".join(faults), pytrace=False)


def find_fault(subject: Subject) -> str:
    """What torch.library.opcheck finds. Raises MissingOperatorError when there is no operator to check."""
    warnings.simplefilter("ignore")
    leaves, again = subject.leaves(), _is_twice_differentiable(subject)
    with _Recorder() as recorder:
        output = subject(leaves)
        # A backward operator that refuses to be differentiated is checked without a graph; another question books it.
        recorder.keeps_graph = again
        subject.pull_back(output, leaves)
        # Third order is nobody's promise.
        recorder.keeps_graph = False
        if again:
            subject.double_backward()
    if not recorder.calls:
        raise MissingOperatorError("it calls no operator that torch.library knows of")
    return "; ".join(
        f"{operator} {check}: {str(outcome).strip().splitlines()[0]}"
        for operator, (args, kwargs) in recorder.calls.items()
        for check, outcome in torch.library.opcheck(operator, args, kwargs, raise_exception=False).items()
        if outcome != "SUCCESS"
    )
