"""Small pictures of arrays: indexed PNGs, for marking which of many elements changed."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence

import numpy as np


def png(indices: np.ndarray, palette: Sequence[tuple[int, int, int]]) -> bytes:
    """A PNG of ``indices``, uint8 [height][width], each the number of a colour of ``palette`` (RGB)."""
    height, width = indices.shape
    rows = np.zeros((height, width + 1), np.uint8)  # each row begins with its filter, 0 for none
    rows[:, 1:] = indices
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    colours = bytes(value for colour in palette for value in colour)
    parts = (b"IHDR", header), (b"PLTE", colours), (b"IDAT", zlib.compress(rows.tobytes(), 1)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts)


def data_uri(picture: bytes) -> str:
    """The PNG as the address of an HTML image."""
    return "data:image/png;base64," + base64.b64encode(picture).decode()


def fitted(flags: np.ndarray, height: int, width: int) -> np.ndarray:
    """``flags`` (bool [rows][columns]) in at most ``height`` by ``width`` cells: a cell is set where any of
    those it stands for is."""
    for axis, limit in enumerate((height, width)):
        size = flags.shape[axis]
        if size > limit:
            starts = np.arange(limit) * size // limit
            flags = np.logical_or.reduceat(flags, starts, axis=axis)
    return flags


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
