"""What both schedulers share: sgl-jax's own event loop with a stop in every step where transfers move on."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sgl_pd_connector.sgl_jax import compat, repairs
from sgl_pd_connector.sgl_jax.pools import SchedulerPools
from sgl_pd_connector.sgl_jax.server_args import DisaggregationArgs
from sgl_pd_connector.transfer import JaxTransferKVManager, kv_args

if TYPE_CHECKING:
    from sgl_pd_connector.sgl_jax.surface import SchedulerSurface as _Scheduler
else:
    _Scheduler = object

logger = logging.getLogger(__name__)

WAIT_BUSY_MS = 1
"""How long an idle scheduler sleeps at most while transfers are in flight. A new request wakes it."""

WAIT_IDLE_MS = 20
"""The same without transfers; the manager still wants a step now and then."""


class _Stop(Exception):
    """SIGTERM: leaves sgl-jax's event loop, which has no other end."""


class DisaggregationSchedulerMixin(_Scheduler):
    """Mixed in before sgl-jax's ``Scheduler``.

    sgl-jax's loops call `recv_requests` once at the top of every step, paused or idle or not. That is where this
    package's work is done: never waiting, on the scheduler's thread, the owner of the pools, between two forwards.
    """

    disaggregation: DisaggregationArgs
    kv_manager: JaxTransferKVManager
    _stopping = False

    def _start_transfers(self, args: DisaggregationArgs) -> None:
        """Makes the manager, once the engine's pools exist, and registers with the bootstrap server."""
        self.disaggregation = args
        pools = SchedulerPools(self)
        self.kv_manager = JaxTransferKVManager(
            kv_args(pools.get_pools(), self.page_size),
            args.bootstrap_addr,
            role="prefill" if args.mode == "prefill" else "decode",
            config=args.config,
        )
        self.kv_manager.register_runner(pools)

    def _run_event_loop(self) -> None:
        """sgl-jax's loop, plain or overlapped, until SIGTERM."""
        signal.signal(signal.SIGTERM, self._on_sigterm)
        try:
            if self.enable_overlap:
                super().event_loop_overlap()
            else:
                super().event_loop_normal()
        except _Stop:
            logger.info("SIGTERM: ending %d transfers", self._num_transfers())
        finally:
            self.kv_manager.close()

    def _on_sigterm(self, signum: int, frame: object) -> None:
        self._stopping = True

    def recv_requests(self) -> list[Any]:
        if self._stopping:
            raise _Stop
        self.kv_manager.step()
        self._poll_transfers()
        if self.cur_batch is None or self._engine_paused:
            self.recv_from_tokenizer.poll(WAIT_BUSY_MS if self._num_transfers() else WAIT_IDLE_MS)
        return super().recv_requests()

    def _poll_transfers(self) -> None:
        """Looks at every transfer and moves its request on."""
        raise NotImplementedError

    def _num_transfers(self) -> int:
        """Transfers, and pages held for them, that have not come to an end."""
        raise NotImplementedError

    def _accept(self, req: Any) -> bool:
        """A request enters the waiting queue. False: it is kept elsewhere for now."""
        raise NotImplementedError

    def _add_request_to_queue(self, req: Any) -> None:
        if self._enters(req):
            super()._add_request_to_queue(req)

    def _extend_requests_to_queue(self, reqs: list[Any], is_retracted: bool = False) -> None:
        super()._extend_requests_to_queue([req for req in reqs if self._enters(req)], is_retracted)

    def _enters(self, req: Any) -> bool:
        repairs.uniform_logprobs(req)
        return self._accept(req)

    def get_new_batch_prefill(self) -> Any:
        compat.forget_full(self.running_batch)
        return super().get_new_batch_prefill()

    def _can_flush_cache(self) -> tuple[bool, str]:
        # Also sgl-jax's test for "nothing is going on", after which it counts every page.
        if count := self._num_transfers():
            return False, f"Cache not flushed because there are {count} KV transfers."
        return super()._can_flush_cache()

    def get_internal_state(self, recv_req: Any) -> Any:
        """``/get_server_info`` says how transfers stand, too."""
        out = super().get_internal_state(recv_req)
        out.internal_state["kv_transfers"] = asdict(self.kv_manager.stats())
        return out

    def stream_output(self, reqs: list[Any], *args: Any, **kwargs: Any) -> None:
        super().stream_output(list(self._answerable(reqs)), *args, **kwargs)

    def _answer(self, req: Any) -> None:
        """Streams out one request by itself. As a batch with logprobs, in which one without them has empty lists."""
        self.stream_output([req], return_logprob=True, return_output_logprob_only=False)

    def _answerable(self, reqs: Iterable[Any]) -> Iterable[Any]:
        """Of the requests to be streamed out, those that may be."""
        return reqs
