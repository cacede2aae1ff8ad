"""KV layouts: comparing two, and how many bytes they make."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import msgpack
import numpy as np
import pytest

from sgl_pd_connector.base import MAIN_KV, KVArgs, PoolTransferSpec
from sgl_pd_connector.wire.layout import KVLayout, dtype_bits, explain_difference

pytestmark = pytest.mark.unit

LAYOUT = KVLayout(
    num_layers=4, page_size=16, dtype="bfloat16", page_shape=(16, 2, 2, 128), sharding=(1, 1, 1, 1)
)
OTHERS: dict[str, Any] = {
    "num_layers": 5,
    "page_size": 32,
    "dtype": "float16",
    "page_shape": (16, 4, 1, 128),
    "sharding": (1, 2, 1, 1),
}

# Whatever an engine may keep its cache in: all element types that JAX knows by name.
NAMES = sorted(
    {
        np.dtype(kind).name
        for kind in vars(jnp).values()
        if isinstance(kind, type(jnp.float32)) and np.dtype(kind).name != "object"
    }
    | {name for name in vars(ml_dtypes) if name.startswith(("float", "bfloat", "int", "uint"))}
    - {"finfo", "iinfo"}
)


def test_the_list_of_dtypes_is_not_empty() -> None:
    assert {"bfloat16", "float32", "int8", "float8_e4m3fn", "float8_e5m2", "int4", "float8_e8m0fnu"} <= set(
        NAMES
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_width_of_every_dtype_of_jax(name: str) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    if hasattr(ml_dtypes, name):  # NumPy stores those narrower than a byte in a byte
        info = ml_dtypes.iinfo if "int" in name else ml_dtypes.finfo
        assert dtype_bits(name) == info(dtype).bits
    else:
        assert dtype_bits(name) == dtype.itemsize * 8


@pytest.mark.parametrize("name", ["", "object", "float", "float_8", "V"])
def test_a_dtype_of_unknown_width_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match="width of dtype"):
        dtype_bits(name)


def test_bytes_of_a_page() -> None:
    assert LAYOUT.layer_page_bytes == 16 * 2 * 2 * 128 * 2
    assert LAYOUT.page_bytes == 4 * LAYOUT.layer_page_bytes
    assert dataclasses.replace(LAYOUT, dtype="int4").page_bytes == LAYOUT.page_bytes // 4


@pytest.mark.parametrize(("tokens", "pages"), [(1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_a_partial_last_page_is_a_page(tokens: int, pages: int) -> None:
    assert LAYOUT.pages(tokens) == pages


def test_from_what_an_engine_says_of_itself() -> None:
    spec = PoolTransferSpec(MAIN_KV, "paged_kv", "bfloat16", (16, 2, 2, 128), (1, 1, 1, 1), {"num_layers": 4})
    assert KVLayout.from_args(KVArgs([spec], page_size=16)) == LAYOUT


def test_equal_layouts_have_equal_digests() -> None:
    digest = dataclasses.replace(LAYOUT).digest
    assert digest == LAYOUT.digest
    assert len(bytes.fromhex(digest)) == 16


@pytest.mark.parametrize("field", OTHERS)
def test_every_field_changes_the_digest_and_is_explained_with_both_values(field: str) -> None:
    other = dataclasses.replace(LAYOUT, **{field: OTHERS[field]})
    assert other.digest != LAYOUT.digest
    text = explain_difference(LAYOUT.as_dict(), other.as_dict())
    ours, theirs = (
        list(value) if isinstance(value, tuple) else value
        for value in (LAYOUT.as_dict()[field], OTHERS[field])
    )
    assert text == f"{field}: ours {ours}, theirs {theirs}"


def test_every_field_is_tried_above() -> None:
    assert OTHERS.keys() == LAYOUT.as_dict().keys()


@pytest.mark.parametrize("codec", [(json.dumps, json.loads), (msgpack.packb, msgpack.unpackb)])
def test_a_layout_that_went_over_the_wire_is_no_different(codec: Any) -> None:
    encode, decode = codec
    assert explain_difference(LAYOUT.as_dict(), decode(encode(LAYOUT.as_dict()))) == ""


def test_several_differences_and_missing_fields_are_all_named() -> None:
    theirs = LAYOUT.as_dict() | {"page_size": 32, "lanes": 3}
    del theirs["dtype"]
    assert explain_difference(LAYOUT.as_dict(), theirs) == (
        "dtype: ours bfloat16, theirs None; lanes: ours None, theirs 3; page_size: ours 16, theirs 32"
    )
