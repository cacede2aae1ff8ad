"""Serving: real vLLM servers, the same model and prompts, one connector after the other.

=============== ================================================================================
sgl             SglJaxConnector behind sglang's mini_lb, which asks P and D at the same time
sgl_sequential  the same servers behind a proxy that asks P first
tpu_connector   TPUConnector behind that proxy
plain           one server without a connector
=============== ================================================================================

Each start of servers gets a compilation cache of its own, a copy of one that has seen no connector: so that what a
connector compiles under load is compiled in every repeat, and can be counted as new files of that cache.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from sgl_pd_connector.bench.load import run_load, summary
from sgl_pd_connector.bench.ratios import serve_ratios
from sgl_pd_connector.bench.workloads import WORKLOADS, interleaved, warm_up
from sgl_pd_connector.testing.checkpoints import cache_directory
from sgl_pd_connector.testing.engines import ENGINES, Role, VllmEngine
from sgl_pd_connector.testing.servers import Fleet, Server, free_ports, mini_lb, sequential_proxy

START_SECONDS = 600.0
SAMPLE_SECONDS = 0.25
STOCK_PROGRAMS = ("jit_select_from_kv_caches-*", "jit__copy_pages-*")
"""TPUConnector's, which it compiles under load; all of ours are compiled at the start, known or not."""

SYSTEMS = {
    "SglJaxConnector": ("sgl", "sgl_sequential"),
    "TPUConnector": ("tpu_connector",),
    "plain": ("plain",),
}


@dataclass(frozen=True)
class _Deployment:
    """Running servers, and the URL of each system that they make up."""

    servers: dict[Role, Server]
    fronts: dict[str, str]
    compiled: Path


def run(connectors: Sequence[str], *, quick: bool, repeats: int) -> dict[str, Any]:
    """Every workload on every system, as the report's section ``serve``.

    Args:
        connectors: keys of `SYSTEMS`. They take turns; a "repeat" starts each one's servers anew.
        quick: fewer requests per workload.
        repeats: how often.
    """
    engine = ENGINES["vllm"](None)
    assert isinstance(engine, VllmEngine)
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="sgl-pd-bench-") as scratch:
        for repeat in range(repeats):
            order = connectors if repeat % 2 == 0 else list(reversed(connectors))
            for connector in order:
                directory = Path(scratch) / f"{connector}-{repeat}"
                with _deployed(engine, connector, directory) as deployment:
                    for system in deployment.fronts:
                        measured = _measure(engine, deployment, system, quick=quick)
                        runs.append({"system": system, "repeat": repeat, **measured})
    return section(runs)


@contextmanager
def _deployed(engine: VllmEngine, connector: str, directory: Path) -> Iterator[_Deployment]:
    compiled = directory / "xla"
    known = cache_directory() / "xla"
    if known.is_dir():
        shutil.copytree(known, compiled, ignore=shutil.ignore_patterns(*STOCK_PROGRAMS))
    else:
        compiled.mkdir(parents=True)
    engine = replace(engine, environment={**engine.environment, "VLLM_XLA_CACHE_PATH": str(compiled)})
    ports = free_ports(8)
    log = directory / "router.log"
    with Fleet() as fleet:
        match connector:
            case "plain":
                plain = engine.server("plain", port=ports[0], directory=directory)
                fleet.start(plain)
                fleet.wait_ready([plain], START_SECONDS)
                yield _Deployment({"plain": plain}, {"plain": plain.url}, compiled)
                return
            case "SglJaxConnector":
                settings = {"bootstrap_port": ports[2]}
                p = engine.server("prefill", port=ports[0], directory=directory, settings=settings)
                d = engine.server("decode", port=ports[1], directory=directory)
                sequential = sequential_proxy(p, d, port=ports[4], log=log)
                at_once = mini_lb(p, ports[2], d, port=ports[3], log=directory / "mini_lb.log")
                fronts = {"sgl": at_once, "sgl_sequential": sequential}
            case _:
                p = _stock(
                    engine.server("plain", port=ports[0], directory=directory), "prefill", ports[5], ports[7]
                )
                d = _stock(
                    engine.server("plain", port=ports[1], directory=directory), "decode", ports[6], ports[7]
                )
                fronts = {"tpu_connector": sequential_proxy(p, d, port=ports[4], log=log)}
        fleet.start(p, d)
        fleet.wait_ready([p, d], START_SECONDS)
        fleet.start(*fronts.values())
        fleet.wait_ready(fronts.values(), START_SECONDS)
        urls = {name: server.url for name, server in fronts.items()}
        yield _Deployment({"prefill": p, "decode": d}, urls, compiled)


