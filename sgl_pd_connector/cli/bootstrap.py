"""``sgl-pd bootstrap``: the bootstrap server as a process of its own."""

from __future__ import annotations

from typing import Annotated

import typer


def run(
    host: Annotated[
        str, typer.Option(envvar="SGL_PD_HOST", help="Address to bind; :: takes IPv4 and IPv6.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(envvar="SGL_PD_BOOTSTRAP_PORT", min=0, max=65_535, help="0 takes a free port.")
    ] = 8998,
    ttl: Annotated[
        float,
        typer.Option(
            envvar="SGL_PD_HEARTBEAT_TTL", min=0.1, help="Seconds until a silent instance is forgotten."
        ),
    ] = 15.0,
    secret_file: Annotated[
        str | None, typer.Option(help="File with the secret that all instances share; or SGL_PD_SECRET.")
    ] = None,
    allow_insecure: Annotated[
        bool, typer.Option("--allow-insecure", help="Serve other machines without a secret.")
    ] = False,
) -> None:
    """Runs the server where prefill and decode instances find each other, until SIGTERM or Ctrl-C.

    A prefill instance runs one of its own unless its bootstrap_addr names this one.
    """
    import logging
    import signal
    import time

    from sgl_pd_connector.bootstrap.server import HTTPBootstrapServer
    from sgl_pd_connector.config import load_config
    from sgl_pd_connector.errors import BootstrapError
    from sgl_pd_connector.wire.address import Address
    from sgl_pd_connector.wire.secret import bearer_token, require_secret

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)

    # Not sigtimedwait: Python lets it return as if a signal had come when the process was stopped and continued.
    ends: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: ends.append(number))
    given = {"secret_file": secret_file} if secret_file is not None else {}
    config = load_config(given, where="command line")
    secret = config.read_secret()
    require_secret(
        Address.of(host, port, setting="--host").resolved(setting="--host"),
        secret,
        allow_insecure=allow_insecure or config.allow_insecure,
    )
    server = HTTPBootstrapServer(host, port, ttl=ttl, auth_token=bearer_token(secret))
    server.start()
    typer.echo(f"bootstrap server on {server.address.url()}")
    try:
        while not ends:
            if not server.poll():
                raise BootstrapError("the bootstrap server ended by itself: see its log lines")
            time.sleep(0.2)
    finally:
        server.stop()
