"""ps_roi_align and its backward."""

from __future__ import annotations

from kernels.raw.pooling import linear_pooling

OPERATORS = linear_pooling(
    "ps_roi_align",
    "ps_roi_align_backward",
    1,
    lambda input, rois, size, *_: (rois.shape[0], input[1] // (size[0] * size[1]), *size),
)
