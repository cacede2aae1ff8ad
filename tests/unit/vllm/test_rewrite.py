"""What vLLM is given for each request of a router or proxy, on either leg."""

from __future__ import annotations

import re
from typing import Any

import pytest

from sgl_pd_connector.errors import RequestError
from sgl_pd_connector.vllm.rewrite import Role, rewrite
from sgl_pd_connector.wire.rooms import MAX_ROOM

pytestmark = pytest.mark.unit

ROUTER = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 8000, "bootstrap_room": 7}
PROMPT = {"model": "m", "prompt": "hi"}


def on_prefill(body: dict[str, Any], endpoint: Any = "completions") -> dict[str, Any]:
    out = rewrite({**body, **ROUTER}, endpoint, "prefill")
    assert out is not None
    return out


def on_decode(body: dict[str, Any], endpoint: Any = "completions") -> dict[str, Any]:
    out = rewrite({**body, **ROUTER}, endpoint, "decode")
    assert out is not None
    return out


class TestOrdinaryRequests:
    @pytest.mark.parametrize("role", ["prefill", "decode"])
    @pytest.mark.parametrize(
        "extra",
        [
            {},
            {"bootstrap_host": None, "bootstrap_port": None, "bootstrap_room": None},
            {"kv_transfer_params": None},
            {"kv_transfer_params": {}},
            {"kv_transfer_params": {"do_remote_decode": False, "do_remote_prefill": None}},
            {"kv_transfer_params": {"prompt_token_ids": [1, 2]}},
            {"kv_transfer_params": "vLLM says what is wrong with this"},
        ],
    )
    def test_they_are_not_touched(self, extra: dict[str, Any], role: Role) -> None:
        assert rewrite({**PROMPT, "max_tokens": 50, "stream": True, **extra}, "completions", role) is None


class TestRouterFields:
    def test_prefill_is_told_to_offer_the_cache(self) -> None:
        out = on_prefill(PROMPT)
        assert out == {
            **PROMPT,
            "max_tokens": 1,
            "kv_transfer_params": ROUTER,
        }

    def test_decode_keeps_the_clients_fields(self) -> None:
        body = {
            **PROMPT,
            "max_tokens": 50,
            "min_tokens": 5,
            "stream": True,
            "n": 2,
            "logprobs": 3,
            "stop": ["x"],
        }
        out = on_decode(body)
        assert out == {**body, "kv_transfer_params": {"do_remote_prefill": True, **ROUTER}}

    def test_the_body_given_is_not_changed(self) -> None:
        body = {**PROMPT, **ROUTER, "stream": True, "kv_transfer_params": {"x": 1}}
        before = {**body, "kv_transfer_params": {"x": 1}}
        rewrite(body, "completions", "prefill")
        assert body == before

    def test_params_of_the_client_are_kept_beside_them(self) -> None:
        out = on_decode({**PROMPT, "kv_transfer_params": {"prompt_token_ids": [1], "bootstrap_room": 7}})
        assert out["kv_transfer_params"]["prompt_token_ids"] == [1]

    def test_they_may_be_inside_kv_transfer_params_only(self) -> None:
        inside = rewrite({**PROMPT, "kv_transfer_params": ROUTER}, "completions", "decode")
        assert inside == on_decode(PROMPT)

    @pytest.mark.parametrize("room", [0, MAX_ROOM])
    def test_every_room_of_63_bits_is_accepted(self, room: int) -> None:
        out = rewrite({**PROMPT, **ROUTER, "bootstrap_room": room}, "completions", "decode")
        assert out is not None
        assert out["kv_transfer_params"]["bootstrap_room"] == room

    @pytest.mark.parametrize("role", ["prefill", "decode"])
    def test_lists_for_a_batch_give_one_room_on_both_sides(self, role: Role) -> None:
        lists = {"bootstrap_host": ["h", "h"], "bootstrap_port": [1, 1], "bootstrap_room": [5, 6]}
        out = rewrite({"prompt": ["a", "b"], **lists}, "completions", role)
        assert out is not None
        assert out["prompt"] == ["a", "b"]
        params = out["kv_transfer_params"]
        assert (params["bootstrap_host"], params["bootstrap_port"], params["bootstrap_room"]) == ("h", 1, 5)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"bootstrap_room": None}, "bootstrap_room is missing beside bootstrap_host and bootstrap_port"),
        ({"bootstrap_room": "7"}, "bootstrap_room must be a whole number from 0 to 2**63 - 1, not '7'"),
        ({"bootstrap_room": 2**63}, "bootstrap_room must be"),
        ({"bootstrap_room": []}, "bootstrap_room is an empty list"),
        ({"bootstrap_room": ["1", 2]}, "bootstrap_room must be"),
        ({"bootstrap_port": 0}, "bootstrap_port must be a port number from 1 to 65535, not 0"),
        ({"bootstrap_port": 65_536}, "bootstrap_port must be"),
        ({"bootstrap_port": [1, 2]}, "bootstrap_port names several prefill servers"),
        ({"bootstrap_host": None}, "bootstrap_host must be"),
        ({"bootstrap_host": 5}, "bootstrap_host must be"),
        ({"bootstrap_host": ["a", "b"]}, "bootstrap_host names several prefill servers"),
        ({"bootstrap_host": "http://x"}, "bootstrap_host"),
        ({"kv_transfer_params": [1]}, "kv_transfer_params must be an object"),
        (
            {"kv_transfer_params": {"bootstrap_room": 8}},
            "bootstrap_room = 7 contradicts kv_transfer_params.bootstrap_room = 8",
        ),
        ({"kv_transfer_params": {"do_remote_decode": "yes"}}, "do_remote_decode must be true or false"),
    ],
)
def test_a_wrong_field_is_named_on_both_servers(change: dict[str, Any], says: str, role: Role) -> None:
    with pytest.raises(RequestError, match=re.escape(says)):
        rewrite({**PROMPT, **ROUTER, **change}, "completions", role)


