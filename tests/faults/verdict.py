"""What a run of faults found: one verdict per cell, printed as a table and written as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(kw_only=True)
class Verdict:
    """One fault that met one request.

    Attributes:
        fault, target: what happened to whom.
        state: the request's, when it happened.
        wrong, hang, leak: the three things that must never be.
        problems: what did not hold, in words; empty if the cell passed.
    """

    fault: str
    target: str
    state: str
    wrong: bool = False
    hang: bool = False
    leak: bool = False
    problems: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.problems

    @property
    def sign(self) -> str:
        """How the request ended, for the table."""
        raise NotImplementedError

    def as_dict(self) -> dict[str, object]:
        return asdict(self) | {"passed": self.passed}


def report(title: str, row: Sequence[Verdict], seconds: float, console: Console) -> None:
    """One fault's cells, with all that is wrong with them."""
    bad = [cell for cell in row if not cell.passed]
    console.print(f"{title}: {len(row) - len(bad)} of {len(row)} in {seconds:.1f} s")
    for problem in sorted({problem for cell in bad for problem in cell.problems}):
        where = ", ".join(f"{cell.state} {cell.sign}" for cell in bad if problem in cell.problems)
        console.print(f"  {where}: {problem}", style="red", markup=False)


def table(cells: Sequence[Verdict], states: Sequence[str], title: str) -> Table:
    """A row per fault, a column per state."""
    result = Table(title=f"{title}, red: wrong")
    result.add_column("fault")
    for state in states:
        result.add_column(state)
    rows: dict[str, dict[str, list[str]]] = {}
    for cell in cells:
        text = cell.sign if cell.passed else f"[red]{cell.sign} ![/red]"
        row = rows.setdefault(f"{cell.fault}: {cell.target}", {})
        row.setdefault(cell.state, []).append(text)
    for name, row in rows.items():
        result.add_row(name, *("  ".join(row.get(state, [])) for state in states))
    return result


def summary(cells: Sequence[Verdict], seconds: float, **more: Any) -> Mapping[str, Any]:
    """The JSON of a run."""
    return {
        "cells": len(cells),
        "passed": sum(cell.passed for cell in cells),
        "wrong_tokens": sum(cell.wrong for cell in cells),
        "hangs": sum(cell.hang for cell in cells),
        "leaks": sum(cell.leak for cell in cells),
        "seconds": round(seconds, 1),
        **more,
        "rows": [cell.as_dict() for cell in cells],
    }
