"""The CPU engine: kernels compiled by clang and run on the machine's cores."""

from .engine import CpuEngine

__all__ = ["CpuEngine"]
