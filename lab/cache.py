"""Files kept between runs: compiled kernels and precompiled headers, in the user's cache folder.

A key is a hash of everything that went into the file, so entries never go stale. Several processes may
share the folder: files appear whole (written beside, then renamed) and any may vanish at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import platformdirs

LIMIT = 512 << 20  # bytes kept in all; the longest unused go first

_DIGEST = 32  # bytes of SHA-256 that an entry begins with
_CHECK_EVERY = 16  # files written between two looks at the folder's size


def folder() -> Path:
    """The cache folder: ``METAL_LAB_CACHE``, or the user's own cache folder for ``metal-kernel-lab``."""
    return Path(os.environ.get("METAL_LAB_CACHE") or platformdirs.user_cache_dir("metal-kernel-lab", False))


def key(*parts: str | bytes) -> str:
    """A file name from everything that an entry depends on."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:40]


class Cache:
    """Entries as files in one folder, at most ``limit`` bytes of them."""

    def __init__(self, root: Path, limit: int = LIMIT) -> None:
        self.root = root
        self.limit = limit
        self._written = 0

    def get(self, name: str) -> bytes | None:
        """What was put under this name, or None: also where the disk lost a part of it. Counts as a use."""
        path = self.root / name
        try:
            entry = path.read_bytes()
        except OSError:
            return None
        digest, data = entry[:_DIGEST], entry[_DIGEST:]
        if digest != hashlib.sha256(data).digest():
            return None
        self._touch(path)
        return data

    def path(self, name: str, make: Callable[[Path], None]) -> Path:
        """Path of an entry, which ``make`` writes where it is missing."""
        path = self.root / name
        if not path.exists():
            with self._beside() as fresh:
                make(fresh)
                with fresh.open("rb") as file:
                    os.fsync(file.fileno())  # it has no digest: the name must never stand for half of it
                os.replace(fresh, path)
            self._evict()
        else:
            self._touch(path)
        return path

    def put(self, name: str, data: bytes) -> None:
        """Keep ``data``. A full disk or a read-only folder is no error: the entry is made anew next time."""
        with contextlib.suppress(OSError):
            with self._beside() as fresh:
                fresh.write_bytes(hashlib.sha256(data).digest() + data)
                os.replace(fresh, self.root / name)
            self._evict()

    @contextlib.contextmanager
    def _beside(self):  # type: ignore[no-untyped-def]
        self.root.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self.root, prefix=".new-")
        os.close(handle)
        try:
            yield Path(name)
        finally:
            Path(name).unlink(missing_ok=True)

    @staticmethod
    def _touch(path: Path) -> None:
        with contextlib.suppress(OSError):
            os.utime(path)

    def _evict(self) -> None:
        self._written += 1
        if self._written % _CHECK_EVERY != 1:
            return
        entries, now = [], time.time()
        for entry in os.scandir(self.root):
            with contextlib.suppress(OSError):
                status = entry.stat()
                abandoned = entry.name.startswith(".new-") and now - status.st_mtime > 3600
                entries.append((0.0 if abandoned else status.st_mtime, status.st_size, entry))
        total = sum(size for _, size, _ in entries)
        for when, size, entry in sorted(entries, key=lambda e: e[0]):
            if total <= self.limit and when:
                break
            if entry.is_file():
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)
                    total -= size


def shared() -> Cache:
    """The cache of this user."""
    return Cache(folder())
