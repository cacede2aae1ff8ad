"""Every place where this package leans on sgl-jax's internals. Written for, and checked against, `VERSION`.

sgl-jax has no entry points and no scheduler plug-ins, so two names of its modules are replaced before its server
starts (`install`), and one more in the scheduler's process (`run_scheduler`). An upstream registry of scheduler classes
would make all three unnecessary. Its own disaggregation stays off (``disaggregation_mode="null"``): that refuses page
sizes under 128 and loopback addresses, and pairs by request id.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import logging
import os
import sys
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import numpy as np

from sgl_pd_connector.errors import ConfigError
from sgl_pd_connector.sgl_jax import repairs, surface
from sgl_pd_connector.sgl_jax.requests import PDRequest
from sgl_pd_connector.sgl_jax.server_args import DisaggregationArgs

VERSION = "0.1.0rc0"

# Where the one string field of sgl-jax's request classes is that its scheduler copies from the tokenized request to
# its own. The room itself must not travel in `bootstrap_room`: sgl-jax switches prefix matching off for such requests.
_CARRIER = "bootstrap_host"

# Sampling parameters that make no difference to the KV cache; P samples one token that nobody reads.
_PREFILL_SAMPLING = {
    "max_new_tokens": 1,
    "min_new_tokens": 0,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
}


def check_installed() -> None:
    """Refuses a sgl-jax that this module was not written for.

    Raises:
        ConfigError: another version, or a method with another signature.
    """
    try:
        installed = importlib.metadata.version("sglang-jax")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError("sglang-jax is not installed: pip install 'sgl-pd-connector[sgl-jax]'") from None
    if installed != VERSION:
        raise ConfigError(
            f"sglang-jax {installed} is installed; sgl_pd_connector.sgl_jax is written for {VERSION}"
        )
    from sgl_jax.srt.managers.scheduler import Scheduler
    from sgl_jax.srt.managers.tokenizer_manager import TokenizerManager

    differing = [
        f"{found.__name__}.{name}"
        for ours, found in (
            (surface.SchedulerSurface, Scheduler),
            (surface.TokenizerSurface, TokenizerManager),
        )
        for name, stub in surface.methods(ours).items()
        if _parameters(stub) != _parameters(getattr(found, name, None))
    ]
    if differing:
        raise ConfigError(
            f"sglang-jax {installed}: missing, or with other parameters: {', '.join(differing)}"
        )


def _parameters(method: Callable[..., Any] | None) -> list[str] | None:
    return None if method is None else list(inspect.signature(method).parameters)


def install(args: DisaggregationArgs) -> None:
    """Makes the next sgl-jax server of this process a disaggregated one."""
    from sgl_jax.srt.entrypoints import engine

    from sgl_pd_connector.sgl_jax.tokenizer import DisaggregationTokenizerMixin

    class TokenizerManager(DisaggregationTokenizerMixin, engine.TokenizerManager):  # type: ignore[misc]
        disaggregation = args

    engine.TokenizerManager = TokenizerManager
    engine.run_scheduler_process = functools.partial(run_scheduler, args)


def run_scheduler(args: DisaggregationArgs, *scheduler_args: Any) -> None:
    """The scheduler process: sgl-jax's, with our scheduler class in it. Runs in a spawned child."""
    from sgl_jax.srt.managers import scheduler

    from sgl_pd_connector.sgl_jax.schedulers import make_scheduler

    # It logs every heartbeat at INFO, the level that sgl-jax gives to all loggers.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    repairs.install()
    scheduler.Scheduler = functools.partial(make_scheduler, args)
    scheduler.run_scheduler_process(*scheduler_args)


def server_args(argv: list[str]) -> Any:
    """sgl-jax's ``ServerArgs`` from its own flags. Wrong ones end the process, as argparse does."""
    from sgl_jax.srt.server_args import ServerArgs

    # Given no words it would read this process's command line.
    return ServerArgs.from_cli(argv or ["--help"])


def serve(server_args: Any) -> None:
    """Runs a server, with what `install` put in it, until it is stopped."""
    from sgl_jax.srt.entrypoints import http_server

    from sgl_pd_connector.sgl_jax.tokenizer import stop_children

    try:
        http_server.launch(server_args)
    finally:
        stop_children()
        kill_process_tree(include_self=False)


def serve_plain(argv: list[str]) -> None:
    """Runs sgl-jax's launcher as if it had been started with these flags."""
    from sgl_jax.launch_server import main

    sys.argv[1:] = argv
    main()


def kill_process_tree(*, include_self: bool) -> None:
    """Ends whatever of a server is left."""
    from sgl_jax.srt.utils import kill_process_tree as kill

    kill(os.getpid(), include_parent=include_self)


