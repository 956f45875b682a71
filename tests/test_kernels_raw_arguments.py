"""torch.ops.gradparity.* can be called by anybody: wrong arguments are refused with a sentence, never a signal."""

from __future__ import annotations

import math
import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import library

IMAGE = torch.arange(2 * 4 * 5 * 6, dtype=torch.float32).view(2, 4, 5, 6) / 100
ROIS = torch.tensor([[0, 0.5, 0.5, 3.0, 3.5], [1, 1.0, 0.0, 4.0, 2.0], [1, 0.0, 0.0, 1.0, 1.0]])
OFFSET, WEIGHT, MASK, BIAS = (
    torch.zeros(2, 2 * 6, 4, 4),
    torch.ones(2, 4, 2, 3),
    torch.ones(2, 6, 4, 4),
    torch.ones(2),
)
WINDOW = {"stride": [1, 1], "padding": [0, 0], "dilation": [1, 1], "closed": False}
VALUES = {"input": IMAGE, "offset": OFFSET, "weight": WEIGHT, "mask": MASK}
DEFORM_GRAD = torch.ones(2, 2, 4, 4)
SAMPLING = {"output_size": [2, 2], "spatial_scale": 1.0, "sampling_ratio": 2}
ALIGN = {**SAMPLING, "aligned": True}
POOLING = {"output_size": [2, 2], "spatial_scale": 1.0}
GRAD, ONE_GRAD = torch.ones(3, 4, 2, 2), torch.ones(3, 1, 2, 2)
CHOICE = torch.zeros(3, 4, 2, 2, dtype=torch.int64)

GOOD: dict[str, dict[str, Any]] = {
    "deform_conv2d": {**VALUES, "bias": BIAS, **WINDOW},
    "deform_conv2d_backward": {"grad": DEFORM_GRAD, **VALUES, **WINDOW, "needs": [True] * 4},
    "deform_conv2d_double_backward": {
        **{f"grad_grad_{name}": torch.ones_like(value) for name, value in VALUES.items()},
        "grad": DEFORM_GRAD,
        **VALUES,
        **WINDOW,
        "needs": [True] * 5,
    },
    "roi_align": {
        "input": IMAGE,
        "rois": ROIS,
        "winner": CHOICE,
        "direction": ROIS,
        "second_direction": ROIS,
        **ALIGN,
    },
    "roi_align_backward": {
        "grad": GRAD,
        "rois": ROIS,
        "winner": CHOICE,
        "direction": ROIS,
        "second_direction": ROIS,
        "input_size": [2, 4, 5, 6],
        **ALIGN,
    },
    "roi_align_rois_backward": {
        "grad": GRAD,
        "input": IMAGE,
        "rois": ROIS,
        "winner": CHOICE,
        "direction": ROIS,
        **ALIGN,
    },
    "roi_align_max": {"input": IMAGE, "rois": ROIS, **ALIGN},
    "roi_pool": {"input": IMAGE, "rois": ROIS, **POOLING},
    "roi_pool_gather": {"input": IMAGE, "rois": ROIS, "argmax": CHOICE},
    "roi_pool_scatter": {"grad": GRAD, "rois": ROIS, "argmax": CHOICE, "input_size": [2, 4, 5, 6]},
    "ps_roi_align": {"input": IMAGE, "rois": ROIS, **SAMPLING},
    "ps_roi_align_backward": {"grad": ONE_GRAD, "rois": ROIS, "input_size": [2, 4, 5, 6], **SAMPLING},
    "ps_roi_pool": {"input": IMAGE, "rois": ROIS, **POOLING},
    "ps_roi_pool_backward": {"grad": ONE_GRAD, "rois": ROIS, "input_size": [2, 4, 5, 6], **POOLING},
}


