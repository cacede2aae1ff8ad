"""``sgl-pd doctor``: looks at settings and machine the way an instance will, and says what it would trip
over."""

from __future__ import annotations

import enum
import importlib.metadata
import json
import socket
from collections.abc import Callable, Iterator
from typing import Annotated, NamedTuple

import typer

from sgl_pd_connector.config import ConnectorConfig, load_config
from sgl_pd_connector.errors import PDError
from sgl_pd_connector.wire.address import Address

# What this version was tested with; the engines are optional.
KNOWN_VERSIONS = {
    "jax": ("0.10.2", "0.11.2", "0.12.0.1"),
    "vllm-tpu": ("0.32.0",),
    "tpu-inference": ("0.32.0",),
    "sglang-jax": ("0.1.0rc0",),
    "sglang-router": ("0.3.2",),
}
PULL_SECONDS = 10.0


class Level(enum.StrEnum):
    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


class Finding(NamedTuple):
    """What one check says."""

    level: Level
    subject: str
    text: str


def _host(config: ConnectorConfig) -> Address:
    return Address.of(config.host, 0, setting="host").resolved(setting="host")


def check_versions(installed: Callable[[str], str] = importlib.metadata.version) -> Iterator[Finding]:
    """Packages whose internals this one leans on, beside the versions it was tested with."""
    for package, known in KNOWN_VERSIONS.items():
        try:
            version = installed(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        if version in known:
            yield Finding(Level.OK, package, version)
        else:
            yield Finding(
                Level.WARNING,
                package,
                f"{version} was never tested with this version; {', '.join(known)} was",
            )


def check_exposure(config: ConnectorConfig) -> Iterator[Finding]:
    """Who can reach what this instance binds, and what protects it."""
    host = _host(config)
    if host.is_wildcard:
        yield Finding(
            Level.ERROR, "host", f"{host.host} cannot be advertised: name the address that peers reach"
        )
        return
    secret = config.read_secret()
    if host.is_loopback:
        yield Finding(Level.OK, "host", f"{host.host}: this machine only; set host to serve others")
        return
    assert host.ip is not None
    if host.ip.is_private:
        yield Finding(Level.OK, "host", f"{host.host}: a private address")
    else:
        yield Finding(
            Level.WARNING,
            "transfer port",
            f"{host.host} is not a private address: the native transfer port has no authentication, and a few bytes "
            "from anybody end the process; only a firewall or a NetworkPolicy protects it",
        )
    if secret is not None:
        yield Finding(Level.OK, "secret", "set: side channel signed, bootstrap server authorised")
    elif config.allow_insecure:
        yield Finding(
            Level.WARNING, "secret", "none, and allow_insecure is set: whoever reaches the ports is trusted"
        )
    else:
        yield Finding(Level.ERROR, "secret", "none: an instance on this host will not start; set secret_file")


def check_ports(config: ConnectorConfig) -> Iterator[Finding]:
    """Whether the fixed ports of a prefill instance are free."""
    host = _host(config)
    ports = {
        "bootstrap_port": config.bootstrap_port if config.bootstrap_addr is None else 0,
        "side_channel_port": config.side_channel_port,
        "transfer_port": config.transfer_port,
    }
    for setting, port in ports.items():
        if port == 0:
            continue
        family = socket.AF_INET6 if ":" in host.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host.host, port))
            except OSError as error:
                yield Finding(Level.ERROR, setting, f"{port} cannot be bound: {error.strerror}")
            else:
                yield Finding(Level.OK, setting, f"{port} is free")


