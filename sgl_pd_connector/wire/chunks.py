"""How a request's pages are cut into chunks, and a chunk into buffers.

A chunk is the unit that is gathered, registered, pulled and scattered by itself. Chunk sizes are powers of two up to a
maximum, and N pages are written in that ladder exactly (13 = 8 + 4 + 1): nothing is padded, and every prompt length is
served by at most ``log2(max) + 1`` compiled shapes.

A chunk travels as one buffer per group of layers. One pull costs a fixed time per buffer, while a single huge buffer
serialises the copy; between roughly 1 and 16 MB both costs are small. So layers are stacked until a buffer reaches the
size aimed at.
"""

from __future__ import annotations

from typing import NamedTuple


class Chunk(NamedTuple):
    """Pages ``[first, first + pages)`` of a prompt."""

    first: int
    pages: int


def ladder(max_chunk_pages: int) -> tuple[int, ...]:
    """Every chunk size there is: the powers of two up to ``max_chunk_pages`` (itself one), largest first."""
    if max_chunk_pages < 1 or max_chunk_pages & (max_chunk_pages - 1):
        raise ValueError(f"max_chunk_pages must be a power of two, not {max_chunk_pages}")
    return tuple(1 << bit for bit in range(max_chunk_pages.bit_length() - 1, -1, -1))


def plan_chunks(num_pages: int, max_chunk_pages: int) -> tuple[Chunk, ...]:
    """Cuts ``num_pages`` >= 1 pages into chunks, largest first, in prompt order."""
    if num_pages < 1:
        raise ValueError(f"a request has at least one page, not {num_pages}")
    chunks: list[Chunk] = []
    first = 0
    for size in ladder(max_chunk_pages):
        while num_pages - first >= size:
            chunks.append(Chunk(first, size))
            first += size
    return tuple(chunks)


def plan_groups(num_layers: int, layer_bytes: int, chunk_bytes: int) -> tuple[int, ...]:
    """How many consecutive layers go into each buffer of a chunk.

    Args:
        num_layers: layers of the model, >= 1.
        layer_bytes: bytes of one layer of the chunk.
        chunk_bytes: size aimed at for one buffer.

    Returns:
        Group sizes that differ by at most one and sum to ``num_layers``.
    """
    per_group = max(1, min(num_layers, chunk_bytes // max(1, layer_bytes)))
    count = -(-num_layers // per_group)
    small, larger = divmod(num_layers, count)
    return (small + 1,) * larger + (small,) * (count - larger)
