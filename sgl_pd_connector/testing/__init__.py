"""For tests, demos and benchmarks only: CPU emulation, tiny checkpoints, processes to run real engines."""
