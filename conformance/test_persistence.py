"""Does a layer survive deepcopy, pickle and its state dict?"""

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

from cases.case import Case
from cases.operator import all_operators
from cases.sweep import is_typical
from conformance.bench import Bench
from conformance.expectation import Expectation, Gradients
from conformance.subject import Subject


def asks(case: Case) -> bool:
    """Of a few cases of every layer."""
    return is_typical(case) and all_operators()[case.operator].is_module


def deepcopy(layer: nn.Module, subject: Subject) -> nn.Module:
    """copy.deepcopy."""
    return copy.deepcopy(layer)


def pickled(layer: nn.Module, subject: Subject) -> nn.Module:
    """pickle, there and back."""
    again: nn.Module = pickle.loads(pickle.dumps(layer))
    return again


def state_dict(layer: nn.Module, subject: Subject) -> nn.Module:
    """torch.save of the state dict, loaded into a new layer; weights_only, as checkpoints of others should be."""
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    again = subject.new_module()
    again.load_state_dict(torch.load(file, weights_only=True), strict=True)
    return again


@pytest.mark.parametrize("keep", [deepcopy, pickled, state_dict], ids=lambda keep: keep.__name__)
def test_persistence(case: Case, bench: Bench, keep: Callable[[nn.Module, Subject], nn.Module]) -> None:
    """The output of the layer that comes back, after the first one is overwritten."""

    def compute(subject: Subject) -> Gradients:
        layer = subject.loaded_module()
        again = keep(layer, subject)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.fill_(torch.nan)
            return {"output": again(subject.leaves()["input"].detach())}

    if faults := bench.compare("persistence", case, compute, Expectation.output, together=keep.__name__):
        pytest.fail("\n".join(faults), pytrace=False)
