"""Gather and scatter on this CPU, beside memcpy, beside plain JAX, and under 100 prompt lengths.

    python benchmarks/ops.py --json ops.json --plot ops.svg

Everything that is compared runs in turn, in one process, round by round. Prints a table; exit status 0 always: a busy
machine's numbers are its own.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from sgl_pd_connector import ops
from sgl_pd_connector.bench.measure import compare
from sgl_pd_connector.config import ConnectorConfig
from sgl_pd_connector.wire.chunks import ladder, plan_chunks, plan_groups

PAGE = (16, 8, 2, 128)  # 16 tokens of 8 KV heads, head dim 128
DTYPE = jnp.dtype(jnp.bfloat16)
PAGE_BYTES = int(np.prod(PAGE)) * DTYPE.itemsize
NUM_PAGES = 256
BUFFER_BYTES = ConnectorConfig().chunk_bytes
MAX_CHUNK = 128
# (layers, pages): 1 to 256 MB
CASES = [
    (16, 1),
    (16, 4),
    (16, 16),
    (32, 16),
    (80, 4),
    (32, 32),
    (80, 16),
    (64, 32),
    (80, 32),
    (32, 128),
    (16, 128),
]


def make_pools(layers: int) -> list[jax.Array]:
    fill = jax.jit(lambda value: jnp.full((NUM_PAGES, *PAGE), value, DTYPE))
    return [fill(layer) for layer in range(layers)]


def clocked(run: Callable[[], Any]) -> Callable[[], float]:
    def timed() -> float:
        start = time.perf_counter()
        jax.block_until_ready(run())
        return time.perf_counter() - start

    return timed


def copies(layers: int, n: int, rounds: int) -> dict[str, Any]:
    pools = make_pools(layers)
    # Other pages in each round: what was copied last is not what the caches hold.
    rng = np.random.default_rng(0)
    nbytes = layers * n * PAGE_BYTES
    groups = plan_groups(layers, n * PAGE_BYTES, BUFFER_BYTES)
    ops.warmup(pools, {n: groups})
    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    plain_get = jax.jit(lambda pools, ids: [pool.at[ids].get() for pool in pools])
    plain_set = jax.jit(
        lambda pools, pages, ids: [pool.at[ids].set(page) for pool, page in zip(pools, pages, strict=True)],
        donate_argnums=0,
    )

    def ids() -> np.ndarray:
        return rng.permutation(NUM_PAGES)[:n].astype(np.int32)

    packed, pages = ops.gather(pools, ids(), groups), plain_get(pools, ids())

    def scatter() -> jax.Array:
        nonlocal pools
        pools, token = ops.scatter(pools, packed, ids())
        return token

    def at_set() -> list[jax.Array]:
        nonlocal pools
        pools = plain_set(pools, pages, ids())
        return pools

    measured = compare(
        {
            "memcpy": clocked(lambda: np.copyto(target, source)),
            "memcpy to fresh memory": clocked(source.copy),
            "gather": clocked(lambda: ops.gather(pools, ids(), groups)),
            ".at[].get()": clocked(lambda: plain_get(pools, ids())),
            "scatter": clocked(scatter),
            ".at[].set()": clocked(at_set),
        },
        rounds=rounds,
        warmup=2,
    )
    return {
        "layers": layers,
        "pages": n,
        "buffers": len(groups),
        "nbytes": nbytes,
        "gb_per_s": {name: nbytes / measured.median(name) / 1e9 for name in measured.seconds},
        # What the machine can do when nothing else gets in between; says more than the median on a busy one.
        "fastest_gb_per_s": {name: nbytes / min(times) / 1e9 for name, times in measured.seconds.items()},
        "to_memcpy": {name: measured.ratio(name, to="memcpy") for name in measured.seconds},
        "to_fresh_memcpy": {
            name: measured.ratio(name, to="memcpy to fresh memory") for name in measured.seconds
        },
    }


def lengths(count: int) -> dict[str, Any]:
    """A gather for each of `count` random prompt lengths, from nothing compiled to the last byte copied."""
    pools = make_pools(16)
    rng = np.random.default_rng(1)
    requests = [
        rng.permutation(NUM_PAGES)[:n].astype(np.int32) for n in rng.integers(1, NUM_PAGES + 1, count)
    ]
    groups = {n: plan_groups(len(pools), n * PAGE_BYTES, BUFFER_BYTES) for n in ladder(MAX_CHUNK)}

    compiled = ops.compilations()
    start = time.perf_counter()
    ops.warmup(pools, groups, ops=("gather",))
    warm = time.perf_counter()
    for ids in requests:
        for chunk in plan_chunks(len(ids), MAX_CHUNK):
            packed = ops.gather(pools, ids[chunk.first : chunk.first + chunk.pages], groups[chunk.pages])
        jax.block_until_ready(packed)
    done = time.perf_counter()
    ours = {
        "compilations": ops.compilations() - compiled,
        "warm_up_s": warm - start,
        "requests_s": done - warm,
    }

    select = jax.jit(lambda pools, ids: [pool.at[ids].get() for pool in pools])  # as tpu-inference gathers
    start = time.perf_counter()
    for ids in requests:
        jax.block_until_ready(select(pools, ids))
    theirs = {"compilations": len({len(ids) for ids in requests}), "requests_s": time.perf_counter() - start}
    return {"requests": count, "ladder": ours, "per length": theirs}


def plot(report: dict[str, Any], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    cases = sorted(report["copies"], key=lambda case: case["nbytes"])
    for name in cases[0]["gb_per_s"]:
        axes.plot(
            [case["nbytes"] / 2**20 for case in cases],
            [case["gb_per_s"][name] for case in cases],
            "o-",
            label=name,
        )
    axes.set(
        xscale="log", yscale="log", xlabel="MiB in all layers", ylabel="GB/s", title="Paged pools on a CPU"
    )
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--plot", type=Path, help="where the plot goes (.svg, .png); needs matplotlib")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of which the median is taken")
    args = parser.parse_args()

    report: dict[str, Any] = {
        "jax": jax.__version__,
        "cpus": os.cpu_count(),
        "rounds": args.rounds,
        "copies": [],
    }
    report["lengths"] = lengths(100)  # first: nothing is compiled yet
    print(json.dumps(report["lengths"]), "\n")
    names = ("memcpy", "memcpy to fresh memory", "gather", ".at[].get()", "scatter", ".at[].set()")
    print("GB/s, median (in brackets: of memcpy's speed in the same round) / fastest\n")
    print("| MiB | layers | " + " | ".join(names) + " |\n|" + "---:|" * (2 + len(names)))
    for layers, n in sorted(CASES, key=lambda case: case[0] * case[1]):
        case = copies(layers, n, args.rounds)
        report["copies"].append(case)
        cells = [
            f"{case['gb_per_s'][name]:.1f} ({case['to_memcpy'][name]:.2f}) / {case['fastest_gb_per_s'][name]:.1f}"
            for name in names
        ]
        print(f"| {case['nbytes'] >> 20} | {layers} | " + " | ".join(cells) + " |", flush=True)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    if args.plot:
        plot(report, args.plot)


if __name__ == "__main__":
    main()
