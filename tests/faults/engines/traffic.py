"""Requests in every state that a fault can meet them in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

import httpx

from tests.faults.engines.calls import FRONTS, PATIENCE, Call
from tests.faults.engines.golden import Golden, GoldenAnswers
from tests.faults.engines.pair import DEADLINES, LONGEST, Pair

STATES = ("queued", "prefilling", "transferring", "decoding")

STREAMED = ("queued", "decoding")

Plan = Mapping[tuple[str, str], Golden]
"""By state and front."""


def plan(answers: GoldenAnswers) -> Plan:
    """One request for each front in each state."""
    return {(state, front): answers.take(state) for state in STATES for front in FRONTS}


class Traffic:
    """A handful of clients, who leave at the end of the block; `finish` waits for their answers."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self.calls: list[Call] = []

    async def __aenter__(self) -> Self:
        timeout = httpx.Timeout(PATIENCE, connect=10.0)
        # No pool: a client that leaves closes its connection.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx.AsyncClient(timeout=timeout, limits=limits)
        self._tasks: list[asyncio.Task[None]] = []
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.let_go()
        await self.leave()
        await self._client.aclose()

    async def place(self, plan: Plan) -> str:
        """All requests of the plan, each in its state; transfers are held back until `let_go`.

        Returns what went otherwise, as may be on a busy machine: a request was over before the last was on its way.
        The proxies must exist: a request must have passed before.
        """
        for call in self._send(plan, "decoding"):
            await call.started.wait()
        for proxy in self._pair.view.transfers.values():
            await asyncio.to_thread(proxy.hold)
        num_held = len(self._send(plan, "transferring"))
        late = await self._until({"in_flight": num_held, "registered_bytes": 1}, LONGEST, wake=True)
        if late:
            return late
        self._send(plan, "prefilling")
        self._send(plan, "queued")
        # What is held back waits no longer than that.
        late = await self._until({"in_flight": num_held + 1}, DEADLINES["transfer_timeout"])
        over = [
            f"{call.state} {call.front}: {call.outcome} {call.error}" for call in self.calls if call.outcome
        ]
        return "; ".join(filter(None, [late, *over]))

    async def ask(self, plan: Plan) -> list[Call]:
        """The requests of a plan whose states do not matter, to their end."""
        for state in {state for state, _ in plan}:
            self._send(plan, state)
        await self.finish()
        return self.calls

    async def let_go(self) -> None:
        for proxy in self._pair.view.transfers.values():
            await asyncio.to_thread(proxy.let_go)

    async def leave(self) -> None:
        """Every client closes its connection."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks)

    async def finish(self) -> None:
        """Every client gets its answer, or loses patience."""
        await asyncio.gather(*self._tasks)

    def _send(self, plan: Plan, state: str) -> list[Call]:
        calls = [
            Call(each, front, golden, stream=each in STREAMED)
            for (each, front), golden in plan.items()
            if each == state
        ]
        self.calls += calls
        self._tasks += [asyncio.create_task(call.run(self._client, self._pair)) for call in calls]
        return calls

    async def _until(self, least: Mapping[str, float], within: float, *, wake: bool = False) -> str:
        """P says so, or what else it says after ``within`` seconds. ``wake``: it has nothing to compute by now."""
        deadline = time.monotonic() + within
        while True:
            if wake:
                await asyncio.to_thread(self._pair.wake, "P")
            standing = await asyncio.to_thread(self._pair.standing, "P")
            if all(standing[gauge] >= number for gauge, number in least.items()):
                return ""
            if time.monotonic() > deadline:
                return f"after {within:g} s P has not {dict(least)} but {dict(standing)}"
            await asyncio.sleep(0.02)
