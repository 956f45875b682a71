"""deform_conv2d, its backward, and its double backward, which is its forward-mode derivative as well.

With the gradients g = backward(grad, x) of <grad, f(x)> by the values x = (input, offset, weight, mask), and
cotangents t of these, double backward is the gradient of <t, g>: by grad it is the derivative of f along t, and by
x it is the second derivative of <grad, f> along t, which is symmetric. So the derivatives of all three, in
both modes, are made of the same three kernels. Only the full derivative of double backward is third order and
goes through the composite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.checks import Window
from kernels.composite.deform_conv2d import compute
from kernels.raw.operator import RawOperator, same_device

Optional = Tensor | None
Settings = tuple[Sequence[int], Sequence[int], Sequence[int], bool]  # stride, padding, dilation, closed


class Forward(RawOperator):
    """(input, offset, weight, mask, bias) -> output."""

    name = "deform_conv2d"

    @staticmethod
    def fake(
        input: Tensor, offset: Tensor, weight: Tensor, mask: Optional, bias: Optional, *settings: Any
    ) -> Tensor:
        """(N, O, oh, ow)."""
        same_device(input, offset, weight, mask, bias)
        return input.new_empty((input.shape[0], weight.shape[0], *offset.shape[2:]))

    @staticmethod
    def save(ctx: Any, arguments: tuple[Any, ...], output: Tensor) -> None:
        """The values; only the presence of bias matters."""
        *values, _, ctx.stride, ctx.padding, ctx.dilation, ctx.closed = arguments
        _keep(ctx, values)

    @staticmethod
    def backward(ctx: Any, grad: Optional) -> tuple[Optional, ...]:  # type: ignore[override]
        """The backward operator; bias gets the sum of grad."""
        assert grad is not None
        _, *needs, needs_bias = ctx.needs_input_grad[:6]
        gradients: Sequence[Optional] = (None,) * 4
        if any(needs):
            found = _backward(grad, *ctx.saved_tensors, *_settings(ctx), needs)
            gradients = _only(needs, found)
        return (*gradients, _sum_of_channels(grad) if needs_bias else None)

    @staticmethod
    def jvp(ctx: Any, *tangents: Optional) -> Tensor:
        """The first result of double backward."""
        *of_values, of_bias = tangents
        tangent = _along(of_values, ctx.saved_tensors, _settings(ctx))
        return tangent if of_bias is None else tangent + of_bias.view(-1, 1, 1)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Tensor, int]:
        """The batch becomes groups."""
        *tensors, stride, padding, dilation, closed = arguments
        folded = _fold(info.batch_size, in_dims, tensors, (1, 1, 0, 1, 0))
        output = torch.ops.gradparity.deform_conv2d(*folded, stride, padding, dilation, closed)
        return _unfold(info.batch_size, (output,), (1,))[0], 1


class Backward(RawOperator):
    """(grad, input, offset, weight, mask) -> gradients of the four values; empty where not needed."""

    name = "deform_conv2d_backward"

    @staticmethod
    def fake(
        grad: Tensor, input: Tensor, offset: Tensor, weight: Tensor, mask: Optional, *rest: Any
    ) -> tuple[Tensor, ...]:
        """The values' shapes, (0,) where not needed."""
        same_device(grad, input, offset, weight, mask)
        return _empty_like(rest[-1], input, offset, weight, mask)

    @staticmethod
    def save(ctx: Any, arguments: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
        """Everything."""
        *tensors, ctx.stride, ctx.padding, ctx.dilation, ctx.closed, needs = arguments
        ctx.needs = [needed and tensor is not None for needed, tensor in zip(needs, tensors[1:], strict=True)]
        _keep(ctx, tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Optional) -> tuple[Optional, ...]:
        """The double backward operator."""
        needs = ctx.needs_input_grad[1:6]
        present = _only(ctx.needs, cotangents)
        if not any(needs) or all(cotangent is None for cotangent in present):
            return (None,) * 5
        found = _double_backward(*present, *ctx.saved_tensors, *_settings(ctx), needs)
        return _only(needs, found)

    @staticmethod
    def jvp(ctx: Any, *tangents: Optional) -> tuple[Tensor, ...]:
        """Linear in grad, and symmetric in the values."""
        grad, *values = ctx.saved_tensors
        of_grad, *of_values = tangents
        parts: list[Sequence[Tensor]] = []
        if of_grad is not None:
            parts.append(_backward(of_grad, *values, *_settings(ctx), ctx.needs))
        if any(tangent is not None for tangent in of_values):
            found = _double_backward(*of_values, grad, *values, *_settings(ctx), [False, *ctx.needs])
            parts.append(found[1:])
        return tuple(sum(terms[1:], terms[0]) for terms in zip(*parts, strict=True))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], *arguments: Any
    ) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
        """The batch becomes groups."""
        *tensors, stride, padding, dilation, closed, needs = arguments
        folded = _fold(info.batch_size, in_dims, tensors, (1, 1, 1, 0, 1))
        gradients = _backward(*folded, stride, padding, dilation, closed, needs)
        return _unfold(info.batch_size, gradients, (1, 1, 0, 1)), _out_dims(gradients, (1, 1, 0, 1))


