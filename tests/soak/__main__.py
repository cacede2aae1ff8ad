"""`python -m tests.soak --minutes 10`: half the time P restarts again and again, half the time D."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from tests.faults.scene import Scene
from tests.soak.load import Load
from tests.support.engine_pair import start_fork_server

RESTART_EVERY = 60.0
RESTARTS_AT_LEAST = 2
WARM_UP = 0.3
"""Of each half: allocators and caches have what they need after it."""
MAX_GROWTH = 0.05


def soak(minutes: float, seed: int) -> dict[str, Any]:
    """Runs it; ``"passed"`` says whether everything held."""
    with Scene() as scene:
        load = Load(scene, seed)
        survivors = {
            survivor: half(scene, load, restarted, 30 * minutes)
            for survivor, restarted in (("D", "P"), ("P", "D"))
        }
        held = scene.held()
    outcome = load.outcome
    result: dict[str, Any] = {
        "minutes": minutes,
        "seed": seed,
        "requests": sum(outcome.events.values()),
        "events": dict(outcome.events),
        "ended": dict(outcome.ended),
        "wrong_tokens": outcome.wrong_bytes,
        "hangs": outcome.hangs,
        "failed_for_no_reason": outcome.bystanders,
        "held_at_the_end": held,
        "survivors": survivors,
    }
    result["passed"] = (
        outcome.ended["ok"] > 0
        and not outcome.wrong_bytes
        and not outcome.hangs
        and not outcome.bystanders
        and not held
        and all(survivor["growth"] < MAX_GROWTH and not survivor["leaks"] for survivor in survivors.values())
    )
    return result


def half(scene: Scene, load: Load, restarted: str, seconds: float) -> dict[str, Any]:
    """Load, and a restart of one side now and then; returns what became of the other's resources."""
    survivor = scene.processes["D" if restarted == "P" else "P"]
    run(load, WARM_UP * seconds)
    before, rss_before = at_rest(scene, load, survivor)
    loaded = (1 - WARM_UP) * seconds
    restarts = max(RESTARTS_AT_LEAST, int(loaded / RESTART_EVERY))
    for number in range(restarts):
        run(load, loaded / (restarts + 1))
        scene.kill(restarted)
        scene.start(restarted, same_address=number % 2 == 0)
        load.lost(restarted)
    run(load, loaded / (restarts + 1))
    after, rss_after = at_rest(scene, load, survivor)
    return {
        "restarts_of_its_peer": restarts,
        "rss_before": rss_before,
        "rss_after": rss_after,
        "growth": round(rss_after / rss_before - 1, 4),
        "leaks": {name: [before[name], after[name]] for name in after if after[name] > before[name]},
    }


def run(load: Load, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        load.turn()


def at_rest(scene: Scene, load: Load, survivor: Any) -> tuple[dict[str, int], int]:
    """Its descriptors, threads and memory when nothing is under way and what is idle was closed."""
    load.drain()
    for process in (scene.p, scene.d):
        process.records()
    lowest: dict[str, int] = survivor.resources()
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        now = survivor.resources()
        lowest = {name: min(lowest[name], now[name]) for name in now}
        time.sleep(0.5)
    return lowest, survivor.rss()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file for the result")
    options = parser.parse_args()
    start_fork_server()
    result = soak(options.minutes, options.seed)
    text = json.dumps(result, indent=1)
    print(text)
    if options.json is not None:
        options.json.write_text(text)
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
