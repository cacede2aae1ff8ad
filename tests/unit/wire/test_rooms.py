"""The digest that tells the prompts of one room apart."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_pd_connector.wire.rooms import DIGEST_BYTES, prompt_digest

pytestmark = pytest.mark.unit

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=20)


@given(TOKENS, st.binary(max_size=40))
def test_equal_prompts_have_equal_digests_however_they_are_held(tokens: list[int], salt: bytes) -> None:
    digest = prompt_digest(tokens, salt)
    assert len(digest) == DIGEST_BYTES
    assert prompt_digest(tuple(tokens), salt) == digest
    assert prompt_digest(np.array(tokens, np.int64), salt) == digest


@given(TOKENS, TOKENS, st.binary(max_size=40), st.binary(max_size=40))
def test_different_prompts_or_salts_have_different_digests(
    a: list[int], b: list[int], x: bytes, y: bytes
) -> None:
    assert (prompt_digest(a, x) == prompt_digest(b, y)) == ((a, x) == (b, y))


def test_tokens_are_not_confused_with_salt_or_with_their_bytes() -> None:
    assert (
        len(
            {
                prompt_digest([1, 2]),
                prompt_digest([2, 1]),
                prompt_digest([1], b"\2\0\0\0"),
                prompt_digest([513]),
            }
        )
        == 4
    )


def test_the_digest_is_the_same_in_every_process() -> None:
    # A literal, because P and D compute it in two processes, perhaps of two versions.
    assert prompt_digest([1, 2, 3], b"lora").hex() == "7b70e2fcca51a8b20348fdef2adec483"


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_that_does_not_fit_is_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        prompt_digest([token])
