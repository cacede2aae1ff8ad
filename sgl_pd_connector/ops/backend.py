"""Which implementation runs: the one place that looks at the platform."""

import functools
import logging
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

from sgl_pd_connector.ops import xla

logger = logging.getLogger(__name__)

ENVIRONMENT = "SGL_PD_OPS_BACKEND"
_NAMES = ("xla", "pallas", "pallas_interpret")
_forced: str | None = None


class Backend(NamedTuple):
    """Copies on the pools of one device; page ids of `num_pages` or more are another shard's pages."""

    gather: Callable[[Sequence[jax.Array], jax.Array, Sequence[int]], list[jax.Array]]
    scatter: Callable[[Sequence[jax.Array], Sequence[jax.Array], jax.Array], list[jax.Array]]
    compiler_options: dict[str, str] | None = None


def set_backend(name: str | None) -> None:
    """Forces "xla", "pallas" or "pallas_interpret" in this process; None ends that."""
    global _forced  # noqa: PLW0603
    _forced = None if name is None else _known(name, "set_backend")


def backend_name(platform: str) -> str:
    """What runs on a platform: forced, else $SGL_PD_OPS_BACKEND, else Pallas on "tpu" and XLA elsewhere.

    "pallas_interpret" is Pallas' TPU interpreter, for tests on a CPU. Raises ValueError for an unknown name.
    """
    if _forced:
        return _forced
    if name := os.environ.get(ENVIRONMENT):
        return _known(name, ENVIRONMENT)
    return "pallas" if platform == "tpu" else "xla"


@functools.cache
def build(name: str, pool: jax.ShapeDtypeStruct) -> Backend:
    """The backend for pools like this one (global shape, with sharding)."""
    if name == "xla":
        platform = next(iter(pool.sharding.device_set)).platform
        return Backend(xla.gather_pages, xla.scatter_pages, xla.compiler_options(platform, pool.dtype))
    from jax.experimental.pallas import tpu as pltpu

    from sgl_pd_connector.ops import pallas

    interpret = pltpu.InterpretParams() if name == "pallas_interpret" else False
    order = tuple(range(pool.ndim)) if interpret else pallas.page_major_order(pool)
    if order is None:
        logger.warning("pools %s: pages are not contiguous in device memory, copying them with XLA", pool)
        return build("xla", pool)
    return Backend(
        functools.partial(pallas.gather_pages, order=order, interpret=interpret),
        functools.partial(pallas.scatter_pages, order=order, interpret=interpret),
    )


def _known(name: str, source: str) -> str:
    if name not in _NAMES:
        raise ValueError(f"{source}: ops backend {name!r} is unknown, choose one of {', '.join(_NAMES)}")
    return name