def check_bootstrap(config: ConnectorConfig) -> Iterator[Finding]:
    """Whether the configured bootstrap server answers, and who is registered there."""
    from sgl_pd_connector.bootstrap.client import BootstrapClient
    from sgl_pd_connector.wire.secret import bearer_token

    if config.bootstrap_addr is None:
        return
    try:
        address = Address.parse(config.bootstrap_addr, setting="bootstrap_addr").resolved(
            setting="bootstrap_addr"
        )
        with BootstrapClient(address, auth_token=bearer_token(config.read_secret())) as client:
            routes = client.list("prefill")
    except PDError as error:
        yield Finding(Level.ERROR, "bootstrap_addr", str(error))
        return
    yield Finding(Level.OK, "bootstrap_addr", f"{address} answers; {len(routes)} prefill instances")
    for route in routes:
        ip = Address.parse(route.transfer_addr, setting="transfer_addr").ip
        if ip is not None and not ip.is_private:
            yield Finding(
                Level.WARNING,
                route.instance_id,
                f"transfers at {route.transfer_addr}, which is not a private address",
            )


def check_transfer(config: ConnectorConfig) -> Iterator[Finding]:
    """One array through the native transfer, from this process to itself."""
    import time

    import jax
    import jax.numpy as jnp

    from sgl_pd_connector.transfer.engine import JaxTransferKVEngine, new_uuid
    from sgl_pd_connector.transfer.transport import Peer

    device = jax.local_devices()[0]
    host = _host(config)
    shape = {
        "host": host.host,
        "port": 0,
        "channels": config.transfer_channels,
        "transfer_size": config.transfer_size,
        "stall_timeout": config.peer_timeout,
    }
    server = JaxTransferKVEngine(**shape, serve=True)  # type: ignore[arg-type]
    client = JaxTransferKVEngine(**shape, serve=False)  # type: ignore[arg-type]
    sent = jax.device_put(jnp.arange(1024, dtype=jnp.int32), device)
    uuid = new_uuid()
    server.register(uuid, [sent], PULL_SECONDS)
    spec = jax.ShapeDtypeStruct(sent.shape, sent.dtype, sharding=jax.sharding.SingleDeviceSharding(device))
    link = client.link(Peer("doctor", 1, server.transfer_addr, server.transfer_ports))
    (received,) = link.pull(uuid, [spec])
    deadline = time.monotonic() + PULL_SECONDS
    while not received.is_ready() and time.monotonic() < deadline:  # type: ignore[attr-defined]
        time.sleep(0.01)
    arrived = received.is_ready() and bool((received == sent).all())  # type: ignore[attr-defined]
    link.retire()
    link.cut()
    what = f"{device.platform} device, {config.transfer_channels} channels on {host.host}"
    if arrived:
        yield Finding(Level.OK, "native transfer", what)
    else:
        yield Finding(Level.ERROR, "native transfer", f"{what}: nothing arrived in {PULL_SECONDS:g} s")


def doctor(
    config: Annotated[
        str,
        typer.Option(metavar="JSON", help="Settings, as for kv_connector_extra_config; SGL_PD_* apply too."),
    ] = "{}",
    transfer: Annotated[
        bool, typer.Option(help="Also move an array through the native transfer server.")
    ] = True,
) -> None:
    """Check settings, versions, ports, exposure and the native transfer on this machine. Exit status 1 on
    an error."""
    from rich.console import Console
    from rich.table import Table

    try:
        explicit = json.loads(config)
    except json.JSONDecodeError as error:
        raise typer.BadParameter(f"not JSON: {error}", param_hint="--config") from None
    if not isinstance(explicit, dict):
        raise typer.BadParameter("not a JSON object", param_hint="--config")
    settings = load_config(explicit, where="--config")
    findings = [
        *check_versions(),
        *check_exposure(settings),
        *check_ports(settings),
        *check_bootstrap(settings),
        *(check_transfer(settings) if transfer else ()),
    ]
    colours = {Level.OK: "green", Level.WARNING: "yellow", Level.ERROR: "red"}
    table = Table(box=None, show_header=False)
    for finding in findings:
        table.add_row(f"[{colours[finding.level]}]{finding.level}[/]", finding.subject, finding.text)
    Console().print(table)
    if any(finding.level is Level.ERROR for finding in findings):
        raise typer.Exit(1)
