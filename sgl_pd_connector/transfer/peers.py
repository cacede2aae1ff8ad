"""How an instance describes itself to the bootstrap server, and which prefill instances found there it can use."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import jax

from sgl_pd_connector.bootstrap.client import BootstrapClient
from sgl_pd_connector.config import ConnectorConfig
from sgl_pd_connector.errors import BootstrapError, ConfigError, ForbiddenPeerError, IncompatiblePeerError
from sgl_pd_connector.transfer.interest import PeerRoute
from sgl_pd_connector.transfer.transport import Peer
from sgl_pd_connector.wire.address import Address
from sgl_pd_connector.wire.allow import AllowList
from sgl_pd_connector.wire.layout import KVLayout
from sgl_pd_connector.wire.routes import Route

logger = logging.getLogger(__name__)

ALLOWED = "allowed_bootstrap_hosts"
LOOPBACK_V4 = "127.0.0.0/8"
LOOPBACK_V6 = "::1"


def describe(
    *,
    config: ConnectorConfig,
    layout: KVLayout,
    epoch: int,
    transfer_addr: str,
    transfer_ports: Sequence[int],
    zmq_addr: str,
) -> Route:
    """A prefill instance's registration. One process drives all its local devices, so it is one rank."""
    mesh: dict[str, Any] = {
        "platform": jax.local_devices()[0].platform,
        "devices": jax.local_device_count(),
        "page_sharding": list(layout.sharding),
    }
    return Route(
        role="prefill",
        tp_rank=0,
        tp_size=1,
        cp_rank=0,
        cp_size=1,
        dp_rank=0,
        dp_size=1,
        pp_rank=0,
        pp_size=1,
        instance_id=config.instance_id,
        epoch=epoch,
        transfer_addr=transfer_addr,
        transfer_ports=list(transfer_ports),
        zmq_addr=zmq_addr,
        page_size=layout.page_size,
        kv_dtype=layout.dtype,
        layout_digest=layout.digest,
        transfer_channels=config.transfer_channels,
        transfer_size=config.transfer_size,
        mesh_meta=mesh,
    )


class PrefillFinder:
    """Looks prefill instances up. Called on look-up threads: it blocks for a name's resolution and one HTTP request.

    What does not match is refused before anything connects: the native transfer server aborts the process when channel
    counts or address families differ, hangs when transfer sizes do, and takes any layout of the right size for its own.
    """

    def __init__(
        self, config: ConnectorConfig, layout: KVLayout, *, own_bootstrap: str | None, auth_token: str | None
    ) -> None:
        """
        Args:
            config: this instance's settings, ``host`` resolved.
            layout: this instance's.
            own_bootstrap: the bootstrap server this instance was configured with; always allowed.
            auth_token: what the bootstrap servers want.
        """
        self._config = config
        self._layout = layout
        self._auth_token = auth_token
        entries = config.allowed_bootstrap_hosts or (LOOPBACK_V4, LOOPBACK_V6, config.host)
        self._allowed = AllowList.parse(entries, setting=ALLOWED)
        if own_bootstrap:
            self._allowed.addresses.add(Address.parse(own_bootstrap, setting="bootstrap_addr"))

    def __call__(self, bootstrap_addr: str) -> Sequence[PeerRoute]:
        """
        Raises:
            BootstrapError: the server does not answer, or its name cannot be resolved at the moment.
            ConfigError: that is no address.
            ForbiddenPeerError: this instance may not ask that server.
            IncompatiblePeerError: instances are registered, and this one can use none of them.
        """
        named = Address.parse(bootstrap_addr, setting="bootstrap_host")
        bootstrap = self._permitted(named)
        with BootstrapClient(
            bootstrap,
            timeout=self._config.peer_timeout,
            timeout_setting="peer_timeout",
            auth_token=self._auth_token,
        ) as client:
            routes = client.list("prefill")
        usable: list[PeerRoute] = []
        problems: list[str] = []
        for route in routes:
            problem = self._mismatch(route, bootstrap)
            if problem:
                problems.append(f"prefill instance {route.instance_id} at {route.zmq_addr}: {problem}")
            else:
                peer = Peer(route.instance_id, route.epoch, route.transfer_addr, tuple(route.transfer_ports))
                usable.append(PeerRoute(peer, route.zmq_addr))
        if problems and not usable:
            raise IncompatiblePeerError("; ".join(problems))
        for text in problems:
            logger.warning("not using %s", text)
        return usable

    def _permitted(self, named: Address) -> Address:
        """Where to connect to, numeric."""
        if self._allowed.may_permit(named):
            try:
                resolved = named.resolved(setting="bootstrap_host")
            except ConfigError as error:
                # Name servers fail and come back, and names appear with the pods that they are of.
                raise BootstrapError(str(error)) from None
            if self._allowed.permits(named, resolved):
                return resolved
        raise ForbiddenPeerError(
            f"the request names a server that is not among those allowed here (setting {ALLOWED})"
        )

    def _mismatch(self, route: Route, bootstrap: Address) -> str | None:
        config, layout = self._config, self._layout
        pairs = (
            ("page_size", layout.page_size, route.page_size),
            ("kv_dtype", layout.dtype, route.kv_dtype),
            ("transfer_channels", config.transfer_channels, route.transfer_channels),
            ("transfer_size", config.transfer_size, route.transfer_size),
            ("KV layout digest", layout.digest, route.layout_digest),
        )
        for name, ours, theirs in pairs:
            if ours != theirs:
                return f"{name} is {theirs} there and {ours} here; it must be equal"
        transfer = Address.parse(route.transfer_addr, setting="transfer_addr")
        own = Address.of(config.host, 0, setting="host")
        if transfer.family is not own.family:
            return f"it is at {transfer} and this instance at {own.host}: both must be IPv4 or both IPv6 (setting host)"
        if transfer.is_loopback and not bootstrap.is_loopback:
            return f"it advertises {transfer}, which only its own machine can reach (its setting host)"
        return None
