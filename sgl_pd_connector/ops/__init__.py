"""Device code: gather and scatter between paged pools and packed buffers."""
