"""Plots of a report, as PNG and SVG. Needs matplotlib (the extra ``bench``)."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sgl_pd_connector.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot(report: dict[str, Any], directory: Path) -> list[Path]:
    """Draws every section that the report has; returns the files.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plots needs matplotlib: pip install 'sgl-pd-connector[bench]'")
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib.figure import Figure

    directory.mkdir(parents=True, exist_ok=True)
    drawings: dict[str, Callable[[dict[str, Any], Axes], None]] = {
        "handoff": _handoff,
        "control": _control,
        "serve": _serve,
    }
    written = []
    for name, draw in drawings.items():
        if name not in report:
            continue
        figure = Figure(figsize=(8, 5), layout="constrained")
        draw(report[name], figure.subplots())
        for kind in ("png", "svg"):
            path = directory / f"{name}.{kind}"
            figure.savefig(path, dpi=120)
            written.append(path)
    return written


def _handoff(section: dict[str, Any], axes: Axes) -> None:
    cases = sorted(
        (case for case in section["cases"] if case["concurrent"] == 1), key=lambda case: case["nbytes"]
    )
    for name in cases[0]["median_s"]:
        axes.plot(
            [case["nbytes"] / 1e6 for case in cases],
            [1e3 * case["median_s"][name] for case in cases],
            marker="o",
            label=name,
        )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="MB in one request",
        ylabel="median ms",
        title="Handoff from P to D",
    )
    axes.grid(alpha=0.3)
    axes.legend()


def _control(section: dict[str, Any], axes: Axes) -> None:
    grown = section["bootstrap"]
    ranks = [each["ranks"] for each in grown]
    axes.plot(ranks, [100 * each["cpu_share"] for each in grown], marker="o", label="% of a core")
    for name in ("p50", "p99"):
        axes.plot(
            ranks, [1e3 * each["lookup_s"][name] for each in grown], marker="s", label=f"look-up {name}, ms"
        )
    axes.set(xscale="log", xlabel="ranks registered", title="Bootstrap server")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()


def _serve(section: dict[str, Any], axes: Axes) -> None:
    runs = section["runs"]
    workloads = list(runs[0]["workloads"])
    systems = list(dict.fromkeys(run["system"] for run in runs))
    width = 0.8 / len(systems)
    for index, system in enumerate(systems):
        for name, height in (("p99", 0.45), ("p50", 1.0)):
            values = [
                [
                    1e3 * run["workloads"][workload]["ttft_s"][name]
                    for run in runs
                    if run["system"] == system and "ttft_s" in run["workloads"][workload]
                ]
                for workload in workloads
            ]
            axes.bar(
                [place + index * width for place in range(len(workloads))],
                [sum(each) / len(each) if each else 0.0 for each in values],
                width,
                color=f"C{index}",
                alpha=height,
                label=f"{system} {name}",
            )
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(workloads))], workloads)
    axes.set(yscale="log", ylabel="TTFT, ms (pale: p99)", title="Serving")
    axes.legend(fontsize="small")
