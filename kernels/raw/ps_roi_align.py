"""ps_roi_align and its backward."""

from __future__ import annotations

from kernels.raw.pooling import linear_pooling, position_sensitive_shape

OPERATORS = linear_pooling("ps_roi_align", "ps_roi_align_backward", 1, position_sensitive_shape)
