"""Whatever offsets, masks, boxes and shapes hold, the kernels answer or refuse, and never read or write elsewhere.

Under `tests/sanitized.py` a wrong access ends the process; without it, a crash does.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import DrawFn
from torch import Tensor

import kernels

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
HOSTILE = (
    *(0.0, -0.0, -1.0, 0.5, -0.5, 1e-9, 1e-30, 5e-324, math.nan, math.inf, -math.inf),
    *(2.0**31, -(2.0**31), 2.0**33, 2.0**63, -(2.0**63), 1e19, 1e30, -1e30, 3e38, 1e300, -1e300),
)
ROI_OPERATORS: dict[str, dict[str, Any]] = {
    "roi_align": {"aligned": False},
    "roi_align aligned": {"aligned": True},
    "roi_align rois_grad": {"aligned": True, "rois_grad": True},
    "roi_align max": {"aligned": False, "mode": "max"},
    "roi_align max rois_grad": {"aligned": False, "mode": "max", "rois_grad": True},
    "roi_pool": {},
    "ps_roi_align": {},
    "ps_roi_pool": {},
}

quick = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@st.composite
def hostile(draw: DrawFn, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of ordinary values of which some, or all, are replaced by hostile ones."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    values = torch.randn(shape, generator=generator, dtype=torch.float64) * draw(
        st.sampled_from((1.0, 4.0, 40.0))
    )
    chosen = torch.tensor(
        draw(st.lists(st.sampled_from(HOSTILE), min_size=1, max_size=4)), dtype=torch.float64
    )
    which = torch.randint(len(chosen), shape, generator=generator)
    replaced = torch.rand(shape, generator=generator) < draw(st.sampled_from((0.0, 0.1, 1.0)))
    return torch.where(replaced, chosen[which], values).to(dtype)


def differentiate_twice(out: Tensor, leaves: list[Tensor]) -> None:
    """First and second order by everything, along cotangents of ones."""
    assert out.is_contiguous()
    cotangent = torch.ones_like(out, requires_grad=True)
    gradients = torch.autograd.grad(out, leaves, cotangent, create_graph=True)
    for gradient, leaf in zip(gradients, leaves, strict=True):
        assert gradient.shape == leaf.shape
    second = [gradient.sum() for gradient in gradients if gradient.requires_grad]
    torch.autograd.grad(second, [*leaves, cotangent], allow_unused=True)


@quick
@given(st.data())
def test_deform_conv2d(data: st.DataObject) -> None:
    def number(*choices: int) -> int:
        return data.draw(st.sampled_from(choices))

    dtype = data.draw(st.sampled_from(DTYPES))
    groups, offset_groups = number(1, 2, 3), number(1, 2, 3, 6)
    batch, channels, outputs = number(1, 2, 0), 6 * number(1, 2), groups * number(1, 2)
    size, kernel = (number(1, 2, 5, 9), number(1, 2, 7)), (number(1, 2, 3), number(1, 2, 3))
    stride, dilation = (number(1, 2, 5), number(1, 3)), (number(1, 2), number(1, 2, 3))
    padding = tuple(
        max(number(0, 1, 3), (d * (k - 1) + 2 - s) // 2)
        for d, k, s in zip(dilation, kernel, size, strict=True)
    )
    rows, columns = (
        (s + 2 * p - d * (k - 1) - 1) // step + 1
        for s, p, d, k, step in zip(size, padding, dilation, kernel, stride, strict=True)
    )
    taps = offset_groups * kernel[0] * kernel[1]
    shapes = {
        "input": (batch, channels, *size),
        "offset": (batch, 2 * taps, rows, columns),
        "weight": (outputs, channels // groups, *kernel),
        "bias": (outputs,),
        "mask": (batch, taps, rows, columns),
    }
    tensors = {name: data.draw(hostile(shape, dtype)).requires_grad_() for name, shape in shapes.items()}
    for name in data.draw(st.sets(st.sampled_from(("bias", "mask")))):
        del tensors[name]
    out = kernels.deform_conv2d(
        **tensors,
        stride=stride,
        padding=padding,  # type: ignore[arg-type]
        dilation=dilation,
        boundary=data.draw(st.sampled_from(("open", "closed"))),
    )
    differentiate_twice(out, list(tensors.values()))


@quick
@given(st.data())
def test_pooling(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    name = data.draw(st.sampled_from(sorted(ROI_OPERATORS)))
    options = dict(ROI_OPERATORS[name])
    bins = (data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4)))
    batch, boxes = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 4))
    size = (data.draw(st.sampled_from((1, 2, 9))), data.draw(st.sampled_from((1, 3, 8))))
    image = data.draw(hostile((batch, 2 * bins[0] * bins[1], *size), dtype))
    rois = data.draw(hostile((boxes, 5), dtype))
    rois[:, 0] = torch.arange(boxes) % batch
    if name.startswith(("roi_align", "ps_roi_align")):
        options["sampling_ratio"] = data.draw(st.sampled_from((-1, 0, 1, 3)))
    scale = data.draw(st.sampled_from((1.0, 0.25, 1 / 3, 1e30, 1e-30)))
    differentiated = [image.requires_grad_()]
    if options.get("rois_grad"):
        differentiated.append(rois.requires_grad_())
    operator = getattr(kernels, name.split()[0])
    differentiate_twice(operator(image, rois, bins, scale, **options), differentiated)


@quick
@given(st.data())
def test_a_batch_index_is_an_image_or_refused(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    index = torch.tensor(data.draw(st.sampled_from((*HOSTILE, 0.0, 1.0, 2.0))), dtype=torch.float64).to(dtype)
    image, rois = torch.ones(2, 4, 3, 3, dtype=dtype), torch.ones(1, 5, dtype=dtype)
    rois[0, 0] = index
    operator = getattr(
        kernels, data.draw(st.sampled_from(sorted({name.split()[0] for name in ROI_OPERATORS})))
    )
    refused = (
        contextlib.nullcontext() if index in (0, 1) else pytest.raises(ValueError, match="batch indices")
    )
    with refused:
        operator(image, rois, (2, 2), 1.0)
