"""Registrations as JSON: the RFC's flat names, every field checked, nothing without a bound."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from sgl_pd_connector.wire.routes import (
    MAX_BODY_BYTES,
    MAX_MESH_META_BYTES,
    MAX_RANKS_PER_HEARTBEAT,
    Heartbeat,
    Rank,
    Route,
    RouteKey,
    RouteQuery,
)
from tests.registrations import PAYLOAD

pytestmark = pytest.mark.unit


def refused(change: dict[str, Any]) -> dict[str, Any]:
    """The first error of a payload with ``change``, read as JSON."""
    with pytest.raises(ValidationError) as caught:
        Route.model_validate_json(json.dumps(PAYLOAD | change))
    # The server hands over parsed JSON: both ways must agree.
    with pytest.raises(ValidationError):
        Route.model_validate(PAYLOAD | change)
    return dict(caught.value.errors()[0])


def test_the_wire_uses_the_flat_names_of_the_rfc() -> None:
    route = Route.model_validate(PAYLOAD)
    assert json.loads(route.wire_json) == PAYLOAD
    assert Route.model_validate_json(route.wire_json) == route


def test_the_key_is_role_instance_and_the_four_ranks() -> None:
    key = Route.model_validate(PAYLOAD).key
    assert key == RouteKey("prefill", "prefill-0", Rank(tp=1, cp=0, dp=2, pp=0))
    assert str(key) == "prefill instance 'prefill-0' rank tp=1 cp=0 dp=2 pp=0"
    as_text = {name: str(value) for name, value in key.query().items()}
    assert RouteQuery.model_validate(as_text).key == key


def test_ranks_left_out_of_a_query_are_zero() -> None:
    query = RouteQuery.model_validate({"role": "decode", "instance_id": "d"})
    assert query.key.rank == Rank(0, 0, 0, 0)


@pytest.mark.parametrize("field", sorted(PAYLOAD.keys() - {"transfer_ports", "scheduler_addr", "mesh_meta"}))
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Route.model_validate({name: value for name, value in PAYLOAD.items() if name != field})
    assert [error["loc"] for error in caught.value.errors()] == [(field,)]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("role", "router"),
        ("instance_id", ""),
        ("instance_id", "two words"),
        ("instance_id", "line\n"),
        ("instance_id", "x" * 129),
        ("instance_id", 5),
        ("epoch", 0),
        ("epoch", 2**53),
        ("epoch", "7"),
        ("tp_rank", 4),
        ("tp_rank", -1),
        ("tp_rank", True),
        ("tp_rank", 0.0),
        ("dp_rank", 3),
        ("pp_size", 0),
        ("pp_size", 10**9),
        ("transfer_addr", "somewhere"),
        ("transfer_addr", "localhost:5"),
        ("transfer_addr", "0.0.0.0:5"),
        ("transfer_addr", "[::]:5"),
        ("transfer_ports", 5),
        ("transfer_ports", [0]),
        ("transfer_ports", ["5"]),
        ("transfer_ports", [1] * 1026),
        ("zmq_addr", "10.0.0.1:0"),
        ("zmq_addr", "x" * 81),
        ("scheduler_addr", "http://10.0.0.1:8000"),
        ("page_size", None),
        ("kv_dtype", []),
        ("mesh_meta", [1]),
        ("mesh_meta", {"a": float("nan")}),
        ("mesh_meta", {"a": "\ud800"}),
        ("mesh_meta", {"a": "x" * MAX_MESH_META_BYTES}),
        ("mesh_meta", {"a": [[[[[[[[1]]]]]]]]}),
        ("layout_digest", "d" * 129),
        ("transfer_channels", 0),
        ("transfer_size", 2**40),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_field(field: str, value: Any) -> None:
    error = refused({field: value})
    # A lone surrogate is no JSON at all for a strict parser, which then knows no field.
    assert error["loc"][:1] == (field,) or error["type"] == "json_invalid"


def test_a_rank_outside_its_size_says_both() -> None:
    assert "rank 4 must be below tp_size 4" in refused({"tp_rank": 4})["msg"]


def test_fields_of_a_newer_version_are_ignored() -> None:
    route = Route.model_validate(PAYLOAD | {"not_invented_yet": {"a": 1}})
    assert route == Route.model_validate(PAYLOAD)


def test_addresses_are_registered_in_canonical_form() -> None:
    route = Route.model_validate(PAYLOAD | {"transfer_addr": "[2001:DB8:0::1]:5"})
    assert route.transfer_addr == "[2001:db8::1]:5"
    assert route.address_family == "IPv6"
    assert Route.model_validate(PAYLOAD).address_family == "IPv4"


def test_the_largest_heartbeat_and_the_largest_route_fit_into_a_body() -> None:
    ranks = [Rank(65_535, 65_535, 65_535, 65_535)] * MAX_RANKS_PER_HEARTBEAT
    beat = Heartbeat(role="prefill", instance_id="i" * 128, epoch=2**53 - 1, ranks=ranks)
    assert len(beat.model_dump_json()) < MAX_BODY_BYTES
    mesh = {"a": "x" * (MAX_MESH_META_BYTES - 9)}
    assert len(Route.model_validate(PAYLOAD | {"mesh_meta": mesh}).wire_json) < MAX_BODY_BYTES


@pytest.mark.parametrize(
    "ranks", [[], [[0, 0, 0]], [[0, 0, 0, 0, 0]], [[0, 0, 0, "0"]], [[0, 0, 0, -1]], [[0] * 4] * 1025, {}]
)
def test_a_heartbeat_carries_one_to_1024_ranks_of_four_numbers(ranks: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        Heartbeat.model_validate({"role": "prefill", "instance_id": "p", "epoch": 1, "ranks": ranks})
    assert caught.value.errors()[0]["loc"][0] == "ranks"
