"""What this package calls, overrides and reads of sgl-jax's classes, written down with its signatures.

The mixins derive from these for the type checker only; at run time the real classes stand in their place.
`compat.check_installed` compares every method here with the installed sgl-jax, so a version that moved something is
refused at start-up instead of failing in the middle of a request.
"""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any


class SchedulerSurface:
    """Of ``managers.scheduler.Scheduler``."""

    server_args: Any
    page_size: int
    model_config: Any
    enable_overlap: bool
    is_hybrid: bool
    tree_cache: Any
    req_to_token_pool: Any
    token_to_kv_pool_allocator: Any
    waiting_queue: list[Any]
    running_batch: Any
    cur_batch: Any
    chunked_reqs: list[Any]
    recv_from_tokenizer: Any
    _engine_paused: bool

    # Called.
    def event_loop_normal(self) -> None: ...
    def event_loop_overlap(self) -> None: ...

    # Overridden.
    def recv_requests(self) -> list[Any]: ...
    def _add_request_to_queue(self, req: Any) -> None: ...
    def _extend_requests_to_queue(self, reqs: list[Any], is_retracted: bool = False) -> None: ...
    def get_new_batch_prefill(self) -> Any: ...
    def update_running_batch(self, batch: Any) -> Any: ...
    def process_batch_result(self, batch: Any, result: Any, launch_done: Any = None) -> None: ...
    def abort_request(self, recv_req: Any) -> None: ...
    def _can_flush_cache(self) -> tuple[bool, str]: ...
    def get_internal_state(self, recv_req: Any) -> Any: ...
    def stream_output(
        self,
        reqs: list[Any],
        return_logprob: bool,
        return_output_logprob_only: bool,
        skip_reqs: Any = None,
        cache_miss_count: Any = None,
    ) -> None: ...


class TokenizerSurface:
    """Of ``managers.tokenizer_manager.TokenizerManager``."""

    rid_to_state: dict[str, Any]
    gracefully_exit: bool

    # Called.
    def shutdown(self) -> None: ...

    # Overridden.
    def generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[Any]: ...
    def _create_tokenized_object(
        self, obj: Any, input_text: str, input_ids: list[int], mm_inputs: object | None = None
    ) -> Any: ...
    def _send_one_request(self, obj: Any, tokenized_obj: Any, created_time: float | None = None) -> Any: ...
    def _wait_one_response(self, obj: Any, state: Any, request: Any = None) -> AsyncIterator[Any]: ...
    def detokenize_logprob_tokens(
        self, token_logprobs_val: list[Any], token_logprobs_idx: list[Any], decode_to_text: bool
    ) -> list[Any]: ...
    def _handle_abort_req(self, recv_obj: Any) -> None: ...
    async def sigterm_watchdog(self) -> None: ...


def methods(surface: type) -> dict[str, Callable[..., Any]]:
    """The methods that a surface names."""
    return {
        name: member
        for name, member in vars(surface).items()
        if callable(member) and not name.startswith("__")
    }
