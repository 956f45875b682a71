"""roi_align, mean and largest sample, differentiable by the image and by the boxes to any order.

A sample is linear in the image, in its y and in its x, and these are linear in the corners of its box. So every
derivative is the sum over the same samples (or of the winners among them) with other weights: those of order 0, and
those along one or two directions of rois; a third derivative by rois is 0. `roi_align` is that sum,
`roi_align_backward` its transpose, and `roi_align_rois_backward` its gradient by a further direction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.raw.operator import RawOperator, same_device
from kernels.raw.pooling import fold, folded_size, keep, one_by_one, pooled_shape, total, unfold

Optional = Tensor | None
Directions = tuple[Optional, Optional]


class Forward(RawOperator):
    """(input, rois, winner, direction, second_direction, *settings) -> output."""

    name = "roi_align"

    @staticmethod
    def fake(input: Tensor, rois: Tensor, *rest: Any) -> Tensor:
        """(K, C, rows, columns)."""
        same_device(input, rois, *rest[:3])
        return input.new_empty(pooled_shape(input.shape[1], rois, rest[3]))

    @staticmethod
    def save(ctx: Any, arguments: tuple[Any, ...], output: Tensor) -> None:
        """The input only for the gradient of rois."""
        input, rois, winner, first, second, *ctx.settings = arguments
        ctx.input_size, ctx.output_size = input.shape, output.shape
        _keep_input(ctx, input, rois, winner, first, second)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Optional, ...]:  # type: ignore[override]
        """The transpose by input; by every direction, and by rois, the gradient of rois."""
        input, rois, winner, *along = ctx.saved_tensors
        by_input = None
        if ctx.needs_input_grad[1]:
            by_input = _backward(grad, rois, winner, *along, ctx.input_size, *ctx.settings)
        return by_input, *_by_boxes(ctx, grad, input, rois, winner, along)

    @staticmethod
    def jvp(ctx: Any, *tangents: Optional) -> Tensor:
        """One term for each tangent."""
        input, rois, winner, *along = ctx.saved_tensors
        of_input, of_rois, _, *of_along = tangents
        terms = [
            _forward(input, rois, winner, *directions, *ctx.settings)
            for directions in _moved(along, of_rois, of_along)
        ]
        if of_input is not None:
            terms.append(_forward(of_input, rois, winner, *along, *ctx.settings))
        return total(terms, rois, ctx.output_size)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        """Channels side by side."""
        if any(in_dims[number] is not None for number in (1, 3, 4)):
            return one_by_one(_forward, info.batch_size, in_dims, arguments)
        input, rois, winner, *rest = arguments
        winner = winner if winner is None else fold(info, in_dims[2], winner)
        return unfold(info, _forward(fold(info, in_dims[0], input), rois, winner, *rest)), 1


class Backward(RawOperator):
    """(grad, rois, winner, direction, second_direction, input_size, *settings) -> gradient by input."""

    name = "roi_align_backward"

    @staticmethod
    def fake(grad: Tensor, rois: Tensor, *rest: Any) -> Tensor:
        """input_size."""
        same_device(grad, rois, *rest[:3])
        return grad.new_empty(tuple(rest[3]))

    @staticmethod
    def save(ctx: Any, arguments: tuple[Any, ...], gradient: Tensor) -> None:
        """The gradient of the output only for that of rois."""
        grad, rois, winner, first, second, ctx.input_size, *ctx.settings = arguments
        _keep_input(ctx, grad, rois, winner, first, second)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Optional, ...]:  # type: ignore[override]
        """The forward by grad; by every direction, and by rois, the gradient of rois."""
        grad, rois, winner, *along = ctx.saved_tensors
        by_grad = None
        if ctx.needs_input_grad[1]:
            by_grad = _forward(cotangent, rois, winner, *along, *ctx.settings)
        return by_grad, *_by_boxes(ctx, grad, cotangent, rois, winner, along)

    @staticmethod
    def jvp(ctx: Any, *tangents: Optional) -> Tensor:
        """One term for each tangent."""
        grad, rois, winner, *along = ctx.saved_tensors
        of_grad, of_rois, _, *of_along = tangents
        terms = [
            _backward(grad, rois, winner, *directions, ctx.input_size, *ctx.settings)
            for directions in _moved(along, of_rois, of_along)
        ]
        if of_grad is not None:
            terms.append(_backward(of_grad, rois, winner, *along, ctx.input_size, *ctx.settings))
        return total(terms, rois, ctx.input_size)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        """Channels side by side."""
        if any(in_dims[number] is not None for number in (1, 3, 4)):
            return one_by_one(_backward, info.batch_size, in_dims, arguments)
        grad, rois, winner, first, second, size, *settings = arguments
        winner = winner if winner is None else fold(info, in_dims[2], winner)
        folded = fold(info, in_dims[0], grad)
        gradient = _backward(folded, rois, winner, first, second, folded_size(info, size), *settings)
        return unfold(info, gradient), 1


class RoisBackward(RawOperator):
    """(grad, input, rois, winner, direction, *settings) -> gradient by rois."""

    name = "roi_align_rois_backward"

    @staticmethod
    def fake(grad: Tensor, input: Tensor, rois: Tensor, *rest: Any) -> Tensor:
        """(K, 5)."""
        same_device(grad, input, rois, *rest[:2])
        return rois.new_empty(rois.shape)

    @staticmethod
    def save(ctx: Any, arguments: tuple[Any, ...], gradient: Tensor) -> None:
        """Everything."""
        *tensors, ctx.settings = *arguments[:5], arguments[5:]
        keep(ctx, *tensors)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Optional, ...]:  # type: ignore[override]
        """The cotangent is one more direction."""
        grad, input, rois, winner, first = ctx.saved_tensors
        along = (cotangent, None) if first is None else (first, cotangent)
        needs = ctx.needs_input_grad[1:]
        by_grad = _forward(input, rois, winner, *along, *ctx.settings) if needs[0] else None
        by_input = _backward(grad, rois, winner, *along, input.shape, *ctx.settings) if needs[1] else None
        if not (needs[2] and first is None) and not needs[4]:
            return by_grad, by_input
        by_box = _rois_backward(grad, input, rois, winner, cotangent, *ctx.settings)
        return by_grad, by_input, by_box if first is None else None, None, by_box if needs[4] else None

    @staticmethod
    def jvp(ctx: Any, *tangents: Optional) -> Tensor:
        """Linear in grad, input and direction, and symmetric in the directions."""
        grad, input, rois, winner, first = ctx.saved_tensors
        of_grad, of_input, of_rois, _, of_first = tangents
        calls = [(of_grad, input, first), (grad, of_input, first)]
        calls += [(grad, input, of_first)] if of_first is not None else []
        calls += [(grad, input, of_rois)] if of_rois is not None and first is None else []
        terms = [
            _rois_backward(one, other, rois, winner, direction, *ctx.settings)
            for one, other, direction in calls
            if one is not None and other is not None
        ]
        return total(terms, rois, rois.shape)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        """It sums over channels, so that these can't hold the batch."""
        return one_by_one(_rois_backward, info.batch_size, in_dims, arguments)


