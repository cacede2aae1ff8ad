"""Every kind of fault in every state of a request: `python -m tests.faults --json out.json`."""
