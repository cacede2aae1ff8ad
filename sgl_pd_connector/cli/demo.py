"""``sgl-pd demo``: one prefill server, one decode server and a router on this machine, checked token by
token."""

from __future__ import annotations

import json
import random
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from sgl_pd_connector.errors import PDError
from sgl_pd_connector.testing.engines import ENGINES, Engine
from sgl_pd_connector.testing.servers import Fleet, Server, free_ports, mini_lb, rust_router, sequential_proxy

START_SECONDS = 600.0
REQUEST_SECONDS = 120.0
ANSWER_TOKENS = 12

console = Console()


class Router(StrEnum):
    """sglang's routers, both sending P and D the same body at the same time."""

    MINI_LB = "mini_lb"
    RUST = "rust"


@dataclass(frozen=True)
class Checked:
    """One request: what the plain server said, what came through the router, and what D recorded of the
    transfer."""

    prompt_tokens: int
    expected: list[int]
    got: list[int]
    record: dict[str, Any] | None
    moved_tokens: int

    def as_json(self) -> dict[str, Any]:
        record = self.record or {}
        return {
            "prompt_tokens": self.prompt_tokens,
            "pages": record.get("pages", 0),
            "bytes": record.get("nbytes", 0),
            "pull_ms": round(1000 * record.get("pull_s", 0.0), 3),
            "ok": self.ok,
        }

    @property
    def ok(self) -> bool:
        if self.record is None:
            return self.expected == self.got and self.moved_tokens == 0
        return self.expected == self.got and bool(self.record["outcome"] == "ok")


def demo(
    *,
    model: Annotated[
        str | None, typer.Option(help="Path or name of a model; by default a tiny random one.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave it serving until Ctrl-C.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the results there.")
    ] = None,
    sequential: Annotated[
        bool, typer.Option("--sequential", help="Use a proxy that asks P first, instead of sglang's router.")
    ] = False,
    router: Annotated[Router, typer.Option(help="Which of sglang's routers to use.")] = Router.MINI_LB,
    engine: Annotated[str, typer.Option(help=f"One of: {', '.join(ENGINES)}.")] = "vllm",
) -> None:
    """Serve a model from a prefill and a decode server, and compare every token with a plain server's."""
    if engine not in ENGINES:
        raise typer.BadParameter(f"{engine!r} is not one of: {', '.join(ENGINES)}", param_hint="--engine")
    directory = Path(tempfile.mkdtemp(prefix="sgl-pd-demo-"))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    complete = False
    try:
        kind = None if sequential else router
        results = _run(ENGINES[engine](model), directory, router=kind, keep=keep, json_file=json_file)
        complete = all(result.ok for result in results)
    except KeyboardInterrupt:
        console.print("stopped")
        complete = True
        raise typer.Exit(130) from None
    finally:
        if complete or not any(directory.iterdir()):
            shutil.rmtree(directory)
        else:
            console.print(f"the servers' logs are in {directory}", highlight=False)
    if not complete:
        raise typer.Exit(1)


def prompt_lengths(page_size: int, longest: int) -> list[int]:
    """Distinct lengths in tokens: a few short ones, three around each page boundary, some of many pages."""
    around = {pages * page_size + off for pages in range(1, 14) for off in (-1, 0, 1)}
    long = {30 * page_size + 5, 40 * page_size + 1, 50 * page_size}
    return sorted(length for length in {1, 2, 3, 5} | around | long if length <= longest)


def _run(
    engine: Engine, directory: Path, *, router: Router | None, keep: bool, json_file: Path | None
) -> list[Checked]:
    rng = random.Random(0)
    # Printable ASCII: valid, and no special token, in every vocabulary.
    lengths = prompt_lengths(engine.page_size, engine.max_tokens - ANSWER_TOKENS)
    prompts = [[rng.randrange(32, 127) for _ in range(length)] for length in lengths]
    console.print(
        f"model {engine.model}{', emulated on the CPU' if engine.emulated else ''}", highlight=False
    )
    with Fleet() as fleet, _uninterrupted_cleanup():
        expected = _golden(fleet, engine, prompts, directory)
        front, transfer_log = _start_pair(fleet, engine, directory, router)
        got = _ask_all(engine, front, prompts, f"through {front.name}")
        moved = [engine.moved_tokens(length) for length in lengths]
        records = _records(transfer_log, moved)
        results = [Checked(*each) for each in zip(lengths, expected, got, records, moved, strict=True)]
        _show(results)
        if json_file is not None:
            json_file.write_text(json.dumps(_as_json(results), indent=1) + "\n")
        if keep:
            _serve_on(fleet, engine, front)
    return results


@contextmanager
def _uninterrupted_cleanup() -> Iterator[None]:
    """After the first Ctrl-C further ones are ignored, so that they do not leave servers behind."""
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _golden(fleet: Fleet, engine: Engine, prompts: list[list[int]], directory: Path) -> list[list[int]]:
    """What one plain server answers. It is stopped again, so that two engines at a time have to fit the
    machine."""
    (port,) = free_ports(1)
    plain = engine.server("plain", port=port, directory=directory)
    _start(fleet, plain)
    answers = _ask_all(engine, plain, prompts, "plain server, for comparison")
    fleet.stop(plain)
    return answers


