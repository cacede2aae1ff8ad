"""``sgl-pd bench``: measures, and says which of this project's goals are met."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(no_args_is_help=True, help="Measure this machine: handoff, control plane, serving.")

Quick = Annotated[bool, typer.Option("--quick", help="Fewer sizes and requests, shorter windows.")]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Add the results to this report.")]
Plots = Annotated[
    Path | None, typer.Option("--plots", metavar="DIR", help="Draw the results there, as PNG and SVG.")
]
Rounds = Annotated[int, typer.Option(min=1, help="Measured rounds of each case; systems take turns.")]


@app.command()
def handoff(*, quick: Quick = False, json_file: Json = None, plots: Plots = None, rounds: Rounds = 7) -> None:
    """From pages in P's pool to pages in D's, beside a raw pull, TCP and memcpy; no model."""
    from sgl_pd_connector.bench import handoff as bench

    _finish("handoff", bench.run(quick=quick, rounds=rounds), json_file, plots)


@app.command()
def control(*, quick: Quick = False, json_file: Json = None, plots: Plots = None, rounds: Rounds = 3) -> None:
    """The bootstrap server with 10,000 ranks, the side channel, and 1,000 rooms in flight."""
    from sgl_pd_connector.bench import control as bench

    _finish("control", bench.run(quick=quick, rounds=rounds), json_file, plots)


@app.command()
def serve(
    *,
    connector: Annotated[
        str, typer.Option(help="Which to measure, in this order, then in turns.")
    ] = "SglJaxConnector,TPUConnector,plain",
    quick: Quick = False,
    json_file: Json = None,
    plots: Plots = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each connector's servers are started.")] = 2,
) -> None:
    """Real vLLM servers, the same prompts through each connector."""
    from sgl_pd_connector.bench import serve as bench

    names = connector.split(",")
    if unknown := set(names) - set(bench.SYSTEMS):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: choose from {', '.join(bench.SYSTEMS)}")
    _finish("serve", bench.run(names, quick=quick, repeats=rounds), json_file, plots)


@app.command()
def report(
    json_file: Annotated[Path, typer.Argument(metavar="FILE", help="What --json wrote.")],
    *,
    plots: Plots = None,
) -> None:
    """Print a report as Markdown."""
    import json

    _show(json.loads(json_file.read_text()), plots)


def _finish(name: str, section: dict[str, Any], json_file: Path | None, plots: Path | None) -> None:
    import tempfile

    from sgl_pd_connector.bench import report as reports

    with tempfile.TemporaryDirectory() as scratch:
        _show(reports.add(json_file or Path(scratch) / "report.json", name, section), plots)


def _show(report: dict[str, Any], plots: Path | None) -> None:
    from sgl_pd_connector.bench import report as reports

    typer.echo(reports.markdown(report))
    if plots is not None:
        from sgl_pd_connector.bench.plots import plot

        for path in plot(report, plots):
            typer.echo(f"wrote {path}")
