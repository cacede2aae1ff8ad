"""What the demo found out: one entry per request, as JSON and as a table."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table


@dataclass(frozen=True)
class Checked:
    """One request: what the plain server said, what came through the router, and what D recorded of the
    transfer."""

    prompt_tokens: int
    expected: list[int]
    got: list[int]
    record: dict[str, Any] | None
    moved_tokens: int

    def as_json(self) -> dict[str, Any]:
        record = self.record or {}
        return {
            "prompt_tokens": self.prompt_tokens,
            "pages": record.get("pages", 0),
            "bytes": record.get("nbytes", 0),
            "pull_ms": round(1000 * record.get("pull_s", 0.0), 3),
            "ok": self.ok,
        }

    @property
    def ok(self) -> bool:
        if self.record is None:
            return self.expected == self.got and self.moved_tokens == 0
        return self.expected == self.got and bool(self.record["outcome"] == "ok")


def read_records(transfer_log: Path) -> dict[int, dict[str, Any]]:
    """D's records by the number of tokens moved: the demo's prompts all differ in length."""
    lines = transfer_log.read_text().splitlines() if transfer_log.exists() else []
    return {record["num_tokens"]: record for record in map(json.loads, lines)}


def as_json(results: Sequence[Checked]) -> dict[str, Any]:
    entries = [result.as_json() for result in results]
    return {
        "requests": len(entries),
        "mismatches": sum(result.expected != result.got for result in results),
        "transferred_bytes": sum(entry["bytes"] for entry in entries),
        "per_request": entries,
    }


def show(results: Sequence[Checked], console: Console) -> None:
    totals = as_json(results)
    moved = [result.record for result in results if result.record is not None]
    table = Table("moved from P to D", "median", "max", "total")
    counts = (("tokens", "num_tokens"), ("pages", "pages"), ("KiB", "nbytes"))
    for title, name in counts:
        values = [record[name] / (1024 if name == "nbytes" else 1) for record in moved] or [0]
        table.add_row(title, f"{statistics.median(values):.0f}", f"{max(values):.0f}", f"{sum(values):.0f}")
    stages = (
        ("ms until P was ready", "bootstrap_s"),
        ("ms until D had pages", "input_s"),
        ("ms to pull", "pull_s"),
    )
    for title, name in (*stages, ("ms to pull and write", "transfer_s")):
        values = [1000 * record[name] for record in moved] or [0.0]
        table.add_row(title, f"{statistics.median(values):.1f}", f"{max(values):.1f}", "")
    console.print(table)
    for result in results:
        if result.expected != result.got:
            console.print(f"[red]{result.prompt_tokens} tokens:[/] plain {result.expected}, got {result.got}")
        elif not result.ok:
            said = result.record["error"] if result.record else "not transferred"
            console.print(f"[red]{result.prompt_tokens} tokens:[/] right answer, but {escape(said)}")
    console.print(f"{totals['requests']} requests, {totals['mismatches']} mismatches with the plain server")
