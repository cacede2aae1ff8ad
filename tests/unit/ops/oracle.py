"""What gather and scatter must do, in NumPy, and pools to do it on."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import ml_dtypes
import numpy as np
from hypothesis import strategies as st
from jax.sharding import Sharding, SingleDeviceSharding

DTYPES = [np.dtype(t) for t in (ml_dtypes.bfloat16, np.float32, np.int8, ml_dtypes.float8_e4m3fn)]


def random_pools(layers: int, shape: tuple[int, ...], dtype: np.dtype, seed: int = 0) -> list[np.ndarray]:
    """Every bit pattern, NaNs with payloads included: a copy must not look at values."""
    rng = np.random.default_rng(seed)
    return [
        rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0] for _ in range(layers)
    ]


def put(pools: Sequence[np.ndarray], sharding: Sharding | None = None) -> list[jax.Array]:
    """Pools as an engine has them: memory of the device's own, which a donation can reuse."""
    sharding = sharding or SingleDeviceSharding(jax.devices()[0])
    bits = [pool.view(f"u{pool.dtype.itemsize}") for pool in pools]
    copy = jax.jit(lambda x: jax.lax.bitcast_convert_type(x, pools[0].dtype), out_shardings=sharding)
    return [copy(jax.device_put(pool, sharding)) for pool in bits]


def same_bits(left: Sequence[object], right: Sequence[np.ndarray]) -> bool:
    return all(np.asarray(x).tobytes() == y.tobytes() for x, y in zip(left, right, strict=True))


def gather(pools: Sequence[np.ndarray], page_ids: np.ndarray, groups: Sequence[int]) -> list[np.ndarray]:
    taken = [pool[page_ids] for pool in pools]
    ends = np.cumsum(groups)
    return [np.stack(taken[end - layers : end]) for end, layers in zip(ends, groups, strict=True)]


def scatter(
    pools: Sequence[np.ndarray], packed: Sequence[np.ndarray], page_ids: np.ndarray, skip: int = 0
) -> list[np.ndarray]:
    written = [pool.copy() for pool in pools]
    for pool, layer in zip(written, [layer for buffer in packed for layer in buffer], strict=True):
        pool[page_ids[skip:]] = layer[skip:]
    return written


@st.composite
def page_lists(draw: st.DrawFn, num_pages: int, n: int) -> np.ndarray:
    """n distinct pages: in any order, ascending, or in runs of consecutive ones."""
    kind = draw(st.sampled_from(["any", "ascending", "runs"]))
    ids = np.array(draw(st.permutations(range(num_pages))), np.int32)[:n]
    if kind == "ascending":
        return np.sort(ids)
    if kind == "runs":
        start = draw(st.integers(0, num_pages - n))
        run = np.arange(start, start + n, dtype=np.int32)
        return np.roll(run, draw(st.integers(0, n - 1)))
    return ids


@st.composite
def groupings(draw: st.DrawFn, layers: int) -> tuple[int, ...]:
    """How many consecutive layers go into each buffer."""
    cuts = sorted(draw(st.sets(st.integers(1, layers - 1)))) if layers > 1 else []
    return tuple(int(size) for size in np.diff([0, *cuts, layers]))