class TestSequentialProxies:
    def test_prefill_gets_a_room_of_its_own(self) -> None:
        asked = {"do_remote_decode": True, "do_remote_prefill": False}
        body = {
            **PROMPT,
            "min_tokens": 3,
            "stream": True,
            "kv_transfer_params": {**asked, "remote_engine_id": None},
        }
        out = rewrite(body, "completions", "prefill")
        assert out is not None
        room = out["kv_transfer_params"].pop("bootstrap_room")
        assert 0 <= room <= MAX_ROOM
        assert out == {**PROMPT, "max_tokens": 1, "stream": False, "kv_transfer_params": asked}

    def test_what_prefill_answered_is_validated_on_decode(self) -> None:
        params = {"do_remote_prefill": True, **ROUTER}
        out = rewrite({**PROMPT, "kv_transfer_params": params}, "completions", "decode")
        assert out == on_decode(PROMPT)

    def test_params_of_another_connector_are_refused(self) -> None:
        params = {"do_remote_prefill": True, "remote_engine_id": "x", "remote_port": 1}
        with pytest.raises(RequestError, match="without bootstrap_room"):
            rewrite({**PROMPT, "kv_transfer_params": params}, "completions", "decode")

    @pytest.mark.parametrize(
        ("role", "flag"), [("prefill", "do_remote_prefill"), ("decode", "do_remote_decode")]
    )
    def test_the_wrong_server_says_so(self, role: Role, flag: str) -> None:
        with pytest.raises(RequestError, match=f"{flag} is for a .*swapped"):
            rewrite({**PROMPT, "kv_transfer_params": {flag: True, **ROUTER}}, "completions", role)