def _start_pair(fleet: Fleet, engine: Engine, directory: Path, kind: Router | None) -> tuple[Server, Path]:
    """P, D and the router in front of them (None: a proxy that asks P first); and D's record of transfers."""
    prefill_port, decode_port, bootstrap_port, router_port, metrics_port = free_ports(5)
    transfer_log = directory / "transfers.jsonl"
    prefill = engine.server(
        "prefill", port=prefill_port, directory=directory, settings={"bootstrap_port": bootstrap_port}
    )
    decode = engine.server(
        "decode", port=decode_port, directory=directory, settings={"transfer_log": str(transfer_log)}
    )
    _start(fleet, prefill, decode)
    log = directory / "router.log"
    match kind:
        case None:
            router = sequential_proxy(prefill, decode, port=router_port, log=log)
        case Router.MINI_LB:
            router = mini_lb(prefill, bootstrap_port, decode, port=router_port, log=log)
        case Router.RUST:
            router = rust_router(
                prefill, bootstrap_port, decode, port=router_port, metrics_port=metrics_port, log=log
            )
    _start(fleet, router)
    return router, transfer_log


def _start(fleet: Fleet, *servers: Server) -> None:
    began = time.monotonic()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        tasks = {server.name: progress.add_task(f"starting {server.name}") for server in servers}

        def ready(server: Server) -> None:
            progress.remove_task(tasks[server.name])
            console.print(
                f"{server.name} is ready at {server.url} after {time.monotonic() - began:.0f} s",
                highlight=False,
            )

        fleet.start(*servers)
        fleet.wait_ready(servers, START_SECONDS, ready)


def _ask_all(engine: Engine, server: Server, prompts: list[list[int]], what: str) -> list[list[int]]:
    """The generated tokens for each prompt, one request after another."""
    answers = []
    with (
        Progress(console=console, transient=True) as progress,
        httpx.Client(timeout=REQUEST_SECONDS) as client,
    ):
        for prompt in progress.track(prompts, description=what):
            path, body = engine.request(prompt, ANSWER_TOKENS)
            try:
                response = client.post(server.url + path, json=body)
                response.raise_for_status()
                answers.append(engine.token_ids(response.json()))
            except (httpx.HTTPError, KeyError) as error:
                raise PDError(
                    f"{what}: a prompt of {len(prompt)} tokens got no answer: {error!r}; log: {server.log}"
                ) from None
    console.print(f"{what}: {len(answers)} requests answered")
    return answers


def _records(transfer_log: Path, lengths: Sequence[int]) -> list[dict[str, Any] | None]:
    """D's record of each request. All prompts differ in length, so the length tells which is which."""
    deadline = time.monotonic() + 10.0
    expected = len(lengths) - lengths.count(0)
    while True:
        lines = transfer_log.read_text().splitlines() if transfer_log.exists() else []
        by_length = {record["num_tokens"]: record for record in map(json.loads, lines)}
        if len(by_length) >= expected or time.monotonic() > deadline:
            return [by_length.get(length) for length in lengths]
        time.sleep(0.1)


def _as_json(results: Sequence[Checked]) -> dict[str, Any]:
    entries = [result.as_json() for result in results]
    return {
        "requests": len(entries),
        "mismatches": sum(result.expected != result.got for result in results),
        "transferred_bytes": sum(entry["bytes"] for entry in entries),
        "per_request": entries,
    }


def _show(results: Sequence[Checked]) -> None:
    totals = _as_json(results)
    moved = [result.record for result in results if result.record is not None]
    table = Table("moved from P to D", "median", "max", "total")
    counts = (("tokens", "num_tokens"), ("pages", "pages"), ("KiB", "nbytes"))
    for title, name in counts:
        values = [record[name] / (1024 if name == "nbytes" else 1) for record in moved] or [0]
        table.add_row(title, f"{statistics.median(values):.0f}", f"{max(values):.0f}", f"{sum(values):.0f}")
    stages = (
        ("ms until P was ready", "bootstrap_s"),
        ("ms until D had pages", "input_s"),
        ("ms to pull", "pull_s"),
    )
    for title, name in (*stages, ("ms to pull and write", "transfer_s")):
        values = [1000 * record[name] for record in moved] or [0.0]
        table.add_row(title, f"{statistics.median(values):.1f}", f"{max(values):.1f}", "")
    console.print(table)
    for result in results:
        if result.expected != result.got:
            console.print(f"[red]{result.prompt_tokens} tokens:[/] plain {result.expected}, got {result.got}")
        elif not result.ok:
            said = result.record["error"] if result.record else "not transferred"
            console.print(f"[red]{result.prompt_tokens} tokens:[/] right answer, but {escape(said)}")
    console.print(f"{totals['requests']} requests, {totals['mismatches']} mismatches with the plain server")


def _serve_on(fleet: Fleet, engine: Engine, router: Server) -> None:
    path, body = engine.request([72, 101, 108, 108, 111], ANSWER_TOKENS)
    console.print("serving; Ctrl-C stops everything. Try:")
    command = f"curl -s {router.url}{path} -H 'content-type: application/json' -d '{json.dumps(body)}'"
    console.print(command, highlight=False, soft_wrap=True)
    while True:
        fleet.wait_ready([router], timeout=10.0)
        time.sleep(1.0)
