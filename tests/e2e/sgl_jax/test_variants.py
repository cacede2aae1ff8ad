"""Other settings of both servers, each with a pair of its own."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from sgl_pd_connector.testing.servers import Server
from tests.e2e.sgl_jax.deployment import PAGE, Deployment, deployment, engine
from tests.e2e.sgl_jax.prompts import greedy, prompt

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

STOP_SECONDS = 10.0


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """P: ChunkCache, chunked prefill, room for one packed copy. D: radix cache, every third step retracts a request."""
    with deployment(
        tmp_path_factory.mktemp("caches"),
        prefill=engine("--disable-radix-cache", "--chunked-prefill-size", "64"),
        decode=engine(
            "--disaggregation-decode-radix-cache",
            environment={"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "3"},
        ),
        settings={"max_packed_bytes": 1},
    ) as running:
        yield running


@pytest.fixture
def other(caches: Deployment) -> Iterator[Deployment]:
    yield caches
    caches.wait_settled()


def ask(servers: Deployment, text: str, tokens: int = 8) -> list[int]:
    out = servers.answer(
        servers.routers["mini_lb"], "/generate", {"text": text, "sampling_params": greedy(tokens)}
    )
    return list(out["output_ids"])


@pytest.mark.parametrize("length", [63, 64, 65, 66, 129, 300])
def test_a_prompt_prefilled_in_chunks_is_sent_after_the_last(other: Deployment, length: int) -> None:
    text = prompt(length, seed=60)
    assert ask(other, text) == other.model.greedy(text, 8).tokens


def test_pages_wait_while_there_is_no_room_for_their_copy(other: Deployment) -> None:
    texts = [prompt(100 + 20 * i, seed=61) for i in range(12)]
    with ThreadPoolExecutor(len(texts)) as threads:
        got = list(threads.map(lambda text: ask(other, text), texts))
    assert got == [other.model.greedy(text, 8).tokens for text in texts]


def test_what_the_decode_server_holds_is_not_pulled_again(other: Deployment) -> None:
    begin = prompt(4 * PAGE, seed=62)
    for text in (begin + "x", begin + prompt(30, seed=63), begin + "x"):
        assert ask(other, text) == other.model.greedy(text, 8).tokens
    other.wait_settled()
    cached = other.state(other.decode)["tree_cache_size"]
    assert cached >= 4 * PAGE
    out = other.answer(
        other.routers["mini_lb"], "/generate", {"text": begin + "x", "sampling_params": greedy()}
    )
    # Only what was held before counts as cached, not what was received.
    assert out["meta_info"]["cached_tokens"] == 4 * PAGE


def test_a_retracted_request_is_recomputed(other: Deployment) -> None:
    text = prompt(50, seed=64)
    assert ask(other, text, 30) == other.model.greedy(text, 30).tokens
    other.wait_for_log(other.decode, "Testing retraction")


@pytest.fixture(scope="module")
def two_devices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Tensor parallelism over two devices, which the CPU backend pretends to have: each page is split over both."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    split = engine("--tp-size", "2", environment=flags)
    with deployment(tmp_path_factory.mktemp("devices"), prefill=split, decode=split) as running:
        yield running


@pytest.mark.parametrize("length", [PAGE + 1, 100])
def test_pages_that_are_split_over_devices(two_devices: Deployment, length: int) -> None:
    text = prompt(length, seed=68)
    assert ask(two_devices, text) == two_devices.model.greedy(text, 8).tokens
    two_devices.wait_settled()
    assert two_devices.state(two_devices.decode)["kv_transfers"]["ok"] >= 1
    assert "tp_size=2" in two_devices.decode.log.read_text()


@pytest.fixture(scope="module")
def overlapped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """The overlap schedule and pages of one token, sgl-jax's defaults, on both; a failed transfer is an error."""
    both = engine(overlap=True, page_size=1, failure_policy="fail")
    with deployment(
        tmp_path_factory.mktemp("overlap"),
        prefill=both,
        decode=both,
        routers=("mini_lb", "rust"),
    ) as running:
        yield running


@pytest.mark.parametrize("length", [1, 2, PAGE, PAGE + 1, 40, 100])
def test_the_overlap_schedule(overlapped: Deployment, length: int) -> None:
    # One at a time: on the CPU sgl-jax's overlap schedule gives wrong tokens under concurrency, without us too.
    text = prompt(length, seed=65)
    assert ask(overlapped, text) == overlapped.model.greedy(text, 8).tokens
    overlapped.wait_settled()


def test_a_failed_transfer_is_an_http_error_to_the_client(overlapped: Deployment) -> None:
    text = prompt(40, seed=66)
    half = {"text": text, "sampling_params": greedy(), **overlapped.bootstrap}
    for room, server in enumerate((overlapped.prefill, overlapped.decode)):
        for extra in ({}, {"return_logprob": True}, {"return_logprob": True, "top_logprobs_num": 2}):
            response = overlapped.post(server, "/generate", {**half, **extra, "bootstrap_room": 100 + room})
            assert response.status_code == 502, response.text
            assert "KV transfer failed" in response.text
    completion = {
        "model": "m",
        "prompt": text,
        "max_tokens": 4,
        **overlapped.bootstrap,
        "bootstrap_room": 102,
    }
    response = overlapped.post(overlapped.decode, "/v1/completions", completion)
    assert response.status_code == 500
    assert "KV transfer failed" in response.text
    (event,) = overlapped.events(overlapped.decode, "/generate", {**half, "bootstrap_room": 103})
    assert "KV transfer failed" in event["error"]["message"]
    overlapped.wait_settled()
    assert ask(overlapped, text) == overlapped.model.greedy(text, 8).tokens


def test_sigterm_ends_each_server_in_time_with_requests_in_flight(overlapped: Deployment) -> None:
    """Last of this file: it uses the servers up."""
    endless = {"text": prompt(40, seed=67), "sampling_params": {**greedy(1500), "ignore_eos": True}}
    with ThreadPoolExecutor(2) as threads:
        leftover = [
            threads.submit(overlapped.post, overlapped.decode, "/generate", endless),
            threads.submit(
                overlapped.post,
                overlapped.prefill,
                "/generate",
                {**endless, **overlapped.bootstrap, "bootstrap_room": 104},
            ),
        ]
        overlapped.wait_for_log(overlapped.decode, "Decode batch")
        for server in (overlapped.prefill, overlapped.decode):
            assert _seconds_to_stop(server) < STOP_SECONDS
        for future in leftover:
            future.exception()


def _seconds_to_stop(server: Server) -> float:
    began = time.monotonic()
    server.signal(signal.SIGTERM)
    while server.running and time.monotonic() - began < 2 * STOP_SECONDS:
        time.sleep(0.05)
    return time.monotonic() - began
