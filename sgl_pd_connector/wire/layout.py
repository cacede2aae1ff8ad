"""How an instance lays out its KV cache, in a form that two instances can compare.

The native transfer moves bytes: a peer with another dtype of the same width, another order of axes or another
sharding would be served happily, and wrong. So both sides compare this before the first byte moves.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sgl_pd_connector.base import KVArgs

# Widths, in bits, of dtypes whose names do not end in it.
_BITS = {"bool": 8, "bfloat16": 16}


def dtype_bits(dtype: str) -> int:
    """Bits of one element of a dtype, by its NumPy or ml_dtypes name: ``"bfloat16"``, ``"float8_e4m3fn"``."""
    if dtype in _BITS:
        return _BITS[dtype]
    digits = dtype.lstrip("abcdefghijklmnopqrstuvwxyz").split("_")[0]
    if not digits.isdigit():
        raise ValueError(f"cannot tell the width of dtype {dtype!r}")
    return int(digits)


@dataclass(frozen=True)
class KVLayout:
    """Layout of the main KV pool.

    Attributes:
        num_layers: layers, one pool array each.
        page_size: tokens per page.
        dtype: element type by name.
        page_shape: one page of one layer.
        sharding: devices each axis of ``page_shape`` is split over.
    """

    num_layers: int
    page_size: int
    dtype: str
    page_shape: tuple[int, ...]
    sharding: tuple[int, ...]

    @classmethod
    def from_args(cls, args: KVArgs) -> KVLayout:
        spec = args.pools[0]
        return cls(int(spec.metadata["num_layers"]), args.page_size, spec.dtype, spec.shape, spec.sharding)

    @property
    def layer_page_bytes(self) -> int:
        """Bytes of one page of one layer, over all devices."""
        return math.prod(self.page_shape) * dtype_bits(self.dtype) // 8

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return self.num_layers * self.layer_page_bytes

    def pages(self, num_tokens: int) -> int:
        """Pages of a prompt, the partial last one included."""
        return -(-num_tokens // self.page_size)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def digest(self) -> str:
        """32 hex digits; equal if and only if the layouts are."""
        text = json.dumps(self.as_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def explain_difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """One phrase per field in which two layouts differ: ``page_size: ours 16, theirs 32``."""
    names = sorted(ours.keys() | theirs.keys())

    def plain(value: Any) -> Any:
        return list(value) if isinstance(value, tuple) else value

    differing = [name for name in names if plain(ours.get(name)) != plain(theirs.get(name))]
    return "; ".join(
        f"{name}: ours {plain(ours.get(name))}, theirs {plain(theirs.get(name))}" for name in differing
    )
