"""What the benchmarks found, as JSON, as Markdown and as plots; and which goals it meets."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

Report = dict[str, Any]
MIN_RATIO_BYTES = 16 << 20


def machine() -> dict[str, Any]:
    """What the figures depend on, in general terms."""
    device = jax.local_devices()[0]
    return {
        "cpus": os.cpu_count(),
        "architecture": platform.machine(),
        "device": f"{jax.local_device_count()} x {device.device_kind}",
        "jax": jax.__version__,
        "load_average": round(os.getloadavg()[0], 1),
    }


def add(path: Path, name: str, section: Mapping[str, Any]) -> Report:
    """Puts one benchmark's section into a report, which is made if it does not exist, and returns the whole."""
    report: Report = json.loads(path.read_text()) if path.exists() else {}
    report[name] = {**section, "machine": machine()}
    report["compiles_after_warmup"] = sum(
        part.get("compiles_after_warmup", 0) for part in report.values() if isinstance(part, dict)
    )
    report["goals"] = [goal.as_dict() for goal in goals(report)]
    path.write_text(json.dumps(report, indent=1) + "\n")
    return report


@dataclass(frozen=True)
class Goal:
    """One figure against its bound."""

    name: str
    value: float
    bound: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def as_dict(self) -> dict[str, Any]:
        sign = ">=" if self.at_least else "<="
        return {"goal": self.name, "value": self.value, "bound": f"{sign} {self.bound:g}", "met": self.met}


def goals(report: Report) -> list[Goal]:
    """Those about which the report says something."""
    found: list[Goal] = []
    handoff, control, serve = (report.get(name, {}) for name in ("handoff", "control", "serve"))
    if handoff:
        by_size = {int(size): ratio for size, ratio in handoff["ratio_to_raw"].items()}
        for size in sorted(size for size in by_size if size >= 0.9 * MIN_RATIO_BYTES):
            name = f"handoff of {size_text(size)}: throughput by that of the raw pull"
            found.append(Goal(name, by_size[size], 0.9, at_least=True))
        smallest = min(handoff["overhead_s"], key=int)
        name = f"handoff of {size_text(int(smallest))}: ms above the raw pull"
        found.append(Goal(name, 1e3 * handoff["overhead_s"][smallest], 2.0))
        wire = max(case["wire_bytes_per_page_byte"] for case in handoff["cases"])
        found.append(Goal("bytes on the wire by bytes of the pages", wire, 1.0))
    if control:
        ranks = control["bootstrap"][-1]["ranks"]
        found.append(Goal(f"bootstrap server with {ranks} ranks: part of a core", control["cpu_share"], 0.1))
        found.append(Goal("route look-up, p99 in ms", 1e3 * control["lookup_p99_s"], 5.0))
    if "mixed" in serve:
        mixed = serve["mixed"]
        found.append(Goal("serving, mixed lengths: TTFT p99 by TPUConnector's", mixed["ttft_p99_ratio"], 0.5))
        found.append(Goal("serving, mixed lengths: TTFT p50 by TPUConnector's", mixed["ttft_p50_ratio"], 0.8))
        found.append(
            Goal(
                "serving, mixed lengths: requests/s by TPUConnector's",
                mixed["throughput_ratio"],
                1.1,
                at_least=True,
            )
        )
    if "itl_p99_ratio" in serve:
        found.append(Goal("inter-token latency p99 with transfers by without", serve["itl_p99_ratio"], 1.1))
    if handoff or serve:
        found.append(Goal("compilations after warm-up", report["compiles_after_warmup"], 0))
    return found