def nested(image: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they are a prototype
        return torch.nested.nested_tensor(list(image))


def with_index(index: float) -> Tensor:
    rois = ROIS.clone()
    rois[1, 0] = index
    return rois


def naming(index: int) -> Tensor:
    choice = CHOICE.clone()
    choice[1, 2, 0, 1] = index
    return choice


DEFORM = ("deform_conv2d", "deform_conv2d_backward", "deform_conv2d_double_backward")
WITH_INPUT = (
    "roi_align",
    "roi_align_rois_backward",
    "roi_align_max",
    "roi_pool",
    "ps_roi_align",
    "ps_roi_pool",
)
WITH_GRAD = ("roi_align_backward", "roi_align_rois_backward", "ps_roi_align_backward", "ps_roi_pool_backward")
WITH_SIZE = ("roi_align_backward", "ps_roi_align_backward", "ps_roi_pool_backward", "roi_pool_scatter")
WITH_BINS = tuple(name for name, arguments in GOOD.items() if "output_size" in arguments)
WITH_RATIO = tuple(name for name, arguments in GOOD.items() if "sampling_ratio" in arguments)
WITH_ROIS = tuple(name for name, arguments in GOOD.items() if "rois" in arguments)
POSITION_SENSITIVE = tuple(name for name in GOOD if name.startswith("ps_"))

# Operators, the argument that is wrong, what comes, and how the answer begins.
WRONG: list[tuple[tuple[str, ...], str, Any, str]] = [
    (DEFORM, "input", IMAGE[0], "input must have 4 dimensions"),
    (DEFORM, "input", IMAGE.int(), "input must be float64, float32, float16 or bfloat16, got Int"),
    (
        DEFORM,
        "input",
        IMAGE.to(torch.complex64),
        "input must be float64, float32, float16 or bfloat16, got Complex",
    ),
    (DEFORM, "input", IMAGE.to_sparse(), "input must be a strided tensor"),
    (DEFORM, "input", IMAGE.double(), "offset must have input's dtype Double, got Float"),
    (
        DEFORM,
        "input",
        IMAGE[:, :3],
        "weight's dimension 1 (C/groups) must divide the 3 channels of input, got 4",
    ),
    (DEFORM, "input", IMAGE[:, :0], "input must have C, H and W of at least 1"),
    (DEFORM, "input", IMAGE[:, :, :1], "input of 1 x 6 is too small for weight's kernel"),
    (DEFORM, "input", IMAGE[:1], "offset must have shape [1, 12, 4, 4], got [2, 12, 4, 4]"),
    (DEFORM, "offset", OFFSET[:, :11], "offset's dimension 1 must be 2*OG*kh*kw"),
    (DEFORM, "offset", OFFSET[:, :0], "offset's dimension 1 must be 2*OG*kh*kw"),
    (
        DEFORM,
        "offset",
        OFFSET.repeat(1, 3, 1, 1),
        "offset's dimension 1 must be 2*OG*kh*kw with OG a divisor of the 4",
    ),
    (DEFORM, "offset", OFFSET[..., :3], "offset must have shape [2, 12, 4, 4], got [2, 12, 4, 3]"),
    (DEFORM, "offset", OFFSET.half(), "offset must have input's dtype Float, got Half"),
    (DEFORM, "offset", OFFSET.to("meta"), "all tensors must be on one device, got cpu and meta"),
    (DEFORM, "weight", WEIGHT[:, :0], "weight must not have an empty dimension"),
    (
        DEFORM,
        "weight",
        torch.ones(3, 2, 2, 3),
        "weight's dimension 0 (O) must be a multiple of the 2 groups, got 3",
    ),
    (DEFORM, "weight", WEIGHT[0], "weight must have 4 dimensions"),
    (DEFORM, "mask", MASK[:, :5], "mask must have shape [2, 6, 4, 4], got [2, 5, 4, 4]"),
    (DEFORM, "mask", MASK.double(), "mask must have input's dtype Float, got Double"),
    (("deform_conv2d",), "bias", BIAS[:1], "bias must have weight's 2 output channels, got shape [1]"),
    (("deform_conv2d",), "bias", BIAS.view(1, 2), "bias must have 1 dimensions"),
    (DEFORM, "stride", [0, 1], "stride must be at least 1 and below 2**31, got [0, 1]"),
    (DEFORM, "stride", [1, -1], "stride must be at least 1 and below 2**31, got [1, -1]"),
    (DEFORM, "padding", [-1, 0], "padding must be at least 0 and below 2**31, got [-1, 0]"),
    (DEFORM, "dilation", [0, 0], "dilation must be at least 1 and below 2**31, got [0, 0]"),
    (DEFORM, "dilation", [2**62, 1], "dilation must be at least 1 and below 2**31"),
    (DEFORM, "padding", [1, 1, 1], "padding must have 2 values, got [1, 1, 1]"),
    (DEFORM[1:], "grad", DEFORM_GRAD[:, :1], "grad must have shape [2, 2, 4, 4], got [2, 1, 4, 4]"),
    (DEFORM[1:], "grad", DEFORM_GRAD.double(), "grad must have input's dtype Float, got Double"),
    (DEFORM[1:], "needs", [True], "needs must have"),
    (DEFORM[2:], "grad", None, "grad must be given for every result but the first"),
    (DEFORM[2:], "mask", None, "grad_grad_mask must be absent when mask is"),
    (
        DEFORM[2:],
        "grad_grad_input",
        IMAGE[:1],
        "grad_grad_input must have shape [2, 4, 5, 6], got [1, 4, 5, 6]",
    ),
    (
        DEFORM[2:],
        "grad_grad_offset",
        OFFSET.half(),
        "grad_grad_offset must have input's dtype Float, got Half",
    ),
    (DEFORM[2:], "grad_grad_weight", WEIGHT[0], "grad_grad_weight must have 4 dimensions"),
    (DEFORM[2:], "grad_grad_mask", MASK[..., :1], "grad_grad_mask must have shape [2, 6, 4, 4]"),
    (WITH_INPUT, "input", IMAGE[0], "input must have 4 dimensions"),
    (WITH_INPUT, "input", IMAGE[..., :0], "input must have C, H and W of at least 1"),
    (WITH_INPUT, "input", IMAGE.double(), "input must have boxes' dtype Float, got Double"),
    (WITH_INPUT, "input", IMAGE.int(), "input must be float64, float32, float16 or bfloat16, got Int"),
    (WITH_INPUT, "input", IMAGE.to_sparse(), "input must be a strided tensor"),
    (WITH_INPUT, "input", IMAGE.to_mkldnn(), "input must be a strided tensor, got one of MkldnnCPU"),
    (WITH_INPUT, "input", nested(IMAGE), "input must be a strided tensor, got one of NestedTensorCPU"),
    (WITH_ROIS, "rois", ROIS.to_sparse(), "rois must be a strided tensor, got one of SparseCPU"),
    (WITH_ROIS, "rois", ROIS.to("meta"), "all tensors must be on one device, got cpu and meta"),
    (WITH_ROIS, "rois", ROIS[:, :4], "boxes must have shape (K, 5)"),
    (WITH_ROIS, "rois", ROIS[0], "boxes must have shape (K, 5)"),
    (WITH_ROIS, "rois", ROIS.long(), "boxes must be float64, float32, float16 or bfloat16, got Long"),
    (WITH_ROIS, "rois", with_index(2), "boxes must hold batch indices that are integers from 0 to 1, got 2"),
    (
        WITH_ROIS,
        "rois",
        with_index(-1),
        "boxes must hold batch indices that are integers from 0 to 1, got -1",
    ),
    (
        WITH_ROIS,
        "rois",
        with_index(0.5),
        "boxes must hold batch indices that are integers from 0 to 1, got 0.5",
    ),
    (
        WITH_ROIS,
        "rois",
        with_index(math.nan),
        "boxes must hold batch indices that are integers from 0 to 1, got nan",
    ),
    (
        WITH_ROIS,
        "rois",
        with_index(math.inf),
        "boxes must hold batch indices that are integers from 0 to 1, got inf",
    ),
    (
        WITH_ROIS,
        "rois",
        with_index(1e30),
        "boxes must hold batch indices that are integers from 0 to 1, got 1e+30",
    ),
    (WITH_BINS, "output_size", [0, 2], "output_size must be 2 values of at least 1"),
    (WITH_BINS, "output_size", [2], "output_size must be 2 values of at least 1"),
    (WITH_BINS, "output_size", [2, -1], "output_size must be 2 values of at least 1"),
    (
        WITH_BINS,
        "output_size",
        [2**20, 2**20],
        "output_size must be 2 values of at least 1 whose product is below",
    ),
    (WITH_BINS, "output_size", [2**62, 4], "output_size must be 2 values of at least 1"),
    (WITH_BINS, "spatial_scale", 0.0, "spatial_scale must be positive and finite"),
    (WITH_BINS, "spatial_scale", -1.0, "spatial_scale must be positive and finite"),
    (WITH_BINS, "spatial_scale", math.nan, "spatial_scale must be positive and finite"),
    (WITH_BINS, "spatial_scale", math.inf, "spatial_scale must be positive and finite"),
    (WITH_BINS, "spatial_scale", 1e39, "spatial_scale must be positive and finite in float32, got 1e+39"),
    (WITH_BINS, "spatial_scale", 1e-50, "spatial_scale must be positive and finite in float32, got 1e-50"),
    (WITH_RATIO, "sampling_ratio", 1025, "sampling_ratio must be at most 1024, got 1025"),
    (WITH_RATIO, "sampling_ratio", 2**40, "sampling_ratio must be at most 1024"),
    (WITH_GRAD, "grad", GRAD[..., :1], "grad must have shape"),
    (WITH_GRAD, "grad", GRAD[0], "grad must have shape"),
    (WITH_GRAD, "grad", GRAD.double(), "grad must have boxes' dtype Float, got Double"),
    (WITH_SIZE, "input_size", [2, 4, 5], "input_size must have 4 dimensions"),
    (WITH_SIZE, "input_size", [2, 4, -5, 6], "input_size must have C, H and W of at least 1"),
    (WITH_SIZE, "input_size", [-2, 4, 5, 6], "input_size must have C, H and W of at least 1"),
    (WITH_SIZE, "input_size", [2, 4, 2**31, 2**31], "input_size asks for more memory than can be addressed"),
    (POSITION_SENSITIVE, "output_size", [3, 2], "channels must be a multiple of output_size's 6 bins, got 4"),
    (
        ("roi_align", "roi_align_backward", "roi_align_rois_backward"),
        "winner",
        CHOICE.int(),
        "winner must be a strided",
    ),
    (
        ("roi_align", "roi_align_backward", "roi_align_rois_backward"),
        "winner",
        CHOICE[:2],
        "winner must have shape",
    ),
    (("roi_align", "roi_align_backward", "roi_align_rois_backward"), "winner", naming(4), "winner must"),
    (("roi_align", "roi_align_backward", "roi_align_rois_backward"), "winner", naming(-2), "winner must"),
    (
        ("roi_align", "roi_align_backward", "roi_align_rois_backward"),
        "direction",
        ROIS[:2],
        "direction must have shape",
    ),
    (("roi_align", "roi_align_backward"), "direction", None, "second_direction must"),
    (("roi_align", "roi_align_backward"), "second_direction", ROIS.half(), "second_direction must have"),
    (("roi_pool_gather", "roi_pool_scatter"), "argmax", naming(30), "argmax must"),
    (("roi_pool_gather", "roi_pool_scatter"), "argmax", naming(-2), "argmax must"),
    (("roi_pool_gather", "roi_pool_scatter"), "argmax", naming(2**62), "argmax must"),
    (
        ("roi_pool_gather", "roi_pool_scatter"),
        "argmax",
        CHOICE.float(),
        "argmax must be a strided int64 tensor",
    ),
    (("roi_pool_gather", "roi_pool_scatter"), "argmax", CHOICE[:2], "argmax must have shape"),
    (("roi_pool_scatter",), "grad", GRAD[:, :1], "grad must have shape"),
]


def call(operator: str, arguments: dict[str, Any]) -> Any:
    library.load()
    overload = getattr(torch.ops.gradparity, operator).default
    assert [argument.name for argument in overload._schema.arguments] == list(arguments)
    return overload(*arguments.values())


@pytest.mark.parametrize("operator", GOOD)
def test_the_right_arguments_are_taken(operator: str) -> None:
    results = call(operator, GOOD[operator])
    assert all(
        isinstance(result, Tensor) for result in (results if isinstance(results, tuple) else (results,))
    )


@pytest.mark.parametrize(
    ("operator", "argument", "value", "sentence"),
    [(operator, *wrong) for operators, *wrong in WRONG for operator in operators],
    ids=lambda part: part if isinstance(part, str) and len(part) < 40 else "",
)
def test_a_wrong_argument_is_refused(operator: str, argument: str, value: Any, sentence: str) -> None:
    with pytest.raises((ValueError, TypeError, RuntimeError), match=re.escape(sentence)) as caught:
        call(operator, {**GOOD[operator], argument: value})
    assert "INTERNAL ASSERT" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("operator", [name for name in WITH_BINS if "grad" not in GOOD[name]])
@pytest.mark.parametrize("size", [[0, 2], [2], [2, -1], [2**31, 1]])
def test_meta_tensors_are_refused_a_wrong_output_size(operator: str, size: list[int]) -> None:
    arguments = {
        name: value.to("meta") if isinstance(value, Tensor) else value
        for name, value in GOOD[operator].items()
    }
    with pytest.raises((ValueError, TypeError), match="output_size must be"):
        call(operator, {**arguments, "output_size": size})


@pytest.mark.parametrize("operator", DEFORM)
def test_no_images_of_any_size_take_no_memory(operator: str) -> None:
    """A row of these outputs would take a terabyte."""
    columns = 2**31
    arguments = {
        **GOOD[operator],
        "input": IMAGE[:0],
        "offset": torch.empty(0, 12, 4, columns),
        "mask": torch.empty(0, 6, 4, columns),
        "padding": [0, 2**30 - 2],
    }
    arguments |= {f"grad_grad_{name}": arguments[name] for name in ("input", "offset", "mask")}
    arguments["grad"] = torch.empty(0, 2, 4, columns)
    results = call(operator, {name: arguments[name] for name in GOOD[operator]})
    for result in results if isinstance(results, tuple) else (results,):
        assert result.numel() <= WEIGHT.numel()
        assert not result.any()


def test_every_operator_is_tried() -> None:
    library.load()
    assert {name for name in dir(torch.ops.gradparity) if not name.startswith("_")} - {"name"} <= set(GOOD)
    assert len(WRONG) >= 60
