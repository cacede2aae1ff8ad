"""The ``sgl-pd`` command. Each subcommand is a module that imports what it needs when it runs."""

from __future__ import annotations

import sys

import typer

from sgl_pd_connector.cli import bench, bootstrap, demo, doctor
from sgl_pd_connector.errors import PDError

app = typer.Typer(
    name="sgl-pd",
    help="Prefill/decode disaggregation for JAX/TPU engines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("bootstrap")(bootstrap.run)
app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Entry point: what the user can set right is one line on stderr and exit status 1, not a traceback."""
    try:
        app()
    except PDError as error:
        sys.exit(f"sgl-pd: {error}")


if __name__ == "__main__":
    main()
