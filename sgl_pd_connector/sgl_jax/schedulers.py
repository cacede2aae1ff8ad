"""The scheduler classes: sgl-jax's, with the mixins in front. Importing this imports sgl-jax."""

from __future__ import annotations

from typing import Any

from sgl_jax.srt.managers.scheduler import Scheduler

from sgl_pd_connector.sgl_jax.decode import SchedulerDisaggregationDecodeMixin
from sgl_pd_connector.sgl_jax.prefill import SchedulerDisaggregationPrefillMixin
from sgl_pd_connector.sgl_jax.server_args import DisaggregationArgs


class PrefillScheduler(SchedulerDisaggregationPrefillMixin, Scheduler):  # type: ignore[misc]
    """Prefills prompts and sends their KV."""

    def event_loop_normal(self) -> None:
        self._event_loop_prefill_disagg()

    event_loop_overlap = event_loop_normal


class DecodeScheduler(SchedulerDisaggregationDecodeMixin, Scheduler):  # type: ignore[misc]
    """Receives prompts' KV and decodes."""

    def event_loop_normal(self) -> None:
        self._event_loop_decode_disagg()

    event_loop_overlap = event_loop_normal


def make_scheduler(args: DisaggregationArgs, *scheduler_args: Any, **scheduler_kwargs: Any) -> Scheduler:
    """The scheduler for ``--disaggregation-mode``.

    Args:
        args: ours.
        scheduler_args, scheduler_kwargs: what sgl-jax's ``Scheduler`` is made of: ``ServerArgs`` and ``PortArgs``.

    Raises:
        ConfigError: the model or a setting is not supported with disaggregation.
    """
    if args.mode == "null":
        return Scheduler(*scheduler_args, **scheduler_kwargs)
    kind = PrefillScheduler if args.mode == "prefill" else DecodeScheduler
    scheduler = kind(*scheduler_args, **scheduler_kwargs)
    scheduler._start_transfers(args)
    return scheduler