def _stock(plain: Server, role: Role, transfer_port: int, side_channel_port: int) -> Server:
    """A plain server made into one with tpu-inference's own connector, in its default settings."""
    transfer = {
        "kv_connector": "TPUConnector",
        "kv_connector_module_path": "tpu_inference.distributed.tpu_connector",
        "kv_role": "kv_producer" if role == "prefill" else "kv_consumer",
    }
    ports = {"TPU_KV_TRANSFER_PORT": str(transfer_port), "TPU_SIDE_CHANNEL_PORT": str(side_channel_port)}
    return replace(
        plain,
        name=f"stock {role}",
        command=[*plain.command, "--kv-transfer-config", json.dumps(transfer)],
        log=plain.log.with_name(f"{role}.log"),
        environment={**plain.environment, **ports},
    )


def _measure(engine: VllmEngine, deployment: _Deployment, system: str, *, quick: bool) -> dict[str, Any]:
    url = deployment.fronts[system]
    # One by one, so that every shape of the model itself is known; then together, for its batch sizes.
    for planned in warm_up(system):
        run_load(url, engine.model, [planned])
    run_load(url, engine.model, warm_up(f"{system} together"))
    before = _programs(deployment.compiled)
    compilations = _gauges(deployment, "vllm:sgl_pd_compilations")
    results = {}
    for name, make in WORKLOADS.items():
        with _Occupancy(deployment) as occupancy:
            results[name] = summary(run_load(url, engine.model, make(quick, system)))
        results[name]["occupied"] = occupancy.average
    new = _programs(deployment.compiled) - before
    return {
        "workloads": results,
        "programs_compiled_under_load": dict(Counter(name.split("-")[0] for name in new)),
        # A program that another run has left in the cache is no new file, but our own counter sees it.
        "compiles_after_warmup": max(
            len(new), int(_gauges(deployment, "vllm:sgl_pd_compilations") - compilations)
        ),
        "itl": _inter_token(engine, deployment, system, quick=quick),
    }


def _inter_token(
    engine: VllmEngine, deployment: _Deployment, system: str, *, quick: bool
) -> dict[str, dict[str, float]]:
    """Gaps between tokens of requests that decode on D while others arrive.

    They are asked of D itself, so that no router stands between its steps and the clock. ``alone``: nothing arrives.
    ``prefills``: P prefills what would arrive, and keeps it, so that on a machine that P and D share both have the same
    work. ``transfers``: it arrives.
    """
    servers = deployment.servers
    decodes, prefills = servers.get("decode") or servers["plain"], servers.get("prefill")
    targets = {
        "alone": None,
        "prefills": prefills.url if prefills is not None else None,
        "transfers": deployment.fronts[system],
    }
    found = {}
    for name, target in targets.items():
        decoding, arriving = interleaved(quick, f"{system} {name}")
        with ThreadPoolExecutor(1, thread_name_prefix="bench-load") as background:
            answers = background.submit(run_load, decodes.url, engine.model, decoding)
            if target is not None:
                run_load(target, engine.model, arriving)
            found[name] = summary(answers.result())["itl_s"]
    return found


def _programs(compiled: Path) -> set[str]:
    """Names of the compiled programs in a cache."""
    return {path.name for path in compiled.rglob("*-cache")}


def _gauges(deployment: _Deployment, name: str) -> float:
    """Sum of a gauge over all servers."""
    return sum(_gauge(server, name) or 0.0 for server in deployment.servers.values())


def _gauge(server: Server, name: str) -> float | None:
    text = httpx.get(f"{server.url}/metrics", timeout=10.0, verify=False, trust_env=False).text
    for line in text.splitlines():
        if line.startswith(name + "{"):
            return float(line.rpartition(" ")[2])
    return None


class _Occupancy:
    """Samples how full each server's KV pool is while the block runs; a thread of its own."""

    def __init__(self, deployment: _Deployment) -> None:
        self._deployment = deployment
        self._samples: dict[str, list[float]] = {role: [] for role in deployment.servers}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bench-occupancy")

    def __enter__(self) -> _Occupancy:
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._seconds = time.monotonic() - self._began

    @property
    def average(self) -> dict[str, float]:
        """By server: average part of its pool in use, times seconds."""
        return {
            role: self._seconds * sum(values) / len(values)
            for role, values in self._samples.items()
            if values
        }

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            for role, server in self._deployment.servers.items():
                value = _gauge(server, "vllm:kv_cache_usage_perc")
                if value is not None:
                    self._samples[role].append(value)


def section(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The runs, and ratios of ours to TPUConnector's in the same repeat, as medians over the repeats."""
    return {"runs": list(runs), **serve_ratios(runs)}
