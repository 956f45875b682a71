"""Deliberately broken providers, each with one fault, and the question that must catch it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import kernels
from conformance.providers.reference import Reference


class Broken(Reference):
    """The reference with a fault; `caught_by` names the question that must find it."""

    caught_by = ""

    def __init__(self) -> None:
        self.name = type(self).__name__

    def load(self) -> str:
        super().load()
        return "1"


def with_gradient_of(value: Tensor, other: Tensor) -> Tensor:
    """``value``, which differentiates as ``other`` does."""
    return value.detach() + (other - other.detach())


class _Tamper(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:  # type: ignore[override]
        ctx.change = change
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.change(grad), None


def tamper(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """``tensor``, whose gradient is changed on its way back."""
    changed: Tensor = _Tamper.apply(tensor, change)  # type: ignore[no-untyped-call]
    return changed


def read_as_contiguous(tensor: Tensor) -> Tensor:
    """What a kernel sees that ignores strides."""
    return tensor.detach().as_strided(tensor.shape, torch.empty(tensor.shape).stride())


class SwappedAxes(Broken):
    """x before y in the offset channels."""

    caught_by = "output"

    def deform_conv2d(self, input: Tensor, offset: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        swapped = offset.unflatten(1, (-1, 2)).flip(2).flatten(1, 2)
        return super().deform_conv2d(input, swapped, *args, **kwargs)


class SwappedPadding(Broken):
    """Horizontal padding used vertically."""

    caught_by = "output"

    def deform_conv2d(self, input: Tensor, offset: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        vertical, horizontal = kwargs["padding"]
        moved = offset.unflatten(1, (-1, 2)) + torch.tensor([vertical - horizontal, 0]).view(1, 1, 2, 1, 1)
        return super().deform_conv2d(input, moved.flatten(1, 2).to(offset.dtype), *args, **kwargs)


class MaskLeftOutOfInputGradient(Broken):
    """The gradient of the input forgets the mask."""

    caught_by = "gradients"

    def deform_conv2d(
        self,
        input: Tensor,
        offset: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        mask: Tensor | None,
        **kwargs: Any,
    ) -> Tensor:
        right = super().deform_conv2d(input.detach(), offset, weight, bias, mask=mask, **kwargs)
        unmasked = super().deform_conv2d(input, offset.detach(), weight.detach(), None, mask=None, **kwargs)
        return right + (unmasked - unmasked.detach())


class NothingInTheLowRim(Broken):
    """Samples between -1 and 0 are taken for outside: an off-by-one at one border."""

    caught_by = "output"

    def deform_conv2d(
        self, input: Tensor, offset: Tensor, weight: Tensor, bias: Tensor | None, **kwargs: Any
    ) -> Tensor:
        kh, kw = weight.shape[2:]
        rows = torch.arange(offset.shape[2]).view(1, 1, 1, -1, 1) * kwargs["stride"][0] - kwargs["padding"][0]
        taps = torch.arange(kh).repeat_interleave(kw).view(1, 1, -1, 1, 1) * kwargs["dilation"][0]
        moved = offset.unflatten(1, (-1, kh * kw, 2)).clone()
        y = rows + taps + moved[:, :, :, 0]
        moved[:, :, :, 0] -= ((y > -1) & (y < 0)).to(offset.dtype) * 1000
        return super().deform_conv2d(input, moved.flatten(1, 3), weight, bias, **kwargs)


class FirstImageBeyond32(Broken):
    """From the 33rd image on, the first one is read."""

    caught_by = "output"

    def deform_conv2d(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        read = torch.cat([input[:32], input[:1].expand(max(len(input) - 32, 0), -1, -1, -1)])
        return super().deform_conv2d(read, *args, **kwargs)


class DilationIgnoredBeyondOne(Broken):
    """Vertical dilation above 1 counts as 1."""

    caught_by = "output"

    def deform_conv2d(
        self, input: Tensor, offset: Tensor, weight: Tensor, *args: Any, dilation: Any, **kwargs: Any
    ) -> Tensor:
        kh, kw = weight.shape[2:]
        rows = torch.arange(kh).repeat_interleave(kw) * (1 - dilation[0])
        moved = offset.unflatten(1, (-1, kh * kw, 2)).clone()
        moved[:, :, :, 0] += rows.view(1, 1, -1, 1, 1)
        return super().deform_conv2d(input, moved.flatten(1, 3), weight, *args, dilation=dilation, **kwargs)


class StridedGradOutput(Broken):
    """grad_output is read as if it were contiguous."""

    caught_by = "gradients"

    def deform_conv2d(self, *args: Any, **kwargs: Any) -> Tensor:
        return tamper(super().deform_conv2d(*args, **kwargs), read_as_contiguous)


class StridedInput(Broken):
    """The input is read as if it were contiguous."""

    caught_by = "output"

    def deform_conv2d(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return super().deform_conv2d(with_gradient_of(read_as_contiguous(input), input), *args, **kwargs)


class OnlyInFloat32(Broken):
    """One result in a hundred thousand too large, in float32."""

    caught_by = "output"

    def deform_conv2d(self, *args: Any, **kwargs: Any) -> Tensor:
        output = super().deform_conv2d(*args, **kwargs)
        return output * (1 + 1e-5) if output.dtype == torch.float32 else output


class Float32InFloat64(Broken):
    """float64 computed in float32."""

    caught_by = "output"

    def deform_conv2d(self, *args: Any, **kwargs: Any) -> Tensor:
        output = super().deform_conv2d(*args, **kwargs)
        return with_gradient_of(output.float().to(output.dtype), output)


class ClosedEdge(Broken):
    """Follows torchvision's convention at -1 and does not say so."""

    caught_by = "gradients"

    def deform_conv2d(self, *args: Any, **kwargs: Any) -> Tensor:
        return kernels.deform_conv2d(*args, **kwargs, boundary="closed")


