"""What D holds afterwards is, byte for byte, what P held: every element type, length and overlap."""

from __future__ import annotations

import pytest

from sgl_pd_connector.wire.rooms import prompt_digest
from tests.support.engine_pair import EnginePair, ToyPool

pytestmark = pytest.mark.integration

SMALL = {"max_chunk_pages": 8}
PAGE_BYTES = 4 * 4 * 2 * 8 * 2


def assert_equal_bytes(pair: EnginePair, p_pages: list[int], d_pages: list[int]) -> None:
    expected = pair.p.digests(p_pages)
    assert len(set(expected)) == len(expected), "the toy pages are all different"
    assert pair.d.digests(d_pages) == expected


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 4 * 8 - 1, 4 * 8, 4 * 8 + 1, 4 * 13, 4 * 63 + 1])
def test_prompts_of_any_length(pair: EnginePair, num_tokens: int) -> None:
    moved = pair.request(num_tokens)
    moved.finish()
    assert_equal_bytes(pair, moved.p_pages, moved.d_pages)
    [sent] = [r for r in pair.p.records() if r["room"]]
    [received] = pair.d.records()
    for record in (sent, received):
        assert record["outcome"] == "ok"
        assert (record["num_tokens"], record["pages"]) == (num_tokens, len(moved.p_pages))
        assert record["nbytes"] == len(moved.p_pages) * PAGE_BYTES


def test_pages_in_any_order_and_no_others_are_written(pair: EnginePair) -> None:
    before = pair.d.digests(range(64))
    p_pages, d_pages = [40, 3, 17, 60, 5, 6, 0, 63, 21], [1, 62, 30, 2, 44, 9, 63, 10, 33]
    moved = pair.request(4 * 9, p_pages=p_pages, d_pages=d_pages)
    moved.finish()
    assert_equal_bytes(pair, p_pages, d_pages)
    after = pair.d.digests(range(64))
    assert {page for page in range(64) if before[page] != after[page]} <= set(d_pages)


def test_the_native_transfer_reports_no_leftovers(pair: EnginePair) -> None:
    pair.request(100).finish()
    p, d = pair.p.stats(), pair.d.stats()
    assert (p["packed_bytes"], p["registered_bytes"], p["in_flight"], p["waiting_sends"]) == (0, 0, 0, 0)
    assert (d["pulled_bytes"], d["in_flight"]) == (0, 0)
    assert (p["bad_frames"], d["bad_frames"]) == (0, 0)


@pytest.mark.parametrize(("skip", "pulled"), [(1, 13), (7, 13), (8, 5), (9, 5), (12, 1)])
def test_pages_that_d_already_holds_are_not_written(pair: EnginePair, skip: int, pulled: int) -> None:
    """Nor counted, except as bytes of a chunk (8, 4 and 1 pages) that is pulled for its other pages."""
    moved = pair.request(4 * 13)
    moved.sender.send(moved.p_pages)
    moved.receiver.wait("WaitingForInput")
    before = pair.d.digests(range(64))
    moved.receiver.receive(moved.d_pages[skip:], skip=skip)
    moved.receiver.wait("Success")
    moved.sender.wait("Success")
    assert_equal_bytes(pair, moved.p_pages[skip:], moved.d_pages[skip:])
    after = pair.d.digests(range(64))
    assert {page for page in range(64) if before[page] != after[page]} <= set(moved.d_pages[skip:])
    sent, received = pair.p.records()[-1], pair.d.records()[-1]
    assert (sent["pages"], sent["nbytes"]) == (13, 13 * PAGE_BYTES)
    assert (received["pages"], received["nbytes"]) == (13 - skip, pulled * PAGE_BYTES)


def test_a_prompt_that_d_holds_in_full_is_success_on_both_sides(pair: EnginePair) -> None:
    moved = pair.request(4 * 13)
    moved.sender.send(moved.p_pages)
    moved.receiver.wait("WaitingForInput")
    moved.receiver.receive([], skip=13)
    moved.receiver.wait("Success")
    moved.sender.wait("Success")


def test_many_requests_at_once(pair: EnginePair) -> None:
    before = pair.p.stats()["compilations"], pair.d.stats()["compilations"]
    requests = [
        pair.request(
            4 * (i % 3 + 1), p_pages=range(i, i + i % 3 + 1), d_pages=range(3 * i, 3 * i + i % 3 + 1)
        )
        for i in range(20)
    ]
    for moved in reversed(requests):
        assert moved.sender.send(moved.p_pages)
    for moved in requests:
        moved.receiver.wait("WaitingForInput")
        moved.receiver.receive(moved.d_pages)
    for moved in requests:
        moved.receiver.wait("Success")
        moved.sender.wait("Success")
    for moved in requests:
        assert_equal_bytes(pair, moved.p_pages, moved.d_pages)
    assert (pair.p.stats()["compilations"], pair.d.stats()["compilations"]) == before, (
        "nothing is compiled later"
    )


def test_several_prompts_in_one_room_are_not_mixed_up(pair: EnginePair) -> None:
    prompts = [prompt_digest([i]) for i in range(3)]
    receivers = [pair.d.receiver(f"list-r{i}", 10**9, p, 8, pair.p.bootstrap) for i, p in enumerate(prompts)]
    senders = [pair.p.sender(f"list-s{i}", 10**9, p, 8) for i, p in reversed(list(enumerate(prompts)))]
    for i, sender in enumerate(reversed(senders)):
        sender.send([10 * i, 10 * i + 1])
    for i, receiver in enumerate(receivers):
        receiver.wait("WaitingForInput")
        receiver.receive([5 * i, 5 * i + 1])
    for transfer in (*receivers, *senders):
        transfer.wait("Success")
    for i in range(3):
        assert_equal_bytes(pair, [10 * i, 10 * i + 1], [5 * i, 5 * i + 1])


def test_samples_of_one_prompt_are_each_served_once(pair: EnginePair) -> None:
    prompt = prompt_digest([7])
    senders = [pair.p.sender(f"n-s{i}", 10**9 + 1, prompt, 8) for i in range(3)]
    receivers = [pair.d.receiver(f"n-r{i}", 10**9 + 1, prompt, 8, pair.p.bootstrap) for i in range(3)]
    for sender in senders:
        sender.send([20, 21])
    for i, receiver in enumerate(receivers):
        receiver.wait("WaitingForInput")
        receiver.receive([2 * i, 2 * i + 1])
    for transfer in (*receivers, *senders):
        transfer.wait("Success")
    for i in range(3):
        assert_equal_bytes(pair, [20, 21], [2 * i, 2 * i + 1])


@pytest.mark.parametrize("dtype", ["float32", "int8", "float8_e4m3fn"])
def test_element_types(dtype: str) -> None:
    # bfloat16 is that of all the other tests. Random bytes hold every NaN and denormal.
    with EnginePair(ToyPool(dtype=dtype), p_config=SMALL, d_config=SMALL, own_bootstrap=False) as pair:
        for num_tokens in (2, 4 * 11 + 1):
            moved = pair.request(num_tokens)
            moved.finish()
            assert_equal_bytes(pair, moved.p_pages, moved.d_pages)
