"""`python -m tests.faults --json out.json`: the core's matrix; `--engines vllm`, `--engines sgl-jax`: a real pair's."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from tests.faults import kinds
from tests.faults.matrix import Matrix
from tests.faults.requests import STATES
from tests.faults.scene import DEADLINES, SECRET, Scene
from tests.faults.verdict import Verdict, report, summary, table
from tests.support.engine_pair import start_fork_server

SHOWN = ("cells", "passed", "wrong_tokens", "hangs", "leaks", "seconds")


def run_core(only: str, console: Console) -> tuple[list[Verdict], dict[str, object]]:
    start_fork_server()
    cells: list[Verdict] = []
    chosen = [fault for fault in kinds.faults() if only in fault.title]
    for secret in (None, SECRET):
        of_this_kind = [fault for fault in chosen if fault.signed == (secret is not None)]
        if of_this_kind:
            with Scene(secret=secret) as scene:
                matrix = Matrix(scene)
                for fault in of_this_kind:
                    began = time.monotonic()
                    row = matrix.run(fault)
                    report(fault.title, row, time.monotonic() - began, console)
                    cells += row
    console.print(
        table(cells, list(STATES), "how requests ended at P / D: = right bytes, e error, x process gone")
    )
    return cells, {"settings": DEADLINES, "skipped": kinds.SKIPPED}


def run_engines(
    engine: str, only: str, logs: Path, console: Console
) -> tuple[list[Verdict], dict[str, object]]:
    from tests.faults.engines import kinds, pair
    from tests.faults.engines.calls import FRONTS
    from tests.faults.engines.storm import Storm
    from tests.faults.engines.traffic import STATES

    cells: list[Verdict] = []
    with Storm(engine, logs) as storm:
        for fault in kinds.faults():
            if only in fault.title:
                began = time.monotonic()
                row = storm.run(fault)
                report(fault.title, row, time.monotonic() - began, console)
                cells += row
    title = f"how clients of {', '.join(FRONTS)} ended: = right tokens, e error, x left"
    console.print(table(cells, STATES, title))
    return cells, {"engine": engine, "settings": pair.DEADLINES, "skipped": kinds.SKIPPED}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument(
        "--engines", choices=("vllm", "sgl-jax"), help="real servers instead of the core alone"
    )
    parser.add_argument("--json", type=Path, help="file for the result")
    parser.add_argument("--only", default="", help="faults whose title contains this")
    parser.add_argument("--logs", type=Path, help="directory for the logs of real servers")
    options = parser.parse_args()
    console = Console()
    began = time.monotonic()
    if options.engines is None:
        cells, more = run_core(options.only, console)
    else:
        logs = options.logs or Path(tempfile.mkdtemp(prefix="sgl-pd-faults-"))
        console.print(f"logs of the servers: {logs}")
        cells, more = run_engines(options.engines, options.only, logs, console)
    result = summary(cells, time.monotonic() - began, **more)
    console.print({key: result[key] for key in SHOWN})
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1))
    return 0 if result["cells"] == result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
