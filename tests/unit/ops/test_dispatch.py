"""What callers rely on: nothing is compiled after warm-up, nothing is lost to bad input, the token means done."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from sgl_pd_connector import ops
from sgl_pd_connector.ops import backend
from sgl_pd_connector.wire.chunks import ladder, plan_chunks, plan_groups
from tests.unit.ops import oracle

pytestmark = pytest.mark.unit

LAYERS, NUM_PAGES, PAGE = 3, 12, (2, 1, 2, 8)


@pytest.fixture
def host() -> list[np.ndarray]:
    return oracle.random_pools(LAYERS, (NUM_PAGES, *PAGE), np.dtype(ml_dtypes.bfloat16))


def page_ids(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def test_no_request_compiles_anything_after_warm_up() -> None:
    max_chunk, num_pages = 16, 80
    pools = oracle.put(oracle.random_pools(4, (num_pages, *PAGE), np.dtype(np.float32)))
    layer_bytes = pools[0].nbytes // num_pages
    groups = {n: plan_groups(len(pools), n * layer_bytes, 8 * layer_bytes) for n in ladder(max_chunk)}
    assert len(set(groups.values())) > 1, "the sizes of the ladder differ in their groups"
    before = ops.compilations()
    ops.warmup(pools, groups)
    warm = ops.compilations()
    assert warm - before == 2 * len(groups) == 2 * (max_chunk.bit_length())

    rng = np.random.default_rng(0)
    for length in rng.integers(1, num_pages + 1, 40):
        pages = rng.permutation(num_pages).astype(np.int32)[:length]
        for chunk in plan_chunks(int(length), max_chunk):
            ids = pages[chunk.first : chunk.first + chunk.pages]
            packed = ops.gather(pools, ids, groups[chunk.pages])
            pools, _ = ops.scatter(pools, packed, ids[::-1], skip=int(rng.integers(0, len(ids))))
    assert ops.compilations() == warm


def test_warm_up_takes_pools_that_do_not_exist_yet(host: list[np.ndarray]) -> None:
    pools = oracle.put(host)
    specs = [jax.ShapeDtypeStruct(pool.shape, pool.dtype, sharding=pool.sharding) for pool in pools]
    ops.warmup(specs, {4: (2, 1)}, ops=("gather",))
    warm = ops.compilations()
    ops.gather(pools, page_ids(3, 2, 1, 0), (2, 1))
    assert ops.compilations() == warm


def test_scatter_reuses_the_pools_memory_and_gather_leaves_them(host: list[np.ndarray]) -> None:
    pools = oracle.put(host)
    packed = ops.gather(pools, page_ids(0, 1), (LAYERS,))
    assert not any(pool.is_deleted() for pool in pools)
    addresses = [pool.unsafe_buffer_pointer() for pool in pools]
    written, _ = ops.scatter(pools, packed, page_ids(4, 5))
    assert all(pool.is_deleted() for pool in pools)
    assert [pool.unsafe_buffer_pointer() for pool in written] == addresses
    assert not any(buffer.is_deleted() for buffer in packed)


def test_the_token_is_not_ready_before_the_pools_and_outlives_them() -> None:
    pools = oracle.put(oracle.random_pools(8, (128, 16, 4, 2, 64), np.dtype(np.float32)))
    ids = np.arange(64, dtype=np.int32)
    packed = ops.gather(pools, ids, (8,))
    jax.block_until_ready(packed)
    for _ in range(5):
        pools, token = ops.scatter(pools, packed, ids[::-1])
        while not token.is_ready():
            pass
        assert all(pool.is_ready() for pool in pools)
        step = jax.jit(lambda pools: [pool + 1 for pool in pools], donate_argnums=0)  # the engine's next step
        pools = step(pools)
        assert int(token) == 0


@pytest.mark.parametrize(
    ("ids", "skip", "message"),
    [
        pytest.param(page_ids(0, NUM_PAGES), 0, "outside the pool of 12 pages", id="past-the-end"),
        pytest.param(page_ids(-1, 0), 0, "outside the pool", id="negative"),
        pytest.param(page_ids(4, 4), 0, "named twice", id="twice"),
        pytest.param(page_ids(4, 5), 2, "cannot skip 2 of 2", id="all-skipped"),
        pytest.param(page_ids(4, 5, 6), 0, "packed buffer is", id="not-the-buffers-count"),
    ],
)
def test_a_scatter_that_is_refused_loses_nothing(
    host: list[np.ndarray], ids: np.ndarray, skip: int, message: str
) -> None:
    pools = oracle.put(host)
    packed = ops.gather(pools, page_ids(0, 1), (LAYERS,))
    with pytest.raises(ValueError, match=message):
        ops.scatter(pools, packed, ids, skip)
    assert oracle.same_bits(pools, host)


def test_a_skipped_page_may_have_any_id(host: list[np.ndarray]) -> None:
    pools = oracle.put(host)
    packed = ops.gather(pools, page_ids(0, 1), (LAYERS,))
    written, _ = ops.scatter(pools, packed, page_ids(NUM_PAGES + 7, 5), skip=1)
    expected = [pool.copy() for pool in host]
    for pool in expected:
        pool[5] = pool[1]
    assert oracle.same_bits(written, expected)


def test_a_gather_that_is_refused_says_why(host: list[np.ndarray]) -> None:
    pools = oracle.put(host)
    with pytest.raises(ValueError, match="outside the pool of 12 pages"):
        ops.gather(pools, page_ids(12), (LAYERS,))
    with pytest.raises(ValueError, match="name 2 layers, there are 3 pools"):
        ops.gather(pools, page_ids(1), (1, 1))
    with pytest.raises(ValueError, match="at least one page"):
        ops.gather(pools, page_ids(), (LAYERS,))
    with pytest.raises(ValueError, match="differ"):
        ops.gather([*pools[:-1], jnp.zeros((NUM_PAGES, 5))], page_ids(1), (LAYERS,))


def test_the_backend_follows_the_platform_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(backend.ENVIRONMENT, raising=False)
    assert backend.backend_name("tpu") == "pallas"
    assert backend.backend_name("cpu") == backend.backend_name("gpu") == "xla"
    monkeypatch.setenv(backend.ENVIRONMENT, "pallas_interpret")
    assert backend.backend_name("cpu") == "pallas_interpret"
    ops.set_backend("xla")
    try:
        assert backend.backend_name("tpu") == "xla"
    finally:
        ops.set_backend(None)


def test_unknown_backends_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="set_backend: ops backend 'cuda' is unknown"):
        ops.set_backend("cuda")
    monkeypatch.setenv(backend.ENVIRONMENT, "cuda")
    with pytest.raises(ValueError, match="SGL_PD_OPS_BACKEND: ops backend 'cuda' is unknown"):
        backend.backend_name("cpu")
