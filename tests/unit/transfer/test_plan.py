"""READY as P makes it and as D checks it, and which chunks D pulls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_pd_connector.errors import IncompatiblePeerError
from sgl_pd_connector.transfer.plan import ChunkPlanner, plan_pull
from sgl_pd_connector.wire import messages as msg
from sgl_pd_connector.wire.layout import KVLayout

pytestmark = pytest.mark.unit

LAYOUT = KVLayout(num_layers=4, page_size=16, dtype="bfloat16", page_shape=(16, 2), sharding=(1, 1))
PLANNER = ChunkPlanner(LAYOUT, chunk_bytes=4096, max_chunk_pages=8)


def ready(num_tokens: int, planner: ChunkPlanner = PLANNER) -> msg.Ready:
    chunks = planner.chunks(planner.layout.pages(num_tokens))
    made = planner.ready(1, 2, num_tokens, chunks, range(100, 100 + len(chunks)))
    decoded = msg.decode(msg.encode(made))
    assert isinstance(decoded, msg.Ready)
    return decoded


def test_every_compiled_shape_is_known_beforehand() -> None:
    assert PLANNER.groups_by_size == {8: (4,), 4: (4,), 2: (4,), 1: (4,)}
    assert replace(PLANNER, chunk_bytes=1024).groups_by_size == {8: (2, 2), 4: (4,), 2: (4,), 1: (4,)}


@given(st.integers(1, 2000))
def test_d_accepts_what_an_equal_p_offers(num_tokens: int) -> None:
    PLANNER.check(ready(num_tokens), num_tokens)
    PLANNER.check(ready(num_tokens), None)


def test_another_layout_is_refused_with_both_values() -> None:
    other = replace(PLANNER, layout=replace(LAYOUT, dtype="float16"))
    with pytest.raises(IncompatiblePeerError, match="dtype: ours bfloat16, theirs float16"):
        PLANNER.check(ready(40, other), 40)


def test_another_number_of_tokens_is_refused_with_both_values() -> None:
    with pytest.raises(IncompatiblePeerError, match="has 40 tokens of a prompt of 41"):
        PLANNER.check(ready(40), 41)


@pytest.mark.parametrize("change", [{"chunk_bytes": 128}, {"max_chunk_pages": 2}])
def test_another_way_to_cut_is_refused_with_the_settings(change: dict[str, Any]) -> None:
    with pytest.raises(IncompatiblePeerError, match="chunk_bytes and max_chunk_pages"):
        PLANNER.check(ready(200, replace(PLANNER, **change)), 200)


def test_a_prompt_of_too_many_chunks_is_refused_with_the_setting() -> None:
    planner = replace(PLANNER, max_chunk_pages=1)
    assert len(planner.chunks(msg.MAX_CHUNKS)) == msg.MAX_CHUNKS
    with pytest.raises(IncompatiblePeerError, match=r"10001 chunks, at most 10000 .*max_chunk_pages = 1"):
        planner.chunks(msg.MAX_CHUNKS + 1)
    with pytest.raises(IncompatiblePeerError, match="chunks, at most"):
        PLANNER.check(ready(200).model_copy(update={"num_tokens": 2**60}), None)


@pytest.mark.parametrize(
    "damage",
    [
        lambda chunks: chunks[:-1],
        lambda chunks: [*chunks, chunks[-1]],
        lambda chunks: chunks[::-1],
        lambda chunks: [chunks[0].model_copy(update={"first": 1}), *chunks[1:]],
        lambda chunks: [chunks[0].model_copy(update={"pages": 64}), *chunks[1:]],
    ],
)
def test_chunks_that_do_not_cover_the_prompt_are_refused(damage: Any) -> None:
    made = ready(200)
    with pytest.raises(IncompatiblePeerError):
        PLANNER.check(made.model_copy(update={"chunks": damage(made.chunks)}), 200)


@given(st.integers(1, 600), st.data())
def test_every_page_that_is_not_skipped_is_pulled_once_and_goes_where_it_belongs(
    tokens: int, data: st.DataObject
) -> None:
    offer = ready(tokens)
    total = LAYOUT.pages(tokens)
    skip = data.draw(st.integers(0, total))
    page_ids = [1000 + page for page in range(skip, total)]
    written: dict[int, int] = {}
    by_uuid = {chunk.uuid: chunk for chunk in offer.chunks}
    for chunk in plan_pull(offer, page_ids, skip):
        source = by_uuid.pop(chunk.uuid)
        assert chunk.pages == source.pages == len(chunk.page_ids)
        assert chunk.page_ids.dtype == np.int32
        assert 0 <= chunk.skip < chunk.pages, "a chunk of which nothing is written is not pulled"
        for place in range(chunk.skip, chunk.pages):
            written[source.first + place] = int(chunk.page_ids[place])
    assert written == {page: 1000 + page for page in range(skip, total)}


def test_with_everything_skipped_nothing_is_pulled() -> None:
    assert plan_pull(ready(200), [], LAYOUT.pages(200)) == []


@pytest.mark.parametrize(
    ("given_pages", "skip"), [(12, 0), (14, 0), (13, 1), (12, 2), (14, -1), (0, 0), (0, 14)]
)
def test_a_wrong_number_of_pages_is_an_error_with_the_numbers(given_pages: int, skip: int) -> None:
    with pytest.raises(ValueError, match=f"{skip} skipped and {given_pages} given .* 13"):
        plan_pull(ready(200), list(range(given_pages)), skip)
