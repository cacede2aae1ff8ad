"""Clients of the inference API, each a task that can leave, and what became of them."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from sgl_pd_connector.testing.servers import LOCALHOST
from tests.faults.engines.golden import Golden
from tests.faults.engines.pair import LONGEST, ROUTERS, Pair

FRONTS = (*ROUTERS, "direct")
"""What a client talks to. ``direct``: to P and D at once, as a router that survives everything."""

PATIENCE = LONGEST + 20.0
"""Seconds of silence after which a client calls it a hang; the deadlines, and time for a busy machine to generate."""

PATH = "/v1/completions"


@dataclass
class Call:
    """One request of one client.

    Attributes:
        state: which it is meant to be in when the fault comes.
        front: what it is sent to.
        text: what has been answered so far.
        outcome: ``"answered"``, ``"error"``, ``"hang"`` or ``"left"``; empty while it waits.
        error: the status or exception that ended it.
        seconds: how long it took.
        started: set with the first token of a streamed answer, or its end.
    """

    state: str
    front: str
    golden: Golden
    stream: bool
    text: str = ""
    outcome: str = ""
    error: str = ""
    seconds: float = 0.0
    started: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def wrong(self) -> bool:
        """Whether a wrong token was answered, be it in a part of an answer."""
        right = self.golden.text
        return self.text != right if self.outcome == "answered" else not right.startswith(self.text)

    async def run(self, client: httpx.AsyncClient, pair: Pair) -> None:
        """Sends it and waits for its end. Cancelled: the client leaves."""
        began = time.monotonic()
        try:
            await self._send(client, pair)
            self.outcome = "error" if self.error else "answered"
        except httpx.ReadTimeout:
            self.outcome, self.error = "hang", f"nothing for {PATIENCE:g} s"
        except (httpx.HTTPError, OSError) as error:
            self.outcome, self.error = "error", f"{type(error).__name__}: {error}"
        except asyncio.CancelledError:
            self.outcome = "left"
        self.seconds = time.monotonic() - began
        self.started.set()

    async def _send(self, client: httpx.AsyncClient, pair: Pair) -> None:
        body: dict[str, Any] = {"model": pair.model, "prompt": self.golden.prompt, "stream": self.stream}
        body |= {"max_tokens": self.golden.max_tokens, "temperature": 0, "ignore_eos": True}
        if self.front in ROUTERS:
            await self._receive(client, pair.servers[self.front].url, body)
            return
        body |= {"bootstrap_host": LOCALHOST, "bootstrap_port": pair.bootstrap_port}
        body["bootstrap_room"] = random.getrandbits(62)
        p, d = pair.servers["P"].url, pair.servers["D"].url
        prefill = asyncio.create_task(client.post(p + PATH, json=body))
        try:
            await self._receive(client, d, body)
        finally:
            prefill.cancel()
            # Its answer is of no interest, but the connection must be closed before the client is.
            await asyncio.gather(prefill, return_exceptions=True)

    async def _receive(self, client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> None:
        async with client.stream("POST", url + PATH, json=body) as answer:
            if answer.status_code != httpx.codes.OK:
                self.error = f"{answer.status_code} {(await answer.aread()).decode(errors='replace')[:300]}"
            elif self.stream:
                await self._read_events(answer)
            else:
                self._add(json.loads(await answer.aread()))

    async def _read_events(self, answer: httpx.Response) -> None:
        async for line in answer.aiter_lines():
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                return
            if data:
                self._add(json.loads(data))
                self.started.set()
        self.error = self.error or "the stream broke off"

    def _add(self, answer: dict[str, Any]) -> None:
        """A whole answer, or one event of it."""
        if "choices" not in answer:
            self.error = json.dumps(answer)[:300]
            return
        for choice in answer["choices"]:
            self.text += choice["text"]
            if choice["finish_reason"] not in (None, "length"):
                self.error = f"finish_reason {choice['finish_reason']}"
