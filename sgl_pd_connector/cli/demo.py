"""``sgl-pd demo``: one prefill server, one decode server and a router on this machine, checked token by
token."""

from __future__ import annotations

import json
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Self

import httpx
import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from sgl_pd_connector.cli import demo_results
from sgl_pd_connector.cli.demo_results import Checked
from sgl_pd_connector.errors import PDError
from sgl_pd_connector.testing.engines import ENGINES, Engine
from sgl_pd_connector.testing.servers import Fleet, Server, free_ports, mini_lb, rust_router, sequential_proxy

START_SECONDS = 600.0
REQUEST_SECONDS = 120.0
RECORD_SECONDS = 10.0
ANSWER_TOKENS = 12

console = Console()


class Router(StrEnum):
    """sglang's routers, both sending P and D the same body at the same time."""

    MINI_LB = "mini_lb"
    RUST = "rust"


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
    complete = False
    try:
        kind = None if sequential else router
        with _Interrupt() as interrupt:
            run = _Run(ENGINES[engine](model), directory, interrupt)
            results = run(router=kind, keep=keep, json_file=json_file)
        complete = all(result.ok for result in results)
    except KeyboardInterrupt:
        console.print("stopped")
        complete = True
        raise typer.Exit(130) from None
    finally:
        if complete or not any(directory.iterdir()):
            shutil.rmtree(directory)
        else:
            _say(f"the servers' logs are in {directory}")
    if not complete:
        raise typer.Exit(1)


def prompt_lengths(page_size: int, longest: int) -> list[int]:
    """Distinct lengths in tokens: a few short ones, three around each page boundary, some of many pages."""
    around = {pages * page_size + off for pages in range(1, 14) for off in (-1, 0, 1)}
    long = {30 * page_size + 5, 40 * page_size + 1, 50 * page_size}
    return sorted(length for length in {1, 2, 3, 5} | around | long if length <= longest)


