"""The records a kernel's entry points take, as ``include/msl_launch.h`` has them."""

from __future__ import annotations

import ctypes


class LaunchRecord(ctypes.Structure):
    """``msl_launch``: one dispatch."""

    _fields_ = (
        ("buffer", ctypes.c_uint64 * 32),
        ("grid", ctypes.c_uint32 * 3),
        ("groups", ctypes.c_uint32 * 3),
        ("size", ctypes.c_uint32 * 3),
        ("threadgroup_bytes", ctypes.c_uint32 * 32),
    )


class GroupRecord(ctypes.Structure):
    """``msl_group``: one threadgroup of a dispatch."""

    _fields_ = (
        ("launch", ctypes.c_uint64),
        ("threadgroup_memory", ctypes.c_uint64),
        ("position", ctypes.c_uint32 * 3),
        ("size", ctypes.c_uint32 * 3),
    )
