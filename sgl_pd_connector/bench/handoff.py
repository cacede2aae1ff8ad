"""From pages in P's pool to pages in D's: two processes, no model.

Each system of `systems` is two halves, one per process, driven in step from here. The time counts from the start of P's
offer to the moment when D has everything where it belongs. Both clocks are the machine's monotonic one.

============== =================================================================================================
ours           gather -> register -> READY -> pull -> wait -> scatter -> DONE
raw            one `jax.experimental.transfer` pull of the same bytes in one array: the limit of that backend
tcp            one TCP connection, warm buffers on both sides: the limit of the machine's loopback
memcpy         one copy within D: the limit of its memory
tpu_connector  the data path of tpu-inference's own connector, where that is installed
============== =================================================================================================
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import numpy as np

from sgl_pd_connector.bench.measure import Comparison, compare, slope
from sgl_pd_connector.bench.shapes import SHAPES, HandoffCase
from sgl_pd_connector.testing.engines import emulation_environment, one_chip
from sgl_pd_connector.testing.hardware import tpu_chips

BASIC_SYSTEMS = ("ours", "raw", "tcp")


class _Half:
    """One process's part in every system. The parent calls `arm` on D, then `fire` on P and `land` on D."""

    def __init__(self, case: HandoffCase, names: Sequence[str], peers: Mapping[str, Any]) -> None:
        from sgl_pd_connector.bench.systems import SYSTEMS, Pools

        Path("/proc/self/clear_refs").write_text("5")  # the peak of memory counts from here
        pools = Pools(case)
        # mypy takes a protocol's own __init__ for that of its classes.
        self._systems = {name: SYSTEMS[name](case, pools, peers.get(name)) for name in names}  # type: ignore[call-arg]
        self._buffers = np.ones((2, case.nbytes), np.uint8) if peers else None

    def addresses(self) -> dict[str, Any]:
        return {name: system.address() for name, system in self._systems.items()}

    def arm(self, name: str, number: int) -> None:
        self._systems[name].arm(number)

    def fire(self, name: str, number: int) -> float:
        began = time.monotonic()
        self._systems[name].fire(number)
        return began

    def land(self, name: str) -> float:
        self._systems[name].land()
        return time.monotonic()

    def copy(self) -> float:
        assert self._buffers is not None
        began = time.monotonic()
        np.copyto(self._buffers[1], self._buffers[0])
        return time.monotonic() - began

    def figures(self) -> dict[str, Any]:
        """Stage times and counters of this process's manager since the last call; peak memory of the process."""
        from sgl_pd_connector.bench.systems import Ours

        ours = self._systems["ours"]
        assert isinstance(ours, Ours)
        return {
            "records": [record.as_dict() for record in ours.manager.take_records()],
            "stats": vars(ours.manager.stats()),
            "peak_rss_bytes": _peak_rss(),
        }

    def close(self) -> None:
        for system in self._systems.values():
            system.close()


def _serve(pipe: Connection, environment: Mapping[str, str]) -> None:
    """A process: carries out the parent's calls. `prepare` makes its half of a case, the others are calls on that."""
    os.environ.update(environment)
    half: _Half | None = None
    while True:
        name, arguments = pipe.recv()
        try:
            if half is not None and name in ("prepare", "end"):
                half.close()
                half = None
            match name:
                case "end":
                    result = None
                case "prepare":
                    half, result = _Half(*arguments), None
                case _:
                    result = getattr(half, name)(*arguments)
        except Exception as error:  # noqa: BLE001 - the parent raises it
            result = RuntimeError(f"{type(error).__name__}: {error}")
        pipe.send(result)
        if name == "end":
            return


class _Remote:
    """The parent's end of a process."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, environment))
        self._process.start()
        theirs.close()

    def start(self, name: str, *arguments: Any) -> None:
        self._pipe.send((name, arguments))

    def result(self) -> Any:
        result = self._pipe.recv()
        if isinstance(result, Exception):
            raise result
        return result

    def __call__(self, name: str, *arguments: Any) -> Any:
        self.start(name, *arguments)
        return self.result()

    def close(self) -> None:
        with suppress(OSError):  # it may have ended already
            self._pipe.send(("end", ()))
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()
        self._pipe.close()


@dataclass(frozen=True)
class HandoffResult:
    """What one case gave: times by system, and what the two processes counted."""

    case: HandoffCase
    comparison: Comparison
    warm_compilations: int
    prefill: dict[str, Any]
    decode: dict[str, Any]

    @property
    def compiles_after_warmup(self) -> int:
        counted = self.prefill["stats"]["compilations"] + self.decode["stats"]["compilations"]
        return int(counted - self.warm_compilations)

    def as_dict(self) -> dict[str, Any]:
        comparison, nbytes = self.comparison, self.case.nbytes
        names = list(comparison.seconds)
        moved, transfers = self.decode["stats"]["nbytes"], self.decode["stats"]["ok"]
        return {
            "model": self.case.shape.name,
            "nbytes": nbytes,
            "concurrent": self.case.concurrent,
            "rounds": comparison.rounds,
            "median_s": {name: comparison.median(name) for name in names},
            "gb_per_s": {name: nbytes / comparison.median(name) / 1e9 for name in names},
            "ratio_to": {name: comparison.ratio("ours", to=name) for name in names if name != "ours"},
            "overhead_s": comparison.median("ours") - comparison.median("raw"),
            "wire_bytes_per_page_byte": moved / (transfers * nbytes / self.case.concurrent),
            "compiles_after_warmup": self.compiles_after_warmup,
            "peak_rss_bytes": {
                "prefill": self.prefill["peak_rss_bytes"],
                "decode": self.decode["peak_rss_bytes"],
            },
            "stages_s": _stages(self.decode["records"]),
        }


def _peak_rss() -> int:
    """Of this process since its case began, in bytes."""
    (line,) = (row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def _stages(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Median seconds of D's stages: waiting for P, allocating, pulling, writing."""
    moved = [record for record in records if record["outcome"] == "ok"]
    return {
        "ready": float(np.median([record["bootstrap_s"] for record in moved])),
        "allocate": float(np.median([record["input_s"] for record in moved])),
        "pull": float(np.median([record["pull_s"] for record in moved])),
        "write": float(np.median([record["transfer_s"] - record["pull_s"] for record in moved])),
    }


