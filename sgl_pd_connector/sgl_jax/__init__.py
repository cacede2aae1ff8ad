"""The sgl-jax adapter: the connector behind sgl-jax's scheduler. ``launch_server`` starts a server with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sgl_pd_connector.sgl_jax.decode import SchedulerDisaggregationDecodeMixin
from sgl_pd_connector.sgl_jax.prefill import SchedulerDisaggregationPrefillMixin
from sgl_pd_connector.sgl_jax.server_args import DisaggregationArgs

if TYPE_CHECKING:
    from sgl_pd_connector.sgl_jax.schedulers import DecodeScheduler, PrefillScheduler, make_scheduler

__all__ = [
    "DecodeScheduler",
    "DisaggregationArgs",
    "PrefillScheduler",
    "SchedulerDisaggregationDecodeMixin",
    "SchedulerDisaggregationPrefillMixin",
    "make_scheduler",
]


def __getattr__(name: str) -> Any:
    # These need sgl-jax itself; the mixins and the flags do not.
    if name in ("DecodeScheduler", "PrefillScheduler", "make_scheduler"):
        from sgl_pd_connector.sgl_jax import schedulers

        return getattr(schedulers, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
