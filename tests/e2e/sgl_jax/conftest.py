"""One pair of servers for most tests, and what must hold after each of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sgl_pd_connector.testing.servers import Server
from tests.e2e.sgl_jax.deployment import Deployment, deployment, engine


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """The defaults: radix cache on P, ChunkCache on D, and both routers."""
    directory = tmp_path_factory.mktemp("pair")
    with deployment(directory, prefill=engine(), decode=engine(), routers=("mini_lb", "rust")) as running:
        yield running


@pytest.fixture
def pair(servers: Deployment) -> Iterator[Deployment]:
    """The shared servers. After the test nothing may be left of it, and both must still serve."""
    yield servers
    servers.wait_settled()


@pytest.fixture(params=["mini_lb", "rust"])
def router(pair: Deployment, request: pytest.FixtureRequest) -> Server:
    """Each router in turn."""
    return pair.routers[request.param]


@pytest.fixture
def lb(pair: Deployment) -> Server:
    """The router that passes every field on."""
    return pair.routers["mini_lb"]
