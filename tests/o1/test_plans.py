"""Plans: what the specification's tables say, as data."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

import lab
import lab.o1
from lab.systems.contract import refusal

SIZES = lab.o1.Sizes(ng=2, hpg=4, d=128, w=32, ns=3, m=5, windows=(0, 20))
ORDER = {
    "chunk": "far_e score land max far soft sum add far_commit ring_commit meta",
    "matmul": "far_e gather matmul_scores land gmax far gsoft matmul_values gadd far_commit ring_commit meta",
    "token": "tok_near tok_far tok_merge tok_commit",
}


@pytest.mark.parametrize("path", lab.o1.PATHS)
def test_a_path_has_its_dispatches_in_order(path: str) -> None:
    plan = lab.o1.plan(SIZES, path, 1)
    assert [d.kernel.removeprefix("o1c_") for d in plan.dispatches] == ORDER[path].split()


def test_sizes_of_dispatches_are_those_of_the_tables() -> None:
    z, k = SIZES, 7
    found = {
        d.kernel: (d.grid, d.groups)
        for path in ("chunk", "matmul")
        for d in lab.o1.plan(z, path, k).dispatches
    }
    found |= {d.kernel: (d.grid, d.groups) for d in lab.o1.plan(z, "token", 1).dispatches}
    d4, ncap = z.d // 4, z.ns + z.w + k
    threads = {
        "o1c_far_e": (z.nh * z.m, 1, 1),
        "o1c_score": (z.ns + z.w, z.ng, k),
        "o1c_land": (z.m, z.ng, k),
        "o1c_far": (z.nh, k, 1),
        "o1c_sum": (z.ng * 8 * d4, k, 1),
        "o1c_add": (z.nh * d4, k, 1),
        "o1c_far_commit": (d4, z.ghm, 1),
        "o1c_ring_commit": (d4, z.ng, k),
        "o1c_meta": (z.ng, 1, 1),
        "o1c_gather": (d4, ncap, z.ng),
        "o1c_gadd": (z.nh * d4, k, 1),
        "o1c_tok_merge": (z.nh * d4, 1, 1),
    }
    groups = {
        **dict.fromkeys(("o1c_max", "o1c_soft", "o1c_gmax", "o1c_gsoft"), (z.nh, k, 1)),
        "o1c_tok_near": (z.ng, 4, 1),
        "o1c_tok_far": (z.nh, 1, 1),
        "o1c_tok_commit": (z.ng, 1, 1),
    }
    hosts = dict.fromkeys(("matmul_scores", "matmul_values"))
    assert found == {
        **{kernel: (size, None) for kernel, size in threads.items()},
        **{kernel: (None, size) for kernel, size in groups.items()},
        **{kernel: (None, None) for kernel in hosts},
    }
    sizes = {d.kernel: d.threadgroup for d in lab.o1.plan(z, "token", 1).dispatches}
    assert (sizes["o1c_tok_near"], sizes["o1c_tok_far"]) == ((256, 1, 1), (32, 1, 1))
    assert sizes["o1c_tok_commit"] == (256, 1, 1)


def test_contracts_fit_the_shipped_kernels() -> None:
    session = lab.o1.session()
    assert len(lab.o1.CONTRACTS) == 20
    for name in lab.o1.CONTRACTS:
        signature = session.shipped(name).signature
        assert refusal(session.system, signature) == ""
        written = {p.index for p in signature.buffers if signature.writes(p)}
        contract = lab.o1.CONTRACTS[name]
        assert written == {contract.buffers.index(b) for b in contract.writes}


def test_the_parameter_block_has_twelve_words() -> None:
    (far_e, *_) = lab.o1.plan(SIZES, "chunk", 7, r0=5, rows=20).dispatches
    block = lab.o1.system().types["u"]
    words = np.frombuffer(block.pack(far_e.constants["u"]), np.uint32)  # type: ignore[union-attr, arg-type]
    assert words.tolist()[:10] == [4, 5, 32, 3, 128, 8, 2, 7, 5, 40]
    assert words[10:11].view(np.float32) == np.float32(128**-0.5) and words[11] == 0


@pytest.mark.parametrize("path", lab.o1.PATHS)
def test_fields_lie_within_their_buffers_and_count_their_elements(path: str) -> None:
    k = 1 if path == "token" else 7
    for buffer in lab.o1.plan(SIZES, path, k, 2, 20).buffers.values():
        covered = np.zeros(buffer.shape[-1], int)
        for field in buffer.fields:
            covered[field.start : field.stop] += 1
            assert np.prod(field.shape) == (field.stop - field.start) * np.prod(buffer.shape[:-1])
            assert (field.tolerance == 0) == (field.why == "")
        assert (covered <= 1).all()


def test_every_buffer_of_a_dispatch_is_described() -> None:
    for path in lab.o1.PATHS:
        plan = lab.o1.plan(SIZES, path, 1)
        for dispatch in plan.dispatches:
            assert set(dispatch.buffers) - {"u"} <= plan.buffers.keys()
            assert set(dispatch.writes) <= set(dispatch.buffers)


def test_a_sequence_is_cut_into_chunks() -> None:
    def cut(rows: int, chunks: object = None, path: object = "chunk") -> list[tuple[str, int, int]]:
        return [(p.path, p.first, p.rows) for p in lab.o1.plans(SIZES, rows, chunks, path)]  # type: ignore[arg-type]

    assert cut(50) == [("chunk", 0, 20), ("chunk", 20, 20), ("chunk", 40, 10)]
    assert cut(5, 4) == [("chunk", 0, 4), ("chunk", 4, 1)]
    assert cut(2, path="token") == [("token", 0, 1), ("token", 1, 1)]
    mixed = cut(22, [20, 1, 1], ["matmul", "token", "chunk"])
    assert mixed == [("matmul", 0, 20), ("token", 20, 1), ("chunk", 21, 1)]
    assert cut(0) == []
    with pytest.raises(lab.ArgumentError, match="chunks have 21 rows together, the inputs 22"):
        cut(22, [20, 1])
    with pytest.raises(lab.ArgumentError, match="1 paths for 2 chunks"):
        cut(5, 4, ["chunk"])
    with pytest.raises(lab.ArgumentError, match="21 rows is longer than the window of 20"):
        cut(50, 21)
    with pytest.raises(lab.ArgumentError, match="at least 1 row, not 0"):
        cut(50, 0)
    with pytest.raises(lab.ArgumentError, match="4 rows from row 3 does not lie within 5 rows"):
        lab.o1.plan(SIZES, "chunk", 4, 3, 5)


def test_the_hosts_products_are_the_same_in_numpy_and_mlx(rng: np.random.Generator) -> None:
    plan = lab.o1.plan(SIZES, "matmul", 7, 2, 12)
    system = lab.o1.system()
    for dispatch in (d for d in plan.dispatches if d.host):
        given = {n: rng.standard_normal(plan.buffers[n].shape, np.float32) for n in dispatch.buffers}
        (written,) = dispatch.writes
        by_mlx = system.hosts[dispatch.host](dispatch, {n: mx.array(a) for n, a in given.items()}, "apple")
        by_numpy = system.hosts[dispatch.host](dispatch, given, "cpu")
        assert by_numpy[written] is given[written], "written in place"
        assert by_mlx[written].shape == plan.buffers[written].shape
        np.testing.assert_allclose(by_mlx[written], by_numpy[written], rtol=1e-4, atol=1e-5)
