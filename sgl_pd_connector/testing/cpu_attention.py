"""Ragged paged attention in plain JAX: what tpu-inference's TPU kernel computes, on any backend.

Ours, written for the CPU backend: work is proportional to the real tokens, not to the padded shapes, memory to one
tile of scores, and the cache is updated in place. All loops have dynamic lengths, so one compilation serves every mix
of prefill, chunked prefill and decode of the same padded shape.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

_QUERY_TILE = 64
_KV_CHUNK = 256
# Arguments of the kernel that only tune it for a TPU.
_TUNING = frozenset(
    (
        "chunk_prefill_size",
        "d_block_sizes",
        "p_block_sizes",
        "m_block_sizes",
        "vmem_limit_bytes",
        "mask_value",
    )
)
_PLAIN = {"use_causal_mask": True, "update_kv_cache": True, "skip_kv_mask": False}


def ragged_paged_attention(  # noqa: PLR0917  the kernel's signature
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    kv_cache: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    distribution: jax.Array,
    *,
    sm_scale: float = 1.0,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """Write the new keys and values into the paged cache, then attend causally over all of it.

    Args:
        queries: `[tokens, heads, head_dim]`, all sequences one after another, padded at the end.
        keys, values: `[tokens, kv_heads, head_dim]` of the same tokens.
        kv_cache: `[pages, page_size, rows, packing, padded_head_dim]`; the `rows * packing` vectors of a token are
            key and value of each head in turn, padded. Float32 or bfloat16.
        kv_lens: int32 `[max_seqs]`, length of each sequence including its new tokens.
        page_indices: int32 `[max_seqs * pages_per_seq]`, the pages of each sequence.
        cu_q_lens: int32 `[max_seqs + 1]`, where each sequence's new tokens begin in `queries`.
        distribution: int32 `[3]`; sequences from `distribution[2]` on are padding.
        sm_scale: factor of the scores.
        options: other arguments of the kernel. Those that tune it are ignored.

    Returns:
        The attention output, like `queries` (rows of padding are 0), and the updated cache.

    Raises:
        NotImplementedError: an option asks for something that is not emulated (sliding window, soft cap, quantised
            KV, attention that is not causal).
    """
    for name, value in options.items():
        if name not in _TUNING and value is not None and _PLAIN.get(name) != value:
            raise NotImplementedError(f"CPU emulation of attention does not support {name}={value!r}")
    table = page_indices.reshape(len(kv_lens), -1)
    batch = _Batch(kv_lens, table, cu_q_lens, distribution[2])
    kv_cache = _write(kv_cache, keys, values, batch)
    scaled = queries.astype(jnp.float32) * sm_scale
    return _attend(scaled, kv_cache, batch, keys.shape[1]).astype(queries.dtype), kv_cache


class _Batch(NamedTuple):
    """The first `real` sequences are not padding; `table` is `[max_seqs, pages_per_seq]`."""

    kv_lens: jax.Array
    table: jax.Array
    cu_q_lens: jax.Array
    real: jax.Array


def _write(kv_cache: jax.Array, keys: jax.Array, values: jax.Array, batch: _Batch) -> jax.Array:
    """The cache with the new tokens in their places."""
    tokens, kv_heads, head_dim = keys.shape
    page_size, rows, packing, padded_head_dim = kv_cache.shape[1:]
    merged = jnp.stack([keys, values], axis=2).reshape(tokens, 2 * kv_heads, head_dim)
    merged = jnp.pad(merged, ((0, 0), (0, rows * packing - 2 * kv_heads), (0, padded_head_dim - head_dim)))
    merged = merged.reshape(tokens, 1, 1, rows, packing, padded_head_dim).astype(kv_cache.dtype)

    def write_sequence(sequence: jax.Array, cache: jax.Array) -> jax.Array:
        begin, end = batch.cu_q_lens[sequence], batch.cu_q_lens[sequence + 1]

        # One update per token, because XLA's scatter copies a float32 pool as a whole.
        def write_token(token: jax.Array, cache: jax.Array) -> jax.Array:
            position = batch.kv_lens[sequence] - end + token
            page = batch.table[sequence, position // page_size]
            return lax.dynamic_update_slice(cache, merged[token], (page, position % page_size, 0, 0, 0))

        written: jax.Array = lax.fori_loop(begin, end, write_token, cache)
        return written

    updated: jax.Array = lax.fori_loop(0, batch.real, write_sequence, kv_cache)
    return updated


def _attend(queries: jax.Array, kv_cache: jax.Array, batch: _Batch, kv_heads: int) -> jax.Array:
    """Causal attention of scaled float32 `[tokens, heads, head_dim]` queries over the cache."""
    tokens, heads, head_dim = queries.shape
    groups = heads // kv_heads
    page_size = kv_cache.shape[1]
    pages_per_chunk = -(-min(_KV_CHUNK, batch.table.shape[1] * page_size) // page_size)
    chunk = pages_per_chunk * page_size
    # Slices of a fixed size must not reach beyond the end: they would be shifted.
    table = jnp.pad(batch.table, ((0, 0), (0, pages_per_chunk)))
    queries = jnp.pad(queries, ((0, _QUERY_TILE), (0, 0), (0, 0)))

    def read(sequence: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys and values of one chunk of a sequence: each `[kv_heads, chunk, head_dim]` in float32."""
        pages = lax.dynamic_slice(table, (sequence, number * pages_per_chunk), (1, pages_per_chunk))[0]
        vectors = kv_cache[pages].reshape(chunk, -1, kv_cache.shape[-1])[:, : 2 * kv_heads, :head_dim]
        pairs = vectors.reshape(chunk, kv_heads, 2, head_dim).astype(jnp.float32).transpose(2, 1, 0, 3)
        return pairs[0], pairs[1]

    def attend_tile(sequence: jax.Array, first: jax.Array, tile: int) -> jax.Array:
        """Output of the `tile` queries from `first` on, `[tile, heads, head_dim]`."""
        positions = batch.kv_lens[sequence] - batch.cu_q_lens[sequence + 1] + first + jnp.arange(tile)
        query = lax.dynamic_slice(queries, (first, 0, 0), (tile, heads, head_dim))
        query = query.reshape(tile, kv_heads, groups, head_dim).transpose(1, 2, 0, 3)
        query = query.reshape(kv_heads, groups * tile, head_dim)

        def attend_chunk(number: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            best, total, mixed = state  # running maximum, sum and weighted values of a softmax seen in pieces
            key, value = read(sequence, number)
            visible = jnp.tile(positions, groups)[:, None] >= number * chunk + jnp.arange(chunk)
            scores = jnp.where(visible, jnp.einsum("hqd,hkd->hqk", query, key), -jnp.inf)
            new_best = jnp.maximum(best, scores.max(axis=-1, keepdims=True))
            weights, keep = jnp.exp(scores - new_best), jnp.exp(best - new_best)
            total = total * keep + weights.sum(axis=-1, keepdims=True)
            mixed = mixed * keep + jnp.einsum("hqk,hkd->hqd", weights, value)
            return new_best, total, mixed

        single = jnp.zeros((*query.shape[:2], 1), jnp.float32)
        # A finite start keeps the first subtraction defined: every query sees position 0 in the first chunk.
        start = (single + jnp.finfo(jnp.float32).min, single, jnp.zeros_like(query))
        visible_to_tile = jnp.minimum(positions[-1] + 1, batch.kv_lens[sequence])
        _, total, mixed = lax.fori_loop(0, -(-visible_to_tile // chunk), attend_chunk, start)
        answer: jax.Array = (mixed / total).reshape(kv_heads, groups, tile, head_dim)
        return answer.transpose(2, 0, 1, 3).reshape(tile, heads, head_dim)

    def attend_sequence(sequence: jax.Array, output: jax.Array) -> jax.Array:
        begin, end = batch.cu_q_lens[sequence], batch.cu_q_lens[sequence + 1]

        def tiles(size: int) -> jax.Array:
            def attend(index: jax.Array, output: jax.Array) -> jax.Array:
                first = begin + index * size
                answer = attend_tile(sequence, first, size)
                old = lax.dynamic_slice(output, (first, 0, 0), answer.shape)
                answer = jnp.where((first + jnp.arange(size) < end)[:, None, None], answer, old)
                return lax.dynamic_update_slice(output, answer, (first, 0, 0))

            filled: jax.Array = lax.fori_loop(0, -(-(end - begin) // size), attend, output)
            return filled

        chosen: jax.Array = lax.cond(end - begin == 1, lambda: tiles(1), lambda: tiles(_QUERY_TILE))
        return chosen

    attended: jax.Array = lax.fori_loop(0, batch.real, attend_sequence, jnp.zeros_like(queries))
    return attended[:tokens]
