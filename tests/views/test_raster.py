"""Indexed PNGs, read back by hand."""

from __future__ import annotations

import struct
import zlib

import numpy as np

from lab.views.raster import fitted, png


def read(picture: bytes) -> np.ndarray:
    """The palette's numbers in an 8-bit indexed PNG whose rows have no filter."""
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    chunks, at = {}, 8
    while at < len(picture):
        (length,), kind = struct.unpack_from(">I", picture, at), picture[at + 4 : at + 8]
        data = picture[at + 8 : at + 8 + length]
        (check,) = struct.unpack_from(">I", picture, at + 8 + length)
        assert check == zlib.crc32(kind + data)
        chunks[kind] = data
        at += 12 + length
    width, height, depth, colour = struct.unpack_from(">IIBB", chunks[b"IHDR"])
    assert (depth, colour) == (8, 3) and list(chunks) == [b"IHDR", b"PLTE", b"IDAT", b"IEND"]
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, width + 1)
    assert not rows[:, 0].any()
    return rows[:, 1:]


def test_a_png_holds_what_was_put_into_it(rng: np.random.Generator) -> None:
    for shape in ((1, 1), (3, 7), (40, 300)):
        indices = rng.integers(0, 3, shape).astype(np.uint8)
        np.testing.assert_array_equal(read(png(indices, [(0, 0, 0), (9, 8, 7), (255, 255, 255)])), indices)


def test_fitting_keeps_small_arrays_and_loses_no_mark_of_large_ones(rng: np.random.Generator) -> None:
    small = rng.random((4, 9)) < 0.5
    np.testing.assert_array_equal(fitted(small, 4, 9), small)
    for _ in range(20):
        rows, columns = rng.integers(1, 500, 2)
        large = np.zeros((rows, columns), bool)
        at = rng.integers(rows), rng.integers(columns)
        large[at] = True
        cells = fitted(large, 48, 100)
        assert cells.sum() == 1 and cells.shape == (min(rows, 48), min(columns, 100))
        (row,), (column,) = np.nonzero(cells)
        assert abs(row / cells.shape[0] - at[0] / rows) <= 1 / cells.shape[0]
        assert abs(column / cells.shape[1] - at[1] / columns) <= 1 / cells.shape[1]
