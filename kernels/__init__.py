"""Reference kernels for deformable convolution and the RoI operators, differentiable to any order.

Importing this compiles nothing; the compiled operators are built when a CPU tensor first needs them.
"""

from kernels import composite
from kernels.build import BuildError
from kernels.deform_conv2d import DeformConv2d, deform_conv2d
from kernels.packs import DeformConv2dPack, ModulatedDeformConv2dPack, upgrade_state_dict
from kernels.roi_align import RoIAlign, roi_align
from kernels.torchvision_patch import patch_torchvision

__all__ = [
    "BuildError",
    "DeformConv2d",
    "DeformConv2dPack",
    "ModulatedDeformConv2dPack",
    "RoIAlign",
    "composite",
    "deform_conv2d",
    "patch_torchvision",
    "roi_align",
    "upgrade_state_dict",
]
