"""Device code: gather and scatter between paged pools and packed buffers."""

from sgl_pd_connector.ops.backend import set_backend
from sgl_pd_connector.ops.dispatch import compilations, gather, packed_specs, scatter, warmup

__all__ = ["compilations", "gather", "packed_specs", "scatter", "set_backend", "warmup"]
