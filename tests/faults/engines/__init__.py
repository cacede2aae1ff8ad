"""Faults that meet real engines behind real routers: `python -m tests.faults --engines vllm`."""