class DoubleBackward(RawOperator):
    """(cotangents of the four gradients, grad, the four values) -> gradients by grad and the values."""

    name = "deform_conv2d_double_backward"

    @staticmethod
    def fake(*arguments: Any) -> tuple[Tensor, ...]:
        """The shapes of grad and the values, (0,) where not needed."""
        same_device(*arguments[:9])
        input, offset, weight, mask = arguments[5:9]
        grad = input.new_empty((input.shape[0], weight.shape[0], *offset.shape[2:]))
        return _empty_like(arguments[-1], grad, input, offset, weight, mask)

    @staticmethod
    def save(ctx: Any, arguments: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
        """Everything."""
        *tensors, ctx.stride, ctx.padding, ctx.dilation, ctx.closed, needs = arguments
        ctx.needs = [
            needed and tensor is not None for needed, tensor in zip(needs, (0, *tensors[5:]), strict=True)
        ]
        _keep(ctx, tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Optional) -> tuple[Optional, ...]:
        """Of the first result alone, second order, by the kernels; of the others by the composite."""
        needs = ctx.needs_input_grad[1:10]
        present = _only(ctx.needs, cotangents)
        if not any(needs) or all(cotangent is None for cotangent in present):
            return (None,) * 9
        if present[0] is not None and all(cotangent is None for cotangent in present[1:]):
            return _differentiate_tangent(present[0], ctx.saved_tensors, _settings(ctx), needs)
        tensors, function = _third_order(ctx)
        results, pull = _vjp(function, tensors)
        (found,) = pull({number: _or_zeros(present[number], result) for number, result in results.items()})
        return tuple(found.get(number) if needed else None for number, needed in enumerate(needs))

    @staticmethod
    def jvp(ctx: Any, *tangents: Optional) -> tuple[Tensor, ...]:
        """Through the composite: the transpose of the transpose, which needs no forward mode of its own."""
        if torch._C._are_functorch_transforms_active():
            raise RuntimeError(
                "deform_conv2d_double_backward has no forward mode under torch.func: kernels.deform_conv2d has it, "
                "by way of its composite"
            )
        tensors, function = _third_order(ctx)
        results, pull = _vjp(function, tensors)
        zeros = {number: torch.zeros_like(result) for number, result in results.items()}
        _, push = _vjp(lambda cotangents: pull(cotangents)[0], zeros)
        along = {number: _or_zeros(tangents[number], tensor) for number, tensor in tensors.items()}
        (found,) = push(along)
        empty = tensors[5].new_empty(0)
        return tuple(found.get(number, empty) for number in range(5))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], *arguments: Any
    ) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
        """The batch becomes groups."""
        *tensors, stride, padding, dilation, closed, needs = arguments
        folded = _fold(info.batch_size, in_dims, tensors, (1, 1, 0, 1, 1, 1, 1, 0, 1))
        found = _double_backward(*folded, stride, padding, dilation, closed, needs)
        return _unfold(info.batch_size, found, (1, 1, 1, 0, 1)), _out_dims(found, (1, 1, 1, 0, 1))


def _sum_of_channels(grad: Tensor) -> Tensor:
    """The sum over all but dimension 1, whose parts don't depend on the number of threads."""
    wide = torch.float32 if grad.element_size() == 2 else grad.dtype
    images, channels, rows, columns = grad.shape
    if images * channels == 1:  # torch shares a single sum out among its threads, and no other
        per_image = grad.sum(3, dtype=wide).sum(2)
    else:
        per_image = grad.reshape(images, channels, rows * columns).sum(2, dtype=wide)
    return per_image.sum(0).to(grad.dtype)


OPERATORS = (Forward, Backward, DoubleBackward)


def _backward(*arguments: Any) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = torch.ops.gradparity.deform_conv2d_backward(*arguments)
    return found


def _double_backward(*arguments: Any) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = torch.ops.gradparity.deform_conv2d_double_backward(*arguments)
    return found


def _along(tangents: Sequence[Optional], values: Sequence[Optional], settings: Settings) -> Tensor:
    """The derivative of the output along tangents of the values."""
    return _double_backward(*tangents, None, *values, *settings, [True, False, False, False, False])[0]


