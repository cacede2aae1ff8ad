"""What the errors that end a transfer say: the room, who, after how long, and the setting that allows more."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sgl_pd_connector.config import ConnectorConfig
from sgl_pd_connector.errors import ForbiddenPeerError, IncompatiblePeerError, PDError, TransferTimeoutError
from sgl_pd_connector.transfer import reasons

pytestmark = pytest.mark.unit

ROOM = 7
D = reasons.decode_instance("decode-0", "10.0.0.2:41000")
P = reasons.prefill_instance("prefill-1", "10.0.0.1:5555")
BOOTSTRAP = "boot:8998"
PROBLEM = "connection reset"
LATE: dict[str, Any] = {"age": 31.25, "limit": 30.0}
MISFIT = IncompatiblePeerError("page_size: ours 16, theirs 32")
FORBIDDEN = ForbiddenPeerError("not among those allowed here (setting allowed_bootstrap_hosts)")

Case = tuple[dict[str, Any], str]
"""Arguments beside the room, and the settings that the text names; empty where none changes anything."""

CASES: dict[Callable[..., PDError], Case] = {
    reasons.given_up: ({"who": D, "reason": PROBLEM}, ""),
    reasons.peer_failed: ({"who": D, "reason": PROBLEM}, ""),
    reasons.peer_gave_up: ({"who": P, "reason": PROBLEM}, ""),
    reasons.not_prefilled: ({"who": D, **LATE}, "prefill_timeout"),
    reasons.no_room: ({"who": D, **LATE}, "prefill_timeout"),
    reasons.not_asked_for: (LATE, "lease"),
    reasons.decode_silent: ({"who": D, **LATE}, "lease"),
    reasons.not_fetched: ({"who": D, **LATE}, "prefill_timeout + transfer_timeout"),
    reasons.not_copied: ({"who": D, "problem": PROBLEM}, ""),
    reasons.not_registered: ({"who": D, "problem": PROBLEM}, ""),
    reasons.other_version: ({"who": D, "theirs": 2, "ours": 1}, ""),
    reasons.other_layout: ({"who": D, "theirs": "d1", "ours": "d2"}, ""),
    reasons.not_at_bootstrap: ({"who": BOOTSTRAP, "cause": PROBLEM, **LATE}, "bootstrap_timeout"),
    reasons.look_up_refused: ({"who": BOOTSTRAP, "problem": FORBIDDEN}, "allowed_bootstrap_hosts"),
    reasons.prefill_silent: ({"who": P, **LATE}, "peer_timeout"),
    reasons.unknown_at_prefill: ({"who": P, **LATE, "other_prompt": True}, "bootstrap_timeout"),
    reasons.prefill_slow: ({"who": P, **LATE}, "prefill_timeout"),
    reasons.prefill_forgot: ({"who": P}, ""),
    reasons.does_not_fit: ({"who": P, "problem": MISFIT}, ""),
    reasons.no_pages: ({"who": P, **LATE}, "prefill_timeout"),
    reasons.not_pulled: ({"who": P, **LATE}, "transfer_timeout"),
    reasons.not_written: ({"who": P, **LATE}, "transfer_timeout"),
    reasons.pull_failed: ({"who": P, "problem": PROBLEM}, ""),
    reasons.not_offered_again: ({"who": P, "problem": PROBLEM, "age": 2.0}, ""),
    reasons.write_failed: ({"who": P, "problem": PROBLEM}, ""),
}
NAMES = ("decode_instance", "prefill_instance", "for_peer")
every_reason = pytest.mark.parametrize("reason", CASES, ids=lambda reason: reason.__name__)


def text_of(reason: Callable[..., PDError]) -> str:
    return str(reason(ROOM, **CASES[reason][0]))


def test_every_reason_has_a_case() -> None:
    made_here = inspect.getmembers(reasons, lambda member: inspect.getmodule(member) is reasons)
    functions = {name for name, member in made_here if inspect.isfunction(member)}
    assert functions - set(NAMES) == {reason.__name__ for reason in CASES}


@pytest.mark.parametrize("module", sorted(Path(reasons.__file__).parent.glob("*.py")), ids=lambda m: m.stem)
def test_no_error_that_ends_a_transfer_is_made_elsewhere(module: Path) -> None:
    if module.stem == "reasons":
        return
    made = {
        node.func.id
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not {name for name in made if name.startswith(("Transfer", "PDError")) and name.endswith("Error")}


@every_reason
def test_the_room_comes_first_and_the_other_side_does_not_hear_it_twice(
    reason: Callable[..., PDError],
) -> None:
    error = reason(ROOM, **CASES[reason][0])
    assert str(error).startswith("room 7: ")
    assert "room 7" not in reasons.for_peer(ROOM, error)
    assert str(error).endswith(reasons.for_peer(ROOM, error))


@every_reason
def test_it_says_who_at_which_address_and_what(reason: Callable[..., PDError]) -> None:
    arguments, _ = CASES[reason]
    for name in ("who", "problem", "reason", "cause", "theirs", "ours"):
        if name in arguments:
            assert str(arguments[name]) in text_of(reason)
    assert "who" in arguments or reason is reasons.not_asked_for, "that one is about nobody"


@every_reason
def test_after_a_deadline_it_says_how_long_and_the_setting(reason: Callable[..., PDError]) -> None:
    arguments, setting = CASES[reason]
    late = isinstance(reason(ROOM, **arguments), TransferTimeoutError)
    assert late == ("limit" in arguments)
    assert "age" in arguments or not late
    if late:
        assert f" 31.2 s (setting {setting} = 30 s)" in text_of(reason)
    elif setting:
        assert f"setting {setting}" in text_of(reason)
    for name in setting.split(" + ") if setting else ():
        assert name in ConnectorConfig.model_fields


@pytest.mark.parametrize(
    "reason",
    [reasons.given_up, reasons.not_prefilled, reasons.no_room, reasons.not_copied],
    ids=lambda r: r.__name__,
)
def test_before_the_two_have_met_it_says_so(reason: Callable[..., PDError]) -> None:
    text = str(reason(ROOM, **CASES[reason][0] | {"who": ""}))
    assert "any decode instance" in text or "before the other side was known" in text


def test_a_reason_of_any_length_can_be_told() -> None:
    assert len(reasons.for_peer(ROOM, reasons.pull_failed(ROOM, P, "x" * 5000))) == reasons.MAX_TOLD
