"""The load generator, against a server that says exactly what a test wants."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from sgl_pd_connector.bench.load import Answer, Planned, poisson, run_load, summary
from sgl_pd_connector.bench.workloads import WORKLOADS

pytestmark = pytest.mark.unit


class Scripted(BaseHTTPRequestHandler):
    """The first token of a prompt says what becomes of it: 0 is answered, 1 breaks off, 2 is refused, 3 fails late."""

    bodies: list[dict[str, Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        kind = body["prompt"][0]
        self.send_response(503 if kind == 2 else 200)
        self.end_headers()
        if kind == 2:
            self.wfile.write(b"too busy")
            return
        for _ in range(1 if kind == 1 else body["max_tokens"]):
            self.event({"choices": [{"token_ids": [7]}]})
        if kind == 3:
            self.event({"error": {"message": "transfer failed"}})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, data: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Scripted.bodies = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Scripted) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_every_token_has_its_time(url: str) -> None:
    (answer,) = run_load(url, "m", [Planned(0.0, [0, 5], 3)])
    assert answer.ok
    assert len(answer.tokens) == 3
    assert answer.sent <= answer.tokens[0] <= answer.tokens[1] <= answer.tokens[2]
    (body,) = Scripted.bodies
    assert (body["model"], body["prompt"], body["max_tokens"], body["stream"]) == ("m", [0, 5], 3, True)


@pytest.mark.parametrize(
    ("kind", "error"), [(1, "1 of 3 tokens"), (2, "status 503.*too busy"), (3, "transfer failed")]
)
def test_what_goes_wrong_is_a_failure_of_that_request_alone(url: str, kind: int, error: str) -> None:
    answers = run_load(url, "m", [Planned(0.0, [0], 3), Planned(0.0, [kind], 3)])
    assert [answer.ok for answer in answers] == [True, False]
    found = summary(answers)
    assert found["failures"] == 1
    with pytest.raises(AssertionError, match=error):
        raise AssertionError(found["errors"])


def test_a_server_that_is_not_there_fails_every_request() -> None:
    found = summary(run_load("http://127.0.0.1:9", "m", [Planned(0.0, [0], 1)]))
    assert (found["requests"], found["failures"]) == (1, 1)
    assert "ttft_s" not in found


def answer(sent: float, *tokens: float) -> Answer:
    return Answer(Planned(0.0, [1], len(tokens)), sent, list(tokens))


def test_a_slow_first_token_and_a_slow_gap_show_in_the_summary() -> None:
    found = summary([answer(0.0, 1.0, 1.1, 1.2), answer(0.0, 5.0, 5.1, 9.1)])
    assert found["ttft_s"] == pytest.approx({"p50": 3.0, "p95": 4.8, "p99": 4.96})
    assert found["itl_s"]["p50"] == pytest.approx(0.1)
    assert found["itl_s"]["p99"] == pytest.approx(3.883)
    assert found["requests_per_s"] == pytest.approx(2 / 9.1)


def test_poisson_arrivals_have_the_rate_asked_for() -> None:
    times = poisson(4.0, 2000, random.Random(0))
    assert times == sorted(times)
    assert 2000 / times[-1] == pytest.approx(4.0, rel=0.1)


@pytest.mark.parametrize("quick", [True, False])
def test_workloads_differ_between_systems_only_in_their_tokens(quick: bool) -> None:
    for make in WORKLOADS.values():
        first, second = make(quick, "a"), make(quick, "b")
        assert [(each.at, len(each.prompt)) for each in first] == [
            (each.at, len(each.prompt)) for each in second
        ]
        assert all(one.prompt != two.prompt for one, two in zip(first, second, strict=True))


def test_mixed_lengths_repeat_no_number_of_pages() -> None:
    pages = [-(-len(each.prompt) // 16) for each in WORKLOADS["mixed"](False, "a")]
    assert len(set(pages)) == len(pages)