class _Interrupt:
    """Ctrl-C and SIGTERM while the block runs: the first raises `KeyboardInterrupt`, further ones are ignored, so
    that they cannot stop the cleaning up.

    It is also remembered, because an exception that is raised while the interpreter runs a callback is lost.
    """

    def __init__(self) -> None:
        self._asked = False

    def __enter__(self) -> Self:
        self._before = {each: signal.signal(each, self._handle) for each in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._asked:
            self._asked = True
            raise KeyboardInterrupt

    def check(self) -> None:
        """Called wherever the demo waits."""
        if self._asked:
            raise KeyboardInterrupt


class _Run:
    """One run: its servers, and what it asks them."""

    def __init__(self, engine: Engine, directory: Path, interrupt: _Interrupt) -> None:
        self._engine = engine
        self._directory = directory
        self._interrupt = interrupt
        self._fleet = Fleet()

    def __call__(self, *, router: Router | None, keep: bool, json_file: Path | None) -> list[Checked]:
        engine = self._engine
        rng = random.Random(0)
        # Printable ASCII: valid, and no special token, in every vocabulary.
        lengths = prompt_lengths(engine.page_size, engine.max_tokens - ANSWER_TOKENS)
        prompts = [[rng.randrange(32, 127) for _ in range(length)] for length in lengths]
        _say(f"model {engine.model}{', emulated on the CPU' if engine.emulated else ''}")
        with self._fleet:
            expected = self._golden(prompts)
            front, transfer_log = self._start_pair(router)
            got = self._ask_all(front, prompts, f"through {front.name}")
            moved = [engine.moved_tokens(length) for length in lengths]
            records = self._records(transfer_log, moved)
            results = [Checked(*each) for each in zip(lengths, expected, got, records, moved, strict=True)]
            demo_results.show(results, console)
            if json_file is not None:
                json_file.write_text(json.dumps(demo_results.as_json(results), indent=1) + "\n")
            if keep:
                self._serve_on(front)
        return results

    def _golden(self, prompts: list[list[int]]) -> list[list[int]]:
        """What one plain server answers. It is stopped again, so that two engines at a time have to fit the
        machine."""
        (port,) = free_ports(1)
        plain = self._engine.server("plain", port=port, directory=self._directory)
        self._start(plain)
        answers = self._ask_all(plain, prompts, "plain server, for comparison")
        self._fleet.stop(plain)
        return answers

    def _start_pair(self, kind: Router | None) -> tuple[Server, Path]:
        """P, D and the router in front of them (None: a proxy that asks P first); and D's record of transfers."""
        prefill_port, decode_port, bootstrap_port, router_port, metrics_port = free_ports(5)
        transfer_log = self._directory / "transfers.jsonl"
        prefill = self._engine.server(
            "prefill",
            port=prefill_port,
            directory=self._directory,
            settings={"bootstrap_port": bootstrap_port},
        )
        decode = self._engine.server(
            "decode",
            port=decode_port,
            directory=self._directory,
            settings={"transfer_log": str(transfer_log)},
        )
        self._start(prefill, decode)
        log = self._directory / "router.log"
        match kind:
            case None:
                router = sequential_proxy(prefill, decode, port=router_port, log=log)
            case Router.MINI_LB:
                router = mini_lb(prefill, bootstrap_port, decode, port=router_port, log=log)
            case Router.RUST:
                router = rust_router(
                    prefill, bootstrap_port, decode, port=router_port, metrics_port=metrics_port, log=log
                )
        self._start(router)
        return router, transfer_log

    def _start(self, *servers: Server) -> None:
        began = time.monotonic()
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            tasks = {server.name: progress.add_task(f"starting {server.name}") for server in servers}

            def ready(server: Server) -> None:
                progress.remove_task(tasks[server.name])
                _say(f"{server.name} is ready at {server.url} after {time.monotonic() - began:.0f} s")

            self._fleet.start(*servers)
            self._fleet.wait_ready(servers, START_SECONDS, ready, self._interrupt.check)

    def _ask_all(self, server: Server, prompts: list[list[int]], what: str) -> list[list[int]]:
        """The generated tokens for each prompt, one request after another."""
        answers = []
        with (
            Progress(console=console, transient=True) as progress,
            httpx.Client(timeout=REQUEST_SECONDS, verify=False) as client,
        ):
            for prompt in progress.track(prompts, description=what):
                self._interrupt.check()
                path, body = self._engine.request(prompt, ANSWER_TOKENS)
                try:
                    response = client.post(server.url + path, json=body)
                    response.raise_for_status()
                    answers.append(self._engine.token_ids(response.json()))
                except (httpx.HTTPError, KeyError) as error:
                    raise PDError(
                        f"{what}: a prompt of {len(prompt)} tokens got no answer: {error!r}; log: {server.log}"
                    ) from None
        console.print(f"{what}: {len(answers)} requests answered")
        return answers

    def _records(self, transfer_log: Path, moved: Sequence[int]) -> list[dict[str, Any] | None]:
        """D's record of each request; the last ones may still be on their way into the file."""
        deadline = time.monotonic() + RECORD_SECONDS
        while True:
            records = demo_results.read_records(transfer_log)
            if len(records) >= len(moved) - moved.count(0) or time.monotonic() > deadline:
                return [records.get(tokens) for tokens in moved]
            self._interrupt.check()
            time.sleep(0.1)

    def _serve_on(self, router: Server) -> None:
        path, body = self._engine.request([72, 101, 108, 108, 111], ANSWER_TOKENS)
        console.print("serving; Ctrl-C stops everything. Try:")
        _say(f"curl -s {router.url}{path} -H 'content-type: application/json' -d '{json.dumps(body)}'")
        while True:
            self._interrupt.check()
            self._fleet.wait_ready([router], timeout=10.0)
            time.sleep(1.0)


def _say(text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True)
