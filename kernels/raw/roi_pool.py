"""roi_pool; given its argmax it gathers pixels, and its backward scatters to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.raw.operator import RawOperator, same_device
from kernels.raw.pooling import fold, keep, linear_pooling, one_by_one, pooled_shape, total, unfold


class Forward(RawOperator):
    """(input, rois, output_size, spatial_scale) -> output, argmax."""

    name = "roi_pool"

    @staticmethod
    def fake(
        input: Tensor, rois: Tensor, output_size: Sequence[int], spatial_scale: float
    ) -> tuple[Tensor, Tensor]:
        """(K, C, rows, columns) both."""
        same_device(input, rois)
        shape = pooled_shape(input.shape[1], rois, output_size)
        return input.new_empty(shape), input.new_empty(shape, dtype=torch.int64)

    @staticmethod
    def save(ctx: Any, arguments: tuple[Any, ...], results: tuple[Tensor, Tensor]) -> None:
        """What is read, but not the input."""
        ctx.input_size, ctx.output_size = arguments[0].shape, results[0].shape
        keep(ctx, arguments[1], results[1])
        ctx.mark_non_differentiable(results[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Scatters."""
        if not ctx.needs_input_grad[1]:
            return (None,)
        return (torch.ops.gradparity.roi_pool_scatter(grad, *ctx.saved_tensors, ctx.input_size),)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor | None, _: Any) -> tuple[Tensor, None]:  # type: ignore[override]
        """Gathers."""
        if tangent is None:
            return total([], ctx.saved_tensors[0], ctx.output_size), None
        return torch.ops.gradparity.roi_pool_gather(tangent, *ctx.saved_tensors), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        """Channels side by side."""
        if in_dims[1] is not None:
            return one_by_one(torch.ops.gradparity.roi_pool, info.batch_size, in_dims, arguments)
        input, *rest = arguments
        results = torch.ops.gradparity.roi_pool(fold(info, in_dims[0], input), *rest)
        return tuple(unfold(info, result) for result in results), (1, 1)


OPERATORS = (
    Forward,
    *linear_pooling("roi_pool_gather", "roi_pool_scatter", 2, lambda input, rois, argmax: argmax.shape),
)
