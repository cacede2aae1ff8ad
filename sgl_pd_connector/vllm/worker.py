"""The worker side: drives the transfers of one process, once per engine step, on the engine's thread.

It knows devices and peers but no requests, only their ids. One class per role; both take the scheduler side's
orders, let the manager touch the pools, and say what became of every transfer. Whatever goes wrong with one
transfer stays with that transfer: the engine is never told by an exception.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from sgl_pd_connector.base import BaseKVReceiver, BaseKVSender, KVPoll
from sgl_pd_connector.vllm.metadata import StepMetadata, Transfer, WorkerMetadata

logger = logging.getLogger(__name__)

_INTERNAL = "internal error, see the log of the {side} server"


class Manager(Protocol):
    """What is used of `JaxTransferKVManager`."""

    def create_sender(self, room: int, prompt: bytes = b"", num_tokens: int = 0) -> BaseKVSender: ...

    def create_receiver(
        self, room: int, prompt: bytes = b"", num_tokens: int | None = None, bootstrap_addr: str | None = None
    ) -> BaseKVReceiver: ...

    def refuse(self, room: int, reason: str, bootstrap_addr: str | None = None) -> None: ...

    def step(self) -> None: ...


@dataclass(slots=True)
class StepResult:
    """What a step brought about, in vLLM's terms.

    Attributes:
        finished_sending: held requests whose pages vLLM frees now.
        finished_recving: loads that ended; no page of theirs is written any more.
        failed_recving: those of them that hold no valid KV.
        metadata: for the scheduler side.
    """

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)
    metadata: WorkerMetadata = field(default_factory=WorkerMetadata)


class WorkerSide(Protocol):
    """The one hook that both roles have."""

    def step(self, orders: StepMetadata) -> StepResult:
        """Runs after the step's forward was dispatched, also in steps without one."""


class RunnerPools:
    """`KVRunner` over tpu-inference's runner, whose list of pools is replaced by every forward."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def get_pools(self) -> list[Any]:
        return list(self._runner.kv_caches)

    def set_pools(self, pools: list[Any]) -> None:
        self._runner.kv_caches = list(pools)


@dataclass(slots=True)
class _Send:
    sender: BaseKVSender
    sent: bool = False
    reported: bool = False


class PrefillWorker:
    """P: copies prompts out of the pools and reports when their pages may be freed."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._sends: dict[str, _Send] = {}
        self._held: set[str] = set()

    def step(self, orders: StepMetadata) -> StepResult:
        for request_id, transfer in orders.opened.items():
            with self._contained(request_id):
                sender = self._manager.create_sender(transfer.room, transfer.prompt, transfer.num_tokens)
                self._sends[request_id] = _Send(sender)
        for request_id, reason in orders.dropped.items():
            self._abort(request_id, reason)
        for request_id in orders.preempted:
            if request_id in self._sends and not self._sends[request_id].sender.released:
                self._abort(request_id, "preempted on the prefill server before its pages were copied")
        for request_id, page_ids in orders.sends.items():
            with self._contained(request_id):
                if (send := self._sends.get(request_id)) is not None:
                    send.sent = True
                    send.sender.send(page_ids)
        self._held.update(orders.held)
        _step_manager(self._manager, self._sends, self._abort)
        return self._report()

    def _report(self) -> StepResult:
        result = StepResult()
        for request_id, send in list(self._sends.items()):
            if not send.sent:
                continue
            if send.sender.released and not send.reported:
                send.reported = True
                result.metadata.released.append(request_id)
            if send.reported and send.sender.poll().is_final:
                del self._sends[request_id]
        result.finished_sending = {
            request_id
            for request_id in self._held
            if request_id not in self._sends or self._sends[request_id].reported
        }
        self._held -= result.finished_sending
        return result

    @contextmanager
    def _contained(self, request_id: str) -> Iterator[None]:
        try:
            yield
        except Exception:
            logger.exception("request %s: the transfer to the decode server failed", request_id)
            self._abort(request_id, _INTERNAL.format(side="prefill"))

    def _abort(self, request_id: str, reason: str) -> None:
        if (send := self._sends.pop(request_id, None)) is not None:
            _abort_quietly(request_id, send.sender, reason)


class DecodeWorker:
    """D: asks P for prompts, has them written into the allocated pages, and reports how that ended."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._receivers: dict[str, BaseKVReceiver] = {}
        self._loading: set[str] = set()
        self._failed: dict[str, str] = {}

    def step(self, orders: StepMetadata) -> StepResult:
        result = StepResult()
        for request_id, transfer in orders.opened.items():
            with self._contained(request_id):
                self._receivers[request_id] = self._open(transfer)
        for request_id, transfer in orders.refused.items():
            with self._contained(request_id):
                reason = "the decode server refused the request"
                self._manager.refuse(transfer.room, reason, transfer.bootstrap_addr)
        for request_id, reason in orders.dropped.items():
            self._abort(request_id, reason)
            if request_id in self._loading:
                self._loading.discard(request_id)
                result.finished_recving.add(request_id)
        for request_id, load in orders.loads.items():
            self._loading.add(request_id)
            with self._contained(request_id):
                receiver = self._receivers.get(request_id)
                if receiver is not None and receiver.poll() is KVPoll.WaitingForInput:
                    receiver.receive(load.page_ids, load.skip_pages)
        _step_manager(self._manager, self._receivers, self._fail)
        self._report(result)
        return result

    def _open(self, transfer: Transfer) -> BaseKVReceiver:
        return self._manager.create_receiver(
            transfer.room, transfer.prompt, transfer.num_tokens, transfer.bootstrap_addr
        )

    def _report(self, result: StepResult) -> None:
        for request_id, receiver in list(self._receivers.items()):
            state = receiver.poll()
            if state is KVPoll.WaitingForInput:
                result.metadata.ready.append(request_id)
            elif state is KVPoll.Failed:
                self._failed[request_id] = str(receiver.failure_exception())
                del self._receivers[request_id]
            elif state is KVPoll.Success:
                del self._receivers[request_id]
                self._loading.discard(request_id)
                result.finished_recving.add(request_id)
        # A load whose receiver is gone failed, now or before its pages were allocated.
        lost = self._loading - self._receivers.keys()
        self._loading -= lost
        result.finished_recving |= lost
        result.failed_recving |= lost
        result.metadata.failed, self._failed = self._failed, {}

    @contextmanager
    def _contained(self, request_id: str) -> Iterator[None]:
        try:
            yield
        except Exception:
            logger.exception("request %s: the transfer from the prefill server failed", request_id)
            self._fail(request_id, _INTERNAL.format(side="decode"))

    def _fail(self, request_id: str, reason: str) -> None:
        self._failed[request_id] = reason
        self._abort(request_id, reason)

    def _abort(self, request_id: str, reason: str) -> None:
        if (receiver := self._receivers.pop(request_id, None)) is not None:
            _abort_quietly(request_id, receiver, reason)


def _step_manager(manager: Manager, active: dict[str, Any], end: Callable[[str, str], None]) -> None:
    """Lets the manager touch the pools. If that breaks, no transfer can be trusted: all are ended."""
    try:
        manager.step()
    except Exception:
        logger.exception("the step of the transfer manager failed; ending %d transfers", len(active))
        for request_id in list(active):
            end(request_id, "internal error in the transfer manager, see the log")


def _abort_quietly(request_id: str, transfer: BaseKVSender | BaseKVReceiver, reason: str) -> None:
    try:
        transfer.abort(reason)
    except Exception:
        logger.exception("request %s: cannot abort its transfer", request_id)
