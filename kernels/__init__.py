"""Reference kernels for deformable convolution and the RoI operators, differentiable to any order.

Importing this compiles nothing; the compiled operators are built when a CPU tensor first needs them.
"""

from kernels import composite
from kernels.build import BuildError
from kernels.deform_conv2d import DeformConv2d, deform_conv2d
from kernels.packs import DeformConv2dPack, ModulatedDeformConv2dPack, upgrade_state_dict
from kernels.ps_roi_align import PSRoIAlign, ps_roi_align
from kernels.ps_roi_pool import PSRoIPool, ps_roi_pool
from kernels.roi_align import RoIAlign, roi_align
from kernels.roi_pool import RoIPool, roi_pool
from kernels.torchvision_patch import patch_torchvision

__all__ = [
    "BuildError",
    "DeformConv2d",
    "DeformConv2dPack",
    "ModulatedDeformConv2dPack",
    "PSRoIAlign",
    "PSRoIPool",
    "RoIAlign",
    "RoIPool",
    "composite",
    "deform_conv2d",
    "patch_torchvision",
    "ps_roi_align",
    "ps_roi_pool",
    "roi_align",
    "roi_pool",
    "upgrade_state_dict",
]
