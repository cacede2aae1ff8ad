"""Prompts and their right answers, computed ahead on a thread while the servers are at work."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self

from sgl_pd_connector.testing.reference import ReferenceModel

MARGIN = 2e-4
"""Logits by which every token of an answer must lead: whoever rounds otherwise still answers the same."""

AHEAD = 3
"""How many of each kind: one row asks for as many."""


@dataclass(frozen=True)
class Golden:
    """A prompt that nobody was asked before, and its greedy answer of ``max_tokens`` tokens."""

    prompt: str
    max_tokens: int
    text: str


class GoldenAnswers:
    """Entering it starts the thread."""

    def __init__(self, model: ReferenceModel, lengths: Mapping[str, tuple[int, int]]) -> None:
        """``lengths``: by name, how many tokens prompt and answer have."""
        self._model = model
        self._lengths = lengths
        self._seeds = itertools.count(1)

    def __enter__(self) -> Self:
        self._thread = ThreadPoolExecutor(1)
        self._ready: dict[str, deque[Future[Golden]]] = {name: deque() for name in self._lengths}
        self.refill()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def refill(self) -> None:
        """Computes those that will be taken next, now that there is time for it."""
        for name, ready in self._ready.items():
            while len(ready) < AHEAD:
                ready.append(self._thread.submit(self._make, name))

    def take(self, name: str) -> Golden:
        ready = self._ready[name]
        return ready.popleft().result() if ready else self._make(name)

    def _make(self, name: str) -> Golden:
        tokens, max_tokens = self._lengths[name]
        while True:
            letters = random.Random(next(self._seeds))
            # Small letters, each of them a token.
            prompt = "".join(chr(letters.randrange(97, 123)) for _ in range(tokens))
            answer = self._model.greedy(prompt, max_tokens)
            if answer.margin > MARGIN:
                return Golden(prompt, max_tokens, answer.text)
