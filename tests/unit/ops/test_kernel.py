"""The Pallas kernel in TPU interpret mode: DMAs carried out as early and as late as they may be, and no races."""

from __future__ import annotations

from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # the only place where races are reported
from jax.experimental.pallas import tpu as pltpu

from sgl_pd_connector.ops import pallas
from sgl_pd_connector.ops.sharded import ELSEWHERE
from tests.unit.ops import oracle

pytestmark = pytest.mark.unit

PAGE = (2, 3, 8)
# Axis orders in device memory that XLA chooses for TPUs: as written, and with tokens as the minor axis.
ORDERS = [(0, 1, 2, 3), (0, 2, 3, 1)]


def run(
    pools: list[np.ndarray],
    page_ids: np.ndarray,
    groups: tuple[int, ...],
    order: tuple[int, ...],
    **params: Any,
) -> None:
    """Gathers, and scatters the result to the next pages, watching for races."""
    interpret = pltpu.InterpretParams(detect_races=True, **params)
    here = page_ids != ELSEWHERE
    source = np.where(here, page_ids, 0)
    targets = np.where(here, (page_ids + 1) % len(pools[0]), ELSEWHERE).astype(np.int32)

    packed = jax.jit(lambda *args: pallas.gather_pages(*args, groups, order, interpret))(
        oracle.put(pools), page_ids
    )
    assert not interpret_pallas_call.races.races_found
    expected = oracle.gather(pools, source, groups)
    assert oracle.same_bits(
        [np.asarray(buffer)[:, here] for buffer in packed],
        [np.ascontiguousarray(buffer[:, here]) for buffer in expected],
    )

    written = jax.jit(lambda *args: pallas.scatter_pages(*args, order, interpret))(
        oracle.put(pools), expected, targets
    )
    jax.block_until_ready(written)
    assert not interpret_pallas_call.races.races_found
    mine = [np.ascontiguousarray(buffer[:, here]) for buffer in expected]
    assert oracle.same_bits(written, oracle.scatter(pools, mine, targets[here]))


@pytest.mark.parametrize(("mode", "order"), [("on_wait", ORDERS[0]), ("eager", ORDERS[1])])
@pytest.mark.parametrize(
    "page_ids",
    [
        pytest.param([5], id="one"),
        pytest.param(range(2, 18), id="one-run"),
        pytest.param(range(15, -1, -1), id="descending"),
        pytest.param([8, 9, 10, 3, 30, 31, 0, 1], id="runs"),
        pytest.param(range(0, 32, 2), id="more-runs-than-the-ring-holds"),
        pytest.param([ELSEWHERE, 30, 31, ELSEWHERE, ELSEWHERE, 0, 1, ELSEWHERE], id="pages-of-another-shard"),
        pytest.param([ELSEWHERE] * 4, id="nothing-here"),
    ],
)
def test_page_lists(mode: str, order: tuple[int, ...], page_ids: list[int]) -> None:
    pools = oracle.random_pools(3, (32, *PAGE), np.dtype(ml_dtypes.bfloat16))
    run(pools, np.array(page_ids, np.int32), (1, 2), order, dma_execution_mode=mode)


@settings(derandomize=True, deadline=None, max_examples=4)
@given(data=st.data())
def test_any_pages_in_any_mode(data: st.DataObject) -> None:
    layers = data.draw(st.integers(1, 5))
    n = data.draw(st.sampled_from([1, 4, 16]))
    run(
        oracle.random_pools(layers, (20, *PAGE), data.draw(st.sampled_from(oracle.DTYPES))),
        data.draw(oracle.page_lists(20, n)),
        data.draw(oracle.groupings(layers)),
        data.draw(st.sampled_from(ORDERS)),
        dma_execution_mode=data.draw(st.sampled_from(["eager", "on_wait"])),
    )
