"""The compiled operators: built at first use, then known to autograd and to fake tensors.

After `load()` they are torch.ops.gradparity.{deform_conv2d, deform_conv2d_backward, roi_align,
roi_align_backward}; csrc/schema.cpp lists their arguments.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kernels.build import load_library
from kernels.checks import Window
from kernels.composite.deform_conv2d import compute

CSRC = Path(__file__).parent / "csrc"
NAME = "gradparity_kernels"

_lock = threading.Lock()
_loaded = False


def load() -> None:
    """Builds (or finds) and registers the operators, once per process. Raises BuildError."""
    global _loaded
    if _loaded:  # without the lock, so that a compiler which traces this sees no more than a constant
        return
    with _lock:
        if not _loaded:
            sources = sorted(CSRC.rglob("*.cpp"))
            load_library(NAME, sources, include_dirs=[CSRC], depends=sorted(CSRC.rglob("*.h")))
            _register()
            _loaded = True


def serves(*tensors: Tensor | None) -> bool:
    """Whether the compiled operators can take these tensors: on the CPU, with reverse-mode autograd at most.

    Forward mode and the transforms of torch.func go to the composite, because an operator that is registered
    from Python would drop a tangent without a word.
    """
    present = [tensor for tensor in tensors if tensor is not None]
    if present[0].device.type != "cpu" or torch._C._are_functorch_transforms_active():
        return False
    return not any(_has_tangent(tensor) for tensor in present)


def _has_tangent(tensor: Tensor) -> bool:
    if forward_ad._current_level < 0:
        return False
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def _refuse_tangent(grad: Tensor) -> None:
    if _has_tangent(grad):
        raise RuntimeError(
            "grad must not carry a forward-mode tangent through the backward of a compiled operator: "
            "run the forward under the same dual level too, with an input that carries one"
        )


def _register() -> None:
    for name, fake in (
        ("deform_conv2d", _fake_deform_conv2d),
        ("deform_conv2d_backward", _fake_deform_conv2d_backward),
        ("roi_align", _fake_roi_align),
        ("roi_align_backward", _fake_roi_align_backward),
    ):
        torch.library.register_fake(f"gradparity::{name}")(fake)
    for name, setup, backward in (
        ("deform_conv2d", _save_deform_conv2d, _differentiate_deform_conv2d),
        ("deform_conv2d_backward", _save_deform_conv2d_backward, _differentiate_deform_conv2d_backward),
        ("roi_align", _save_roi_align, _differentiate_roi_align),
        ("roi_align_backward", _save_roi_align_backward, _differentiate_roi_align_backward),
    ):
        torch.library.register_autograd(f"gradparity::{name}", backward, setup_context=setup)


# --- deform_conv2d


def _fake_deform_conv2d(
    input: Tensor,
    offset: Tensor,
    weight: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    closed: bool,
) -> Tensor:
    return input.new_empty((input.shape[0], weight.shape[0], *offset.shape[2:]))


def _fake_deform_conv2d_backward(
    grad: Tensor,
    input: Tensor,
    offset: Tensor,
    weight: Tensor,
    mask: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    closed: bool,
    needs: Sequence[bool],
) -> tuple[Tensor, ...]:
    values = (input, offset, weight, mask)
    return tuple(
        input.new_empty(value.shape if needed and value is not None else (0,))
        for value, needed in zip(values, needs, strict=True)
    )


def _save_deform_conv2d(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, offset, weight, mask, _, *ctx.settings = inputs
    ctx.save_for_backward(input, offset, weight, mask)


def _differentiate_deform_conv2d(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    _refuse_tangent(grad)
    input, offset, weight, mask = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:4])
    values: list[Tensor | None] = [None] * 4
    if any(needs):
        found = torch.ops.gradparity.deform_conv2d_backward(
            grad, input, offset, weight, mask, *ctx.settings, needs
        )
        values = [value if needed else None for value, needed in zip(found, needs, strict=True)]
    grad_bias = grad.sum((0, 2, 3)) if ctx.needs_input_grad[4] else None
    return (*values, grad_bias, None, None, None, None)


def _save_deform_conv2d_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    grad, input, offset, weight, mask, *ctx.settings, ctx.needs = inputs
    ctx.save_for_backward(grad, input, offset, weight, mask)
    ctx.set_materialize_grads(False)


def _differentiate_deform_conv2d_backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
    """Double backward: the composite's gradients, paired with the cotangents, differentiated once more."""
    *settings, closed = ctx.settings
    window = Window(*map(tuple, settings))
    higher = torch.is_grad_enabled()
    saved = ctx.saved_tensors
    present = [
        needed and value is not None and cotangent is not None
        for needed, value, cotangent in zip(ctx.needs, saved[1:], cotangents, strict=True)
    ]
    wanted = [number for number, needed in enumerate(ctx.needs_input_grad[:5]) if needed]
    result: list[Tensor | None] = [None] * 5
    if any(present) and wanted:
        with torch.enable_grad():
            # Aliases, because offset may have been computed from input: each is a variable of its own here.
            grad, input, offset, weight = (_alias(value, higher) for value in saved[:4])
            mask = None if saved[4] is None else _alias(saved[4], higher)
            output = compute(input, offset, weight, mask, None, window, closed)
            variables = (grad, input, offset, weight, mask)
            # What is not there has nothing present or wanted, which the type checker can't know.
            chosen = [v for v, there in zip(variables[1:], present, strict=True) if there and v is not None]
            sought = [v for number, v in enumerate(variables) if number in wanted and v is not None]
            paired = [c for c, there in zip(cotangents, present, strict=True) if there and c is not None]
            first = torch.autograd.grad(output, chosen, grad, create_graph=True)
            second = torch.autograd.grad(first, sought, paired, create_graph=higher, allow_unused=True)
        for number, value in zip(wanted, second, strict=True):
            result[number] = value
    return (*result, None, None, None, None, None)


def _alias(value: Tensor, connected: bool) -> Tensor:
    return value.view_as(value) if connected and value.requires_grad else value.detach().requires_grad_()


# --- roi_align


def _fake_roi_align(
    input: Tensor,
    rois: Tensor,
    output_size: Sequence[int],
    spatial_scale: float,
    sampling_ratio: int,
    aligned: bool,
) -> Tensor:
    return input.new_empty((rois.shape[0], input.shape[1], *output_size))


def _fake_roi_align_backward(
    grad: Tensor,
    rois: Tensor,
    input_size: Sequence[int],
    output_size: Sequence[int],
    spatial_scale: float,
    sampling_ratio: int,
    aligned: bool,
) -> Tensor:
    return grad.new_empty(tuple(input_size))


def _save_roi_align(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, rois, *ctx.settings = inputs
    ctx.input_size = input.shape
    ctx.save_for_backward(rois)


def _differentiate_roi_align(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    _refuse_tangent(grad)
    value = None
    if ctx.needs_input_grad[0]:
        (rois,) = ctx.saved_tensors
        value = torch.ops.gradparity.roi_align_backward(grad, rois, ctx.input_size, *ctx.settings)
    return (value, *[None] * 5)


def _save_roi_align_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, rois, _, *ctx.settings = inputs
    ctx.save_for_backward(rois)


def _differentiate_roi_align_backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:
    # roi_align is linear in its input, and so is its backward in grad: the transpose is the forward again.
    value = None
    if ctx.needs_input_grad[0]:
        (rois,) = ctx.saved_tensors
        value = torch.ops.gradparity.roi_align(cotangent, rois, *ctx.settings)
    return (value, *[None] * 6)
