"""The operators as composites of differentiable torch operations: any device, any order of derivative.

Same signatures, conventions and results as the compiled operators, at the price of memory and speed.
"""

from kernels.composite.deform_conv2d import deform_conv2d
from kernels.composite.ps_roi_align import ps_roi_align
from kernels.composite.ps_roi_pool import ps_roi_pool
from kernels.composite.roi_align import roi_align
from kernels.composite.roi_pool import roi_pool

__all__ = ["deform_conv2d", "ps_roi_align", "ps_roi_pool", "roi_align", "roi_pool"]
