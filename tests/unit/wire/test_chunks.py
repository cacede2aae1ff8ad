"""The chunk plan: pages into chunks, layers into buffers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_pd_connector.wire.chunks import Chunk, ladder, plan_chunks, plan_groups

pytestmark = pytest.mark.unit

LARGEST = st.integers(0, 10).map(lambda bit: 1 << bit)


def test_an_example() -> None:
    assert ladder(8) == (8, 4, 2, 1)
    assert plan_chunks(13, 64) == (Chunk(0, 8), Chunk(8, 4), Chunk(12, 1))
    assert plan_chunks(13, 4) == (Chunk(0, 4), Chunk(4, 4), Chunk(8, 4), Chunk(12, 1))


@given(st.integers(1, 5000), LARGEST)
def test_chunks_cover_the_prompt_exactly_in_ladder_sizes(pages: int, largest: int) -> None:
    chunks = plan_chunks(pages, largest)
    covered = [page for chunk in chunks for page in range(chunk.first, chunk.first + chunk.pages)]
    assert covered == list(range(pages))
    assert {chunk.pages for chunk in chunks} <= set(ladder(largest))


@given(st.integers(1, 5000), LARGEST)
def test_there_are_no_more_chunks_than_the_ladder_needs(pages: int, largest: int) -> None:
    assert len(plan_chunks(pages, largest)) == pages // largest + (pages % largest).bit_count()


@given(LARGEST)
def test_every_prompt_length_is_served_by_log2_shapes(largest: int) -> None:
    assert len(ladder(largest)) == largest.bit_length()


@pytest.mark.parametrize("pages", [0, -1])
def test_no_pages_is_an_error(pages: int) -> None:
    with pytest.raises(ValueError, match=f"not {pages}"):
        plan_chunks(pages, 8)


@pytest.mark.parametrize("largest", [0, -2, 3, 48])
def test_the_largest_chunk_is_a_power_of_two(largest: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        ladder(largest)


@given(st.integers(1, 200), st.integers(1, 1 << 28), st.integers(1, 1 << 26))
def test_groups_cover_the_layers_evenly_and_keep_to_the_size(
    layers: int, layer_bytes: int, chunk_bytes: int
) -> None:
    groups = plan_groups(layers, layer_bytes, chunk_bytes)
    assert sum(groups) == layers
    assert max(groups) - min(groups) <= 1
    assert max(groups) == 1 or max(groups) * layer_bytes <= chunk_bytes


@given(st.integers(1, 200), st.integers(1, 1 << 28), st.integers(1, 1 << 26))
def test_there_are_no_more_buffers_than_the_size_needs(
    layers: int, layer_bytes: int, chunk_bytes: int
) -> None:
    per_buffer = max(1, chunk_bytes // layer_bytes)
    assert len(plan_groups(layers, layer_bytes, chunk_bytes)) == -(-layers // per_buffer)
