"""The adapter to sgl-jax."""
