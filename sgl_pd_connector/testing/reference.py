"""An independent NumPy forward pass of the checkpoints made in `testing/checkpoints.py`.

It shares no code with any engine, needs no server, and gives golden tokens: what a prompt must be answered
with under greedy decoding, whatever the engine, the batch, the page size or the way its KV cache came.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_pd_connector.testing.checkpoints import read_tensors

Array = npt.NDArray[np.float32]


@dataclass
class KVCache:
    """Keys (after rotary embedding) and values of one sequence: per layer `[tokens, kv_heads, head_dim]`."""

    keys: list[Array] = field(default_factory=list)
    values: list[Array] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.keys[0]) if self.keys else 0


@dataclass(frozen=True)
class Completion:
    """A greedy answer.

    `margin` is the smallest lead the chosen token had over the second best, in logits: the distance to an
    answer that rounding could turn into another one.
    """

    tokens: list[int]
    margin: float

    @property
    def text(self) -> str:
        return bytes(self.tokens).decode("ascii")


class ReferenceModel:
    """A checkpoint of `make_checkpoint`, computed in float32."""

    def __init__(self, directory: Path) -> None:
        self._weights = read_tensors(directory)
        config: dict[str, Any] = json.loads((directory / "config.json").read_text())
        self._layers: int = config["num_hidden_layers"]
        self._head_dim: int = config["head_dim"]
        self._groups: int = config["num_attention_heads"] // config["num_key_value_heads"]
        self._epsilon: float = config["rms_norm_eps"]
        pairs = np.arange(0, self._head_dim, 2, dtype=np.float64)
        self._frequencies = config["rope_theta"] ** (-pairs / self._head_dim)

    def greedy(
        self, prompt: str | Sequence[int], max_tokens: int, cache: KVCache | None = None
    ) -> Completion:
        """Answer a prompt, given as text (one byte is one token) or as token ids.

        A `cache` holds KV of the beginning of the prompt, which is then not computed again; it grows with the
        answer. At least the prompt's last token is computed, as in an engine: the cache is cut to what comes
        before it.
        """
        ids = list(prompt.encode()) if isinstance(prompt, str) else list(prompt)
        cache = KVCache() if cache is None else cache
        if cache.length >= len(ids):
            for layer_arrays in (cache.keys, cache.values):
                layer_arrays[:] = [array[: len(ids) - 1] for array in layer_arrays]
        tokens: list[int] = []
        margin = float("inf")
        pending = ids[cache.length :]
        while len(tokens) < max_tokens:
            logits = self.logits(pending, cache)
            second, first = np.sort(logits)[-2:]
            margin = min(margin, float(first - second))
            pending = [int(np.argmax(logits))]
            tokens += pending
        return Completion(tokens, margin)

    def logits(self, ids: Sequence[int], cache: KVCache) -> Array:
        """Run `ids`, which follow what is in the cache, and add their KV to it.

        Returns the logits of the last one, `[vocab_size]`.
        """
        positions = cache.length + np.arange(len(ids))
        hidden = self._weights["model.embed_tokens.weight"][np.asarray(ids)]
        for layer in range(self._layers):
            prefix = f"model.layers.{layer}"
            normed = self._norm(hidden, f"{prefix}.input_layernorm")
            hidden = hidden + self._attention(normed, positions, layer, cache)
            normed = self._norm(hidden, f"{prefix}.post_attention_layernorm")
            gate = self._linear(normed, f"{prefix}.mlp.gate_proj")
            up = self._linear(normed, f"{prefix}.mlp.up_proj")
            hidden = hidden + self._linear(gate / (1 + np.exp(-gate)) * up, f"{prefix}.mlp.down_proj")
        return self._linear(self._norm(hidden[-1], "model.norm"), "lm_head")

    def _attention(
        self, hidden: Array, positions: npt.NDArray[np.int64], layer: int, cache: KVCache
    ) -> Array:
        prefix = f"model.layers.{layer}.self_attn"

        def project(name: str) -> Array:
            return self._linear(hidden, f"{prefix}.{name}_proj").reshape(len(hidden), -1, self._head_dim)

        queries, keys, values = project("q"), project("k"), project("v")
        if f"{prefix}.q_norm.weight" in self._weights:
            queries, keys = self._norm(queries, f"{prefix}.q_norm"), self._norm(keys, f"{prefix}.k_norm")
        queries, keys = self._rotate(queries, positions), self._rotate(keys, positions)
        if layer < len(cache.keys):
            keys = np.concatenate([cache.keys[layer], keys])
            values = np.concatenate([cache.values[layer], values])
            cache.keys[layer], cache.values[layer] = keys, values
        else:
            cache.keys.append(keys)
            cache.values.append(values)
        keys, values = np.repeat(keys, self._groups, axis=1), np.repeat(values, self._groups, axis=1)
        scores = np.einsum("qhd,khd->hqk", queries, keys, optimize=True) / np.float32(np.sqrt(self._head_dim))
        scores = np.where(positions[:, None] >= np.arange(len(keys)), scores, np.float32(-np.inf))
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", weights, values, optimize=True)
        return self._linear(mixed.reshape(len(hidden), -1), f"{prefix}.o_proj")

    def _rotate(self, heads: Array, positions: npt.NDArray[np.int64]) -> Array:
        """Rotary embedding of `[tokens, heads, head_dim]`, in the half-split order of Hugging Face."""
        angles = positions[:, None, None] * self._frequencies
        cosine, sine = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        first, second = np.split(heads, 2, axis=-1)
        return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)

    def _norm(self, hidden: Array, name: str) -> Array:
        scale: Array = np.sqrt(
            np.mean(np.square(hidden), axis=-1, keepdims=True, dtype=np.float32) + np.float32(self._epsilon)
        )
        normed: Array = hidden / scale * self._weights[f"{name}.weight"]
        return normed

    def _linear(self, hidden: Array, name: str) -> Array:
        return hidden @ self._weights[f"{name}.weight"].T
