"""Moves a request's KV cache from a prefill server to a decode server on JAX/TPU engines."""

__version__ = "0.1.0"
