"""The side channel's messages: one MessagePack map per ZMQ frame.

========== ========= =================================================================================
SUBSCRIBE  D -> P    "tell me when this room is ready"; repeated as a sign of life, it renews P's lease. After a pull
                     has failed: "offer it again"
WAIT       P -> D    "I am here"; whether the room is known, so that D can tell a slow P from a dead one, and knows that
                     P has heard the end
READY      P -> D    the packed copy is offered: its layout, its chunks and the uuid of each
DONE       D -> P    everything is pulled and written: drop the copy
FAILED     both      it went wrong, and why; final
ABORT      both      the request is gone: client left, request aborted, server stopping; final
========== ========= =================================================================================

``attempt`` is D's random number for one try at one request. Messages are idempotent and may be lost, repeated or late:
SUBSCRIBE is repeated until READY arrives, what ends a request on D until P answers that it has none, and whatever names
an attempt that is over changes nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgpack
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from sgl_pd_connector.errors import ProtocolError
from sgl_pd_connector.wire.rooms import DIGEST_BYTES, MAX_ROOM

PROTOCOL_VERSION = 1
MAX_FRAME = 1 << 20
"""Longest frame accepted, in bytes. A READY of 10,000 chunks has about 300 kB."""

MAX_CHUNKS = 10_000
"""Most chunks of one prompt."""

MAX_AGAIN = 16
"""Most times that D may ask for one offer again."""

MAX_UUID = 2**53 - 1
"""Uuids pass through JSON and other languages' doubles unharmed up to here."""

Room = Annotated[int, Field(ge=0, le=MAX_ROOM)]
Attempt = Annotated[int, Field(ge=0, le=MAX_ROOM)]
Prompt = Annotated[bytes, Field(max_length=DIGEST_BYTES)]
Again = Annotated[int, Field(ge=0, le=MAX_AGAIN)]
Reason = Annotated[str, Field(max_length=2000)]
Name = Annotated[str, Field(max_length=128)]


class _Message(BaseModel):
    # Unknown fields come from a newer peer and are ignored; known ones must have exactly the right type.
    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    room: Room
    attempt: Attempt


class Subscribe(_Message):
    type: Literal["subscribe"] = "subscribe"
    version: int = PROTOCOL_VERSION
    prompt: Prompt
    epoch: Annotated[int, Field(ge=0, le=MAX_ROOM)]
    """Of the P that is meant: another may answer at the same address after a restart."""
    instance_id: Name
    layout_digest: Name
    again: Again = 0
    """How many offers D has used up: a pull that fails has, as a rule, consumed what it named."""


class Wait(_Message):
    type: Literal["wait"] = "wait"
    known: Literal["no", "other_prompt", "yes", "restarted"]
    """Whether P has a request for the room: none, only with other prompts, or this one (not prefilled yet). Or P is not
    the instance that D means, but its successor."""


class ReadyChunk(BaseModel):
    """One registered chunk: pages ``[first, first + pages)`` in buffers of ``groups`` layers each."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    uuid: Annotated[int, Field(ge=0, le=MAX_UUID)]
    first: Annotated[int, Field(ge=0)]
    pages: Annotated[int, Field(ge=1)]


class Ready(_Message):
    type: Literal["ready"] = "ready"
    num_tokens: Annotated[int, Field(ge=1)]
    layout: dict[str, Any]
    groups: dict[int, Annotated[list[Annotated[int, Field(ge=1)]], Field(max_length=1024)]]
    """Layers per buffer, by chunk size in pages."""
    chunks: Annotated[list[ReadyChunk], Field(min_length=1, max_length=MAX_CHUNKS)]
    again: Again = 0
    """As in the SUBSCRIBE that it answers: a READY of an earlier offer may be late."""


class Done(_Message):
    type: Literal["done"] = "done"


class Failed(_Message):
    type: Literal["failed"] = "failed"
    reason: Reason


class Abort(_Message):
    type: Literal["abort"] = "abort"
    reason: Reason
    whole_room: bool = False
    """D refused the HTTP request before it was one of its engine's: no D will ask for anything in the room."""


Message = Subscribe | Wait | Ready | Done | Failed | Abort
_ADAPTER: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="type")])


def encode(message: Message) -> bytes:
    """One frame."""
    packed: bytes = msgpack.packb(message.model_dump())
    return packed


def decode(frame: bytes) -> Message:
    """The message in a frame.

    Raises:
        ProtocolError: for any bytes that are not exactly one well-formed message.
    """
    if len(frame) > MAX_FRAME:
        raise ProtocolError(f"frame of {len(frame)} bytes; at most {MAX_FRAME} are accepted")
    try:
        raw = msgpack.unpackb(frame, strict_map_key=False)
    except Exception as error:  # noqa: BLE001 - msgpack raises many kinds for junk, UnicodeDecodeError and StackError included
        raise ProtocolError(f"not MessagePack: {error}") from None
    try:
        return _ADAPTER.validate_python(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ProtocolError(
            f"malformed message: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        ) from None