# Requests in the HTTP process.


def attach(tokenized: Any, pd: PDRequest) -> None:
    """Puts the record where the scheduler finds it; see `take`."""
    tokenized.bootstrap_port = tokenized.bootstrap_room = None
    setattr(tokenized, _CARRIER, pd)


def attached(tokenized: Any) -> PDRequest | None:
    """What `attach` put there."""
    pd = getattr(tokenized, _CARRIER, None)
    return pd if isinstance(pd, PDRequest) else None


def prefill_only(tokenized: Any) -> None:
    """Reduces a validated request to what P has to do: no grammar to compile, no logprobs, one token."""
    for name, value in _PREFILL_SAMPLING.items():
        setattr(tokenized.sampling_params, name, value)
    tokenized.return_logprob = tokenized.return_output_logprob_only = False


def no_logprobs(obj: Any) -> None:
    """Tells the HTTP process not to look for logprobs in P's answer; it would fail for want of them."""
    obj.return_logprob = obj.return_output_logprob_only = False


# Requests in the scheduler.


def take(req: Any) -> PDRequest | None:
    """Takes the record off a scheduler's request, once; from then on sgl-jax sees an ordinary one."""
    pd = attached(req)
    if pd is not None:
        setattr(req, _CARRIER, None)
    return pd


def refusal(req: Any) -> str | None:
    """Why sgl-jax itself has refused the request before it reached a queue, or None."""
    reason = req.to_finish or req.finished_reason
    return None if reason is None else str(reason.message)


def fail(req: Any, message: str, status: HTTPStatus | None) -> None:
    """Ends a request that has no place in any batch; the caller streams it out. No status: the client is gone."""
    from sgl_jax.srt.managers.schedule_batch import FINISH_ABORT

    req.finished_reason = FINISH_ABORT(message, status, status and status.phrase)
    req.return_logprob = False
    req.finished_output = False


def is_aborted(req: Any) -> bool:
    """Whether the request ended by an abort or an error."""
    return req.finished_reason is not None and req.finished_reason.is_error


def matches(abort: Any, req: Any) -> bool:
    """Whether an ``AbortReq`` means this request."""
    return bool(abort.abort_all or req.rid.startswith(abort.rid))


def page_ids(scheduler: surface.SchedulerSurface, req: Any, num_tokens: int) -> np.ndarray:
    """int32 ``[pages]``: where the first ``num_tokens`` tokens of a running request are."""
    page = scheduler.page_size
    locations = scheduler.req_to_token_pool.req_to_token[req.req_pool_idx, :num_tokens:page]
    return np.asarray(locations // page, np.int32)


def batch_requests(batch: Any) -> list[Any]:
    """The requests of a batch."""
    return [req for info in batch.reqs_info for req in info.reqs or ()]


def forget_full(batch: Any) -> None:
    """Lets an empty running batch be filled again.

    sgl-jax marks a batch full when a request does not fit, and looks again only when a request leaves the batch. Here
    pages also come back from transfers, when the batch may be empty for long.
    """
    if batch.is_empty():
        for info in batch.reqs_info:
            info.batch_is_full = False


def hold_prefix(req: Any, locations: np.ndarray, node: Any) -> None:
    """Makes a queued request start from KV that was written for it, instead of what its prefix matches.

    A queued request is matched again in every step until it is admitted, and by some scheduling policies once more;
    sgl-jax's own flag for this (``_pd_skip_prefix_match``) lasts for one match only.

    Args:
        req: the request.
        locations: int32 ``[n]``, where its first n tokens are.
        node: the radix tree's node in which the part that the cache holds ends, or None.
    """

    def init_next_round_input(tree_cache: Any = None) -> None:
        req.prefix_indices = locations
        req._pd_skip_prefix_match = True
        type(req).init_next_round_input(req, tree_cache)
        req.last_node = req.last_host_node = node

    req.init_next_round_input = init_next_round_input


def drop_prefix(req: Any) -> None:
    """Undoes `hold_prefix`: the request is an ordinary one again."""
    vars(req).pop("init_next_round_input", None)
    req.prefix_indices = []
    req.last_node = req.last_host_node = None


def settle_prefix(req: Any, cached: int) -> None:
    """The request has been admitted: says which part of its prefix the cache owns; the rest is the request's own.

    Args:
        req: the request, in a batch that was not run yet.
        cached: leading tokens that the prefix cache holds. Only those are reported as cached to the client.
    """
    vars(req).pop("init_next_round_input", None)
    req.cache_protected_len = req.cached_tokens = cached