class NoGraph(Broken):
    """An output that autograd can't go back from."""

    caught_by = "gradients"

    def deform_conv2d(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().deform_conv2d(*args, **kwargs).detach()


class NoBiasGradient(Broken):
    """The bias gets no gradient."""

    caught_by = "gradients"

    def deform_conv2d(
        self, input: Tensor, offset: Tensor, weight: Tensor, bias: Tensor | None, **kwargs: Any
    ) -> Tensor:
        return super().deform_conv2d(input, offset, weight, None if bias is None else bias.detach(), **kwargs)


class FirstWeightGroupOnly(Broken):
    """The weight gradient of all groups but the first is zero."""

    caught_by = "gradients"

    def deform_conv2d(
        self, input: Tensor, offset: Tensor, weight: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        groups = input.shape[1] // weight.shape[1]
        first = (torch.arange(len(weight)) < len(weight) // groups).view(-1, 1, 1, 1)
        return super().deform_conv2d(
            input, offset, tamper(weight, lambda grad: grad * first), *args, **kwargs
        )


class SharedOffsets(Broken):
    """All offset groups take the first one's offsets."""

    caught_by = "output"

    def deform_conv2d(
        self, input: Tensor, offset: Tensor, weight: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        taps = 2 * weight.shape[2] * weight.shape[3]
        shared = offset[:, :taps].repeat(1, offset.shape[1] // taps, 1, 1)
        return super().deform_conv2d(input, shared, weight, *args, **kwargs)


class EmptyBatchRefused(Broken):
    """An empty batch is an error."""

    caught_by = "output"

    def deform_conv2d(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if len(input) == 0:
            raise ValueError("input is empty")
        return super().deform_conv2d(input, *args, **kwargs)


class DiesOfNaN(Broken):
    """A NaN offset kills the process."""

    caught_by = "output"

    def deform_conv2d(self, input: Tensor, offset: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if offset.isnan().any():
            import os
            import signal

            os.kill(os.getpid(), signal.SIGSEGV)
        return super().deform_conv2d(input, offset, *args, **kwargs)


class HalfSecondOrderOfOffset(Broken):
    """Whatever depends on the offset's gradient is half of what it should be; first order is right."""

    caught_by = "gradgradcheck"

    def deform_conv2d(self, input: Tensor, offset: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return super().deform_conv2d(input, tamper(offset, halve_slope), *args, **kwargs)


def halve_slope(grad: Tensor) -> Tensor:
    """The same values with half the slope."""
    return with_gradient_of(grad, grad * 0.5)


class HalfSecondOrder(Broken):
    """Second order by grad_output is half of what it should be; first order is right."""

    caught_by = "double_backward"

    def deform_conv2d(self, *args: Any, **kwargs: Any) -> Tensor:
        return tamper(super().deform_conv2d(*args, **kwargs), halve_slope)


class WrongFiniteDifference(Broken):
    """The gradient of the offset is half of what it should be."""

    caught_by = "gradcheck"

    def deform_conv2d(self, input: Tensor, offset: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return super().deform_conv2d(input, tamper(offset, lambda grad: grad / 2), *args, **kwargs)


class ConvOffsetBiasForgotten(Broken):
    """A layer whose conv_offset has a bias without gradient."""

    caught_by = "modules"

    def modulated_deform_conv2d_pack(self, *args: Any, **kwargs: Any) -> nn.Module:
        return _with_forward_hook(super().modulated_deform_conv2d_pack(*args, **kwargs))


def _with_forward_hook(pack: nn.Module) -> nn.Module:
    convolution = pack.conv_offset
    assert isinstance(convolution, nn.Conv2d)
    forward = convolution._conv_forward

    def without_bias_gradient(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return forward(input, weight, None if bias is None else bias.detach())

    convolution._conv_forward = without_bias_gradient  # type: ignore[method-assign]
    return pack


class ChangesItsBoxes(Broken):
    """The boxes are moved in place and left so."""

    caught_by = "output"

    def roi_align(self, input: Tensor, rois: Tensor, **kwargs: Any) -> Tensor:
        output = super().roi_align(input, rois, **kwargs)
        rois.data.add_(1)
        return output


class NotAligned(Broken):
    """roi_align without the half pixel of `aligned`."""

    caught_by = "output"

    def roi_align(self, input: Tensor, rois: Tensor, *, aligned: bool, **kwargs: Any) -> Tensor:
        return super().roi_align(input, rois, aligned=False, **kwargs)


class RoIScaleTwice(Broken):
    """roi_align applies a spatial scale other than 1 twice."""

    caught_by = "output"

    def roi_align(self, input: Tensor, rois: Tensor, *, spatial_scale: float, **kwargs: Any) -> Tensor:
        return super().roi_align(input, rois, spatial_scale=spatial_scale**2, **kwargs)


class RoIFirstChannelGradient(Broken):
    """roi_align's gradient of all channels but the first is zero."""

    caught_by = "gradients"

    def roi_align(self, input: Tensor, rois: Tensor, **kwargs: Any) -> Tensor:
        first = (torch.arange(input.shape[1]) < 1).view(-1, 1, 1)
        return super().roi_align(tamper(input, lambda grad: grad * first), rois, **kwargs)


class RoIOnceDifferentiable(Broken):
    """roi_align's second order is silently zero."""

    caught_by = "double_backward"

    def roi_align(self, input: Tensor, rois: Tensor, **kwargs: Any) -> Tensor:
        return tamper(super().roi_align(input, rois, **kwargs), Tensor.detach)


class RoIPoolTruncates(Broken):
    """roi_pool cuts its corners off instead of rounding them."""

    caught_by = "output"

    def roi_pool(self, input: Tensor, rois: Tensor, *, spatial_scale: float, **kwargs: Any) -> Tensor:
        corners = (rois.double() * spatial_scale).trunc() / spatial_scale
        moved = torch.cat([rois[:, :1], corners[:, 1:].to(rois.dtype)], 1)
        return super().roi_pool(input, moved, spatial_scale=spatial_scale, **kwargs)


class RoIPoolLastOfEqualPixels(Broken):
    """roi_pool gives the gradient to the last of equal pixels."""

    caught_by = "gradients"

    def roi_pool(self, input: Tensor, rois: Tensor, **kwargs: Any) -> Tensor:
        rank = torch.arange(input.shape[2] * input.shape[3]).view(input.shape[2:])
        tilted = (input.double() + rank * 1e-7).to(input.dtype)
        right = super().roi_pool(input.detach(), rois, **kwargs)
        return with_gradient_of(right, super().roi_pool(tilted, rois, **kwargs))


class NaNPixelsIgnored(Broken):
    """roi_pool passes over NaN pixels."""

    caught_by = "output"

    def roi_pool(self, input: Tensor, rois: Tensor, **kwargs: Any) -> Tensor:
        return super().roi_pool(torch.where(input.isnan(), -1e4, input), rois, **kwargs)


class PSRoIPoolWithoutLastRow(Broken):
    """ps_roi_pool's forward leaves out the last row and column, as torchvision's does."""

    caught_by = "output"

    def ps_roi_pool(self, input: Tensor, rois: Tensor, **kwargs: Any) -> Tensor:
        right = super().ps_roi_pool(input, rois, **kwargs)
        return with_gradient_of(super().ps_roi_pool(input[..., :-1, :-1].detach(), rois, **kwargs), right)


class PSRoIAlignChannelsInside(Broken):
    """ps_roi_align takes the bins for the slow and the output channels for the fast part of a channel."""

    caught_by = "output"

    def ps_roi_align(self, input: Tensor, rois: Tensor, *, output_size: Any, **kwargs: Any) -> Tensor:
        bins = output_size[0] * output_size[1]
        swapped = input.unflatten(1, (bins, -1)).transpose(1, 2).flatten(1, 2)
        return super().ps_roi_align(swapped, rois, output_size=output_size, **kwargs)


class RoIMaxStartsAtMinus10000(Broken):
    """roi_align_max starts its maximum at -10000, as mmcv's does."""

    caught_by = "output"

    def roi_align_max(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().roi_align_max(*args, **kwargs).clamp_min(-10000)


class RoIMaxWithGradientOfMean(Broken):
    """roi_align_max shares the gradient among all samples."""

    caught_by = "gradients"

    def roi_align_max(self, input: Tensor, rois: Tensor, **kwargs: Any) -> Tensor:
        return with_gradient_of(
            super().roi_align_max(input, rois, **kwargs), super().roi_align(input, rois, **kwargs)
        )


class RoisMoveAsAWhole(Broken):
    """roi_align_rois_grad gives both corners of a box half of the gradient."""

    caught_by = "gradients"

    def roi_align_rois_grad(self, input: Tensor, rois: Tensor, **kwargs: Any) -> Tensor:
        def share(grad: Tensor) -> Tensor:
            both = (grad[:, 1:3] + grad[:, 3:5]) / 2
            return torch.cat([grad[:, :1], both, both], 1)

        return super().roi_align_rois_grad(input, tamper(rois, share), **kwargs)


class HalfSecondOrderOfRois(Broken):
    """Whatever depends on the gradient of rois is half of what it should be; first order is right."""

    caught_by = "double_backward"

    def roi_align_rois_grad(self, input: Tensor, rois: Tensor, **kwargs: Any) -> Tensor:
        return super().roi_align_rois_grad(input, tamper(rois, halve_slope), **kwargs)


class TangentHalved(Broken):
    """The forward-mode tangent is half of what it should be."""

    caught_by = "forward_mode"

    def deform_conv2d(self, *args: Any, **kwargs: Any) -> Tensor:
        halved: Tensor = _TangentHalved.apply(super().deform_conv2d(*args, **kwargs))  # type: ignore[no-untyped-call]
        return halved


class _TangentHalved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:  # type: ignore[override]
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:  # type: ignore[override]
        return tangent / 2


class DetachedUnderTransforms(Broken):
    """torch.func sees an output that does not depend on the input."""

    caught_by = "transforms"

    def deform_conv2d(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        detached = input.detach() if torch._C._are_functorch_transforms_active() else input
        return super().deform_conv2d(detached, *args, **kwargs)


class ShuffledByVmap(Broken):
    """A batching rule that brings the pieces out of order."""

    caught_by = "vmap"

    def roi_align(self, *args: Any, **kwargs: Any) -> Tensor:
        shuffled: Tensor = _ShuffledByVmap.apply(super().roi_align(*args, **kwargs))  # type: ignore[no-untyped-call]
        return shuffled


class _ShuffledByVmap(torch.autograd.Function):
    @staticmethod
    def forward(tensor: Tensor) -> Tensor:  # type: ignore[override]
        return tensor.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int], tensor: Tensor) -> tuple[Tensor, int]:  # type: ignore[override]
        return tensor.roll(1, in_dims[0]), in_dims[0]


def next_number(tensor: Tensor) -> Tensor:
    """The next larger numbers, right within any bound; with the gradient of the tensor."""
    return with_gradient_of(torch.nextafter(tensor, torch.full_like(tensor, torch.inf)), tensor)


class CompiledDifferently(Broken):
    """Compiled, a result is the next larger number: no bound tells."""

    caught_by = "compile"

    def roi_align(self, *args: Any, **kwargs: Any) -> Tensor:
        output = super().roi_align(*args, **kwargs)
        return next_number(output) if torch.compiler.is_compiling() else output


class GeneratedWrong(Broken):
    """Compiled, a result is one percent too large."""

    caught_by = "compile_inductor"

    def roi_align(self, *args: Any, **kwargs: Any) -> Tensor:
        output = super().roi_align(*args, **kwargs)
        return output * 1.01 if torch.compiler.is_compiling() else output


class ExportedWrong(Broken):
    """Exported, a result is one percent too large."""

    caught_by = "export"

    def roi_align(self, *args: Any, **kwargs: Any) -> Tensor:
        output = super().roi_align(*args, **kwargs)
        return output * 1.01 if torch.compiler.is_exporting() else output


@torch.library.custom_op("gradparity_broken::copy", mutates_args=())
def _copy(tensor: Tensor) -> Tensor:
    return tensor.clone()


_copy.register_fake(lambda tensor: tensor.new_empty((*tensor.shape, 1)))
_copy.register_autograd(lambda ctx, grad: grad)


class FakeShape(Broken):
    """An operator whose fake kernel promises another shape."""

    caught_by = "opcheck"

    def roi_align(self, *args: Any, **kwargs: Any) -> Tensor:
        copied: Tensor = _copy(super().roi_align(*args, **kwargs))
        return copied


class WideUnderAutocast(Broken):
    """Under autocast the result is float32, whatever the input was."""

    caught_by = "autocast"

    def deform_conv2d(self, *args: Any, **kwargs: Any) -> Tensor:
        output = super().deform_conv2d(*args, **kwargs)
        return output.float() if torch.is_autocast_enabled("cpu") else output


class CannotBePickled(Broken):
    """A layer that holds a function without a name."""

    caught_by = "persistence"

    def modulated_deform_conv2d_pack(self, *args: Any, **kwargs: Any) -> nn.Module:
        pack = super().modulated_deform_conv2d_pack(*args, **kwargs)
        pack.register_forward_hook(lambda module, inputs, output: output)
        return pack


class InputOnlyWithWeight(Broken):
    """The input has a gradient only when the weight has one."""

    caught_by = "subsets"

    def deform_conv2d(
        self, input: Tensor, offset: Tensor, weight: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        chosen = input if weight.requires_grad else input.detach()
        return super().deform_conv2d(chosen, offset, weight, *args, **kwargs)


class DependsOnThreads(Broken):
    """Another sum with one thread than with two."""

    caught_by = "determinism"

    def deform_conv2d(self, *args: Any, **kwargs: Any) -> Tensor:
        output = super().deform_conv2d(*args, **kwargs)
        return next_number(output) if torch.get_num_threads() == 1 else output


class DependsOnTheBatch(Broken):
    """Another sum for one image than for several."""

    caught_by = "determinism"

    def roi_align(self, input: Tensor, rois: Tensor, **kwargs: Any) -> Tensor:
        output = super().roi_align(input, rois, **kwargs)
        return next_number(output) if len(input) == 1 else output


class RefusesDeterminism(Broken):
    """An error under torch.use_deterministic_algorithms(True)."""

    caught_by = "determinism"

    def deform_conv2d(self, *args: Any, **kwargs: Any) -> Tensor:
        if torch.are_deterministic_algorithms_enabled():
            raise RuntimeError("deform_conv2d does not have a deterministic implementation")
        return super().deform_conv2d(*args, **kwargs)


class KeepsEveryOutput(Broken):
    """Every output is kept for ever."""

    caught_by = "memory"

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def roi_align(self, input: Tensor, rois: Tensor, **kwargs: Any) -> Tensor:
        output = super().roi_align(input, rois, **kwargs)
        self.kept.append(output.detach())
        return output


BROKEN = sorted((cls for cls in Broken.__subclasses__()), key=lambda cls: cls.__name__)
