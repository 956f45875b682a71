"""Pooling operators that are linear in their input: the double backward is the forward again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.raw.operator import RawOperator


def linear_pooling(
    name: str, output_channels: Callable[[int, Sequence[int]], int]
) -> tuple[type[RawOperator], type[RawOperator]]:
    """The operators `name` and `name`_backward of csrc/schema.cpp.

    Their arguments are (input, rois, output_size, ...) and (grad, rois, input_size, output_size, ...).
    `output_channels` gives the channels of the result for those of input and for output_size.
    """

    def forward(input: Tensor, rois: Tensor, *settings: Any) -> Tensor:
        output: Tensor = getattr(torch.ops.gradparity, name)(input, rois, *settings)
        return output

    def transpose(grad: Tensor, rois: Tensor, *settings: Any) -> Tensor:
        gradient: Tensor = getattr(torch.ops.gradparity, f"{name}_backward")(grad, rois, *settings)
        return gradient

    class Forward(RawOperator):
        """(input, rois, *settings) -> output."""

        @staticmethod
        def fake(input: Tensor, rois: Tensor, output_size: Sequence[int], *settings: Any) -> Tensor:
            channels = output_channels(input.shape[1], output_size)
            return input.new_empty((rois.shape[0], channels, *output_size))

        @staticmethod
        def save(ctx: Any, arguments: tuple[Any, ...], output: Tensor) -> None:
            input, rois, *ctx.settings = arguments
            ctx.input_size = input.shape
            ctx.save_for_backward(rois)
            ctx.save_for_forward(rois)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
            (rois,) = ctx.saved_tensors
            needed = ctx.needs_input_grad[1]
            return (transpose(grad, rois, ctx.input_size, *ctx.settings) if needed else None,)

        @staticmethod
        def jvp(ctx: Any, tangent: Tensor | None, _: Any) -> Tensor | None:  # type: ignore[override]
            (rois,) = ctx.saved_tensors
            return None if tangent is None else forward(tangent, rois, *ctx.settings)

        @staticmethod
        def vmap(
            info: Any, in_dims: tuple[int | None, ...], input: Tensor, rois: Tensor, *settings: Any
        ) -> tuple[Tensor, int]:
            if in_dims[1] is not None:
                return _one_by_one(forward, info.batch_size, in_dims, input, rois, *settings), 0
            output = forward(_fold(input, in_dims[0]), rois, *settings)
            return torch.unflatten(output, 1, (info.batch_size, -1)), 1

    class Backward(RawOperator):
        """(grad, rois, input_size, *settings) -> gradient by input."""

        @staticmethod
        def fake(grad: Tensor, rois: Tensor, input_size: Sequence[int], *settings: Any) -> Tensor:
            return grad.new_empty(tuple(input_size))

        @staticmethod
        def save(ctx: Any, arguments: tuple[Any, ...], gradient: Tensor) -> None:
            _, rois, ctx.input_size, *ctx.settings = arguments
            ctx.save_for_backward(rois)
            ctx.save_for_forward(rois)

        @staticmethod
        def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
            (rois,) = ctx.saved_tensors
            return (forward(cotangent, rois, *ctx.settings) if ctx.needs_input_grad[1] else None,)

        @staticmethod
        def jvp(ctx: Any, tangent: Tensor | None, _: Any) -> Tensor | None:  # type: ignore[override]
            (rois,) = ctx.saved_tensors
            return None if tangent is None else transpose(tangent, rois, ctx.input_size, *ctx.settings)

        @staticmethod
        def vmap(
            info: Any,
            in_dims: tuple[int | None, ...],
            grad: Tensor,
            rois: Tensor,
            input_size: Sequence[int],
            *settings: Any,
        ) -> tuple[Tensor, int]:
            if in_dims[1] is not None:
                return _one_by_one(transpose, info.batch_size, in_dims, grad, rois, input_size, *settings), 0
            images, channels, *size = input_size
            folded_size = (images, info.batch_size * channels, *size)
            gradient = transpose(_fold(grad, in_dims[0]), rois, folded_size, *settings)
            return torch.unflatten(gradient, 1, (info.batch_size, channels)), 1

    Forward.name, Backward.name = name, f"{name}_backward"
    return Forward, Backward


def _fold(tensor: Tensor, dim: int | None) -> Tensor:
    """The mapped dimension becomes part of the channels, whose pooling doesn't depend on each other."""
    assert dim is not None
    return tensor.movedim(dim, 1).flatten(1, 2)


def _one_by_one(
    operator: Callable[..., Tensor],
    batch: int,
    in_dims: tuple[int | None, ...],
    values: Tensor,
    rois: Tensor,
    *settings: Any,
) -> Tensor:
    """Boxes that differ over the batch could only be pooled together if a dtype could count all images."""
    chosen = (
        [
            tensor if dim is None else tensor.select(dim, number)
            for tensor, dim in zip((values, rois), in_dims, strict=False)
        ]
        for number in range(batch)
    )
    return torch.stack([operator(*tensors, *settings) for tensors in chosen])
