"""The plain-JAX attention of the CPU emulation equals a naive one for every mix of prefill and decode."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgl_pd_connector.testing.cpu_attention import ragged_paged_attention

pytestmark = pytest.mark.unit

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 128
MAX_SEQS = 4

attention = jax.jit(ragged_paged_attention, static_argnames=["sm_scale"])


class Batch:
    """Sequences of (already cached, new) tokens in a shuffled page pool, padded as an engine would."""

    def __init__(
        self,
        sequences: list[tuple[int, int]],
        *,
        page_size: int = 16,
        dtype: Any = jnp.float32,
        tokens: int = 64,
        max_len: int = 512,
    ) -> None:
        random = np.random.RandomState(len(sequences) + page_size)
        self.sequences, self.page_size, self.dtype = sequences, page_size, dtype
        pages_per_seq = max_len // page_size
        pool = MAX_SEQS * pages_per_seq + 3
        rows, packing = (2 * KV_HEADS, 1) if dtype == jnp.float32 else (KV_HEADS, 2)
        shape = (pool, page_size, rows, packing, HEAD_DIM)
        self.cache = jnp.asarray(random.standard_normal(shape), dtype)
        self.table = random.permutation(pool)[: MAX_SEQS * pages_per_seq].astype(np.int32)
        self.table = self.table.reshape(MAX_SEQS, -1)
        self.queries = jnp.asarray(random.standard_normal((tokens, HEADS, HEAD_DIM)), dtype)
        self.keys = jnp.asarray(random.standard_normal((tokens, KV_HEADS, HEAD_DIM)), dtype)
        self.values = jnp.asarray(random.standard_normal((tokens, KV_HEADS, HEAD_DIM)), dtype)
        # What lies beyond the real sequences is garbage, as in a reused buffer.
        self.kv_lens = np.full(MAX_SEQS, 77, np.int32)
        self.starts = np.full(MAX_SEQS + 1, 3, np.int32)
        self.starts[0] = 0
        for index, (cached, new) in enumerate(sequences):
            self.kv_lens[index] = cached + new
            self.starts[index + 1] = self.starts[index] + new

    def arguments(self) -> list[jax.Array]:
        return [
            self.queries,
            self.keys,
            self.values,
            self.cache,
            jnp.asarray(self.kv_lens),
            jnp.asarray(self.table.reshape(-1)),
            jnp.asarray(self.starts),
            jnp.asarray([0, 0, len(self.sequences)], jnp.int32),
        ]

    def run(self) -> tuple[np.ndarray, np.ndarray]:
        output, cache = attention(*self.arguments(), sm_scale=HEAD_DIM**-0.5)
        return np.asarray(output, np.float32), np.asarray(cache, np.float32)

    def expect(self) -> tuple[np.ndarray, np.ndarray]:
        """The same, one token at a time."""
        cache = np.asarray(self.cache, np.float32).copy()
        queries = np.asarray(self.queries, np.float32)
        output = np.zeros_like(queries)
        slots = cache.reshape(-1, 2 * KV_HEADS, HEAD_DIM)
        keys, values = np.asarray(self.keys, np.float32), np.asarray(self.values, np.float32)
        for index, (cached, new) in enumerate(self.sequences):
            place = [
                int(self.table[index, position // self.page_size]) * self.page_size
                + position % self.page_size
                for position in range(cached + new)
            ]
            for step in range(new):
                token = self.starts[index] + step
                slots[place[cached + step], 0::2] = keys[token]
                slots[place[cached + step], 1::2] = values[token]
                seen = slots[place[: cached + step + 1]]
                for head in range(HEADS):
                    pair = head // (HEADS // KV_HEADS)
                    scores = seen[:, 2 * pair] @ queries[token, head] * HEAD_DIM**-0.5
                    weights = np.exp(scores - scores.max())
                    output[token, head] = weights @ seen[:, 2 * pair + 1] / weights.sum()
        return output, cache


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    "sequences",
    [
        [(0, 1)],
        [(0, 64)],
        [(0, 37)],
        [(300, 1), (15, 1), (16, 1), (0, 1)],
        [(511, 1), (40, 17), (0, 30)],
        [(256, 20), (255, 20), (257, 20)],
    ],
    ids=["one token", "full prefill", "prefill", "decode", "mixed", "chunk borders"],
)
def test_equals_naive_attention(sequences: list[tuple[int, int]], page_size: int, dtype: Any) -> None:
    batch = Batch(sequences, page_size=page_size, dtype=dtype)
    output, cache = batch.run()
    expected_output, expected_cache = batch.expect()
    tolerance = 1e-5 if dtype == jnp.float32 else 1e-2
    np.testing.assert_allclose(output, expected_output, atol=tolerance, rtol=tolerance)
    np.testing.assert_array_equal(cache, expected_cache)


def test_many_query_tiles() -> None:
    batch = Batch([(10, 200), (0, 100)], tokens=320)
    output, cache = batch.run()
    expected_output, expected_cache = batch.expect()
    np.testing.assert_allclose(output, expected_output, atol=1e-5, rtol=1e-5)
    np.testing.assert_array_equal(cache, expected_cache)


def test_an_empty_batch_changes_nothing() -> None:
    batch = Batch([])
    output, cache = batch.run()
    assert not output.any()
    np.testing.assert_array_equal(cache, np.asarray(batch.cache))


def test_a_sequence_is_computed_alike_in_any_company() -> None:
    company = Batch([(100, 1), (30, 5), (0, 20)])
    alone = Batch([(100, 1), (30, 5), (0, 20)])
    alone.sequences = alone.sequences[:1]
    np.testing.assert_array_equal(company.run()[0][0], alone.run()[0][0])


@pytest.mark.parametrize(
    "option", [{"sliding_window": 64}, {"soft_cap": 30.0}, {"k_scale": 0.5}, {"use_causal_mask": False}]
)
def test_what_is_not_emulated_is_refused(option: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=next(iter(option))):
        ragged_paged_attention(*Batch([(0, 1)]).arguments(), **option)
