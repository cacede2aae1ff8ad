"""The only road into an engine's pools, and how an engine's pools are described."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgl_pd_connector import ops
from sgl_pd_connector.base import KVPoll
from sgl_pd_connector.errors import ConfigError, TransferAbortedError
from sgl_pd_connector.transfer.lifecycle import Lifecycle
from sgl_pd_connector.transfer.pool import PoolWrite, PoolWriter, kv_args
from sgl_pd_connector.wire.layout import KVLayout

pytestmark = pytest.mark.unit

PAGES = 8


class Runner:
    """Two layers of eight pages; counts how often the arrays were taken and replaced."""

    def __init__(self) -> None:
        self.pools = [jnp.zeros((PAGES, 2, 4), jnp.float32) for _ in range(2)]

    def get_pools(self) -> list[jax.Array]:
        return list(self.pools)

    def set_pools(self, pools: list[jax.Array]) -> None:
        self.pools = pools

    def page(self, layer: int, page: int) -> float:
        return float(np.asarray(self.pools[layer])[page].mean())


@pytest.fixture
def runner() -> Runner:
    return Runner()


@pytest.fixture
def writer() -> PoolWriter:
    return PoolWriter()


def write(page_ids: list[int], value: float = 1.0, skip: int = 0, life: Lifecycle | None = None) -> PoolWrite:
    packed = [jnp.full((2, len(page_ids), 2, 4), value, jnp.float32)]
    return PoolWrite(life or Lifecycle(0.0), packed, np.array(page_ids, np.int32), skip)


def test_nothing_is_written_before_the_engine_says_so(writer: PoolWriter, runner: Runner) -> None:
    queued = write([3])
    writer.put(queued)
    assert queued.token is None
    assert runner.page(0, 3) == 0.0
    writer.run(runner)
    assert queued.token is not None
    queued.token.block_until_ready()
    assert (runner.page(0, 3), runner.page(1, 3), runner.page(0, 2)) == (1.0, 1.0, 0.0)


def test_writes_are_carried_out_in_order_once(writer: PoolWriter, runner: Runner) -> None:
    writer.put(write([1, 2], 1.0))
    writer.put(write([2, 3], 2.0))
    writer.run(runner)
    assert [runner.page(0, page) for page in range(1, 4)] == [1.0, 2.0, 2.0]
    after = runner.pools
    writer.run(runner)
    assert runner.pools is after


def test_the_token_outlives_a_forward_that_donates_the_pools(writer: PoolWriter, runner: Runner) -> None:
    queued = write([3])
    writer.put(queued)
    writer.run(runner)
    forward = jax.jit(lambda pools: [pool + 1 for pool in pools], donate_argnums=0)
    runner.pools = forward(runner.pools)
    assert queued.token is not None
    queued.token.block_until_ready()
    assert runner.page(0, 3) == 2.0


def test_skipped_pages_are_not_written(writer: PoolWriter, runner: Runner) -> None:
    writer.put(write([0, 0, 5, 6], skip=2))
    writer.run(runner)
    assert [runner.page(0, page) for page in (0, 5, 6)] == [0.0, 1.0, 1.0]


@pytest.mark.parametrize("state", [KVPoll.Failed, KVPoll.Success])
def test_a_write_of_a_transfer_that_is_over_is_not_carried_out(
    writer: PoolWriter, runner: Runner, state: KVPoll
) -> None:
    life = Lifecycle(0.0)
    queued = write([3], life=life)
    writer.put(queued)
    if state is KVPoll.Failed:
        life.fail(TransferAbortedError("client gone"), 0.0)
    else:
        for step in (KVPoll.WaitingForInput, KVPoll.Transferring, KVPoll.Success):
            life.advance(step, 0.0)
    writer.run(runner)
    assert runner.page(0, 3) == 0.0
    assert (queued.token, queued.error) == (None, None)


@pytest.mark.parametrize("page_ids", [[PAGES], [-1], [2, 2]])
def test_a_write_that_is_refused_harms_no_other(
    writer: PoolWriter, runner: Runner, page_ids: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = write(page_ids), write([3])
    writer.put(bad)
    writer.put(good)
    writer.run(runner)
    assert isinstance(bad.error, ValueError)
    assert bad.token is None
    assert good.token is not None
    assert runner.page(0, 3) == 1.0
    assert "cannot write" in caplog.text


def test_what_gather_packs_scatter_writes(writer: PoolWriter, runner: Runner) -> None:
    source = [
        jnp.asarray(np.random.default_rng(layer).random((PAGES, 2, 4), np.float32)) for layer in range(2)
    ]
    packed = ops.gather(source, np.array([7, 0], np.int32), (1, 1))
    writer.put(PoolWrite(Lifecycle(0.0), packed, np.array([2, 5], np.int32), 0))
    writer.run(runner)
    for layer in range(2):
        np.testing.assert_array_equal(
            np.asarray(runner.pools[layer])[[2, 5]], np.asarray(source[layer])[[7, 0]]
        )


# kv_args


def test_pools_are_described_by_one_page_of_one_layer() -> None:
    pools = [jnp.zeros((PAGES, 16, 2, 2, 8), jnp.bfloat16) for _ in range(3)]
    layout = KVLayout.from_args(kv_args(pools, page_size=16))
    assert layout == KVLayout(3, 16, "bfloat16", (16, 2, 2, 8), (1, 1, 1, 1))


@pytest.mark.parametrize("other", [jnp.zeros((4, 2, 4), jnp.float16), jnp.zeros((4, 2, 8), jnp.float32)])
def test_layers_that_differ_are_refused(other: Any) -> None:
    with pytest.raises(ConfigError, match="hybrid models are not supported"):
        kv_args([jnp.zeros((4, 2, 4), jnp.float32), other], page_size=2)
