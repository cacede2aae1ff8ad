"""Both halves of the connector inside vLLM's real scheduler, synchronous and asynchronous; no model, no
device.

The forward is a fake that samples token 42 whenever a request's tokens are all computed; transfers are the
unit tests' fakes. After every test nothing may be left: no request, no page, no transfer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sgl_pd_connector.base import KVPoll
from sgl_pd_connector.testing.checkpoints import make_checkpoint
from sgl_pd_connector.vllm.worker import DecodeWorker, PrefillWorker
from tests.unit.vllm.fakes import FakeManager, FakeReceiver

pytestmark = pytest.mark.e2e

PAGE = 16
TOKEN = 42
ROUTED = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 7}


class Engine:
    """vLLM's scheduler with a fake model runner behind it; ``depth`` steps are in flight, as in EngineCore."""

    def __init__(
        self, role: str, depth: int, *, policy: str = "fail", pages: int = 64, batch: int = 64
    ) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.plugins import load_general_plugins
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        load_general_plugins()
        config = EngineArgs(
            model=str(make_checkpoint()),
            dtype="float32",
            block_size=PAGE,
            max_model_len=512,
            max_num_seqs=4,
            max_num_batched_tokens=batch,
            enforce_eager=True,
            async_scheduling=depth > 1,
            kv_transfer_config={
                "kv_connector": "SglJaxConnector",
                "kv_role": role,
                "kv_load_failure_policy": policy,
            },  # type: ignore[arg-type]
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = pages
        import torch

        spec = FullAttentionSpec(block_size=PAGE, num_kv_heads=1, head_size=1, dtype=torch.float32)
        cache = KVCacheConfig(
            num_blocks=pages, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(PAGE, sha256)
        kind = AsyncScheduler if depth > 1 else Scheduler
        self.scheduler: Any = kind(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=PAGE,
            log_stats=True,
        )
        self.manager = FakeManager()
        self.worker = (PrefillWorker if role == "kv_producer" else DecodeWorker)(self.manager)
        self.outputs: dict[str, list[int]] = {}
        self.finish_reasons: dict[str, str] = {}
        self.answers: dict[str, Any] = {}
        self.computed: dict[str, int] = {}
        self._depth = depth
        self._in_flight: deque[tuple[Any, Any]] = deque()

    def add(self, name: str, tokens: int, params: dict[str, Any] | None = None, **fields: Any) -> Any:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        first = fields.pop("first_token", 0)
        immediately = fields.pop("abort_immediately", False)
        extra = {"kv_transfer_params": dict(ROUTED if params is None else params)}
        sampling = SamplingParams(**{"max_tokens": 4, "extra_args": extra, **fields})
        request = Request(
            request_id=name,
            prompt_token_ids=[(first + i) % 256 for i in range(tokens)],
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=self._hasher,
            abort_immediately=immediately,
        )
        self.scheduler.add_request(request)
        if immediately:
            self.abort(name)
        return request

    def abort(self, name: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
        self.finish_reasons.setdefault(name, "abort")

    def step(self) -> None:
        """One iteration of EngineCore's loop."""
        if self.scheduler.has_requests():
            self._dispatch()
            if len(self._in_flight) < self._depth and self.scheduler.has_requests():
                return
        if self._in_flight:
            self._settle(*self._in_flight.popleft())

    def _dispatch(self) -> None:
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        scheduled = self.scheduler.schedule()
        result = self.worker.step(scheduled.kv_connector_metadata)
        names = list(scheduled.num_scheduled_tokens)
        sampled = []
        for name in names:
            request = self.scheduler.requests[name]
            self.computed[name] = self.computed.get(name, 0) + scheduled.num_scheduled_tokens[name]
            sampled.append([] if request.is_prefill_chunk else [TOKEN])
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=KVConnectorOutput(
                finished_sending=result.finished_sending,
                finished_recving=result.finished_recving,
                failed_recving=result.failed_recving,
                kv_connector_worker_meta=result.metadata or None,
            ),
        )
        self._in_flight.append((scheduled, output))

    def _settle(self, scheduled: Any, output: Any) -> None:
        for outputs in self.scheduler.update_from_output(scheduled, output).values():
            for item in outputs.outputs:
                self.outputs.setdefault(item.request_id, []).extend(item.new_token_ids)
                if item.finish_reason is not None:
                    self.finish_reasons[item.request_id] = str(item.finish_reason)
                    self.answers[item.request_id] = item.kv_transfer_params

    def until(self, condition: Callable[[], bool], steps: int = 100) -> None:
        for _ in range(steps):
            if condition():
                return
            self.step()
        raise AssertionError("the condition does not become true")

    def drain(self) -> None:
        """Runs until nothing is left to do, as an engine that goes idle."""
        self.until(lambda: not self.scheduler.has_requests() and not self._in_flight)

    def assert_empty(self) -> None:
        assert self.scheduler.requests == {}
        assert self.scheduler.get_kv_cache_usage() == 0
        side = self.scheduler.connector._scheduler
        left = [vars(side).get(name) for name in ("_deliveries", "_phases")]
        left += [vars(self.worker).get(name) for name in ("_held", "_receivers", "_loading", "_failed")]
        assert not any(left), left

    @property
    def receiver(self) -> FakeReceiver:
        return self.manager.receivers[-1]


@pytest.fixture(params=[1, 2], ids=["sync", "async"])
def depth(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def make(depth: int) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def build(role: str, **settings: Any) -> Engine:
        engines.append(Engine(role, depth, **settings))
        return engines[-1]

    yield build
    for engine in engines:
        engine.drain()
        engine.assert_empty()


def arrived(engine: Engine, nth: int = 1) -> None:
    """For the ``nth`` request: P is ready, D allocates and loads, everything is written."""
    engine.until(lambda: len(engine.manager.receivers) == nth)
    engine.receiver.state = KVPoll.WaitingForInput
    engine.until(lambda: engine.receiver.pages is not None)
    engine.receiver.state = KVPoll.Success


@pytest.mark.parametrize(
    "tokens", [1, 2, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE - 1, 3 * PAGE, 3 * PAGE + 1, 200]
)
def test_d_loads_the_whole_prompt_and_computes_its_last_token_only(
    make: Callable[..., Engine], tokens: int
) -> None:
    engine = make("kv_consumer")
    engine.add("a", tokens)
    for _ in range(5):
        engine.step()
    assert engine.scheduler.get_kv_cache_usage() == 0, "no page is allocated before P is ready"
    arrived(engine)
    engine.drain()
    assert len(engine.receiver.pages or ()) == -(-tokens // PAGE)
    assert engine.outputs["a"] == [TOKEN] * 4
    # The prompt's last token and the three sampled ones that are fed back.
    assert engine.computed["a"] == 4
    assert engine.receiver.aborted is None


def test_d_loads_only_what_its_cache_lacks(make: Callable[..., Engine]) -> None:
    engine = make("kv_consumer")
    engine.add("a", 3 * PAGE)
    arrived(engine)
    engine.drain()
    engine.add("b", 3 * PAGE + 5)
    arrived(engine, 2)
    engine.drain()
    assert engine.receiver.skipped == 3
    assert len(engine.receiver.pages or ()) == 1
    assert engine.computed["b"] == 4


def test_d_loads_nothing_that_its_cache_holds_and_tells_p(make: Callable[..., Engine]) -> None:
    engine = make("kv_consumer")
    engine.add("a", 3 * PAGE)
    arrived(engine)
    engine.drain()
    engine.add("b", 3 * PAGE + 1)
    engine.drain()
    assert engine.outputs["b"] == [TOKEN] * 4
    assert engine.receiver.aborted == "the decode server does not need the KV"
    assert engine.computed["b"] == 4


def test_prompt_logprobs_are_computed_on_d_and_p_is_told(make: Callable[..., Engine]) -> None:
    engine = make("kv_consumer")
    engine.add("a", 40, prompt_logprobs=1)
    engine.drain()
    assert engine.receiver.aborted
    assert engine.outputs["a"] == [TOKEN] * 4


@pytest.mark.parametrize("phase", ["waiting", "ready", "loading"])
def test_a_failed_transfer_ends_by_the_policy(make: Callable[..., Engine], phase: str) -> None:
    for policy in ("fail", "recompute"):
        engine = make("kv_consumer", policy=policy)
        engine.add("a", 40)
        engine.until(lambda engine=engine: bool(engine.manager.receivers))
        if phase != "waiting":
            engine.receiver.state = KVPoll.WaitingForInput
            engine.step()
        if phase == "loading":
            engine.until(lambda engine=engine: engine.receiver.pages is not None)
        engine.receiver.state = KVPoll.Failed
        engine.drain()
        if policy == "fail":
            assert engine.finish_reasons["a"] == "error"
            assert engine.outputs["a"] == []
        else:
            assert engine.outputs["a"] == [TOKEN] * 4
            assert engine.computed["a"] == 40 + 3


@pytest.mark.parametrize("phase", ["added", "waiting", "ready", "loading", "loaded", "decoding"])
def test_an_abort_in_any_phase_leaves_nothing(make: Callable[..., Engine], phase: str) -> None:
    engine = make("kv_consumer")
    engine.add("a", 40, max_tokens=50)
    if phase != "added":
        engine.until(lambda: bool(engine.manager.receivers))
    if phase in ("ready", "loading", "loaded", "decoding"):
        engine.receiver.state = KVPoll.WaitingForInput
        engine.step()
    if phase in ("loading", "loaded", "decoding"):
        engine.until(lambda: engine.receiver.pages is not None)
    if phase in ("loaded", "decoding"):
        engine.receiver.state = KVPoll.Success
        engine.step()
    if phase == "decoding":
        engine.until(lambda: len(engine.outputs.get("a", ())) > 2)
    engine.abort("a")
    engine.drain()
    assert engine.receiver.state.is_final


def test_a_request_that_vllm_rejects_after_the_router_sent_it_tells_p(make: Callable[..., Engine]) -> None:
    engine = make("kv_consumer")
    engine.add("a", 1, abort_immediately=True)
    engine.drain()
    assert engine.manager.refused == [(ROUTED["bootstrap_room"], "127.0.0.1:8998")]
    assert engine.manager.receivers == [], "vLLM's stand-in has not the prompt that P knows the request by"


def test_requests_that_do_not_fit_together_are_served_one_after_the_other(
    make: Callable[..., Engine],
) -> None:
    engine = make("kv_consumer", pages=8)
    engine.add("a", 5 * PAGE)
    engine.add("b", 5 * PAGE, first_token=100)
    engine.until(lambda: len(engine.manager.receivers) == 2)
    first, second = engine.manager.receivers
    first.state = second.state = KVPoll.WaitingForInput
    engine.until(lambda: first.pages is not None)
    for _ in range(5):
        engine.step()
    assert second.pages is None
    first.state = KVPoll.Success
    engine.until(lambda: second.pages is not None)
    second.state = KVPoll.Success
    engine.drain()
    assert engine.outputs == {"a": [TOKEN] * 4, "b": [TOKEN] * 4}


def test_a_preempted_request_is_recomputed_locally(make: Callable[..., Engine]) -> None:
    engine = make("kv_consumer", pages=10)
    requests = [
        engine.add(name, 4 * PAGE - 4, first_token=first, max_tokens=40)
        for name, first in (("a", 0), ("b", 100))
    ]
    engine.until(lambda: len(engine.manager.receivers) == 2)
    for receiver in engine.manager.receivers:
        receiver.state = KVPoll.WaitingForInput
    engine.until(lambda: all(receiver.pages for receiver in engine.manager.receivers))
    for receiver in engine.manager.receivers:
        receiver.state = KVPoll.Success
    engine.until(lambda: not engine.scheduler.has_requests(), steps=300)
    assert engine.outputs == {"a": [TOKEN] * 40, "b": [TOKEN] * 40}
    assert sum(request.num_preemptions for request in requests) > 0, "the pool is too large for this test"
    assert len(engine.manager.receivers) == 2, "P's copy is fetched once"


@pytest.mark.parametrize("tokens", [1, PAGE - 1, PAGE, PAGE + 1, 150])
def test_p_sends_all_pages_and_answers_after_one_token(make: Callable[..., Engine], tokens: int) -> None:
    engine = make("kv_producer")
    engine.add("a", tokens, max_tokens=50, min_tokens=10)
    engine.drain()
    (sender,) = engine.manager.senders
    assert len(sender.pages or ()) == -(-tokens // PAGE)
    assert engine.outputs["a"] == [TOKEN]
    assert engine.answers["a"] is None


def test_p_sends_cached_pages_too(make: Callable[..., Engine]) -> None:
    engine = make("kv_producer")
    engine.add("a", 100)
    engine.drain()
    engine.add("b", 100)
    engine.drain()
    first, second = engine.manager.senders
    assert first.key == second.key
    assert (first.pages or [])[:6] == (second.pages or [])[:6]
    assert engine.computed["b"] == 4


def test_p_answers_a_sequential_proxy(make: Callable[..., Engine]) -> None:
    engine = make("kv_producer")
    engine.add("a", 40, params={"do_remote_decode": True})
    engine.drain()
    answer = engine.answers["a"]
    assert answer["do_remote_prefill"] is True
    assert (answer["bootstrap_host"], answer["bootstrap_port"]) == ("127.0.0.1", 8998)
    assert answer["bootstrap_room"] == engine.manager.senders[0].key[0]


def test_p_keeps_stepping_while_a_finished_request_waits_for_room(make: Callable[..., Engine]) -> None:
    engine = make("kv_producer", batch=16)
    engine.add("a", 40)
    engine.until(lambda: bool(engine.manager.senders))
    sender = engine.manager.senders[0]
    sender.has_room = False
    engine.until(lambda: "a" in engine.finish_reasons)
    for _ in range(5):
        engine.step()
    assert engine.scheduler.has_requests()
    assert engine.scheduler.get_kv_cache_usage() > 0
    sender.has_room = True
    engine.drain()


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_an_aborted_prefill_tells_d(make: Callable[..., Engine], steps: int) -> None:
    engine = make("kv_producer", batch=16)
    engine.add("a", 100)
    for _ in range(steps):
        engine.step()
    engine.abort("a")
    engine.drain()
    assert engine.manager.senders[0].aborted


def test_ordinary_requests_are_served_by_both(make: Callable[..., Engine]) -> None:
    for role in ("kv_producer", "kv_consumer"):
        engine = make(role)
        engine.add("a", 40, params={})
        engine.drain()
        assert engine.outputs["a"] == [TOKEN] * 4
        assert engine.computed["a"] == 40 + 3
