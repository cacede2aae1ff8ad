"""vLLM's scheduler and the transfer manager, as small as the connector's two halves need them.

`Engine` plays the part of vLLM's scheduler for one request at a time: it calls the hooks in vLLM's order and
checks vLLM's own assertions (``vllm/v1/core/sched/scheduler.py`` of 0.32).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from sgl_pd_connector.base import BaseKVReceiver, BaseKVSender, KVPoll
from sgl_pd_connector.errors import PDError, TransferError
from sgl_pd_connector.vllm.metadata import StepMetadata
from sgl_pd_connector.vllm.scheduler import SchedulerSide
from sgl_pd_connector.vllm.worker import StepResult, WorkerSide

PAGE = 4


def request(name: str, num_tokens: int, **fields: Any) -> Any:
    known: dict[str, Any] = {
        "request_id": name,
        "prompt_token_ids": list(range(num_tokens)),
        "num_prompt_tokens": num_tokens,
        "num_computed_tokens": 0,
        "max_tokens": 16,
        "kv_transfer_params": {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 7},
        "lora_request": None,
        "cache_salt": None,
        "mm_features": [],
        "abort_immediately": False,
        "status": SimpleNamespace(name="RUNNING"),
    }
    return SimpleNamespace(**{**known, **fields})


class _Fake:
    """What both sides of a transfer have; tests set ``state``."""

    def __init__(self, room: int, prompt: bytes, num_tokens: int | None) -> None:
        self.key = (room, prompt, num_tokens)
        self.state = KVPoll.Bootstrapping
        self.pages: list[int] | None = None
        self.aborted: str | None = None

    def poll(self) -> KVPoll:
        return self.state

    def abort(self, reason: str) -> None:
        if not self.state.is_final:
            self.aborted, self.state = reason, KVPoll.Failed

    def failure_exception(self) -> PDError:
        return TransferError(self.aborted or "peer said no")


class FakeSender(_Fake, BaseKVSender):
    has_room = True

    def send(self, kv_indices: Sequence[int]) -> bool:
        assert self.pages is None, "send() is called once"
        self.pages = list(kv_indices)
        return self.released

    @property
    def released(self) -> bool:
        return self.state is KVPoll.Failed or (self.pages is not None and self.has_room)


class FakeReceiver(_Fake, BaseKVReceiver):
    skipped = 0

    def __init__(self, room: int, prompt: bytes, num_tokens: int | None, bootstrap_addr: str | None) -> None:
        super().__init__(room, prompt, num_tokens)
        self.address = bootstrap_addr

    def receive(self, kv_indices: Sequence[int], skip_pages: int = 0) -> None:
        assert self.state is KVPoll.WaitingForInput
        self.pages, self.skipped, self.state = list(kv_indices), skip_pages, KVPoll.Transferring


class FakeManager:
    def __init__(self) -> None:
        self.senders: list[FakeSender] = []
        self.receivers: list[FakeReceiver] = []
        self.refused: list[tuple[int, str | None]] = []
        self.steps = 0
        self.broken = False

    def create_sender(self, room: int, prompt: bytes = b"", num_tokens: int = 0) -> FakeSender:
        self.senders.append(FakeSender(room, prompt, num_tokens))
        return self.senders[-1]

    def create_receiver(
        self, room: int, prompt: bytes = b"", num_tokens: int | None = None, bootstrap_addr: str | None = None
    ) -> FakeReceiver:
        self.receivers.append(FakeReceiver(room, prompt, num_tokens, bootstrap_addr))
        return self.receivers[-1]

    def refuse(self, room: int, reason: str, bootstrap_addr: str | None = None) -> None:
        self.refused.append((room, bootstrap_addr))

    def step(self) -> None:
        self.steps += 1
        if self.broken:
            raise RuntimeError("the device is gone")


class Engine:
    """One scheduler side and one worker side, stepped as vLLM does it. ``live`` is ``Scheduler.requests``."""

    def __init__(self, scheduler: SchedulerSide, worker: WorkerSide) -> None:
        self.scheduler = scheduler
        self.worker = worker
        self.live: dict[str, Any] = {}
        self.finished: set[str] = set()
        self.freed: list[str] = []
        self.orders = StepMetadata()
        self.result = StepResult()

    def add(self, new: Any) -> Any:
        self.live[new.request_id] = new
        self.scheduler.add(new)
        return new

    def step(
        self,
        scheduled: dict[str, int] | None = None,
        pages: dict[str, list[int]] | None = None,
        preempted: Sequence[str] = (),
    ) -> StepResult:
        """Schedules ``scheduled`` tokens per request, runs the worker, and takes what it reports."""
        scheduled = scheduled or {}
        output = SimpleNamespace(
            num_scheduled_tokens=scheduled,
            preempted_req_ids=set(preempted),
            kv_connector_block_state=SimpleNamespace(get_block_ids=lambda name: ((pages or {})[name],)),
        )
        self.orders = self.scheduler.build(output)
        for name, tokens in scheduled.items():
            self.live[name].num_computed_tokens += tokens
        self.result = self.worker.step(self.orders)
        assert self.result.failed_recving <= self.result.finished_recving
        return self.result

    def settle(self) -> None:
        """vLLM's ``update_from_output`` for the last step, after the requests' own outputs were handled."""
        self.scheduler.update(self.result.metadata, self.result.finished_recving)
        for name in self.result.finished_sending | self.result.finished_recving:
            assert name in self.live, "a reported request must still be known to vLLM"
            if name in self.finished:
                self._free(name)
        for name in self.result.finished_sending:
            assert name in self.finished, "vLLM frees pages of finished requests only"

    def run(self, *args: Any, **kwargs: Any) -> StepResult:
        result = self.step(*args, **kwargs)
        self.settle()
        return result

    def finish(self, name: str, status: str = "FINISHED_LENGTH_CAPPED", *, loading: bool = False) -> Any:
        """Ends a request; one that was ``loading`` keeps its pages until it is reported, as in vLLM."""
        ended = self.live[name]
        ended.status = SimpleNamespace(name=status)
        self.finished.add(name)
        delay, answer = self.scheduler.finished(ended)
        if not (delay or loading):
            self._free(name)
        return answer

    def _free(self, name: str) -> None:
        del self.live[name]
        self.freed.append(name)
