"""From a prompt to chunks and back: what P offers, what D accepts and which of it D pulls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sgl_pd_connector.errors import IncompatiblePeerError
from sgl_pd_connector.wire import messages as msg
from sgl_pd_connector.wire.chunks import Chunk, ladder, plan_chunks, plan_groups
from sgl_pd_connector.wire.layout import KVLayout, explain_difference


@dataclass(frozen=True)
class ChunkPlanner:
    """The chunk sizes of one instance, and the groups of layers of each."""

    layout: KVLayout
    chunk_bytes: int
    max_chunk_pages: int

    @property
    def groups_by_size(self) -> dict[int, tuple[int, ...]]:
        """Chunk size in pages -> layers per buffer: every compiled shape there is."""
        return {size: self.groups(size) for size in ladder(self.max_chunk_pages)}

    def groups(self, pages: int) -> tuple[int, ...]:
        return plan_groups(self.layout.num_layers, pages * self.layout.layer_page_bytes, self.chunk_bytes)

    def chunks(self, num_pages: int) -> tuple[Chunk, ...]:
        # Counted before they are made: the number may be a peer's.
        count = num_pages // self.max_chunk_pages + (num_pages % self.max_chunk_pages).bit_count()
        if count > msg.MAX_CHUNKS:
            raise IncompatiblePeerError(
                f"{num_pages} pages are {count} chunks, at most {msg.MAX_CHUNKS} are possible "
                f"(setting max_chunk_pages = {self.max_chunk_pages})"
            )
        return plan_chunks(num_pages, self.max_chunk_pages)

    def ready(
        self, room: int, attempt: int, num_tokens: int, chunks: Sequence[Chunk], uuids: Sequence[int]
    ) -> msg.Ready:
        """P's READY."""
        return msg.Ready(
            room=room,
            attempt=attempt,
            num_tokens=num_tokens,
            layout=self.layout.as_dict()
            | {"page_shape": list(self.layout.page_shape), "sharding": list(self.layout.sharding)},
            groups={size: list(self.groups(size)) for size in sorted({chunk.pages for chunk in chunks})},
            chunks=[
                msg.ReadyChunk(uuid=uuid, first=chunk.first, pages=chunk.pages)
                for uuid, chunk in zip(uuids, chunks, strict=True)
            ],
        )

    def check(self, ready: msg.Ready, num_tokens: int | None) -> None:
        """D's check of a READY, before anything is pulled.

        Raises:
            IncompatiblePeerError: P's layout or chunk settings are not this instance's, or it is for another prompt, or
                its chunks do not cover the prompt exactly.
        """
        difference = explain_difference(self.layout.as_dict(), ready.layout)
        if difference:
            raise IncompatiblePeerError(
                f"the prefill instance lays out its KV cache differently: {difference}"
            )
        if num_tokens is not None and ready.num_tokens != num_tokens:
            raise IncompatiblePeerError(
                f"the prefill instance has {ready.num_tokens} tokens of a prompt of {num_tokens}"
            )
        expected = self.chunks(self.layout.pages(ready.num_tokens))
        groups = {size: list(self.groups(size)) for size in {chunk.pages for chunk in expected}}
        if [(chunk.first, chunk.pages) for chunk in ready.chunks] != list(expected) or ready.groups != groups:
            raise IncompatiblePeerError(
                "the prefill instance cuts prompts differently: settings chunk_bytes and max_chunk_pages must be equal"
            )


class PullChunk(NamedTuple):
    """One chunk that D pulls.

    Attributes:
        uuid: under which P registered it.
        pages: its size.
        page_ids: int32 ``[pages]``, where each page goes; what stands in the first ``skip`` places is not used.
        skip: leading pages that D holds already and does not write.
    """

    uuid: int
    pages: int
    page_ids: np.ndarray
    skip: int


def plan_pull(ready: msg.Ready, page_ids: Sequence[int], skip_pages: int) -> list[PullChunk]:
    """Which chunks D pulls to write the prompt's pages from ``skip_pages`` on; none if it has them all.

    Raises:
        ValueError: the number of pages does not fit the prompt.
    """
    total = sum(chunk.pages for chunk in ready.chunks)
    if skip_pages < 0 or skip_pages + len(page_ids) != total:
        raise ValueError(
            f"{skip_pages} skipped and {len(page_ids)} given pages do not make the {total} of the prompt"
        )
    target = np.concatenate([np.zeros(skip_pages, np.int32), np.asarray(page_ids, np.int32)])
    return [
        PullChunk(
            chunk.uuid,
            chunk.pages,
            target[chunk.first : chunk.first + chunk.pages],
            max(0, skip_pages - chunk.first),
        )
        for chunk in ready.chunks
        if chunk.first + chunk.pages > skip_pages
    ]
