"""MLX's custom Metal kernels on any machine: ``metal_kernel``, and MLX with it in its place."""

from .kernel import MetalKernel, metal_kernel
from .stand_in import install, installed, uninstall

__all__ = ["MetalKernel", "install", "installed", "metal_kernel", "uninstall"]
