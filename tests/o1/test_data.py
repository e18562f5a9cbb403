"""Queries, keys and values of real layers, and the far field's error on them."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import lab
import lab.o1
from lab.o1 import data

PROMPT = [3, 14, 15, 9, 2, 6, 5, 35, 8, 9, 7]


# ---- stored and random ---------------------------------------------------------------------------------


def test_minilm_is_a_layer_of_a_real_text():
    layer = data.minilm()
    n = len(layer.tokens)
    assert 300 <= n <= 512
    for x in (layer.q, layer.k, layer.v):
        assert (x.shape, x.dtype) == ((n, 12, 32), np.float32)
        assert np.isfinite(x).all() and x.std() > 0.1
    assert "rabbit" in layer.tokens and "MiniLM" in layer.source


def test_random_data_comes_from_its_seed():
    layer = data.random(20, 3, 8, 5)
    assert layer.q.shape == layer.k.shape == layer.v.shape == (20, 3, 8)
    assert layer.q.dtype == np.float32 and len(layer.tokens) == 20
    np.testing.assert_array_equal(layer.v, data.random(20, 3, 8, 5).v)
    assert (layer.v != data.random(20, 3, 8, 6).v).any()
    with pytest.raises(lab.ArgumentError, match="heads = 0"):
        data.random(20, 0, 8)


def test_a_layer_runs_on_the_kernels():
    layer = data.minilm()
    sizes = layer.sizes(w=32, m=8, ns=0)
    state = lab.o1.seal(sizes, layer.k[:64], layer.q[:64], rcond=0.01)
    rows = [x[64:128] for x in (layer.q, layer.k, layer.v)]
    exact = lab.o1.attention(state, *rows)
    np.testing.assert_allclose(lab.o1.run(state, *rows, chunks=16), exact, atol=2e-4)


# ---- the error -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [data.minilm(), data.random(300, 4, 32, 0)], ids=["minilm", "random"])
def test_landmarks_and_window_bring_the_system_closer_to_full_attention(layer: data.Layer):
    found = data.approximation_errors(layer, (16, 128), (0, 1, 32))
    error = {(row.window, row.landmarks): row.error for row in found}
    assert list(error) == [(w, m) for w in (16, 128) for m in (0, 1, 32)]
    for window in (16, 128):
        assert error[window, 0] > error[window, 1] > error[window, 32]
    for landmarks in (0, 1, 32):
        assert error[16, landmarks] > error[128, landmarks]


def test_a_window_over_everything_leaves_no_error():
    layer = data.random(40, 2, 8, 1)
    (row,) = data.approximation_errors(layer, [40], [4])
    assert row.error < 1e-14


def test_as_many_landmarks_as_tokens_leave_none_either():
    # Equal segments of one token, all of the far field's tokens among them: exact but for the mixing matrix.
    layer = data.random(16, 2, 16, 2)
    (row,) = data.approximation_errors(layer, [8], [8], sinks=0, rcond=1e-9)
    assert row.error < 1e-4


def test_the_error_is_that_of_the_outputs():
    layer = data.random(36, 2, 8, 3)
    (row,) = data.approximation_errors(layer, [6], [0], sinks=2)

    def softmax_over(seen: Any) -> np.ndarray:
        scores = np.einsum("ihd,jhd->hij", layer.q, layer.k.astype(float)) / np.sqrt(8)
        weights = np.exp(np.where(seen, scores, -np.inf))
        out = np.einsum("hij,jhd->ihd", weights / weights.sum(-1, keepdims=True), layer.v)
        return out[2 + 17 :]

    i, j = np.indices((36, 36))
    full, near = softmax_over(j <= i), softmax_over((j <= i) & ((j < 2) | (j > i - 6)))
    assert row.error == pytest.approx(np.linalg.norm(near - full) / np.linalg.norm(full))


def test_a_sequence_without_a_prefix_is_refused():
    with pytest.raises(lab.ArgumentError, match=r"5 tokens, 4 of them sinks"):
        data.approximation_errors(data.random(5, 1, 8), [4], [1])


# ---- layers of language models -------------------------------------------------------------------------


def tiny(name: str, **options: Any) -> Any:
    """A random model of a model file of mlx-lm: 3 layers, 4 query heads on 2 groups."""
    pytest.importorskip("mlx_lm")
    module = importlib.import_module(f"mlx_lm.models.{name}")
    sizes = {
        "model_type": name, "hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 48,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5,
        "vocab_size": 64, "rope_theta": 1e4, "max_position_embeddings": 128, "tie_word_embeddings": True,
    }  # fmt: skip
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(sizes | options))
    mx.eval(model.parameters())
    return model


def exact(layer: data.Layer) -> np.ndarray:
    """Causal softmax attention over a layer, float64 [n][nh][d]."""
    sizes = layer.sizes(w=len(layer.tokens), m=1, ns=0)
    state = lab.o1.seal(sizes, layer.k, layer.q)
    return lab.o1.full_attention(state, layer.q, layer.k, layer.v)


@pytest.mark.parametrize("at", [0, 2])
def test_what_a_llama_layer_sees_gives_that_layer_s_output(at: int):
    model = tiny("llama")
    layer = data.from_mlx_lm(model, PROMPT, at)
    assert layer.q.shape == (11, 4, 8) and layer.k.shape == layer.v.shape == (11, 2, 8)
    assert layer.scale == pytest.approx(8**-0.5) and layer.tokens[1] == "14"

    hidden = model.model.embed_tokens(mx.array(PROMPT)[None])
    for block in model.layers[:at]:
        hidden = block(hidden, "causal")
    block = model.layers[at]
    own = block.self_attn(block.input_layernorm(hidden), "causal")
    mixed = mx.array(exact(layer).astype(np.float32).reshape(1, 11, -1))
    np.testing.assert_allclose(block.self_attn.o_proj(mixed), own, atol=1e-5)
    # Positions are in the keys: without them both would be those of the projections.
    plain = block.self_attn.k_proj(block.input_layernorm(hidden)).reshape(11, 2, 8)
    np.testing.assert_allclose(layer.k[0], plain[0], atol=1e-5)
    assert np.abs(layer.k - np.asarray(plain)).max() > 0.01


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gemma", "gemma3_text"])
def test_other_model_files_are_seen_too(name: str):
    model = tiny(name, query_pre_attn_scalar=16, sliding_window_pattern=3)
    layer = data.from_mlx_lm(model, mx.array(PROMPT), 1)
    assert layer.q.shape == (11, 4, 8) and layer.k.shape == layer.v.shape == (11, 2, 8)
    assert layer.scale == pytest.approx(16**-0.5 if name == "gemma3_text" else 8**-0.5)


def test_half_precision_models_give_float32():
    model = tiny("llama")
    model.set_dtype(mx.bfloat16)
    layer = data.from_mlx_lm(model, PROMPT, 1)
    assert layer.q.dtype == layer.k.dtype == layer.v.dtype == np.float32 and np.isfinite(layer.v).all()


def test_a_captured_layer_has_errors_like_any_other():
    layer = data.from_mlx_lm(tiny("llama"), list(range(60)), 2)
    near, far = data.approximation_errors(layer, [8], [0, 8])
    assert far.error < near.error


def test_the_function_of_mlx_is_back_afterwards():
    before = mx.fast.scaled_dot_product_attention
    model = tiny("llama")
    data.from_mlx_lm(model, PROMPT, 0)
    assert mx.fast.scaled_dot_product_attention is before
    with pytest.raises(ZeroDivisionError):
        data.from_mlx_lm(lambda ids: 1 / 0, PROMPT, 0)
    assert mx.fast.scaled_dot_product_attention is before


@pytest.mark.parametrize("layer", [3, -1, "1", True])
def test_a_layer_that_does_not_exist_is_refused(layer: Any):
    with pytest.raises(lab.ArgumentError, match=r"no attention layer .*: this llama model has 3, 0 to 2"):
        data.from_mlx_lm(tiny("llama"), PROMPT, layer)


@pytest.mark.parametrize("tokens", [[], [[1, 2]], [0.5], "text"])
def test_a_prompt_is_token_ids(tokens: Any):
    with pytest.raises(lab.ArgumentError, match="tokens are the ids of a prompt"):
        data.from_mlx_lm(tiny("llama"), tokens, 0)


def test_a_model_that_attends_in_another_way_is_told_so():
    pytest.importorskip("mlx_lm")
    with pytest.raises(lab.LabError, match="Nothing captured"):
        data.from_mlx_lm(nn.Embedding(64, 8), PROMPT, 0)


def test_keys_and_values_of_different_width_are_refused():
    pytest.importorskip("mlx_lm")

    def model(ids: mx.array) -> mx.array:
        wide, narrow = mx.zeros((1, 4, ids.size, 16)), mx.zeros((1, 4, ids.size, 8))
        return mx.fast.scaled_dot_product_attention(wide, wide, narrow, scale=1.0)

    with pytest.raises(lab.LabError, match=r"keys \(11, 4, 16\) and values \(11, 4, 8\)"):
        data.from_mlx_lm(model, PROMPT, 0)


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch):
    finder = SimpleNamespace(find_spec=lambda name: None)
    monkeypatch.setattr(data, "importlib", SimpleNamespace(util=finder))
    with pytest.raises(lab.LabError, match=r"pip install 'metal-kernel-lab\[lm\]'"):
        data.from_mlx_lm(None, PROMPT, 0)
