"""What the RoI operators have in common, and those that are linear in their input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.checks import pair
from kernels.raw.operator import RawOperator, same_device

Shape = Sequence[int]


def linear_pooling(
    forward_name: str, transpose_name: str, indices: int, output_shape: Callable[..., Shape]
) -> tuple[type[RawOperator], type[RawOperator]]:
    """The operators of these names in csrc/schema.cpp: one that is linear in its input, and its transpose.

    Their arguments are (input, *indices, *settings) and (grad, *indices, input_size, *settings). `indices` counts the
    tensors that say what is read, rois first. `output_shape(input_size, *indices, *settings)` is the result's.
    """

    def forward(*arguments: Any) -> Tensor:
        output: Tensor = getattr(torch.ops.gradparity, forward_name)(*arguments)
        return output

    def transpose(*arguments: Any) -> Tensor:
        gradient: Tensor = getattr(torch.ops.gradparity, transpose_name)(*arguments)
        return gradient

    class Forward(RawOperator):
        """(input, *indices, *settings) -> output."""

        name = forward_name

        @staticmethod
        def fake(input: Tensor, *rest: Any) -> Tensor:
            same_device(input, *rest[:indices])
            return input.new_empty(tuple(output_shape(input.shape, *rest)))

        @staticmethod
        def save(ctx: Any, arguments: tuple[Any, ...], output: Tensor) -> None:
            ctx.input_size, ctx.settings = arguments[0].shape, arguments[1 + indices :]
            ctx.output_size = output.shape
            keep(ctx, *arguments[1 : 1 + indices])

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
            if not ctx.needs_input_grad[1]:
                return (None,)
            return (transpose(grad, *ctx.saved_tensors, ctx.input_size, *ctx.settings),)

        @staticmethod
        def jvp(ctx: Any, tangent: Tensor | None, *_: Tensor | None) -> Tensor:  # type: ignore[override]
            if tangent is None:
                return total([], ctx.saved_tensors[0], ctx.output_size)
            return forward(tangent, *ctx.saved_tensors, *ctx.settings)

        @staticmethod
        def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Tensor, int]:
            if in_dims[1] is not None:
                return one_by_one(forward, info.batch_size, in_dims, arguments)
            input, rois, *rest = arguments
            chosen = [fold(info, in_dims[2 + n], tensor) for n, tensor in enumerate(rest[: indices - 1])]
            output = forward(fold(info, in_dims[0], input), rois, *chosen, *rest[indices - 1 :])
            return unfold(info, output), 1

    class Transpose(RawOperator):
        """(grad, *indices, input_size, *settings) -> gradient by input."""

        name = transpose_name

        @staticmethod
        def fake(grad: Tensor, *rest: Any) -> Tensor:
            same_device(grad, *rest[:indices])
            return grad.new_empty(tuple(rest[indices]))

        @staticmethod
        def save(ctx: Any, arguments: tuple[Any, ...], gradient: Tensor) -> None:
            ctx.input_size, *ctx.settings = arguments[1 + indices :]
            keep(ctx, *arguments[1 : 1 + indices])

        @staticmethod
        def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
            if not ctx.needs_input_grad[1]:
                return (None,)
            return (forward(cotangent, *ctx.saved_tensors, *ctx.settings),)

        @staticmethod
        def jvp(ctx: Any, tangent: Tensor | None, *_: Tensor | None) -> Tensor:  # type: ignore[override]
            if tangent is None:
                return total([], ctx.saved_tensors[0], ctx.input_size)
            return transpose(tangent, *ctx.saved_tensors, ctx.input_size, *ctx.settings)

        @staticmethod
        def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Tensor, int]:
            if in_dims[1] is not None:
                return one_by_one(transpose, info.batch_size, in_dims, arguments)
            grad, rois, *rest = arguments
            chosen = [fold(info, in_dims[2 + n], tensor) for n, tensor in enumerate(rest[: indices - 1])]
            size = folded_size(info, rest[indices - 1])
            gradient = transpose(fold(info, in_dims[0], grad), rois, *chosen, size, *rest[indices:])
            return unfold(info, gradient), 1

    return Forward, Transpose


def pooled_shape(channels: int, rois: Tensor, output_size: Shape) -> Shape:
    """(K, C, rows, columns). Raises TypeError or ValueError for an output_size that isn't two positive numbers."""
    return rois.shape[0], channels, *pair("output_size", output_size, 1)


def position_sensitive_shape(input_size: Shape, rois: Tensor, output_size: Shape, *_: Any) -> Shape:
    """(K, C/(rows*columns), rows, columns). Raises as `pooled_shape`."""
    rows, columns = pair("output_size", output_size, 1)
    return pooled_shape(input_size[1] // (rows * columns), rois, output_size)


def keep(ctx: Any, *tensors: Tensor | None) -> None:
    """Saves tensors for both modes."""
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)


def total(terms: Sequence[Tensor], rois: Tensor, shape: Shape) -> Tensor:
    """The sum of a derivative's terms. Without any it is zeros: torch takes no None for a floating result."""
    return sum(terms[1:], terms[0]) if terms else rois.new_zeros(tuple(shape))


def fold(info: Any, dim: int | None, tensor: Tensor) -> Tensor:
    """The mapped dimension becomes part of the channels, whose pooling doesn't depend on each other."""
    if dim is None:
        return tensor.unsqueeze(1).expand(-1, info.batch_size, *(-1,) * (tensor.dim() - 1)).flatten(1, 2)
    return tensor.movedim(dim, 1).flatten(1, 2)


def folded_size(info: Any, size: Shape) -> Shape:
    """The size of a tensor that was folded."""
    return (size[0], info.batch_size * size[1], *size[2:])


def unfold(info: Any, tensor: Tensor) -> Tensor:
    """The mapped dimension as dimension 1."""
    return torch.unflatten(tensor, 1, (info.batch_size, tensor.shape[1] // info.batch_size))


def one_by_one(
    operator: Callable[..., Any], batch: int, in_dims: tuple[int | None, ...], arguments: tuple[Any, ...]
) -> tuple[Any, Any]:
    """Boxes that differ over the batch could only be pooled together if a dtype could count all images."""
    results = [
        operator(
            *(
                argument.select(dim, number) if isinstance(dim, int) else argument
                for argument, dim in zip(arguments, in_dims, strict=True)
            )
        )
        for number in range(batch)
    ]
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    return tuple(torch.stack(parts) for parts in zip(*results, strict=True)), (0,) * len(results[0])
