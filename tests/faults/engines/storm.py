"""Runs faults against one pair and judges every cell."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import httpx

from sgl_pd_connector.errors import PDError
from tests.faults.engines.calls import FRONTS, Call
from tests.faults.engines.golden import Golden, GoldenAnswers
from tests.faults.engines.kinds import Fault
from tests.faults.engines.pair import DEADLINES, ENGINES, ROUTERS, Pair
from tests.faults.engines.resources import resources
from tests.faults.engines.traffic import STATES, Plan, Traffic, plan
from tests.faults.verdict import Verdict

SETTLE = max(DEADLINES["lease"], DEADLINES["transfer_timeout"]) + 16.0
"""Seconds until nothing may be left of a storm."""

NOTICE = 15.0
"""Seconds in which the Rust router, which answers 503 for servers that failed, must have noticed that they are back."""

PLACINGS = 5

SURVIVORS = ("P", "D", "bootstrap")

SIGNS = {"answered": "=", "error": "e", "left": "x"}


@dataclass(kw_only=True)
class Cell(Verdict):
    """One request of one client.

    Attributes:
        front: what it was sent to.
        outcome, error, seconds: see `Call`.
    """

    front: str
    outcome: str
    error: str
    seconds: float

    @property
    def sign(self) -> str:
        return "#" if self.wrong else SIGNS.get(self.outcome, "?")


class Storm:
    """One pair, used for one fault after another. Entering it starts the pair."""

    def __init__(self, engine: str, directory: Path) -> None:
        self._pair = Pair(engine, directory)
        # A successor may hold no more than its predecessor did.
        self._baseline: dict[str, dict[str, int]] = {}
        self._dead_peers = 0

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self._pair)
            lengths = self._pair.adapter.lengths
            self._answers = stack.enter_context(GoldenAnswers(self._pair.reference, lengths))
            self._warm_up()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, fault: Fault) -> list[Cell]:
        """A row: requests in all states through all fronts at once, and one fault."""
        try:
            if fault.policy is not None:
                self._pair.use_policy(fault.policy)
            calls, problems, leak = self._row(fault)
        except (httpx.HTTPError, PDError, AssertionError) as error:
            calls = [Call(state, front, Golden("", 0, ""), False) for state in STATES for front in FRONTS]
            problems, leak = [f"the servers do not serve any more: {error!r}"], False
        cells = [_cell(fault, call) for call in calls]
        for cell in cells:
            cell.leak = leak
            cell.problems += problems
        return cells

    def _row(self, fault: Fault) -> tuple[list[Call], list[str], bool]:
        """What became of the requests, what else did not hold, and whether that is a leak."""
        overdue = self._overdue()
        calls = self._meet(fault)
        next_problem, leak = self._next_request_problem(fault.told), self._leak(fault.dies)
        problems = [problem for problem in (next_problem, leak) if problem]
        if fault.noticed and self._overdue() != overdue:
            problems.append(f"transfers were ended by deadlines: {overdue} before, {self._overdue()} now")
        for front in ROUTERS:
            if front not in fault.told:
                self._pair.kill(front)
                self._pair.start(front)
        return calls, problems, bool(leak)

    def problems(self, fault: Fault) -> dict[str, list[str]]:
        """Of the cells that did not pass, by state and front."""
        return {f"{cell.state} {cell.front}": cell.problems for cell in self.run(fault) if not cell.passed}

    def _meet(self, fault: Fault) -> list[Call]:
        misplaced: list[str] = []
        while len(misplaced) < PLACINGS:
            traffic = Traffic(self._pair)
            problem = asyncio.run(self._try_to_meet(fault, traffic, plan(self._answers)))
            if not problem:
                return traffic.calls
            misplaced.append(problem)
            self._unsettled({})
        raise AssertionError(f"requests were not in the states they should be in: {misplaced}")

    async def _try_to_meet(self, fault: Fault, traffic: Traffic, requests: Plan) -> str:
        """Why not, if not."""
        async with traffic:
            if problem := await traffic.place(requests):
                return problem
            await asyncio.to_thread(fault.inject, self._pair)
            self._answers.refill()
            if fault.leave:
                await traffic.leave()
            await traffic.let_go()
            await asyncio.sleep(fault.lasts)
            await asyncio.to_thread(fault.heal, self._pair)
            await traffic.finish()
        return ""

    def _next_request_problem(self, fronts: Iterable[str]) -> str:
        """A request through each of them; its KV must come from P."""
        before, deadline = self._pair.ended("D", "ok"), time.monotonic() + NOTICE
        left, served = list(fronts), 0
        while left:
            calls = asyncio.run(self._ask(left))
            late = time.monotonic() > deadline
            left = [call.front for call in calls if call.error.startswith("503") and not late]
            for call in calls:
                if call.front not in left and (call.wrong or call.outcome != "answered"):
                    return f"the next request through {call.front}: {call.outcome} {call.error} {call.text!r}"
            served += len(calls) - len(left)
            if left:
                time.sleep(0.5)
        while (received := self._pair.ended("D", "ok") - before) < served:
            if time.monotonic() > deadline:
                return f"of the next {served} requests {received:g} were transferred"
            time.sleep(0.1)
        return ""

    async def _ask(self, fronts: Iterable[str]) -> list[Call]:
        async with Traffic(self._pair) as traffic:
            state = "transferring"
            return await traffic.ask({(state, front): self._answers.take(state) for front in fronts})

    def _warm_up(self) -> None:
        """What the processes hold when everything that requests open is open."""
        problem = self._next_request_problem(FRONTS)
        assert not problem, problem
        calls = self._meet(Fault("none", "-"))
        bad = [call for call in calls if call.wrong or call.outcome != "answered"]
        assert not bad, bad
        left = self._unsettled({})
        assert not left, left
        self._baseline = {name: resources(self._pair.servers[name]) for name in SURVIVORS}

    def _overdue(self) -> dict[str, float]:
        """Transfers that P and D have ended because nobody came."""
        return {name: self._pair.ended(name, "timeout") for name in ENGINES}

    def _leak(self, dead: str | None) -> str:
        if dead == "D":
            self._dead_peers = 0
        elif dead == "P":
            self._dead_peers += 1
        allowed = {name: dict(self._baseline[name]) for name in SURVIVORS if name != dead}
        if "D" in allowed:
            # Of a P that is gone D keeps the side channel's socket for two minutes (`decode_channel.SOCKET_IDLE`).
            allowed["D"]["descriptors"] += self._dead_peers
        return self._unsettled(allowed)

    def _unsettled(self, allowed: dict[str, dict[str, int]]) -> str:
        """What is still held after a while, and resources above what is allowed."""
        deadline = time.monotonic() + SETTLE
        while True:
            self._pair.wake("P", "D")
            over = [f"{what}: {value:g}" for what, value in self._pair.held().items()]
            for name, most in allowed.items():
                now = resources(self._pair.servers[name])
                over += [
                    f"{name} {what}: {now[what]}, not {most[what]}" for what in now if now[what] > most[what]
                ]
            if not over or time.monotonic() > deadline:
                return "; ".join(over)
            time.sleep(0.2)


def _cell(fault: Fault, call: Call) -> Cell:
    cell = Cell(
        fault=fault.name,
        target=fault.target,
        state=call.state,
        wrong=call.wrong,
        hang=call.outcome == "hang",
        front=call.front,
        outcome=call.outcome,
        error=call.error,
        seconds=round(call.seconds, 2),
    )
    if cell.wrong:
        cell.problems.append(f"wrong tokens: {call.text!r} instead of {call.golden.text!r}")
    if cell.hang:
        cell.problems.append(call.error)
    if fault.harmless(call.state, call.front) and call.outcome != "answered":
        cell.problems.append(f"must not be harmed, but: {call.error}")
    if fault.fatal(call.state, call.front) and call.outcome == "answered":
        cell.problems.append("its KV was lost, but there was no error")
    return cell