def _differentiate_tangent(
    cotangent: Tensor, tensors: Sequence[Optional], settings: Settings, needs: Sequence[bool]
) -> tuple[Optional, ...]:
    """The gradients of <cotangent, derivative of the output along tangents>, by tangents, grad and values."""
    tangents, values = tensors[:4], tensors[5:]
    by_tangents: Sequence[Optional] = (None,) * 4
    by_values: Sequence[Optional] = (None,) * 4
    if any(needs[:4]):
        by_tangents = _only(needs[:4], _backward(cotangent, *values, *settings, needs[:4]))
    if any(needs[5:]):
        found = _double_backward(*tangents, cotangent, *values, *settings, [False, *needs[5:]])
        by_values = _only(needs[5:], found[1:])
    return (*by_tangents, None, *by_values)


def _third_order(ctx: Any) -> tuple[dict[int, Tensor], Any]:
    """Double backward as a differentiable function of the tensors that are there, by their numbers."""
    stride, padding, dilation, closed = _settings(ctx)
    window = Window(tuple(stride), tuple(padding), tuple(dilation))  # type: ignore[arg-type]
    present = {number: tensor for number, tensor in enumerate(ctx.saved_tensors) if tensor is not None}

    def first_order(values: dict[int, Tensor], grad: Tensor) -> dict[int, Tensor]:
        def output(values: dict[int, Tensor]) -> Tensor:
            input, offset, weight, mask = (values.get(number) for number in range(5, 9))
            assert input is not None
            assert offset is not None
            assert weight is not None
            return compute(input, offset, weight, mask, None, window, closed)

        gradients: dict[int, Tensor] = _vjp(output, values)[1](grad)[0]
        return gradients

    def function(tensors: dict[int, Tensor]) -> dict[int, Tensor]:
        values = {number: tensor for number, tensor in tensors.items() if number > 4}
        # Without a grad there is only the first result, which doesn't depend on it.
        grad = (
            tensors[4] if 4 in tensors else Forward.fake(values[5], values[6], values[7], None, None).zero_()
        )
        gradients, pull = _vjp(first_order, values, grad)
        cotangents = {
            number: _or_zeros(tensors.get(number - 5), gradient) for number, gradient in gradients.items()
        }
        by_values, by_grad = pull(cotangents)
        found = {0: by_grad, **{number - 4: gradient for number, gradient in by_values.items()}}
        return {number: tensor for number, tensor in found.items() if ctx.needs[number]}

    return present, function


def _vjp(function: Callable[..., Any], *primals: Any) -> tuple[Any, Callable[..., Any]]:
    return torch.func.vjp(function, *primals)  # type: ignore[return-value]


def _or_zeros(tensor: Optional, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if tensor is None else tensor


def _settings(ctx: Any) -> Settings:
    return ctx.stride, ctx.padding, ctx.dilation, ctx.closed


def _keep(ctx: Any, tensors: Sequence[Optional]) -> None:
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)


def _only(needs: Sequence[bool], tensors: Sequence[Optional]) -> tuple[Optional, ...]:
    return tuple(tensor if needed else None for needed, tensor in zip(needs, tensors, strict=True))


def _empty_like(needs: Sequence[bool], *tensors: Optional) -> tuple[Tensor, ...]:
    some = next(tensor for tensor in tensors if tensor is not None)
    return tuple(
        some.new_empty(tensor.shape if needed and tensor is not None else (0,))
        for needed, tensor in zip(needs, tensors, strict=True)
    )


def _fold(
    batch: int, in_dims: Sequence[int | None], tensors: Sequence[Optional], into: Sequence[int]
) -> list[Optional]:
    """The tensors with the mapped dimension in front of their channels and one with it.

    A batch of deformable convolutions is one whose groups and offset groups are those of all, side by side.
    """
    folded: list[Optional] = []
    for tensor, in_dim, dim in zip(tensors, in_dims, into, strict=False):
        if tensor is None:
            folded.append(None)
        elif in_dim is None:
            folded.append(
                tensor.unsqueeze(dim)
                .expand(*tensor.shape[:dim], batch, *tensor.shape[dim:])
                .flatten(dim, dim + 1)
            )
        else:
            folded.append(tensor.movedim(in_dim, dim).flatten(dim, dim + 1))
    return folded


def _unfold(batch: int, results: Sequence[Tensor], out_of: Sequence[int]) -> tuple[Tensor, ...]:
    return tuple(
        result if out is None else torch.unflatten(result, out, (batch, result.shape[out] // batch))
        for result, out in zip(results, _out_dims(results, out_of), strict=True)
    )


def _out_dims(results: Sequence[Tensor], out_of: Sequence[int]) -> tuple[int | None, ...]:
    """A result that isn't needed is empty and has no batch."""
    return tuple(None if result.dim() == 1 else dim for result, dim in zip(results, out_of, strict=True))
