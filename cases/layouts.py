"""Memory layouts: the same values at other strides."""

from __future__ import annotations

import torch
from torch import Tensor

LAYOUTS = ("contiguous", "channels_last", "sliced", "transposed")

# What a kernel sees that ignores strides: wrong, but as an offset still finite, which no kernel dies of.
FILLER = 0.375


def lay_out(values: Tensor, layout: str) -> Tensor:
    """A tensor equal to ``values`` with the strides of ``layout``.

    ``sliced`` is every second column of a larger tensor whose other columns hold FILLER, ``transposed`` has
    the last two dimensions swapped in memory, ``channels_last`` concerns 4-D tensors only.
    """
    if layout == "contiguous" or values.dim() < 2:
        return values.contiguous()
    if layout == "channels_last":
        return values.contiguous(
            memory_format=torch.channels_last if values.dim() == 4 else torch.contiguous_format
        )
    if layout == "sliced":
        larger = values.new_full((*values.shape[:-1], 2 * values.shape[-1]), FILLER)
        view = larger[..., ::2]
        view.copy_(values)
        return view
    if layout == "transposed":
        return values.transpose(-2, -1).contiguous().transpose(-2, -1)
    raise ValueError(f"layout: got {layout!r}, expected one of {', '.join(LAYOUTS)}")