def available_systems() -> tuple[str, ...]:
    """The systems that can run here, ours first."""
    stock = ("tpu_connector",) if importlib.util.find_spec("tpu_inference") else ()
    return (*BASIC_SYSTEMS, *stock)


class HandoffPair:
    """A prefill and a decode process, for any number of cases. Ended by leaving the ``with`` block."""

    def __enter__(self) -> Self:
        # On a TPU each process has a chip of its own.
        on_tpu = bool(tpu_chips())
        self._p = _Remote(one_chip("prefill") if on_tpu else emulation_environment())
        self._d = _Remote(one_chip("decode") if on_tpu else emulation_environment())
        return self

    def __exit__(self, *_: object) -> None:
        self._d.close()
        self._p.close()

    def run(
        self, case: HandoffCase, *, rounds: int, systems: Sequence[str] = BASIC_SYSTEMS, warmup: int = 2
    ) -> HandoffResult:
        """Measures systems, and a memcpy, on one case, in alternation."""
        numbers = iter(range(1, 1 << 30))
        p, d = self._p, self._d
        p("prepare", case, systems, {})
        d("prepare", case, systems, p("addresses"))

        def once(name: str) -> float:
            number = next(numbers)
            d("arm", name, number)
            d.start("land", name)
            began: float = p("fire", name, number)
            done: float = d.result()
            return done - began

        for name in systems:
            for _ in range(warmup):
                once(name)
        warm = sum(process("figures")["stats"]["compilations"] for process in (p, d))
        timed = {name: partial(once, name) for name in systems}
        comparison = compare({**timed, "memcpy": lambda: float(d("copy"))}, rounds=rounds)
        return HandoffResult(case, comparison, warm, p("figures"), d("figures"))


def cases(*, quick: bool) -> list[HandoffCase]:
    """Sizes in one shape, the other models at one size, and several requests at once."""
    tiny, llama = SHAPES["tiny"], SHAPES["llama-3-8b"]
    sizes = (1 << 16, 1 << 20) if quick else (1 << 16, 1 << 18, 1 << 20, 4 << 20)
    large = (16 << 20, 64 << 20) if quick else (16 << 20, 64 << 20, 256 << 20, 512 << 20)
    grown = [HandoffCase(tiny, tiny.pages(size)) for size in sizes]
    grown += [HandoffCase(llama, llama.pages(size)) for size in large]
    models = [HandoffCase(SHAPES[name], SHAPES[name].pages(32 << 20)) for name in ("qwen3-32b", "mla")]
    at_once = [HandoffCase(llama, llama.pages(4 << 20), count) for count in ((8,) if quick else (4, 16, 32))]
    return grown + models + at_once


def run(*, quick: bool, rounds: int) -> dict[str, Any]:
    """Everything, as the report's section ``handoff``."""
    systems = available_systems()
    with HandoffPair() as pair:
        # Large cases take seconds a round, small ones are the noisy ones.
        results = [
            pair.run(case, rounds=rounds if case.nbytes > 16 << 20 else 3 * rounds, systems=systems)
            for case in cases(quick=quick)
        ]
    return section(results)


def section(results: Sequence[HandoffResult]) -> dict[str, Any]:
    """The figures by size, from the cases of one request each."""
    single = {each.case.nbytes: each for each in results if each.case.concurrent == 1}
    sizes = sorted(single)
    names = list(results[0].comparison.seconds)
    return {
        "cases": [each.as_dict() for each in results],
        "ratio_to_raw": {str(size): single[size].comparison.ratio("ours", to="raw") for size in sizes},
        "overhead_s": {str(size): single[size].as_dict()["overhead_s"] for size in sizes},
        "slope": {
            name: slope(sizes, [single[size].comparison.median(name) for size in sizes]) for name in names
        }
        if len(sizes) > 1
        else {},
        "compiles_after_warmup": sum(each.compiles_after_warmup for each in results),
        "not_run": {
            "sgl-jax": "its own PD does not run on a CPU: D writes with a Pallas kernel that has no interpret mode"
        },
    }