def size_text(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB" if nbytes >= 1e6 else f"{nbytes / 1024:.0f} KB"


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table; numbers with three significant digits."""
    lines = [head, ["---"] * len(head), *([_cell(value) for value in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(value: Any) -> str:
    match value:
        case bool():
            return "yes" if value else "**no**"
        case float():
            return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
        case None:
            return "-"
        case _:
            return str(value)


def markdown(report: Report) -> str:
    """All sections of a report as Markdown, the goals first."""
    parts = ["## Goals\n", table(["goal", "bound", "measured", "met"], _goal_rows(report))]
    for name, render in (("handoff", _handoff), ("control", _control), ("serve", _serve)):
        if name in report:
            about = ", ".join(f"{key} {value}" for key, value in report[name]["machine"].items())
            parts += [f"## {name.capitalize()}\n", f"{about}\n", render(report[name])]
    return "\n".join(parts)


def _goal_rows(report: Report) -> list[list[Any]]:
    return [[each["goal"], each["bound"], float(each["value"]), each["met"]] for each in report["goals"]]


def _handoff(section: Report) -> str:
    cases = section["cases"]
    systems = list(cases[0]["median_s"])
    head = ["model", "bytes", "at once", "rounds", *(f"{name} ms" for name in systems), "ours by raw"]
    rows = [
        [
            case["model"],
            size_text(case["nbytes"]),
            case["concurrent"],
            case["rounds"],
            *(1e3 * case["median_s"][name] for name in systems),
            case["ratio_to"]["raw"],
        ]
        for case in cases
    ]
    stages = list(cases[0]["stages_s"])
    stage_rows = [
        [
            case["model"],
            size_text(case["nbytes"]),
            case["concurrent"],
            *(1e3 * case["stages_s"][stage] for stage in stages),
            *(size_text(case["peak_rss_bytes"][side]) for side in ("prefill", "decode")),
            case["compiles_after_warmup"],
        ]
        for case in cases
    ]
    stage_head = ["model", "bytes", "at once", *(f"{stage} ms" for stage in stages)]
    stage_head += ["P's peak memory", "D's peak memory", "compilations"]
    slopes = table(["cost ~ size^b", "b"], list(section["slope"].items()))
    notes = "".join(f"Not run: {name}: {why}.\n" for name, why in section["not_run"].items())
    return "\n".join((table(head, rows), table(stage_head, stage_rows), slopes, notes))


def _control(section: Report) -> str:
    head = [
        "ranks",
        "per process",
        "heartbeats/s",
        "part of a core",
        "look-up p50 ms",
        "p99 ms",
        "list all ms",
    ]
    rows = [
        [
            each["ranks"],
            each["ranks_per_process"],
            each["heartbeats_per_s"],
            each["cpu_share"],
            1e3 * each["lookup_s"]["p50"],
            1e3 * each["lookup_s"]["p99"],
            1e3 * each["list_all_s"],
        ]
        for each in (*section["bootstrap"], section["bootstrap_one_rank_per_process"])
    ]
    channel_head = ["rooms asked for", "side-channel messages/s", "P's CPU us per message"]
    channels = [
        [each["rooms"], each["messages_per_s"], 1e6 * each["cpu_s_per_message"]]
        for each in section["side_channel"]
    ]
    rooms = [[each["rooms"], each["seconds"], 1e3 * each["seconds_per_room"]] for each in section["rooms"]]
    return "\n".join(
        (
            table(head, rows),
            table(channel_head, channels),
            table(["rooms in flight", "s for all", "ms per room"], rooms),
            table(["cost ~ size^b", "b"], list(section["slope"].items())),
        )
    )


def _serve(section: Report) -> str:
    head = [
        "workload",
        "system",
        "repeat",
        "TTFT p50 ms",
        "p95",
        "p99",
        "ITL p50 ms",
        "p99",
        "req/s",
        "failures",
    ]
    head += ["pool x s on P", "on D"]
    rows = [
        [workload, run["system"], run["repeat"], *_latencies(run["workloads"][workload])]
        for workload in section["runs"][0]["workloads"]
        for run in section["runs"]
    ]
    itl = [
        [
            run["system"],
            run["repeat"],
            *(1e3 * run["itl"][name]["p99"] if name in run["itl"] else None for name in _ITL),
        ]
        for run in section["runs"]
    ]
    compiled = [
        [run["system"], run["repeat"], sum(run["programs_compiled_under_load"].values()), _names(run)]
        for run in section["runs"]
    ]
    ratios = [
        [
            name,
            *(
                section[name].get(figure)
                for figure in ("ttft_p50_ratio", "ttft_p99_ratio", "throughput_ratio")
            ),
        ]
        for name in section["runs"][0]["workloads"]
        if name in section
    ]
    return "\n".join(
        (
            table(["ours by TPUConnector", "TTFT p50", "TTFT p99", "requests/s"], ratios),
            table(head, rows),
            table(
                ["ITL p99 ms while ...", "repeat", "nothing arrives", "P prefills", "transfers arrive"], itl
            ),
            table(["compiled under load", "repeat", "programs", "which"], compiled),
        )
    )


_ITL = ("alone", "prefills", "transfers")


def _latencies(figures: Mapping[str, Any]) -> list[Any]:
    if "ttft_s" not in figures:
        return [*[None] * 6, figures["failures"], None, None]
    occupied = figures.get("occupied", {})
    return [
        *(1e3 * figures["ttft_s"][name] for name in ("p50", "p95", "p99")),
        *(1e3 * figures["itl_s"][name] for name in ("p50", "p99")),
        figures["requests_per_s"],
        figures["failures"],
        occupied.get("prefill"),
        occupied.get("decode", occupied.get("plain")),
    ]


def _names(run: Mapping[str, Any]) -> str:
    return ", ".join(f"{count} {name}" for name, count in run["programs_compiled_under_load"].items())
