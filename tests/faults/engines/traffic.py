"""Requests in every state that a fault can meet them in."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import TracebackType
from typing import Self

import httpx

from tests.faults.engines.calls import FRONTS, PATIENCE, Call
from tests.faults.engines.golden import Golden, GoldenAnswers
from tests.faults.engines.pair import Pair
from tests.waiting import eventually

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

    async def place(self, plan: Plan) -> bool:
        """All requests of the plan, each in its state; transfers are held back until `let_go`.

        False: one was over before the last was on its way, as may be on a busy machine.

        The proxies must exist: a request must have passed before.
        """
        for call in self._send(plan, "decoding"):
            await call.started.wait()
        for proxy in self._pair.view.transfers.values():
            await asyncio.to_thread(proxy.hold)
        num_held = len(self._send(plan, "transferring"))
        await self._until({"in_flight": num_held, "registered_bytes": 1}, wake=True)
        self._send(plan, "prefilling")
        self._send(plan, "queued")
        await self._until({"in_flight": num_held + 1})
        return not any(call.outcome for call in self.calls)

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

    async def _until(self, least: Mapping[str, float], *, wake: bool = False) -> None:
        """P says so. ``wake``: it has nothing to compute by now."""

        def reached() -> bool:
            if wake:
                self._pair.wake("P")
            standing = self._pair.standing("P")
            return all(standing[gauge] >= number for gauge, number in least.items())

        await asyncio.to_thread(eventually, reached, f"P: at least {least}")
