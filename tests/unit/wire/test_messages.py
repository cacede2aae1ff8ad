"""The side channel's frames: what is accepted, and that nothing else gets further than `decode`."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from sgl_pd_connector.errors import ProtocolError
from sgl_pd_connector.wire import messages as msg
from sgl_pd_connector.wire.rooms import MAX_ROOM

pytestmark = pytest.mark.unit

EXAMPLES: list[msg.Message] = [
    msg.Subscribe(
        room=7, attempt=9, prompt=b"\0" * 16, epoch=5, instance_id="decode-0", layout_digest="ab" * 16
    ),
    msg.Wait(room=7, attempt=9, known="other_prompt"),
    msg.Ready(
        room=MAX_ROOM,
        attempt=0,
        num_tokens=200,
        layout={"dtype": "bfloat16", "page_shape": [16, 2]},
        groups={8: [2, 2], 4: [4]},
        chunks=[
            msg.ReadyChunk(uuid=msg.MAX_UUID, first=0, pages=8),
            msg.ReadyChunk(uuid=1, first=8, pages=4),
        ],
    ),
    msg.Done(room=7, attempt=9),
    msg.Failed(room=7, attempt=9, reason="größer als erlaubt"),
    msg.Abort(room=7, attempt=9, reason=""),
]
KINDS = [message.type for message in EXAMPLES]


def raw(message: msg.Message) -> dict[str, Any]:
    unpacked: dict[str, Any] = msgpack.unpackb(msg.encode(message), strict_map_key=False)
    return unpacked


def changed(message: msg.Message, **fields: Any) -> bytes:
    packed: bytes = msgpack.packb(raw(message) | fields)
    return packed


@pytest.mark.parametrize("message", EXAMPLES, ids=KINDS)
def test_every_message_arrives_as_it_was_sent(message: msg.Message) -> None:
    assert msg.decode(msg.encode(message)) == message


def test_there_is_an_example_of_every_message() -> None:
    assert {type(message) for message in EXAMPLES} == set(msg.Message.__args__)


@pytest.mark.parametrize("message", EXAMPLES, ids=KINDS)
def test_fields_of_a_newer_version_are_ignored(message: msg.Message) -> None:
    assert msg.decode(changed(message, colour="red", deep={"a": [1, {"b": None}]})) == message


@pytest.mark.parametrize("message", EXAMPLES, ids=KINDS)
def test_a_missing_field_is_named(message: msg.Message) -> None:
    for name, field in type(message).model_fields.items():
        if field.is_required():
            fields = raw(message)
            del fields[name]
            with pytest.raises(ProtocolError, match=name):
                msg.decode(msgpack.packb(fields))


WRONG = ["7", 7.0, -1, 2**63, True, None, [], {}, b"7"]


@pytest.mark.parametrize("name", ["room", "attempt"])
@pytest.mark.parametrize("value", WRONG, ids=repr)
@pytest.mark.parametrize("message", EXAMPLES, ids=KINDS)
def test_a_wrong_number_is_named_not_converted(message: msg.Message, name: str, value: object) -> None:
    with pytest.raises(ProtocolError, match=name):
        msg.decode(changed(message, **{name: value}))


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("subscribe", {"prompt": b"\0" * 17}),
        ("subscribe", {"prompt": "text"}),
        ("subscribe", {"instance_id": "x" * 129}),
        ("subscribe", {"instance_id": 7}),
        ("subscribe", {"epoch": "5"}),
        ("subscribe", {"layout_digest": "x" * 129}),
        ("subscribe", {"version": "1"}),
        ("wait", {"known": "perhaps"}),
        ("ready", {"num_tokens": 0}),
        ("ready", {"layout": []}),
        ("ready", {"groups": {"8": [4]}}),
        ("ready", {"groups": {8: [0]}}),
        ("ready", {"groups": {8: [1] * 1025}}),
        ("ready", {"chunks": []}),
        ("ready", {"chunks": [{"uuid": 1, "first": 0, "pages": 1}] * 10_001}),
        ("ready", {"chunks": [{"uuid": msg.MAX_UUID + 1, "first": 0, "pages": 1}]}),
        ("ready", {"chunks": [{"uuid": 1, "first": -1, "pages": 1}]}),
        ("ready", {"chunks": [{"uuid": 1, "first": 0, "pages": 0}]}),
        ("failed", {"reason": "x" * 2001}),
        ("abort", {"reason": b"bytes"}),
    ],
    ids=str,
)
def test_other_wrong_values_are_refused(kind: str, fields: dict[str, object]) -> None:
    with pytest.raises(ProtocolError, match=next(iter(fields))):
        msg.decode(changed(EXAMPLES[KINDS.index(kind)], **fields))


@pytest.mark.parametrize("kind", ["", "hello", None, 1, [], {}, b"done"], ids=repr)
def test_an_unknown_kind_of_message_is_refused(kind: object) -> None:
    with pytest.raises(ProtocolError):
        msg.decode(changed(EXAMPLES[3], type=kind))


@pytest.mark.parametrize("value", [None, 1, "done", [], [1, 2], {}, {1: 2}, b"x"], ids=repr)
def test_a_frame_that_is_no_message_is_refused(value: object) -> None:
    with pytest.raises(ProtocolError):
        msg.decode(msgpack.packb(value))


def test_an_oversize_frame_is_refused_unread() -> None:
    with pytest.raises(ProtocolError, match=f"{msg.MAX_FRAME + 1} bytes"):
        msg.decode(b"\xc1" * (msg.MAX_FRAME + 1))


def test_the_longest_ready_fits_a_frame() -> None:
    chunks = [msg.ReadyChunk(uuid=msg.MAX_UUID, first=100_000 + i, pages=64) for i in range(10_000)]
    ready = msg.Ready(room=1, attempt=1, num_tokens=1, layout={}, groups={64: [1] * 1024}, chunks=chunks)
    assert len(msg.encode(ready)) <= msg.MAX_FRAME


@pytest.mark.parametrize("message", EXAMPLES, ids=KINDS)
def test_a_truncated_frame_or_one_with_a_tail_is_refused(message: msg.Message) -> None:
    frame = msg.encode(message)
    for broken in (frame + b"\0", *(frame[:length] for length in range(len(frame)))):
        with pytest.raises(ProtocolError):
            msg.decode(broken)


@pytest.mark.parametrize(
    "frame",
    [
        b"\x91" * 10_000,  # deep nesting
        b"\x81\xa1a" * 10_000,
        b"\xdd\xff\xff\xff\xff",  # an array of 4 G elements that are not there
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x81\x90\x01",  # a key that cannot be one
        b"\xd6\xff\xff\xff\xff\xff",  # timestamps
        b"\xc7\x0c\xff" + b"\xff" * 12,
        b"\xa1\xff",  # a string that is not UTF-8
    ],
    ids=lambda frame: frame[:3].hex(),
)
def test_hostile_messagepack_is_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        msg.decode(frame)


def decode_or_refuse(frame: bytes) -> None:
    try:
        message = msg.decode(frame)
    except ProtocolError:
        return
    assert msg.decode(msg.encode(message)) == message


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=9)
    | st.binary(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=9) | st.integers(0, 99), inner, max_size=4)
    ),
    max_leaves=6,
)


@given(st.binary(max_size=300))
def test_no_bytes_raise_anything_else(frame: bytes) -> None:
    decode_or_refuse(frame)


@given(st.sampled_from(EXAMPLES), st.data())
def test_no_damaged_message_raises_anything_else(message: msg.Message, data: st.DataObject) -> None:
    frame = bytearray(msg.encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    decode_or_refuse(bytes(frame))


@given(st.sampled_from(EXAMPLES), st.data())
def test_no_wrong_field_raises_anything_else(message: msg.Message, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([*type(message).model_fields, "type"]))
    decode_or_refuse(changed(message, **{name: data.draw(JUNK)}))


def test_a_message_that_could_not_be_decoded_cannot_be_made() -> None:
    with pytest.raises(ValidationError):
        msg.Done(room=-1, attempt=1)
