"""Pools over meshes of 1, 2, 4 and 8 devices, sharded as both engines do it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from sgl_pd_connector import ops
from sgl_pd_connector.ops import sharded, xla
from sgl_pd_connector.ops.backend import Backend
from tests.unit.ops import oracle

pytestmark = pytest.mark.unit

LAYERS, NUM_PAGES, PAGE = 3, 16, (2, 8, 2, 8)
GROUPS = (1, 2)
SOURCE = np.array([3, 12, 13, 0], np.int32)  # more than one shard's pages where pages are sharded
TARGET = np.array([15, 1, 2, 8], np.int32)

HEADS = P(None, None, "tensor")  # both engines, tensor parallelism
DATA_AND_HEADS = P("data", None, "tensor", None, None)  # both engines with data parallelism
PAGES = P(("data", "tensor"))  # MLA: one latent pool, nothing but pages to split


@pytest.fixture(params=["xla", "pallas_interpret"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    ops.set_backend(request.param)
    yield request.param
    ops.set_backend(None)


def mesh(data: int, tensor: int, axis_type: AxisType) -> Mesh:
    devices = np.array(jax.devices()[: data * tensor]).reshape(data, tensor)
    return Mesh(devices, ("data", "tensor"), axis_types=(axis_type, axis_type))


def check(sharding: NamedSharding | SingleDeviceSharding) -> None:
    host = oracle.random_pools(LAYERS, (NUM_PAGES, *PAGE), np.dtype(ml_dtypes.bfloat16))
    pools = oracle.put(host, sharding)
    packed = ops.gather(pools, SOURCE, GROUPS)
    expected = oracle.gather(host, SOURCE, GROUPS)
    assert oracle.same_bits(packed, expected)
    for buffer, spec in zip(packed, ops.packed_specs(pools, len(SOURCE), GROUPS), strict=True):
        assert (buffer.shape, buffer.dtype) == (spec.shape, spec.dtype)
        assert buffer.sharding.is_equivalent_to(spec.sharding, buffer.ndim)

    written, token = ops.scatter(pools, packed, TARGET, skip=1)
    assert oracle.same_bits(written, oracle.scatter(host, expected, TARGET, skip=1))
    assert all(pool.sharding.is_equivalent_to(sharding, pool.ndim) for pool in written)
    assert token.sharding.device_set == sharding.device_set, "every device says when it is done"


@pytest.mark.parametrize(
    ("data", "tensor", "spec"),
    [
        pytest.param(1, 1, HEADS, id="1-device"),
        pytest.param(1, 2, HEADS, id="2-tensor"),
        pytest.param(1, 8, HEADS, id="8-tensor"),
        pytest.param(2, 2, DATA_AND_HEADS, id="2-data-2-tensor"),
        pytest.param(4, 2, DATA_AND_HEADS, id="4-data-2-tensor"),
        pytest.param(2, 4, HEADS, id="replicated-over-data"),
        pytest.param(4, 2, PAGES, id="8-by-pages"),
        pytest.param(2, 2, P(), id="replicated"),
    ],
)
def test_any_sharding(backend: str, data: int, tensor: int, spec: P) -> None:
    check(NamedSharding(mesh(data, tensor, AxisType.Auto), spec))


@pytest.mark.parametrize("spec", [HEADS, DATA_AND_HEADS], ids=str)
def test_explicit_axes_inside_and_outside_the_mesh_context(backend: str, spec: P) -> None:
    sharding = NamedSharding(mesh(2, 2, AxisType.Explicit), spec)
    check(sharding)
    with jax.set_mesh(sharding.mesh):
        check(sharding)


def test_one_device_that_is_not_the_first(backend: str) -> None:
    check(SingleDeviceSharding(jax.devices()[3]))


def test_other_shardings_are_refused() -> None:
    copies = Backend(xla.gather_pages, xla.scatter_pages)
    with pytest.raises(ValueError, match="NamedSharding or a SingleDeviceSharding, not something else"):
        sharded.scatter(copies, cast(Any, "something else"), 5)
