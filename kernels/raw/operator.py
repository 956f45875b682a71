"""Making a compiled operator differentiable in both modes and under every transform of torch.func.

`torch.library.register_autograd` serves reverse mode only: it drops a forward-mode tangent without a word, and
refuses torch.func. A kernel at the Autograd key that runs a single-level autograd function, the way that torch
differentiates its own operators, does all of it, for raw operators too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.autograd.function import _SingleLevelFunction

NAMESPACE = "gradparity"


class RawOperator:
    """An operator of csrc/schema.cpp. A subclass says how it is differentiated and batched."""

    name: ClassVar[str]

    @staticmethod
    def fake(*arguments: Any) -> Any:
        """Empty results of the right shapes."""
        raise NotImplementedError

    @staticmethod
    def save(ctx: Any, arguments: tuple[Any, ...], results: Any) -> None:
        """Keeps in ctx what `backward` and `jvp` need."""
        raise NotImplementedError

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of the tensors among the arguments, which come first; the others have none."""
        raise NotImplementedError

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        """The tangents of the results, for tangents of the tensors among the arguments."""
        raise NotImplementedError

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        """The results for arguments with a further dimension, and where theirs is."""
        raise NotImplementedError


def register(operator: type[RawOperator], library: torch.library.Library) -> None:
    """Tells torch what the operator is under autograd, torch.func and fake tensors."""
    torch.library.register_fake(f"{NAMESPACE}::{operator.name}", operator.fake, lib=library)
    torch.library.register_vmap(f"{NAMESPACE}::{operator.name}", operator.vmap, lib=library)
    library.impl(operator.name, _autograd_kernel(operator), "Autograd", with_keyset=True)  # type: ignore[no-untyped-call]


def _autograd_kernel(operator: type[RawOperator]) -> Callable[..., Any]:
    overload = getattr(getattr(torch.ops, NAMESPACE), operator.name).default
    arguments = overload._schema.arguments
    tensors = sum(isinstance(a.type, (torch.TensorType, torch.OptionalType)) for a in arguments)

    def forward(ctx: Any, state: tuple[Any, bool, bool], *given: Any) -> Any:
        # An autograd function runs without grad mode, which must not reach the transforms further out.
        keyset, grad, forward_grad = state
        with (
            torch.set_grad_enabled(grad),
            _set_fwd_grad_enabled(forward_grad),
            torch._C._AutoDispatchBelowAutograd(),
        ):
            results = overload.redispatch(keyset & torch._C._after_autograd_keyset, *given)
        ctx.set_materialize_grads(False)
        operator.save(ctx, given, results)
        return results

    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(cotangent is None for cotangent in cotangents):
            return (None,) * (1 + len(arguments))
        with _without_autocast(cotangents):
            gradients = operator.backward(ctx, *cotangents)
        return (None, *gradients, *(None,) * (len(arguments) - len(gradients)))

    def jvp(ctx: Any, _: Any, *tangents: Tensor | None) -> Any:
        with _without_autocast(tangents):
            return operator.jvp(ctx, *tangents[:tensors])

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward), "jvp": staticmethod(jvp)}
    function = type(operator.__name__, (_SingleLevelFunction,), members)

    def kernel(keyset: Any, *given: Any) -> Any:
        state = (keyset, torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled())
        with enable_single_level_autograd_function():
            return function.apply(state, *given)  # type: ignore[attr-defined]

    return kernel


def _without_autocast(tensors: Sequence[Tensor | None]) -> torch.autocast:
    """What third order goes through are products, which autocast would compute in 16 bits."""
    device = next(tensor.device.type for tensor in tensors if isinstance(tensor, Tensor))
    return torch.autocast(device if device != "meta" else "cpu", enabled=False)


def same_device(*tensors: Tensor | None) -> None:
    """Raises ValueError for tensors on several devices, of which a fake one decides the dispatch."""
    devices = {str(tensor.device): tensor for tensor in tensors if tensor is not None}
    if len(devices) > 1:
        raise ValueError(f"all tensors must be on one device, got {' and '.join(sorted(devices))}")
