"""Device code: gather and scatter between paged pools and packed buffers."""

from sgl_pd_connector.ops.dispatch import compilations, gather, packed_specs, scatter, set_backend, warmup

__all__ = ["compilations", "gather", "packed_specs", "scatter", "set_backend", "warmup"]
