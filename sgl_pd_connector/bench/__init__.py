"""Benchmarks: every performance figure this project states is produced here, side by side in one run."""
