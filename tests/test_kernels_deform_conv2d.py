"""deform_conv2d: the compiled operator, the composite, and the conventions that both follow."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import composite, deform_conv2d, library

BOUNDARIES = ("open", "closed")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
Inputs = dict[str, Any]


def make(
    dtype: torch.dtype = torch.float64,
    *,
    n: int = 2,
    groups: int = 1,
    offset_groups: int = 1,
    mask: bool = True,
    bias: bool = True,
    channels: int = 6,
    size: tuple[int, int] = (6, 5),
    seed: int = 0,
    spread: float = 1.5,
) -> Inputs:
    """Random inputs for a 3 x 2 kernel, whose window differs between the axes."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    stride, padding, dilation = (2, 1), (1, 2), (1, 2)
    rows, columns = (size[0] + 2 * 1 - 1 * 2 - 1) // 2 + 1, size[1] + 2 * 2 - 2 * 1 - 1 + 1
    taps = 6
    return {
        "input": draw(n, channels, *size),
        "offset": spread * draw(n, 2 * offset_groups * taps, rows, columns),
        "weight": draw(6, channels // groups, 3, 2),
        "bias": draw(6) if bias else None,
        "mask": draw(n, offset_groups * taps, rows, columns).sigmoid() if mask else None,
        "stride": stride,
        "padding": padding,
        "dilation": dilation,
    }


def tensors(inputs: Inputs) -> dict[str, Tensor]:
    return {name: value for name, value in inputs.items() if isinstance(value, Tensor)}


def differentiate(
    function: Callable[..., Tensor], inputs: Inputs, boundary: str = "open"
) -> dict[str, Tensor]:
    """The output and the gradient of every tensor, under a gradient that is nowhere the same."""
    inputs = {k: v.detach().requires_grad_() if isinstance(v, Tensor) else v for k, v in inputs.items()}
    out = function(**inputs, boundary=boundary)
    grad = torch.arange(1, out.numel() + 1, dtype=torch.float64).sin().reshape(out.shape).to(out.dtype)
    leaves = tensors(inputs)
    grads = torch.autograd.grad(out, list(leaves.values()), grad)
    return {"output": out.detach(), **dict(zip(leaves, grads, strict=True))}


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Equal but for rounding, and not finite at the same places (order decides between inf and NaN)."""
    for name, value in expected.items():
        finite = value.isfinite()
        assert torch.equal(got[name].isfinite(), finite), f"{name} is not finite at other places"
        one, other = got[name][finite].double(), value[finite].double()
        error = (one - other).abs().max().item() if one.numel() else 0.0
        scale = other.abs().max().item() if one.numel() else 0.0
        assert error <= 16 * torch.finfo(value.dtype).eps * max(scale, 1e-3), f"{name} is {error} off"


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("groups", "offset_groups"), [(1, 1), (2, 3), (3, 2), (6, 1), (1, 6)])
def test_the_compiled_operator_equals_the_composite(
    dtype: torch.dtype, groups: int, offset_groups: int, boundary: str
) -> None:
    inputs = make(dtype, groups=groups, offset_groups=offset_groups)
    inputs["offset"][:, :4] = inputs["offset"][:, :4].round()  # the edges, and integers between them
    assert_same(
        differentiate(deform_conv2d, inputs, boundary),
        differentiate(composite.deform_conv2d, inputs, boundary),
    )


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("n", [0, 1, 3])
def test_batches_and_missing_tensors(n: int, mask: bool) -> None:
    inputs = make(n=n, mask=mask, bias=not mask)
    got = differentiate(deform_conv2d, inputs)
    assert_same(got, differentiate(composite.deform_conv2d, inputs))
    assert got["output"].shape[0] == n


def test_more_than_one_tile() -> None:
    inputs = make(torch.float32, n=1, channels=48, size=(150, 90))  # 1.9 million column elements
    assert_same(differentiate(deform_conv2d, inputs), differentiate(composite.deform_conv2d, inputs))


def strided(value: Tensor) -> Tensor:
    wide = value.new_full((*value.shape[:-1], 2 * value.shape[-1]), math.nan)
    wide[..., 1::2] = value
    return wide[..., 1::2]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "channels_last": lambda v: v.contiguous(memory_format=torch.channels_last) if v.dim() == 4 else v,
    "strided": strided,
    "transposed": lambda v: v.transpose(-1, 0).contiguous().transpose(-1, 0),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_memory_layouts_do_not_matter(dtype: torch.dtype, layout: str) -> None:
    inputs = make(dtype, groups=2, offset_groups=3)
    changed: Inputs = {k: LAYOUTS[layout](v) if isinstance(v, Tensor) else v for k, v in inputs.items()}
    assert any(not v.is_contiguous() for v in tensors(changed).values())
    expected = differentiate(deform_conv2d, inputs)
    for name, value in differentiate(deform_conv2d, changed).items():
        assert torch.equal(value, expected[name]), name


def test_an_expanded_gradient() -> None:
    inputs: Inputs = {k: v.requires_grad_() if isinstance(v, Tensor) else v for k, v in make().items()}
    leaves = list(tensors(inputs).values())
    got = torch.autograd.grad(deform_conv2d(**inputs).sum(), leaves)
    expected = torch.autograd.grad(composite.deform_conv2d(**inputs).sum(), leaves)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "shape",
    [
        {"channels": 48, "size": (40, 30), "offset_groups": 2},
        {"channels": 3, "size": (64, 64)},
        {"channels": 128, "size": (40, 40)},
        {"channels": 6, "size": (31, 31), "groups": 6},
    ],
    ids=str,
)
def test_the_number_of_threads_does_not_matter(shape: dict[str, Any], dtype: torch.dtype) -> None:
    """To the last bit, of long sums too, which MKL splits by the number of its threads."""
    inputs = make(dtype, n=1, **shape)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(differentiate(deform_conv2d, inputs, "open"))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        for name, tensor in result.items():
            assert torch.equal(tensor, results[0][name]), name


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("mask", [False, True])
def test_gradcheck_and_gradgradcheck(mask: bool, boundary: str) -> None:
    inputs = make(n=1, channels=2, groups=2, offset_groups=2, mask=mask, bias=mask, size=(4, 3))
    settings = {k: v for k, v in inputs.items() if not isinstance(v, Tensor)}
    leaves = tensors(inputs)

    def call(*values: Tensor) -> Tensor:
        return deform_conv2d(**{**settings, **dict(zip(leaves, values, strict=True))}, boundary=boundary)

    values = tuple(value.requires_grad_() for value in leaves.values())
    assert torch.autograd.gradcheck(call, values)
    assert torch.autograd.gradgradcheck(call, values, fast_mode=True)


def test_third_order() -> None:
    inputs = make(n=1, channels=1, size=(4, 3), mask=False, bias=False)
    settings = {k: v for k, v in inputs.items() if not isinstance(v, Tensor)}
    leaves = tensors(inputs)

    def gradient(*values: Tensor) -> tuple[Tensor, ...]:
        out = deform_conv2d(**{**settings, **dict(zip(leaves, values, strict=True))})
        return torch.autograd.grad(out.square().sum(), values, create_graph=True)

    values = tuple(value.requires_grad_() for value in leaves.values())
    assert torch.autograd.gradgradcheck(gradient, values, fast_mode=True)


def test_second_order_of_an_empty_batch() -> None:
    inputs = make(n=0)
    values = [inputs["input"].requires_grad_(), inputs["weight"].requires_grad_()]
    first = torch.autograd.grad(deform_conv2d(**inputs).sum(), values, create_graph=True)
    second = torch.autograd.grad(first[0].sum() + first[1].sum(), values, allow_unused=True)
    assert second[1] is not None
    assert not second[1].any()


@pytest.mark.parametrize(
    "wanted", [("input",), ("offset",), ("mask", "weight"), ("bias",), ("input", "bias")]
)
def test_second_order_by_some_of_the_tensors(wanted: tuple[str, ...]) -> None:
    results = []
    for function in (deform_conv2d, composite.deform_conv2d):
        inputs = make(groups=2, offset_groups=3)
        for name in wanted:
            inputs[name].requires_grad_()
        values = [inputs[name] for name in wanted]
        out = function(**inputs).sin()
        first = torch.autograd.grad(out.sum(), values, create_graph=True)
        results.append(torch.autograd.grad(torch.stack([g.square().sum() for g in first]).sum(), values))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_second_order_when_the_offsets_come_from_the_input() -> None:
    results = []
    for function in (deform_conv2d, composite.deform_conv2d):
        inputs = make(n=1)
        source = inputs["input"].requires_grad_()
        inputs["offset"] = inputs["offset"] + source.mean() * source.flatten()[:1]
        out = function(**inputs)
        (first,) = torch.autograd.grad(out.square().sum(), source, create_graph=True)
        results.append(torch.autograd.grad(first.square().sum(), source)[0])
    torch.testing.assert_close(*results)


# (coordinate on an axis of 3 pixels worth 1, 2, 4) -> value and derivative
ON_THE_AXIS = [
    (-2.5, 0.0, 0.0),
    (-1.0, 0.0, {"open": 0.0, "closed": 1.0}),
    (-0.25, 0.75, 1.0),
    (0.0, 1.0, 1.0),
    (0.5, 1.5, 1.0),
    (1.0, 2.0, 2.0),
    (2.0, 4.0, -4.0),
    (2.75, 1.0, -4.0),
    (3.0, 0.0, 0.0),
    (3.5, 0.0, 0.0),
    (math.nan, 0.0, 0.0),
    (math.inf, 0.0, 0.0),
    (-math.inf, 0.0, 0.0),
    (1e30, 0.0, 0.0),
    (-1e30, 0.0, 0.0),
]


@pytest.mark.parametrize("function", [deform_conv2d, composite.deform_conv2d])
@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(("coordinate", "value", "slope"), ON_THE_AXIS)
def test_value_and_slope_along_an_axis(
    function: Callable[..., Tensor],
    axis: int,
    boundary: str,
    coordinate: float,
    value: float,
    slope: float | dict[str, float],
) -> None:
    pixels = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    image = pixels.view((1, 1, 3, 1) if axis == 0 else (1, 1, 1, 3))
    offset = torch.zeros(1, 2, *image.shape[2:], dtype=torch.float64)
    offset[0, axis].flatten()[0] = coordinate  # of the first output pixel, whose base is 0
    offset.requires_grad_()
    out = function(image, offset, torch.ones(1, 1, 1, 1, dtype=torch.float64), boundary=boundary)
    first = out.flatten()[0]
    (grad,) = torch.autograd.grad(first, offset)
    assert first.item() == value
    expected = slope[boundary] if isinstance(slope, dict) else slope
    assert grad[0, axis].flatten()[0].item() == expected


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("name", ["offset", "mask", "input", "weight"])
@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf, 1e30])
def test_special_values_spread_alike(name: str, special: float, boundary: str) -> None:
    inputs = make(torch.float32, groups=2, offset_groups=3, spread=4.0)
    inputs[name].flatten()[::7] = special
    assert_same(
        differentiate(deform_conv2d, inputs, boundary),
        differentiate(composite.deform_conv2d, inputs, boundary),
    )


@pytest.mark.parametrize("function", [deform_conv2d, composite.deform_conv2d])
def test_a_mask_outside_the_image_has_no_effect(function: Callable[..., Tensor]) -> None:
    inputs = make()
    inputs["offset"][:] = 1e30
    inputs["mask"][:] = math.nan
    result = differentiate(function, inputs)
    assert torch.equal(result["output"], inputs["bias"].view(1, -1, 1, 1).expand_as(result["output"]))
    assert not any(result[name].any() for name in ("input", "offset", "mask", "weight"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_coordinate_is_rounded_once_to_the_dtype(dtype: torch.dtype) -> None:
    # 300 + 0.9 lies between representable neighbours of both dtypes.
    image = torch.arange(512, dtype=torch.float32).remainder(7).to(dtype).view(1, 1, 1, 512)
    offset = torch.full((1, 2, 1, 512), 0.9, dtype=dtype)
    offset[:, 0] = 0
    position = (torch.arange(512).float() + offset[0, 1, 0].float()).to(dtype).float()
    low = position.long()
    padded = torch.cat((image.float().flatten(), torch.zeros(2)))
    fraction = position - low
    expected = ((1 - fraction) * padded[low] + fraction * padded[low + 1]).to(dtype)
    expected[position >= 512] = 0
    for function in (deform_conv2d, composite.deform_conv2d):
        out = function(image, offset, torch.ones(1, 1, 1, 1, dtype=dtype))
        assert torch.equal(out.flatten(), expected)


def test_small_integers_are_exact() -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = make(torch.float32)
    for name in ("input", "weight", "bias", "mask"):
        inputs[name] = torch.randint(-4, 5, inputs[name].shape, generator=generator).float()
    inputs["offset"] = torch.randint(-8, 9, inputs["offset"].shape, generator=generator).float() / 4
    exact: Inputs = {k: v.double() if isinstance(v, Tensor) else v for k, v in inputs.items()}
    assert torch.equal(deform_conv2d(**inputs).double(), composite.deform_conv2d(**exact))


def test_no_offsets_and_no_mask_is_a_convolution() -> None:
    inputs = make(mask=False)
    inputs["offset"].zero_()
    expected = torch.nn.functional.conv2d(
        inputs["input"],
        inputs["weight"],
        inputs["bias"],
        inputs["stride"],
        inputs["padding"],
        inputs["dilation"],
    )
    torch.testing.assert_close(deform_conv2d(**inputs), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_closed_boundary_is_torchvisions(dtype: torch.dtype) -> None:
    torchvision = pytest.importorskip("torchvision")
    inputs = make(dtype, groups=2, offset_groups=3)
    inputs["offset"][:, :6] = inputs["offset"][:, :6].round()

    def theirs(**arguments: Any) -> Tensor:
        del arguments["boundary"]
        out: Tensor = torchvision.ops.deform_conv2d(**arguments)
        return out

    assert_same(differentiate(deform_conv2d, inputs, "closed"), differentiate(theirs, inputs))


def test_a_compiled_function_takes_the_operator_whole() -> None:
    library.load()
    inputs = make()
    compiled = torch.compile(deform_conv2d, backend="aot_eager", fullgraph=True)
    assert_same(differentiate(compiled, inputs), differentiate(deform_conv2d, inputs))
