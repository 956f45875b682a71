"""What the functions do under torch.autocast."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Tensor])


def autocast_is_on(device: str) -> bool:
    """Whether autocast is enabled for a type of device."""
    return device != "meta" and torch.is_autocast_enabled(device)


def float32_under_autocast(function: Function) -> Function:
    """Under autocast, the function of `input` and other tensors computes in float32 and returns input's dtype.

    Coordinates don't survive 16 bits: a bfloat16 offset of 100 pixels is right to half a pixel. float64 stays.
    """

    @functools.wraps(function)
    def wrapped(input: Any, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(input, Tensor) or not autocast_is_on(input.device.type):
            return function(input, *args, **kwargs)
        with torch.autocast(input.device.type, enabled=False):
            cast = {name: _widened(value) for name, value in kwargs.items()}
            return function(_widened(input), *map(_widened, args), **cast).to(input.dtype)

    return wrapped  # type: ignore[return-value]


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.is_floating_point() and value.dtype != torch.float64 else value
    if isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
        return type(value)(map(_widened, value))
    return value
