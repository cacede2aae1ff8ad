"""Damaged copies of valid bytes, the same ones for the same seed: what a fuzzer starts from, without its waiting."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

# Lengths, nesting and numbers that parsers get wrong: MessagePack's huge strings, arrays, maps and extensions, JSON's
# depth and extremes, the ends of integers.
NASTY = (
    b"\xdb\xff\xff\xff\xff",
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\x7f\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x01",
    b"\x91" * 600,
    b"\x81\xa1a" * 300,
    b"\xcf" + b"\xff" * 8,
    b"\xcb\x7f\xf8" + b"\x00" * 6,
    b"\xc1",
    b"[" * 2000,
    b'{"a":' * 500,
    b"1e999",
    b"-0",
    b"18446744073709551616",
    b"NaN",
    b"\\ud800",
    b"\x00",
    b"\xff\xfe",
)


def mutated(seeds: Sequence[bytes], count: int, seed: int) -> Iterator[bytes]:
    """``count`` inputs, each a seed with one to four kinds of damage."""
    generator = random.Random(seed)
    for _ in range(count):
        data = bytearray(generator.choice(seeds))
        for _ in range(generator.randint(1, 4)):
            _damage(data, seeds, generator)
        yield bytes(data)


def _damage(data: bytearray, seeds: Sequence[bytes], generator: random.Random) -> None:
    at = generator.randint(0, len(data))
    until = min(len(data), at + generator.randint(1, 16))
    match generator.randrange(7):
        case 0 if at < len(data):
            data[at] ^= 1 << generator.randrange(8)
        case 1 if at < len(data):
            data[at] = generator.randrange(256)
        case 2:
            del data[at:until]
        case 3:
            data[at:at] = data[at:until] * generator.randint(1, 3)
        case 4:
            data[at:until] = generator.choice(NASTY)
        case 5:
            del data[at:]
        case _:
            other = generator.choice(seeds)
            data[at:] = other[generator.randint(0, len(other)) :]
