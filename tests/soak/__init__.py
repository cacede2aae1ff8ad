"""Hours of requests, failures and restarts in minutes: `python -m tests.soak --minutes 10`."""
