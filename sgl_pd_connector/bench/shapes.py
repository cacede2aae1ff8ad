"""KV shapes of models that people serve, as the engines lay them out for one device."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class KVShape:
    """A model's KV cache on one device: ``layers`` pools of ``[pages, *page_shape]``."""

    name: str
    layers: int
    page_shape: tuple[int, ...]
    dtype: str = "bfloat16"

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.page_shape[0]

    @property
    def page_bytes(self) -> int:
        """Of one page over all layers. Every dtype here has two bytes."""
        return self.layers * math.prod(self.page_shape) * 2

    def pages(self, nbytes: int) -> int:
        """How many pages make up about ``nbytes``; at least one."""
        return max(1, round(nbytes / self.page_bytes))


# vLLM on TPU: [page, 2 * kv heads / packing, packing, head dim], here with 16 tokens a page and two values packed.
SHAPES = {
    shape.name: shape
    for shape in (
        KVShape("llama-3-8b", 32, (16, 8, 2, 128)),
        KVShape("qwen3-32b", 64, (16, 8, 2, 128)),
        KVShape("mla", 61, (16, 1, 2, 320)),
        # Pages small enough for a transfer of 64 KB.
        KVShape("tiny", 4, (16, 2, 2, 128)),
    )
}


@dataclass(frozen=True)
class HandoffCase:
    """What is moved: ``concurrent`` requests of ``pages`` pages each."""

    shape: KVShape
    pages: int
    concurrent: int = 1

    @property
    def nbytes(self) -> int:
        return self.pages * self.shape.page_bytes * self.concurrent
