"""kv_transfer_params: what each router style sends, what it means on either server, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from sgl_pd_connector.errors import RequestError
from sgl_pd_connector.wire.params import DecodeParams, PrefillParams, answer, for_decode, for_prefill

pytestmark = pytest.mark.unit

ROUTED = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 7}
FROM_OTHER_CONNECTORS = {"remote_engine_id": None, "remote_block_ids": None, "remote_host": None}


@pytest.mark.parametrize("params", [None, {}, FROM_OTHER_CONNECTORS, {"bootstrap_room": None}])
def test_without_pd_fields_a_request_is_ordinary_on_both_servers(params: Any) -> None:
    assert for_prefill(params) is None
    assert for_decode(params) is None


def test_a_concurrent_router_gives_both_servers_the_same_fields() -> None:
    assert for_prefill(ROUTED) == PrefillParams(7, answers=False)
    assert for_decode(ROUTED) == DecodeParams(7, "127.0.0.1:8998")


def test_a_sequential_proxy_hands_what_p_answers_to_d() -> None:
    asked = for_prefill({"do_remote_decode": True, "do_remote_prefill": False, **FROM_OTHER_CONNECTORS})
    assert asked is not None
    assert asked.answers
    handed_over = answer(asked.room, "[::1]:8998")
    assert for_decode(handed_over) == DecodeParams(asked.room, "[::1]:8998")


def test_rooms_made_here_differ_and_fit_the_wire() -> None:
    rooms = {params.room for _ in range(100) if (params := for_prefill({"do_remote_decode": True}))}
    assert len(rooms) == 100
    assert all(0 <= room < 2**63 for room in rooms)


def test_an_explicit_false_makes_the_request_ordinary() -> None:
    assert for_prefill({**ROUTED, "do_remote_decode": False}) is None
    assert for_decode({**ROUTED, "do_remote_prefill": False}) is None


def test_a_router_that_was_told_no_port_leaves_the_address_to_ds_own_setting() -> None:
    assert for_decode({**ROUTED, "bootstrap_port": None}) == DecodeParams(7, None)


def test_ipv6_hosts_come_with_or_without_brackets() -> None:
    for host in ("::1", "[::1]"):
        assert for_decode({**ROUTED, "bootstrap_host": host}) == DecodeParams(7, "[::1]:8998")


@pytest.mark.parametrize("room", ["7", 1.5, True, -1, 2**63, [7]])
def test_a_room_is_a_63_bit_number(room: Any) -> None:
    for read in (for_prefill, for_decode):
        with pytest.raises(RequestError, match="bootstrap_room must be a whole number"):
            read({**ROUTED, "bootstrap_room": room})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"bootstrap_port": "8998"}, "bootstrap_port"),
        ({"bootstrap_port": True}, "bootstrap_port"),
        ({"bootstrap_port": 70_000}, "70000"),
        ({"bootstrap_host": None}, "bootstrap_host"),
        ({"bootstrap_host": "not a host"}, "bootstrap_host"),
        ({"do_remote_prefill": "yes"}, "do_remote_prefill"),
    ],
)
def test_a_malformed_field_is_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        for_decode({**ROUTED, **fields})


def test_params_that_are_not_an_object_are_refused() -> None:
    with pytest.raises(RequestError, match="must be an object, not list"):
        for_prefill([])


def test_the_wrong_server_says_which_one_was_meant() -> None:
    with pytest.raises(RequestError, match="for a decode server"):
        for_prefill({**ROUTED, "do_remote_prefill": True})
    with pytest.raises(RequestError, match="for a prefill server"):
        for_decode({**ROUTED, "do_remote_decode": True})


def test_a_remote_prefill_without_a_room_was_made_by_another_connector() -> None:
    with pytest.raises(RequestError, match="both servers must run this connector"):
        for_decode({"do_remote_prefill": True, "remote_engine_id": "x"})
