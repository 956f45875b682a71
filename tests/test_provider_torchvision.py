"""The torchvision provider: the installed torchvision's own functions and classes, or a clear refusal."""

from __future__ import annotations

import importlib
import subprocess
import sys
from types import ModuleType
from typing import Any, NoReturn

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

from conformance.providers.torchvision import Torchvision


@pytest.fixture
def torchvision() -> Torchvision:
    return Torchvision()


def test_version(torchvision: Torchvision) -> None:
    assert torchvision.load() == importlib.import_module("torchvision").__version__


@pytest.mark.parametrize("modulated", [False, True])
def test_geometry_reaches_torchvision(torchvision: Torchvision, modulated: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 4, 9, 8, generator=generator, dtype=torch.float64)
    weight = torch.randn(6, 2, 3, 2, generator=generator, dtype=torch.float64)
    bias = torch.randn(6, generator=generator, dtype=torch.float64)
    geometry: Any = {"stride": (2, 1), "padding": (1, 2), "dilation": (1, 2)}
    expected = F.conv2d(x, weight, bias, groups=2, **geometry)
    size = (expected.shape[2], expected.shape[3])
    got = torchvision.deform_conv2d(
        x,
        torch.zeros(2, 2 * 2 * 6, *size, dtype=torch.float64),
        weight,
        bias,
        mask=torch.ones(2, 2 * 6, *size, dtype=torch.float64) if modulated else None,
        **geometry,
    )
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("sampling_ratio", [0, 1, 3])
@pytest.mark.parametrize("aligned", [False, True])
def test_roi_align_of_a_ramp_gives_the_bin_centres(
    torchvision: Torchvision, aligned: bool, sampling_ratio: int
) -> None:
    ramp = torch.arange(8.0).expand(1, 1, 8, 8)
    output = torchvision.roi_align(
        ramp,
        torch.tensor([[0.0, 2.0, 2.0, 10.0, 10.0]]),
        output_size=(1, 2),
        spatial_scale=0.5,
        sampling_ratio=sampling_ratio,
        aligned=aligned,
    )
    torch.testing.assert_close(output.flatten(), torch.tensor([2.0, 4.0]) - 0.5 * aligned)


def test_the_other_roi_operators_reach_torchvision(torchvision: Torchvision) -> None:
    image = torch.arange(12.0 * 8 * 8).reshape(1, 12, 8, 8)
    rois = torch.tensor([[0.0, 2.0, 2.0, 10.0, 10.0]])
    arguments: dict[str, Any] = {"output_size": (2, 3), "spatial_scale": 0.5}
    plane = image[0, 0, 1:6, 1:6]
    assert torchvision.roi_pool(image, rois, **arguments)[0, 0, 1, 2] == plane.max()
    pooled = torchvision.ps_roi_pool(image, rois, **arguments)
    assert pooled.shape == (1, 2, 2, 3)
    # Output channel 1, bin (0, 0) is of input channel 6: the first rows and columns of the box from 1 to 5.
    torch.testing.assert_close(pooled[0, 1, 0, 0], image[0, 6, 1:3, 1:3].mean())
    for ratio in (0, 2):
        aligned = torchvision.ps_roi_align(image, rois, sampling_ratio=ratio, **arguments)
        expected = torchvision.roi_align(image, rois, sampling_ratio=ratio, aligned=True, **arguments)
        torch.testing.assert_close(aligned[0, 1, 1, 2], expected[0, 11, 1, 2])


def test_published_numbers(torchvision: Torchvision) -> None:
    """conv_offset.bias.grad of https://github.com/pytorch/vision/issues/6885, in either convention."""
    pack = torchvision.modulated_deform_conv2d_pack(
        1,
        1,
        kernel_size=(2, 2),
        stride=(1, 1),
        padding=(1, 1),
        dilation=(1, 1),
        groups=1,
        offset_groups=1,
        bias=True,
        dtype=torch.float64,
        device=torch.device("cpu"),
    )
    parameters = {name: torch.zeros_like(value) for name, value in pack.named_parameters()}
    parameters["weight"] += 1
    parameters = {name: value.requires_grad_() for name, value in parameters.items()}
    x = torch.tensor([[1.0, 2.0, 3.0]] * 3, dtype=torch.float64)[None, None]
    output = functional_call(pack, parameters, (x,))
    (grad,) = torch.autograd.grad(output.sum(), parameters["conv_offset.bias"])
    closed = [0, 0, 0, -1.5, -3, 0, -3, -1.5, 4.5, 4.5, 4.5, 4.5]
    open_ = [-3, -1.5, -3, -1.5, -3, -1.5, -3, -1.5, 4.5, 4.5, 4.5, 4.5]
    assert grad.tolist() in (closed, open_)


def test_pack_parameters(torchvision: Torchvision) -> None:
    pack = torchvision.deform_conv2d_pack(
        2,
        4,
        kernel_size=(3, 1),
        stride=(1, 1),
        padding=(1, 0),
        dilation=(1, 1),
        groups=2,
        offset_groups=2,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    shapes = {name: tuple(value.shape) for name, value in pack.named_parameters()}
    assert shapes == {
        "weight": (4, 1, 3, 1),
        "conv_offset.weight": (12, 2, 3, 1),
        "conv_offset.bias": (12,),
    }


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (ModuleNotFoundError("No module", name="torchvision"), "torchvision is not installed"),
        (ImportError("cannot import name 'x'"), "does not import: cannot import name 'x'"),
        (RuntimeError("operator torchvision::nms does not exist"), "does not fit the installed torch"),
    ],
)
def test_a_failing_import_is_unavailable(
    torchvision: Torchvision, monkeypatch: pytest.MonkeyPatch, error: Exception, sentence: str
) -> None:
    def fail(name: str) -> NoReturn:
        raise error

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(ImportError, match=sentence):
        torchvision.load()


def test_missing_operators_are_unavailable(torchvision: Torchvision, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = ModuleType("torchvision")
    empty.__version__ = "0.1"  # type: ignore[attr-defined]
    monkeypatch.setattr(importlib, "import_module", lambda name: empty)
    monkeypatch.setattr(torch.ops, "torchvision", object())
    with pytest.raises(ImportError, match="no compiled operators"):
        torchvision.load()


def test_importing_the_provider_imports_no_torchvision() -> None:
    code = "import sys, conformance.providers.torchvision; print('torchvision' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert answer.stdout.strip() == "False", answer.stderr
