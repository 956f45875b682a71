"""The mmcv provider: mmcv's own classes, from an installation or a narrow build, and nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from conformance.providers.mmcv import Mmcv
from kernels.build import cache_dir

LOAD = "from conformance.providers.mmcv import Mmcv; print(Mmcv().load())"


def site_packages() -> set[str]:
    folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    return {name for folder in folders for name in os.listdir(folder)}


@pytest.fixture(scope="module")
def mmcv() -> Mmcv:
    """The provider, loaded; on a machine with an empty cache this installs and builds."""
    before = site_packages()
    provider = Mmcv()
    provider.load()
    assert site_packages() == before
    return provider


@pytest.fixture
def narrow(mmcv: Mmcv) -> Mmcv:
    if not mmcv.load().endswith("(narrow build)"):
        pytest.skip("an installed mmcv with compiled operators is in use")
    return mmcv


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


def published_case(provider: Mmcv) -> Tensor:
    """The gradient of conv_offset.bias in https://github.com/pytorch/vision/issues/6885."""
    pack = provider.modulated_deform_conv2d_pack(
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
    return torch.autograd.grad(output.sum(), parameters["conv_offset.bias"])[0]


def test_published_numbers(mmcv: Mmcv) -> None:
    expected = [-3, -1.5, -3, -1.5, -3, -1.5, -3, -1.5, 4.5, 4.5, 4.5, 4.5]
    assert published_case(mmcv).tolist() == expected


@pytest.mark.parametrize("modulated", [False, True])
def test_groups_and_geometry_reach_mmcv(mmcv: Mmcv, modulated: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 4, 9, 8, generator=generator, dtype=torch.float64)
    weight = torch.randn(6, 2, 3, 2, generator=generator, dtype=torch.float64)
    geometry: Any = {"stride": (2, 1), "padding": (1, 2), "dilation": (1, 2)}
    expected = F.conv2d(x, weight, groups=2, **geometry)
    size = (expected.shape[2], expected.shape[3])
    got = mmcv.deform_conv2d(
        x,
        torch.zeros(2, 2 * 2 * 6, *size, dtype=torch.float64),
        weight,
        None,
        mask=torch.ones(2, 2 * 6, *size, dtype=torch.float64) if modulated else None,
        **geometry,
    )
    torch.testing.assert_close(got, expected)


def test_offset_groups_split_the_input_channels(mmcv: Mmcv) -> None:
    x = torch.arange(32, dtype=torch.float64).reshape(1, 2, 4, 4)
    offset = torch.zeros(1, 4, 4, 4, dtype=torch.float64)
    offset[:, 2] = 1.0  # the second group looks one row down
    got = mmcv.deform_conv2d(
        x,
        offset,
        torch.eye(2, dtype=torch.float64)[:, :, None, None],
        None,
        stride=(1, 1),
        padding=(0, 0),
        dilation=(1, 1),
        mask=None,
    )
    expected = torch.stack([x[:, 0], F.pad(x[:, 1, 1:], (0, 0, 0, 1))], 1)
    assert torch.equal(got, expected)


def test_v1_refuses_a_bias(mmcv: Mmcv) -> None:
    x, weight, bias = torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 1, 1), torch.zeros(1)
    with pytest.raises(NotImplementedError, match="takes no bias"):
        mmcv.deform_conv2d(
            x,
            torch.zeros(1, 2, 2, 2),
            weight,
            bias,
            stride=(1, 1),
            padding=(0, 0),
            dilation=(1, 1),
            mask=None,
        )


@pytest.mark.parametrize("sampling_ratio", [0, 1, 3])
@pytest.mark.parametrize("aligned", [False, True])
def test_roi_align_of_a_ramp_gives_the_bin_centres(mmcv: Mmcv, aligned: bool, sampling_ratio: int) -> None:
    ramp = torch.arange(8.0).expand(1, 1, 8, 8).contiguous()
    output = mmcv.roi_align(
        ramp,
        torch.tensor([[0.0, 2.0, 2.0, 10.0, 10.0]]),
        output_size=(1, 2),
        spatial_scale=0.5,
        sampling_ratio=sampling_ratio,
        aligned=aligned,
    )
    torch.testing.assert_close(output.flatten(), torch.tensor([2.0, 4.0]) - 0.5 * aligned)


def test_roi_align_max_of_a_ramp_gives_the_last_sample(mmcv: Mmcv) -> None:
    arguments: dict[str, Any] = {"spatial_scale": 0.5, "sampling_ratio": 2, "aligned": True}
    output = mmcv.roi_align_max(
        torch.arange(8.0).expand(1, 1, 8, 8).contiguous(),
        torch.tensor([[0.0, 2.0, 2.0, 10.0, 10.0]]),
        output_size=(1, 2),
        **arguments,
    )
    # Bins of two pixels from 0.5 on, the second sample at three quarters of each.
    torch.testing.assert_close(output.flatten(), torch.tensor([2.0, 4.0]))


def test_pack_parameters(mmcv: Mmcv) -> None:
    pack = mmcv.deform_conv2d_pack(
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


def test_an_operator_that_was_not_built_says_so(narrow: Mmcv) -> None:
    from mmcv.ops import nms

    boxes = torch.tensor([[0.0, 0.0, 1.0, 1.0]])
    with pytest.raises(NotImplementedError, match="mmcv operator nms is not in this narrow build of mmcv"):
        nms(boxes, torch.ones(1), 0.5)


def test_packages_come_last_and_from_the_cache(narrow: Mmcv) -> None:
    import mmcv
    import numpy

    assert Path(sys.path[-1]).parent == cache_dir()
    assert Path(mmcv.__file__).is_relative_to(cache_dir())
    assert not Path(numpy.__file__).is_relative_to(cache_dir())


def test_the_second_load_uses_the_cache(narrow: Mmcv) -> None:
    answer = run(LOAD, PIP_NO_INDEX="1")
    assert answer.stdout.strip() == narrow.load()
    assert "gradparity:" not in answer.stderr


def test_without_network_there_is_one_clear_sentence(narrow: Mmcv, tmp_path: Path) -> None:
    answer = run(LOAD, PIP_NO_INDEX="1", GRADPARITY_CACHE=str(tmp_path))
    last = answer.stderr.strip().splitlines()[-1]
    assert "UnavailableError: mmcv is not installed, and pip can't fetch its sources: ERROR:" in last
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


@pytest.mark.parametrize("compiled", [True, False])
def test_an_installed_mmcv_is_used_as_it_is(tmp_path: Path, compiled: bool) -> None:
    (tmp_path / "mmcv/ops").mkdir(parents=True)
    (tmp_path / "mmcv/__init__.py").write_text("__version__ = '9.9'")
    (tmp_path / "mmcv/ops/__init__.py").touch()
    if compiled:
        (tmp_path / "mmcv/_ext.py").touch()
    answer = run(LOAD, PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
    if compiled:
        assert answer.stdout.strip() == "9.9"
    else:
        assert "the installed mmcv 9.9 has neither compiled operators nor sources" in answer.stderr


def test_importing_the_provider_imports_no_mmcv() -> None:
    answer = run("import sys, conformance.providers.mmcv; print('mmcv' in sys.modules, 'cv2' in sys.modules)")
    assert answer.stdout.split() == ["False", "False"], answer.stderr
