"""`python -m tests.faults --json out.json`"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.faults.kinds import SKIPPED, Fault, faults
from tests.faults.matrix import Cell, Matrix
from tests.faults.requests import STATES
from tests.faults.scene import DEADLINES, SECRET, Scene
from tests.support.engine_pair import start_fork_server


def run_all(chosen: list[Fault], console: Console) -> list[Cell]:
    cells: list[Cell] = []
    for secret in (None, SECRET):
        of_this_kind = [fault for fault in chosen if fault.signed == (secret is not None)]
        if of_this_kind:
            with Scene(secret=secret) as scene:
                matrix = Matrix(scene)
                for fault in of_this_kind:
                    began = time.monotonic()
                    row = matrix.run(fault)
                    report(fault, row, time.monotonic() - began, console)
                    cells += row
    return cells


def report(fault: Fault, row: list[Cell], seconds: float, console: Console) -> None:
    bad = [cell for cell in row if not cell.passed]
    console.print(f"{fault.title}: {len(row) - len(bad)} of {len(row)} in {seconds:.1f} s")
    for problem in sorted({problem for cell in bad for problem in cell.problems}):
        where = ", ".join(cell.state for cell in bad if problem in cell.problems)
        console.print(f"  {where}: {problem}", style="red", markup=False)


def table(cells: list[Cell]) -> Table:
    """A row per fault. How the request ended at P / at D."""
    result = Table(title="how requests ended at P / D: = right bytes, e error, x process gone, red: wrong")
    result.add_column("fault")
    for state in STATES:
        result.add_column(state)
    signs = {"Success": "=", "Failed": "e", "lost": "x"}
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for cell in cells:
        text = f"{signs.get(cell.p, '?')} / {signs.get(cell.d, '?')}"
        rows.setdefault((cell.fault, cell.target), {})[cell.state] = (
            text if cell.passed else f"[red]{text} ![/red]"
        )
    for (fault, target), row in rows.items():
        result.add_row(f"{fault}: {target}", *(row[state] for state in STATES))
    return result


def summary(cells: list[Cell], seconds: float) -> dict[str, object]:
    return {
        "cells": len(cells),
        "passed": sum(cell.passed for cell in cells),
        "wrong_tokens": sum(cell.wrong_bytes for cell in cells),
        "hangs": sum(cell.hang for cell in cells),
        "leaks": sum(cell.leak for cell in cells),
        "seconds": round(seconds, 1),
        "settings": DEADLINES,
        "skipped": SKIPPED,
        "rows": [cell.as_dict() for cell in cells],
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--json", type=Path, help="file for the result")
    parser.add_argument("--only", default="", help="faults whose title contains this")
    options = parser.parse_args()
    console = Console()
    began = time.monotonic()
    start_fork_server()
    cells = run_all([fault for fault in faults() if options.only in fault.title], console)
    result = summary(cells, time.monotonic() - began)
    console.print(table(cells))
    console.print(
        {key: result[key] for key in ("cells", "passed", "wrong_tokens", "hangs", "leaks", "seconds")}
    )
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1))
    return 0 if result["cells"] == result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
