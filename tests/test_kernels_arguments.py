"""Every wrong argument gets one sentence that names it, from the function and the raw operator alike."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kernels import (
    DeformConv2d,
    DeformConv2dPack,
    ModulatedDeformConv2dPack,
    RoIAlign,
    composite,
    deform_conv2d,
    roi_align,
)

GOOD: dict[str, Any] = {
    "input": torch.zeros(2, 6, 5, 4),
    "offset": torch.zeros(2, 3 * 2 * 6, 4, 4),
    "weight": torch.zeros(4, 3, 2, 3),
    "bias": torch.zeros(4),
    "padding": (0, 1),
    "mask": torch.zeros(2, 3 * 6, 4, 4),
}

WRONG_DEFORM_CONV2D: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"input": [1.0]}, TypeError, "input must be a tensor, got list"),
    (
        {"input": GOOD["input"].to_sparse()},
        TypeError,
        "input must be a strided tensor, got layout torch.sparse_coo",
    ),
    (
        {"input": torch.zeros(6, 5, 4)},
        ValueError,
        "input must have 4 dimensions (N, C, H, W), got shape (6, 5, 4)",
    ),
    (
        {"input": torch.zeros(2, 6, 5, 4, dtype=torch.int64)},
        TypeError,
        "input must be float64, float32, float16",
    ),
    (
        {"input": torch.zeros(2, 6, 5, 4, dtype=torch.complex64)},
        TypeError,
        "input must be float64, float32, float16",
    ),
    ({"input": torch.zeros(2, 0, 5, 4)}, ValueError, "input must have C, H and W of at least 1"),
    ({"input": torch.zeros(2, 6, 0, 4)}, ValueError, "input must have C, H and W of at least 1"),
    (
        {"input": torch.zeros(2, 4, 5, 4)},
        ValueError,
        "weight's dimension 1 (C/groups) must divide the 4 channels",
    ),
    (
        {"input": torch.zeros(3, 6, 5, 4)},
        ValueError,
        "offset must have shape (3, 36, 4, 4), got (2, 36, 4, 4)",
    ),
    ({"offset": None}, TypeError, "offset must be a tensor, got NoneType"),
    (
        {"offset": torch.zeros(2, 36, 4, 4).double()},
        TypeError,
        "offset must have input's dtype torch.float32, got",
    ),
    (
        {"offset": torch.zeros(2, 36, 4, 4, device="meta")},
        ValueError,
        "offset must be on input's device cpu, got",
    ),
    (
        {"offset": torch.zeros(2, 36, 4)},
        ValueError,
        "offset must have 4 dimensions (N, 2*OG*kh*kw, oh, ow), got",
    ),
    (
        {"offset": torch.zeros(2, 35, 4, 4)},
        ValueError,
        "offset's dimension 1 must be 2*OG*2*3 with OG a divisor",
    ),
    (
        {"offset": torch.zeros(2, 0, 4, 4)},
        ValueError,
        "offset's dimension 1 must be 2*OG*2*3 with OG a divisor",
    ),
    ({"offset": torch.zeros(2, 48, 4, 4)}, ValueError, "of the 6 channels of input, got 48"),
    (
        {"offset": torch.zeros(2, 36, 4, 5)},
        ValueError,
        "offset must have shape (2, 36, 4, 4), got (2, 36, 4, 5)",
    ),
    (
        {"weight": torch.zeros(4, 3, 2)},
        ValueError,
        "weight must have 4 dimensions (O, C/groups, kh, kw), got",
    ),
    (
        {"weight": torch.zeros(4, 4, 2, 3)},
        ValueError,
        "weight's dimension 1 (C/groups) must divide the 6 channels",
    ),
    ({"weight": torch.zeros(4, 0, 2, 3)}, ValueError, "weight must not have an empty dimension"),
    (
        {"weight": torch.zeros(5, 3, 2, 3)},
        ValueError,
        "weight's dimension 0 (O) must be a multiple of the 2 groups",
    ),
    ({"weight": torch.zeros(4, 3, 6, 3)}, ValueError, "input of 5 x 4 is too small for weight's kernel"),
    (
        {"weight": torch.zeros(4, 3, 2, 3).half()},
        TypeError,
        "weight must have input's dtype torch.float32, got",
    ),
    ({"bias": torch.zeros(3)}, ValueError, "bias must have weight's 4 output channels, got shape"),
    ({"bias": torch.zeros(4, 1)}, ValueError, "bias must have 1 dimension (O,), got shape (4, 1)"),
    (
        {"bias": torch.zeros(4).double()},
        TypeError,
        "bias must have input's dtype torch.float32, got torch.float64",
    ),
    ({"mask": torch.zeros(2, 6, 4, 4)}, ValueError, "mask must have shape (2, 18, 4, 4), got (2, 6, 4, 4)"),
    ({"mask": torch.zeros(18, 4, 4)}, ValueError, "mask must have 4 dimensions (N, OG*kh*kw, oh, ow), got"),
    (
        {"mask": torch.zeros(2, 18, 4, 4).double()},
        TypeError,
        "mask must have input's dtype torch.float32, got",
    ),
    ({"stride": 0}, ValueError, "stride must be at least 1, got 0"),
    ({"stride": (1, 2, 3)}, TypeError, "stride must be an int or a pair of ints, got (1, 2, 3)"),
    ({"stride": 1.5}, TypeError, "stride must be an int or a pair of ints, got 1.5"),
    ({"padding": (-1, 0)}, ValueError, "padding must be at least 0, got (-1, 0)"),
    ({"padding": 2**40}, ValueError, "padding must be below 2**31, got"),
    ({"padding": "same"}, TypeError, "padding must be an int or a pair of ints, got 'same'"),
    ({"dilation": (1, 0)}, ValueError, "dilation must be at least 1, got (1, 0)"),
    ({"boundary": "torchvision"}, ValueError, 'boundary must be "open" or "closed", got \'torchvision\''),
    ({"boundary": None}, ValueError, 'boundary must be "open" or "closed", got None'),
]


@pytest.mark.parametrize("function", [deform_conv2d, composite.deform_conv2d])
@pytest.mark.parametrize(("change", "error", "sentence"), WRONG_DEFORM_CONV2D)
def test_deform_conv2d(
    function: Callable[..., Tensor], change: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    function(**GOOD)
    with pytest.raises(error, match=re.escape(sentence)) as caught:
        function(**{**GOOD, **change})
    assert "\n" not in str(caught.value)


IMAGE = torch.zeros(2, 3, 5, 4)
BOXES = torch.tensor([[1, 0.0, 0.0, 2.0, 2.0]])

WRONG_ROI_ALIGN: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"input": torch.zeros(3, 5, 4)},
        ValueError,
        "input must have 4 dimensions (N, C, H, W), got shape (3, 5, 4)",
    ),
    ({"input": torch.zeros(2, 3, 5, 0)}, ValueError, "input must have C, H and W of at least 1"),
    (
        {"boxes": torch.zeros(1, 4)},
        ValueError,
        "boxes must have shape (K, 5): batch index, x1, y1, x2, y2; got (1, 4)",
    ),
    ({"boxes": torch.zeros(5)}, ValueError, "boxes must have 2 dimensions (K, 5), got shape (5,)"),
    ({"boxes": BOXES.double()}, TypeError, "boxes must have input's dtype torch.float32, got torch.float64"),
    (
        {"boxes": BOXES + torch.tensor([1.0, 0, 0, 0, 0])},
        ValueError,
        "batch indices that are integers from 0 to 1, got 2",
    ),
    (
        {"boxes": BOXES - torch.tensor([2.0, 0, 0, 0, 0])},
        ValueError,
        "batch indices that are integers from 0 to 1, got -1",
    ),
    (
        {"boxes": BOXES - torch.tensor([0.5, 0, 0, 0, 0])},
        ValueError,
        "batch indices that are integers from 0 to 1, got 0.5",
    ),
    (
        {"boxes": BOXES * torch.tensor([float("nan"), 0, 0, 0, 0])},
        ValueError,
        "batch indices that are integers",
    ),
    ({"boxes": BOXES * torch.tensor([1e30, 0, 0, 0, 0])}, ValueError, "batch indices that are integers"),
    (
        {"boxes": [torch.zeros(1, 4)]},
        ValueError,
        "boxes must be a list with one tensor for each of the 2 images, got 1",
    ),
    (
        {"boxes": [torch.zeros(1, 4), torch.zeros(1, 5)]},
        ValueError,
        "boxes[1] must have shape (L, 4): x1, y1, x2, y2; got",
    ),
    ({"boxes": [torch.zeros(1, 4), 3]}, TypeError, "boxes[1] must be a tensor, got int"),
    ({"boxes": None}, TypeError, "boxes must be a tensor, got NoneType"),
    ({"output_size": 0}, ValueError, "output_size must be at least 1, got 0"),
    ({"output_size": (7, 7.0)}, TypeError, "output_size must be an int or a pair of ints, got (7, 7.0)"),
    ({"spatial_scale": 0.0}, ValueError, "spatial_scale must be positive and finite, got 0.0"),
    ({"spatial_scale": float("nan")}, ValueError, "spatial_scale must be positive and finite, got nan"),
    (
        {"spatial_scale": 1e39},
        ValueError,
        "spatial_scale must be positive and finite in float32 for an input of",
    ),
    (
        {"spatial_scale": 1e-50},
        ValueError,
        "spatial_scale must be positive and finite in float32 for an input",
    ),
    ({"spatial_scale": 10**400}, ValueError, "spatial_scale must be positive and finite, got 1000000"),
    ({"sampling_ratio": -(2**70)}, ValueError, "sampling_ratio must be at least -2**63, got -118"),
    ({"spatial_scale": "1"}, TypeError, "spatial_scale must be a number, got '1'"),
    ({"sampling_ratio": 2.0}, TypeError, "sampling_ratio must be an int, got 2.0"),
    ({"sampling_ratio": 1025}, ValueError, "sampling_ratio must be at most 1024, got"),
    ({"aligned": 1}, TypeError, "aligned must be a bool, got 1"),
]


@pytest.mark.parametrize("function", [roi_align, composite.roi_align])
@pytest.mark.parametrize(("change", "error", "sentence"), WRONG_ROI_ALIGN)
def test_roi_align(
    function: Callable[..., Tensor], change: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    good = {"input": IMAGE, "boxes": BOXES, "output_size": 2}
    function(**good)
    with pytest.raises(error, match=re.escape(sentence)) as caught:
        function(**{**good, **change})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "error", "sentence"),
    [
        (lambda: DeformConv2d(3, 4, 3, groups=2), ValueError, "in_channels must be a multiple of groups 2"),
        (lambda: DeformConv2d(4, 3, 3, groups=2), ValueError, "out_channels must be a multiple of groups 2"),
        (lambda: DeformConv2d(4, 4, 0), ValueError, "kernel_size must be at least 1, got 0"),
        (lambda: DeformConv2d(4, 4, 3, boundary="half"), ValueError, 'boundary must be "open" or "closed"'),
        (lambda: DeformConv2dPack(4, 4, 3, bias=True), ValueError, "bias must be False"),
        (lambda: DeformConv2dPack(4, 4, 3, deform_groups=3), ValueError, "deform_groups must divide the 4"),
        (lambda: ModulatedDeformConv2dPack(0, 4, 3), ValueError, "in_channels must be at least 1, got 0"),
        (lambda: ModulatedDeformConv2dPack(4, True, 3), TypeError, "out_channels must be an int, got True"),
        (lambda: RoIAlign(0, 1.0, 2)(IMAGE, BOXES), ValueError, "output_size must be at least 1, got 0"),
        (lambda: ModulatedDeformConv2dPack(3, 4, 3)(IMAGE[0]), ValueError, "input must have 4 dimensions"),
        (
            lambda: ModulatedDeformConv2dPack(4, 4, 3)(IMAGE),
            ValueError,
            "input must have the layer's 4 channels",
        ),
        (lambda: DeformConv2dPack(3, 4, 7)(IMAGE), ValueError, "input of 5 x 4 is too small for the layer"),
        (
            lambda: DeformConv2dPack(3, 4, 3)(IMAGE.double()),
            TypeError,
            "input must have the layer's dtype torch.float32",
        ),
        (lambda: DeformConv2d(4, 4, 3, bias="no"), TypeError, "bias must be a bool, got 'no'"),  # type: ignore[arg-type]
        (lambda: DeformConv2d(4, 4, 3, dtype=torch.int32), TypeError, "dtype must be float64, float32"),
        (lambda: ModulatedDeformConv2dPack(4, 4, 3, bias="yes"), TypeError, "bias must be a bool, got 'yes'"),
    ],
)
def test_modules(make: Callable[[], nn.Module], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=re.escape(sentence)):
        make()


def test_a_wrong_tensor_is_not_printed_whole() -> None:
    image = torch.zeros(1, 1, 4, 4)
    with pytest.raises(TypeError, match=r"sampling_ratio must be an int, got a tensor of shape \(50, 50\)$"):
        roi_align(image, torch.zeros(1, 5), 1, sampling_ratio=torch.zeros(50, 50))  # type: ignore[arg-type]


def test_a_nested_tensor_is_refused_by_name() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(1, 4, 4)])
    with pytest.raises(TypeError, match="input must be a strided tensor, got a nested tensor"):
        roi_align(nested, torch.zeros(1, 5), 1)
