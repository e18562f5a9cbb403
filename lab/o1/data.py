"""Queries, keys and values to run the system on, and how close it comes to exact attention on them.

    layer = lab.o1.data.minilm()
    lab.o1.data.approximation_errors(layer, windows=(32, 128), landmarks=(0, 4, 16))

A layer's arrays are what ``lab.o1.seal``, ``run`` and ``trace`` take.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np

from .. import resources
from ..errors import ArgumentError, LabError
from . import reference
from .sizes import Sizes
from .state import State

__all__ = ["ApproximationError", "Layer", "approximation_errors", "from_mlx_lm", "minilm", "random"]


@dataclass(frozen=True)
class Layer:
    """What the heads of one attention layer see of a sequence.

    ``q`` [tokens][nh][d], ``k`` and ``v`` [tokens][ng][d] are float32, positions applied; query head ``h``
    reads group ``h // (nh / ng)``. ``tokens`` are the tokens' texts, or their ids where no text is known.
    ``source`` says where all of it comes from, ``scale`` what scores are multiplied with (None for
    1/sqrt(d)).
    """

    q: np.ndarray = field(repr=False)
    k: np.ndarray = field(repr=False)
    v: np.ndarray = field(repr=False)
    tokens: tuple[str, ...] = field(repr=False)
    source: str
    scale: float | None = None

    def sizes(self, w: int, m: int, ns: int = 4) -> Sizes:
        """Sizes of a system that takes these rows: ``w`` ring slots, ``m`` landmarks, ``ns`` sinks."""
        ng = self.k.shape[1]
        return Sizes(ng, self.q.shape[1] // ng, self.q.shape[2], w, ns, m, scale=self.scale)


def minilm() -> Layer:
    """A layer of the sentence encoder all-MiniLM-L6-v2 on the opening of *Alice's Adventures in Wonderland*.

    12 heads of dimension 32 as groups of one; where it comes from is in ``notebooks/data/README.md``.
    """
    with np.load(resources.notebooks() / "data" / "minilm.npz") as stored:
        q, k, v = (stored[name].astype(np.float32) for name in "qkv")
        tokens, layer = tuple(map(str, stored["tokens"])), int(stored["layer"])
    source = f"all-MiniLM-L6-v2, layer {layer}, on the opening of Alice's Adventures in Wonderland"
    return Layer(q, k, v, tokens, source)


def random(tokens: int, heads: int, d: int, seed: int = 0) -> Layer:
    """Normal random queries, keys and values [tokens][heads][d]; heads are groups of one."""
    for name, value in (("tokens", tokens), ("heads", heads), ("d", d)):
        if value < 1:
            raise ArgumentError(f"{name} = {value}: random data takes at least 1.")
    generator = np.random.default_rng(seed)
    q, k, v = generator.standard_normal((3, tokens, heads, d), dtype=np.float32)
    return Layer(q, k, v, tuple(map(str, range(tokens))), f"normal random numbers, seed {seed}")


# ---- layers of language models -------------------------------------------------------------------------


def from_mlx_lm(model: Any, tokens: Sequence[int] | mx.array | np.ndarray, layer: int) -> Layer:
    """What attention layer ``layer`` of an ``mlx-lm`` model sees of a prompt.

        model, tokenizer = mlx_lm.load("mlx-community/Qwen3-0.6B-4bit")
        layer = lab.o1.data.from_mlx_lm(model, tokenizer.encode("Once upon a time"), 10)

    ``tokens`` are the prompt's ids. Layers that attend are counted from 0 in the order in which they run; in
    a model that mixes them with other layers, those are not counted. Queries, keys, values and scale are
    what the layer hands to ``scaled_dot_product_attention``; its mask and sink logits are left out.

    Raises LabError without the package, or where the model computes its attention in another way, and
    ArgumentError for tokens or a layer that the model does not have.
    """
    if importlib.util.find_spec("mlx_lm") is None:
        raise LabError("Layers of language models need mlx-lm: pip install 'metal-kernel-lab[lm]'.")
    ids = np.asarray(tokens)
    if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
        raise ArgumentError(
            f"tokens are the ids of a prompt, whole numbers [n], not {ids.dtype} {ids.shape}."
        )
    name = f"{type(model).__module__.rpartition('.')[2]} model"
    with _attention_calls() as calls:
        model(mx.array(ids.astype(np.int32))[None])  # lazy: only what is kept gets computed
    if not calls:
        raise LabError(
            f"Nothing captured: this {name} does not call mx.fast.scaled_dot_product_attention, so its "
            "queries, keys and values cannot be seen."
        )
    if isinstance(layer, bool) or not isinstance(layer, (int, np.integer)) or not 0 <= layer < len(calls):
        raise ArgumentError(
            f"There is no attention layer {layer!r}: this {name} has {len(calls)}, 0 to {len(calls) - 1}."
        )
    *arrays, scale = calls[layer]
    q, k, v = (
        _rows(what, x, ids.size) for what, x in zip(("queries", "keys", "values"), arrays, strict=True)
    )
    if not q.shape[2] == k.shape[2] == v.shape[2] or k.shape[1] != v.shape[1] or q.shape[1] % k.shape[1]:
        raise LabError(
            f"Layer {layer} of this {name} has queries {q.shape}, keys {k.shape} and values {v.shape}; "
            "lab.o1 takes q [n][nh][d], k and v [n][ng][d] with nh a multiple of ng."
        )
    return Layer(q, k, v, tuple(map(str, ids.tolist())), f"{name}, attention layer {layer}", scale)


def _rows(what: str, x: mx.array, n: int) -> np.ndarray:
    """Float32 [n][heads][d] of an array [1][heads][n][d]."""
    if x.ndim != 4 or x.shape[0] != 1 or x.shape[2] != n:
        raise LabError(f"The layer's {what} have the shape {x.shape}, not (1, heads, {n}, d).")
    return np.ascontiguousarray(np.asarray(x[0].astype(mx.float32)).swapaxes(0, 1))


_ONE_AT_A_TIME = threading.RLock()


@contextmanager
def _attention_calls() -> Iterator[list[tuple[mx.array, mx.array, mx.array, float]]]:
    """A list that gets q, k, v and scale of each attention that this thread asks MLX for.

    Model files have ``mlx_lm.models.base.scaled_dot_product_attention`` under names of their own, or call
    MLX themselves; MLX's function, looked up at each call, is what they have in common.
    """
    calls: list[tuple[mx.array, mx.array, mx.array, float]] = []
    thread = threading.get_ident()

    def recording(
        q: mx.array, k: mx.array, v: mx.array, *args: Any, scale: float, **options: Any
    ) -> mx.array:
        if threading.get_ident() == thread:
            calls.append((q, k, v, float(scale)))
        return original(q, k, v, *args, scale=scale, **options)

    with _ONE_AT_A_TIME:
        original = mx.fast.scaled_dot_product_attention
        setattr(mx.fast, "scaled_dot_product_attention", recording)  # noqa: B010 - mypy refuses the assignment
        try:
            yield calls
        finally:
            setattr(mx.fast, "scaled_dot_product_attention", original)  # noqa: B010


# ---- how close the far field comes ---------------------------------------------------------------------


@dataclass(frozen=True)
class ApproximationError:
    """``error``: |o1 - full| / |full| over all outputs, for a window and a number of landmarks."""

    window: int
    landmarks: int
    error: float


def approximation_errors(
    layer: Layer,
    windows: Iterable[int],
    landmarks: Iterable[int],
    sinks: int = 4,
    rcond: float = 0.01,
) -> list[ApproximationError]:
    """How far the system is from softmax attention over all tokens: a row per window and landmark number.

    The first ``sinks`` tokens are the sinks. The first half of the others is the prefix: landmarks are made
    from it (``lab.o1.seal`` with ``rcond``), it is pushed, and the error is that of the second half, all in
    float64. 0 landmarks stand for no far field: sinks and window alone.
    """
    n = len(layer.tokens)
    prefix = (n - sinks) // 2
    if sinks < 0 or prefix < 1:
        raise ArgumentError(f"{n} tokens, {sinks} of them sinks: prefix and rest take at least 1 each.")
    windows, landmarks = tuple(windows), tuple(landmarks)
    sink_k, sink_v = (x[:sinks].swapaxes(0, 1) for x in (layer.k, layer.v))
    q, k, v = (x[sinks:] for x in (layer.q, layer.k, layer.v))
    rest = q[prefix:], k[prefix:], v[prefix:]
    full: np.ndarray | None = None  # the same for all
    rows = []
    for window in windows:
        for m in landmarks:
            sizes = layer.sizes(window, m or 1, sinks)
            state = State.sealed(sizes, k[:prefix], q[:prefix], sink_k, sink_v, rcond=rcond)
            history = state.history.push(k[:prefix], v[:prefix])
            if not m:
                history = replace(history, mu=np.zeros_like(history.mu))
            if full is None:
                full = reference.full_attention(history, *rest)
            off = np.linalg.norm(reference.attention(history, *rest) - full)
            rows.append(ApproximationError(window, m, float(off / np.linalg.norm(full))))
    return rows
