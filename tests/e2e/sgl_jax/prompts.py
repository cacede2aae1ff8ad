"""Prompts and bodies. One byte of a prompt is one token of the model."""

from __future__ import annotations

import random
from typing import Any


def prompt(length: int, seed: int = 0) -> str:
    """Random lower-case letters."""
    letters = random.Random(f"{length} {seed}")
    return "".join(chr(letters.randrange(97, 123)) for _ in range(length))


def ids(text: str) -> list[int]:
    return list(text.encode())


def greedy(tokens: int = 8, **params: Any) -> dict[str, Any]:
    """Sampling parameters of ``/generate``."""
    return {"max_new_tokens": tokens, "temperature": 0, **params}


def completion(text: Any, tokens: int = 8, **fields: Any) -> dict[str, Any]:
    """A body of ``/v1/completions``."""
    return {"model": "m", "prompt": text, "max_tokens": tokens, "temperature": 0, **fields}


def chat(text: str, tokens: int = 8, **fields: Any) -> dict[str, Any]:
    """A body of ``/v1/chat/completions``."""
    messages = [{"role": "user", "content": text}]
    return {"model": "m", "messages": messages, "max_tokens": tokens, "temperature": 0, **fields}


def chat_prompt(text: str) -> list[int]:
    """The tokens that the model's chat template makes of it: the two markers are one token each."""
    start, end = 257, 258
    return [start, *ids(f"user\n{text}"), end, *ids("\n"), start, *ids("assistant\n")]
