"""Gather and scatter equal the NumPy oracle bit for bit, on every backend that runs on a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sgl_pd_connector import ops
from tests.unit.ops import oracle

pytestmark = pytest.mark.unit

BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(params=["xla", "pallas_interpret"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    ops.set_backend(request.param)
    yield request.param
    ops.set_backend(None)


def check(
    pools: list[np.ndarray], page_ids: np.ndarray, targets: np.ndarray, groups: tuple[int, ...], skip: int = 0
) -> None:
    device = oracle.put(pools)
    packed = ops.gather(device, page_ids, groups)
    expected = oracle.gather(pools, page_ids, groups)
    assert oracle.same_bits(packed, expected)
    written, token = ops.scatter(device, packed, targets, skip)
    assert oracle.same_bits(written, oracle.scatter(pools, expected, targets, skip))
    assert token.shape == ()
    jax.block_until_ready(token)


@settings(
    derandomize=True,
    deadline=None,
    max_examples=6,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_pool_any_pages(backend: str, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(oracle.DTYPES))
    page_shape = data.draw(
        st.one_of(
            st.tuples(*map(st.sampled_from, ([1, 3, 16], [1, 2, 5], [1, 2, 4], [8, 64, 128]))),  # a KV cache
            st.tuples(*map(st.sampled_from, ([1, 8], [2], [64, 576]))),  # one latent vector per token: MLA
        )
    )
    n = data.draw(st.sampled_from([1, 2, 4, 8]))
    num_pages = data.draw(st.integers(n, 24))
    layers = data.draw(st.integers(1, 6))
    pages = oracle.page_lists(num_pages, n)
    check(
        oracle.random_pools(layers, (num_pages, *page_shape), dtype),
        data.draw(pages),
        data.draw(pages),
        data.draw(oracle.groupings(layers)),
        skip=data.draw(st.integers(0, n - 1)),
    )


@pytest.mark.parametrize(
    ("layers", "groups", "page_shape", "dtype"),
    [
        pytest.param(94, (47, 46, 1), (1, 1, 2, 64), BF16, id="94-layers"),
        pytest.param(2, (2,), (256, 1, 2, 128), BF16, id="page-of-256-tokens"),
        pytest.param(3, (1, 2), (8, 2, 576), BF16, id="mla"),
        pytest.param(2, (1, 1), (4, 2, 4, 96), np.dtype(ml_dtypes.float8_e4m3fn), id="float8"),
    ],
)
def test_extremes(
    backend: str, layers: int, groups: tuple[int, ...], page_shape: tuple[int, ...], dtype: np.dtype
) -> None:
    pools = oracle.random_pools(layers, (10, *page_shape), dtype)
    check(pools, np.array([9, 0, 4, 5], np.int32), np.array([1, 2, 3, 8], np.int32), groups)


def test_a_whole_ladder_step_of_128_pages(backend: str) -> None:
    pools = oracle.random_pools(2, (200, 2, 1, 2, 16), BF16)
    order = np.random.default_rng(1).permutation(200).astype(np.int32)
    check(pools, order[:128], np.arange(50, 178, dtype=np.int32), (2,))
