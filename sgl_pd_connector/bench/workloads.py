"""What is asked of the servers: prompts of printable bytes.

Lengths and times are the same for every system. The tokens differ, by ``salt``, because two systems may share servers,
and a prompt that a server has seen is in its prefix cache.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from sgl_pd_connector.bench.load import Planned, poisson

ANSWER_TOKENS = 16


def _prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(32, 127) for _ in range(length)]


def _plan(salt: str, lengths: Sequence[int], times: Sequence[float]) -> list[Planned]:
    rng = random.Random(salt)
    return [
        Planned(at, _prompt(rng, length), ANSWER_TOKENS) for length, at in zip(lengths, times, strict=True)
    ]


def _evenly(count: int, pause: float) -> list[float]:
    return [number * pause for number in range(count)]


def fixed(quick: bool, salt: str) -> list[Planned]:
    """One length."""
    count = 16 if quick else 40
    return _plan(f"fixed {salt}", [256] * count, _evenly(count, 0.25))


def mixed(quick: bool, salt: str) -> list[Planned]:
    """Every length new, and every number of pages: what recompilation costs.

    They come faster than a server that compiles can answer, or requests/s would be the rate of arrival.
    """
    count, rng = 24 if quick else 48, random.Random("mixed")
    lengths = [16 * pages + rng.randrange(1, 16) for pages in rng.sample(range(6, 58), count)]
    return _plan(f"mixed {salt}", lengths, _evenly(count, 0.06))


def long(quick: bool, salt: str) -> list[Planned]:
    """Near the longest prompt that the servers take."""
    count, rng = 8 if quick else 24, random.Random("long")
    return _plan(f"long {salt}", [rng.randrange(900, 1000) for _ in range(count)], _evenly(count, 0.5))


def shared_prefix(quick: bool, salt: str) -> list[Planned]:
    """The same 512 tokens before each question."""
    count, rng = 12 if quick else 32, random.Random(f"shared {salt}")
    prefix = _prompt(rng, 512)
    return [Planned(at, prefix + _prompt(rng, 40), ANSWER_TOKENS) for at in _evenly(count, 0.25)]


def burst(quick: bool, salt: str) -> list[Planned]:
    """All at the same moment."""
    count, rng = 16 if quick else 32, random.Random("burst")
    return _plan(f"burst {salt}", [rng.randrange(100, 400) for _ in range(count)], [0.0] * count)


def steady(quick: bool, salt: str) -> list[Planned]:
    """Poisson arrivals, four a second."""
    count, rng = 20 if quick else 60, random.Random("poisson")
    return _plan(f"poisson {salt}", [rng.randrange(64, 512) for _ in range(count)], poisson(4.0, count, rng))


WORKLOADS: dict[str, Callable[[bool, str], list[Planned]]] = {
    "fixed": fixed,
    "mixed": mixed,
    "long": long,
    "shared_prefix": shared_prefix,
    "burst": burst,
    "poisson": steady,
}


def warm_up(salt: str) -> list[Planned]:
    """Every size to which vLLM rounds a step up."""
    rng = random.Random(f"warm-up {salt}")
    return [Planned(0.0, _prompt(rng, length), 4) for length in (5, 17, 33, 65, 129, 257, 511, 1000)]


def interleaved(quick: bool, salt: str) -> tuple[list[Planned], list[Planned]]:
    """Requests that decode for long, and requests that arrive meanwhile."""
    rng = random.Random(f"interleaved {salt}")
    tokens, count = (500, 16) if quick else (900, 40)
    decoding = [Planned(0.0, _prompt(rng, 40), tokens) for _ in range(4)]
    lengths = [rng.randrange(100, 500) for _ in range(count)]
    arriving = [
        Planned(0.3 + 0.15 * number, _prompt(rng, length), 1) for number, length in enumerate(lengths)
    ]
    return decoding, arriving
