"""What pairs the two halves of a request.

A router gives one room to everything in one HTTP body. A list of prompts, or ``n`` samples of one, become several
engine requests that all carry that room. Their prompts tell them apart: P and D pair by ``(room, digest of the
prompt)``. Two requests with the same room and digest have the same KV cache, so any pairing of those is right.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MAX_ROOM = 2**63 - 1
DIGEST_BYTES = 16


class RoomKey(NamedTuple):
    """The router's room and the digest of one prompt in it."""

    room: int
    prompt: bytes


def prompt_digest(token_ids: Sequence[int], salt: bytes = b"") -> bytes:
    """A 16-byte digest of everything that decides a prompt's KV cache.

    Args:
        token_ids: the prompt as token ids, 0 <= id < 2**32.
        salt: what else changes the cache: the adapter's LoRA name, image hashes, cache salt.
    """
    tokens = np.asarray(token_ids, dtype="<u4").tobytes()
    return hashlib.blake2b(
        tokens, digest_size=DIGEST_BYTES, key=hashlib.blake2b(salt, digest_size=32).digest()
    ).digest()
