"""A load generator with a time for every token: requests at given times, answers streamed.

Poisson arrivals and per-token times in one run are what the figures here need; `vllm bench serve` gives only summaries.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from sgl_pd_connector.bench.measure import quantile


@dataclass(frozen=True)
class Planned:
    """A request: when it is sent (seconds from the start), its prompt's token ids, and how many tokens are wanted."""

    at: float
    prompt: Sequence[int]
    max_tokens: int


@dataclass
class Answer:
    """What became of a request.

    Attributes:
        planned: the request.
        sent: when, in monotonic seconds.
        tokens: when each token arrived; those of one chunk at the same time.
        error: why it failed, empty when it did not.
    """

    planned: Planned
    sent: float = 0.0
    tokens: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.error and len(self.tokens) == self.planned.max_tokens

    @property
    def ttft(self) -> float:
        """Seconds until the first token."""
        return self.tokens[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Seconds between one token and the next."""
        return [later - earlier for earlier, later in zip(self.tokens, self.tokens[1:], strict=False)]


def run_load(url: str, model: str, requests: Sequence[Planned], *, patience: float = 300.0) -> list[Answer]:
    """Sends all requests to an OpenAI-compatible server and returns their answers in the same order.

    Args:
        url: of the server or router, without a path.
        model: its name there.
        requests: what to send when.
        patience: seconds without a token after which a request is given up.
    """
    return asyncio.run(_run(url, model, requests, patience))


async def _run(url: str, model: str, requests: Sequence[Planned], patience: float) -> list[Answer]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        base_url=url, timeout=patience, limits=limits, trust_env=False, verify=False
    ) as client:
        start = time.monotonic()
        return await asyncio.gather(*(_ask(client, model, each, start) for each in requests))


async def _ask(client: httpx.AsyncClient, model: str, planned: Planned, start: float) -> Answer:
    answer = Answer(planned)
    await asyncio.sleep(max(0.0, start + planned.at - time.monotonic()))
    body = {
        "model": model,
        "prompt": list(planned.prompt),
        "max_tokens": planned.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    answer.sent = time.monotonic()
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                answer.error = f"status {response.status_code}: {(await response.aread())[:200]!r}"
                return answer
            async for line in response.aiter_lines():
                answer.tokens += [time.monotonic()] * _tokens_in(line)
    except (httpx.HTTPError, ValueError) as error:
        answer.error = repr(error)
    if not answer.error and len(answer.tokens) != planned.max_tokens:
        answer.error = f"{len(answer.tokens)} of {planned.max_tokens} tokens"
    return answer


def _tokens_in(line: str) -> int:
    """How many tokens a line of the event stream brings.

    Raises:
        ValueError: it is an error, or nothing that a server of this API says.
    """
    if not line.startswith("data: ") or line == "data: [DONE]":
        return 0
    event: dict[str, Any] = json.loads(line.removeprefix("data: "))
    if "error" in event:
        raise ValueError(str(event["error"]))
    return sum(len(choice.get("token_ids") or ()) for choice in event.get("choices", ()))


def poisson(rate: float, count: int, rng: random.Random) -> list[float]:
    """Times of ``count`` arrivals at ``rate`` per second."""
    times, now = [], 0.0
    for _ in range(count):
        now += rng.expovariate(rate)
        times.append(now)
    return times


def summary(answers: Sequence[Answer]) -> dict[str, Any]:
    """TTFT and inter-token latency in seconds, answers per second, failures."""
    good = [answer for answer in answers if answer.ok]
    result: dict[str, Any] = {"requests": len(answers), "failures": len(answers) - len(good)}
    result["errors"] = sorted({answer.error for answer in answers if answer.error})[:3]
    if not good:
        return result
    ttfts = [answer.ttft for answer in good]
    gaps = [gap for answer in good for gap in answer.gaps]
    span = max(answer.tokens[-1] for answer in good) - min(answer.sent for answer in answers)
    result["requests_per_s"] = len(good) / span
    result["ttft_s"] = {name: quantile(ttfts, q) for name, q in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))}
    if gaps:
        result["itl_s"] = {name: quantile(gaps, q) for name, q in (("p50", 0.5), ("p99", 0.99))}
    return result
