"""The adapter to vLLM on tpu-inference."""
