"""Files kept between runs: found again, bounded, and safe with several processes at once."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lab import cache
from lab.cache import Cache, key


@pytest.fixture
def store(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "store")


def names(store: Cache) -> set[str]:
    return {entry.name for entry in store.root.iterdir()}


def test_what_was_put_is_found(store):
    store.put("a", b"data")
    assert store.get("a") == b"data"


def test_what_was_not_put_is_none(store):
    assert store.get("a") is None


def test_a_second_put_takes_the_place_of_the_first(store):
    store.put("a", b"one")
    store.put("a", b"two")
    assert store.get("a") == b"two"


@pytest.mark.parametrize("left", [b"", b"da", b"\0" * 36], ids=["nothing", "a part", "zeros"])
def test_an_entry_that_the_disk_lost_is_none(store, left):
    store.put("a", b"data")
    (store.root / "a").write_bytes(left)
    assert store.get("a") is None
    store.put("a", b"data")
    assert store.get("a") == b"data"


def test_a_path_is_made_once(store):
    made = []

    def make(path: Path) -> None:
        made.append(path)
        path.write_bytes(b"data")

    first, second = store.path("a", make), store.path("a", make)
    assert first == second and first.read_bytes() == b"data"
    assert len(made) == 1


def test_a_file_that_is_being_made_is_not_seen(store):
    def make(path: Path) -> None:
        path.write_bytes(b"half")
        assert not (store.root / "a").exists()
        path.write_bytes(b"whole")

    assert store.path("a", make).read_bytes() == b"whole"


def test_a_failed_making_leaves_nothing(store):
    def make(path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("no compiler")

    with pytest.raises(RuntimeError):
        store.path("a", make)
    assert names(store) == set()


def test_an_entry_that_vanished_is_made_again(store):
    store.path("a", lambda path: path.write_bytes(b"one")).unlink()
    assert store.path("a", lambda path: path.write_bytes(b"two")).read_bytes() == b"two"


def test_no_temporary_file_stays(store):
    for i in range(20):
        store.put(str(i), b"x")
    assert not any(name.startswith(".new") for name in names(store))


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("in the way")
    store = Cache(blocker / "store")
    store.put("a", b"data")
    assert store.get("a") is None


# ---- its size ----------------------------------------------------------------------------------------------


def test_the_longest_unused_entries_go_first(tmp_path):
    store = Cache(tmp_path, limit=10_000)
    for i in range(40):
        store.put(f"{i:02}", bytes(1000))
        os.utime(tmp_path / f"{i:02}", (i, i))
    assert (
        sum(p.stat().st_size for p in tmp_path.iterdir()) <= 10_000 + 16 * 1000
    )  # between two looks it may grow
    assert "39" in names(store) and "00" not in names(store)


def test_a_use_keeps_an_entry(tmp_path):
    store = Cache(tmp_path, limit=20_000)
    store.put("kept", bytes(1000))
    os.utime(tmp_path / "kept", (0, 0))
    assert store.get("kept") is not None
    for i in range(1, 60):
        store.put(str(i), bytes(1000))
        os.utime(tmp_path / str(i), (i, i))
    assert "kept" in names(store)
    assert "1" not in names(store)


def test_a_path_in_use_is_kept(tmp_path):
    store = Cache(tmp_path, limit=20_000)
    make = lambda path: path.write_bytes(bytes(1000))  # noqa: E731
    store.path("kept", make)
    os.utime(tmp_path / "kept", (0, 0))
    store.path("kept", make)
    for i in range(1, 60):
        store.put(str(i), bytes(1000))
        os.utime(tmp_path / str(i), (i, i))
    assert "kept" in names(store)


def test_what_a_killed_process_left_goes_after_an_hour(tmp_path):
    old, new = tmp_path / ".new-old", tmp_path / ".new-new"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 7200,) * 2)
    Cache(tmp_path).put("a", b"data")
    assert (old.exists(), new.exists()) == (False, True)


def test_folders_beside_the_entries_are_left_alone(tmp_path):
    (tmp_path / "zig").mkdir()
    store = Cache(tmp_path, limit=0)
    store.put("a", b"data")
    assert (tmp_path / "zig").is_dir()


# ---- where it is, and what an entry depends on -------------------------------------------------------------


def test_the_folder_is_named_by_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("METAL_LAB_CACHE", str(tmp_path))
    assert cache.folder() == cache.shared().root == tmp_path


def test_the_folder_is_the_user_s_own_otherwise(monkeypatch):
    monkeypatch.delenv("METAL_LAB_CACHE")
    assert cache.folder().name == "metal-kernel-lab"
    assert cache.folder().is_absolute()


def test_a_key_depends_on_every_part_and_on_where_it_ends():
    keys = {key(), key("a"), key("a", "b"), key("ab"), key("b", "a"), key("a", "b", "")}
    assert len(keys) == 6
    assert key("a", "é") == key(b"a", "é".encode())


# ---- several at once ---------------------------------------------------------------------------------------


def test_threads_that_make_the_same_entry_all_find_it_whole(store):
    data = bytes(range(256)) * 4000
    wrong: list[object] = []

    def work() -> None:
        for i in range(10):
            path = store.path(str(i), lambda p: p.write_bytes(data))
            if path.read_bytes() != data:
                wrong.append(i)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


PROCESS = """
import sys
from pathlib import Path
from lab.cache import Cache
store = Cache(Path(sys.argv[1]), limit=200_000)
for i in range(150):
    name = str(i % 30)
    data = name.encode() * 4000
    store.put(name, data)
    got = store.get(str((i * 7) % 30))
    assert got is None or got == str((i * 7) % 30).encode() * 4000, "a torn entry"
"""


def test_processes_that_write_and_evict_the_same_entries_see_them_whole(tmp_path):
    running = [
        subprocess.Popen([sys.executable, "-c", PROCESS, str(tmp_path)], stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    errors = [process.communicate()[1] for process in running]
    assert [process.returncode for process in running] == [0] * 4, errors