class Max(RawOperator):
    """(input, rois, *settings) -> output, winner. Given the winner everything is as above."""

    name = "roi_align_max"

    @staticmethod
    def fake(
        input: Tensor, rois: Tensor, output_size: Sequence[int], *settings: Any
    ) -> tuple[Tensor, Tensor]:
        """(K, C, rows, columns) both."""
        same_device(input, rois)
        shape = pooled_shape(input.shape[1], rois, output_size)
        return input.new_empty(shape), input.new_empty(shape, dtype=torch.int64)

    @staticmethod
    def save(ctx: Any, arguments: tuple[Any, ...], results: tuple[Tensor, Tensor]) -> None:
        """The input only for the gradient of rois."""
        input, rois, *ctx.settings = arguments
        ctx.input_size, ctx.output_size = input.shape, results[0].shape
        _keep_input(ctx, input, rois, results[1])
        ctx.mark_non_differentiable(results[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Optional, ...]:  # type: ignore[override]
        """Of the winners."""
        input, rois, winner = ctx.saved_tensors
        by_input = None
        if ctx.needs_input_grad[1]:
            by_input = _backward(grad, rois, winner, None, None, ctx.input_size, *ctx.settings)
        return by_input, *_by_boxes(ctx, grad, input, rois, winner, (None, None))

    @staticmethod
    def jvp(ctx: Any, of_input: Optional, of_rois: Optional) -> tuple[Tensor, None]:  # type: ignore[override]
        """Of the winners."""
        input, rois, winner = ctx.saved_tensors
        terms = []
        if of_input is not None:
            terms.append(_forward(of_input, rois, winner, None, None, *ctx.settings))
        if of_rois is not None:
            terms.append(_forward(input, rois, winner, of_rois, None, *ctx.settings))
        return total(terms, rois, ctx.output_size), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        """Channels side by side."""
        if in_dims[1] is not None:
            return one_by_one(torch.ops.gradparity.roi_align_max, info.batch_size, in_dims, arguments)
        input, *rest = arguments
        results = torch.ops.gradparity.roi_align_max(fold(info, in_dims[0], input), *rest)
        return tuple(unfold(info, result) for result in results), (1, 1)


OPERATORS = (Forward, Backward, RoisBackward, Max)


def _forward(*arguments: Any) -> Tensor:
    output: Tensor = torch.ops.gradparity.roi_align(*arguments)
    return output


def _backward(*arguments: Any) -> Tensor:
    gradient: Tensor = torch.ops.gradparity.roi_align_backward(*arguments)
    return gradient


def _rois_backward(*arguments: Any) -> Tensor:
    gradient: Tensor = torch.ops.gradparity.roi_align_rois_backward(*arguments)
    return gradient


def _keep_input(ctx: Any, value: Tensor, *others: Optional) -> None:
    """For reverse mode `value` is only needed where the boxes or directions get a gradient."""
    ctx.save_for_backward(value if any(ctx.needs_input_grad[2:6]) else None, *others)
    ctx.save_for_forward(value, *others)


def _by_boxes(
    ctx: Any, grad: Tensor, input: Tensor, rois: Tensor, winner: Optional, along: Sequence[Optional]
) -> tuple[Optional, ...]:
    """The gradients by rois, winner and the two directions, for those that need one."""
    needs_rois, _, needs_first, needs_second = (*ctx.needs_input_grad[2:6], False, False)[:4]
    first, second = along

    def gradient(direction: Optional) -> Tensor:
        return _rois_backward(grad, input, rois, winner, direction, *ctx.settings)

    return (
        gradient(first) if needs_rois and second is None else None,
        None,
        gradient(second) if needs_first else None,
        gradient(first) if needs_second else None,
    )


def _moved(
    along: Sequence[Optional], of_rois: Optional, of_along: Sequence[Optional]
) -> Iterator[Directions]:
    """The directions of the derivative's terms, for tangents of rois and of the directions."""
    first, second = along
    if of_rois is not None and second is None:
        yield (of_rois, None) if first is None else (first, of_rois)
    if of_along[0] is not None:
        yield of_along[0], second
    if of_along[1] is not None:
        yield first, of_along[1]
