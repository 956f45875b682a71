"""The operators as composites of differentiable torch operations: any device, any order of derivative.

Same signatures, conventions and results as the compiled operators, at the price of memory and speed.
"""

from kernels.composite.deform_conv2d import deform_conv2d
from kernels.composite.roi_align import roi_align

__all__ = ["deform_conv2d", "roi_align"]