class TestOneTokenOnPrefill:
    @pytest.mark.parametrize(
        ("endpoint", "given", "left"),
        [
            ("completions", {}, {"max_tokens": 1}),
            ("completions", {"max_tokens": None}, {"max_tokens": 1}),
            ("completions", {"max_tokens": 99}, {"max_tokens": 1}),
            ("completions", {"max_tokens": "99"}, {"max_tokens": 1}),
            ("chat", {}, {"max_tokens": 1}),
            ("chat", {"max_tokens": 99}, {"max_tokens": 1}),
            ("chat", {"max_completion_tokens": 99}, {"max_completion_tokens": 1}),
            (
                "chat",
                {"max_completion_tokens": 9, "max_tokens": 8},
                {"max_completion_tokens": 1, "max_tokens": 8},
            ),
            (
                "chat",
                {"max_completion_tokens": None, "max_tokens": 8},
                {"max_completion_tokens": None, "max_tokens": 1},
            ),
            ("completions", {"max_tokens": 50, "min_tokens": 50}, {"max_tokens": 1}),
            ("completions", {"min_tokens": 16}, {"max_tokens": 1}),
            ("chat", {"min_tokens": 5000}, {"max_tokens": 1}),
            ("completions", {"stream": True}, {"max_tokens": 1, "stream": False}),
            ("completions", {"stream": "true"}, {"max_tokens": 1, "stream": False}),
            (
                "chat",
                {"stream": True, "stream_options": {"include_usage": True}},
                {"max_tokens": 1, "stream": False},
            ),
        ],
    )
    def test_what_depends_on_it_is_rewritten(
        self, endpoint: Any, given: dict[str, Any], left: dict[str, Any]
    ) -> None:
        out = on_prefill(given, endpoint)
        del out["kv_transfer_params"]
        assert out == left

    @pytest.mark.parametrize(
        "wrong",
        [
            {"max_tokens": 0},
            {"max_tokens": -1},
            {"max_tokens": "many"},
            {"max_tokens": 2.5},
            {"max_tokens": 5, "min_tokens": 6},
            {"max_tokens": 5, "min_tokens": -1},
            {"max_tokens": 5, "min_tokens": "few"},
            {"max_tokens": 5, "stream": False, "stream_options": {"include_usage": True}},
        ],
    )
    def test_what_decode_refuses_stays_wrong(self, wrong: dict[str, Any]) -> None:
        out = on_prefill(wrong)
        assert {name: out[name] for name in wrong if name != "max_tokens" or wrong[name] != 5} == {
            name: value for name, value in wrong.items() if name != "max_tokens" or value != 5
        }

    def test_what_shapes_the_prompt_or_each_copy_stays(self) -> None:
        body = {
            "messages": [{"role": "user", "content": "hi"}],
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "tool_choice": "required",
            "response_format": {"type": "json_object"},
            "chat_template_kwargs": {"enable_thinking": False},
            "logprobs": True,
            "top_logprobs": 2,
            "n": 3,
            "temperature": 0.7,
            "stop": ["x"],
            "ignore_eos": True,
        }
        out = on_prefill(body, "chat")
        assert {name: out[name] for name in body} == body


@pytest.mark.parametrize(
    ("endpoint", "asks"),
    [
        ("completions", {"prompt_logprobs": 0}),
        ("completions", {"echo": True, "logprobs": 1}),
        ("chat", {"echo": True}),
        ("chat", {"prompt_logprobs": 2}),
        ("completions", {"prompt_embeds": "AAAA"}),
        ("completions", {"use_beam_search": True, "n": 4, "temperature": 0}),
    ],
)
class TestAnswersThatNeedThePromptOnDecode:
    def test_decode_computes_them_from_an_ordinary_request(self, endpoint: Any, asks: dict[str, Any]) -> None:
        assert on_decode({"max_tokens": 9, **asks}, endpoint) == {"max_tokens": 9, **asks}

    def test_prefill_keeps_nothing_and_answers_cheaply(self, endpoint: Any, asks: dict[str, Any]) -> None:
        out = on_prefill({"max_tokens": 9, **asks}, endpoint)
        assert out.pop("max_tokens") == 1
        assert out.keys() <= {"logprobs", "prompt_embeds", "temperature"}


def test_echo_without_log_probabilities_is_disaggregated() -> None:
    assert "kv_transfer_params" in on_decode({**PROMPT, "echo": True})
