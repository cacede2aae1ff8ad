"""What instances tell the bootstrap server about themselves, as JSON with the RFC's flat field names.

Read with care, since it comes from a network: every string, list and mapping is bounded, wrong types are
refused by the name of their field (no "1" for 1, no true for 1), and fields this version does not know are
ignored, so that a newer instance can register at an older server during a rolling upgrade.
"""

from __future__ import annotations

import json
from functools import cached_property
from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, ValidationInfo, field_validator

from sgl_pd_connector.config import NAME
from sgl_pd_connector.errors import ConfigError
from sgl_pd_connector.wire.address import Address

MAX_BODY_BYTES = 64 * 1024
"""No request body is longer; the server answers 413."""

MAX_RANKS_PER_HEARTBEAT = 1024
MAX_MESH_META_BYTES = 4096
MAX_MESH_META_DEPTH = 8
_MAX_SIZE = 65_536
_MAX_PORTS = 1025

Role = Literal["prefill", "decode"]


def _reachable(text: str) -> str:
    try:
        address = Address.parse(text, setting="address")
    except ConfigError as error:
        raise ValueError(str(error)) from None
    if address.ip is None:
        raise ValueError(f"{text!r} is a host name: register the numeric address")
    if address.is_wildcard or address.port == 0:
        raise ValueError(f"{text!r} can be bound but not connected to: register the real address and port")
    return str(address)


def _bounded_json(value: dict[str, JsonValue]) -> dict[str, JsonValue]:
    # Whatever is accepted here is sent to every reader: it must be JSON that all of them can parse.
    if _depth(value) > MAX_MESH_META_DEPTH:
        raise ValueError(f"nested deeper than {MAX_MESH_META_DEPTH} levels")
    size = len(json.dumps(value, allow_nan=False, ensure_ascii=False).encode())
    if size > MAX_MESH_META_BYTES:
        raise ValueError(f"{size} bytes of JSON, at most {MAX_MESH_META_BYTES} are kept")
    return value


def _depth(value: JsonValue) -> int:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, children), default=0)


Text = Annotated[str, Field(min_length=1, max_length=128, pattern=NAME)]
"""Printable ASCII without spaces: names and digests go into URLs, logs and metrics as they are."""
Reachable = Annotated[str, Field(max_length=80), AfterValidator(_reachable)]
Size = Annotated[int, Field(ge=1, le=_MAX_SIZE)]
Port = Annotated[int, Field(ge=1, lt=65_536)]
RankIndex = Annotated[int, Field(ge=0, lt=_MAX_SIZE)]
Epoch = Annotated[int, Field(ge=1, lt=2**53)]
"""Drawn at random at each start of an instance; compared for equality only."""


class Rank(NamedTuple):
    """Place of one worker in its instance. In JSON a list in this order."""

    tp: RankIndex
    cp: RankIndex
    dp: RankIndex
    pp: RankIndex


class RouteKey(NamedTuple):
    """What a registration is found by."""

    role: Role
    instance_id: str
    rank: Rank

    def __str__(self) -> str:
        ranks = " ".join(f"{axis}={index}" for axis, index in self.rank._asdict().items())
        return f"{self.role} instance {self.instance_id!r} rank {ranks}"

    def query(self) -> dict[str, str | int]:
        """URL query parameters that name this key; `RouteQuery` reads them."""
        ranks = {f"{axis}_rank": index for axis, index in self.rank._asdict().items()}
        return {"role": self.role, "instance_id": self.instance_id, **ranks}


class WireModel(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class RankTuple(WireModel):
    """Place of one worker among the tensor, context, data and pipeline parallel ranks of its instance."""

    tp_size: Size
    cp_size: Size
    dp_size: Size
    pp_size: Size
    # After the sizes: a rank is checked against its size, and a refusal is to name the rank.
    tp_rank: RankIndex
    cp_rank: RankIndex
    dp_rank: RankIndex
    pp_rank: RankIndex

    @field_validator("tp_rank", "cp_rank", "dp_rank", "pp_rank")
    @classmethod
    def _below_size(cls, rank: int, info: ValidationInfo) -> int:
        size_name = str(info.field_name).replace("rank", "size")
        size = info.data.get(size_name)  # absent when the size itself was refused
        if size is not None and rank >= size:
            raise ValueError(f"rank {rank} must be below {size_name} {size}")
        return rank

    @property
    def rank(self) -> Rank:
        return Rank(self.tp_rank, self.cp_rank, self.dp_rank, self.pp_rank)


class Route(RankTuple):
    """One worker's registration: where it is reached, and what must be equal on both sides of a transfer.

    Attributes:
        instance_id: name of the instance, unique in the deployment.
        epoch: new at each start of the instance, so that a restarted one is seen as new.
        transfer_addr: numeric ``host:port`` of its native transfer server.
        transfer_ports: all ports on which that server listens, for data too. A decode instance tells by them which of
            its connections belong to a transfer.
        zmq_addr: numeric ``host:port`` of its side channel.
        scheduler_addr: numeric ``host:port`` of its inference API, if it has one.
        page_size: tokens per page.
        kv_dtype: element type of the KV cache, e.g. ``"bfloat16"``.
        mesh_meta: what the engine says about its device mesh; informative, at most 4 KiB as JSON.
        layout_digest: digest of the KV layout; two sides with different ones must not transfer.
        transfer_channels: TCP connections per peer of the transfer server.
        transfer_size: bytes per message on them.
    """

    role: Role
    instance_id: Text
    epoch: Epoch
    transfer_addr: Reachable
    transfer_ports: Annotated[list[Port], Field(max_length=_MAX_PORTS)] = []
    zmq_addr: Reachable
    scheduler_addr: Reachable | None = None
    page_size: Size
    kv_dtype: Text
    mesh_meta: Annotated[dict[str, JsonValue], AfterValidator(_bounded_json)] = {}
    layout_digest: Text
    transfer_channels: Annotated[int, Field(ge=1, le=1024)]
    transfer_size: Annotated[int, Field(ge=1, lt=2**40)]

    @property
    def key(self) -> RouteKey:
        return RouteKey(self.role, self.instance_id, self.rank)

    @property
    def address_family(self) -> Literal["IPv4", "IPv6"]:
        """Of the transfer server. IPv4 on one side and IPv6 on the other abort the native library."""
        return "IPv6" if self.transfer_addr.startswith("[") else "IPv4"

    @cached_property
    def wire_json(self) -> bytes:
        """As sent. Kept, because a list of routes is asked for much more often than a route changes."""
        return self.model_dump_json().encode()


class RouteList(WireModel):
    """Answer to ``GET /list``."""

    routes: list[Route]


class RouteQuery(BaseModel):
    """The key of one route as URL query parameters; ranks not given are 0."""

    # Not strict: everything in a query string is text.
    model_config = ConfigDict(frozen=True, extra="ignore")

    role: Role
    instance_id: Text
    tp_rank: RankIndex = 0
    cp_rank: RankIndex = 0
    dp_rank: RankIndex = 0
    pp_rank: RankIndex = 0

    @property
    def key(self) -> RouteKey:
        return RouteKey(
            self.role, self.instance_id, Rank(self.tp_rank, self.cp_rank, self.dp_rank, self.pp_rank)
        )


class RouteGoodbye(RouteQuery):
    """Which route to forget; with ``epoch`` only if that epoch holds it."""

    epoch: Epoch | None = None


class Heartbeat(WireModel):
    """ "Still there", for any number of ranks of one instance."""

    role: Role
    instance_id: Text
    epoch: Epoch
    ranks: Annotated[list[Rank], Field(min_length=1, max_length=MAX_RANKS_PER_HEARTBEAT)]


class HeartbeatReply(WireModel):
    """Which of a heartbeat's ranks the server does not hold; all others are renewed.

    Attributes:
        unknown: not registered, or expired, or the server was restarted: register again.
        superseded: another epoch has registered the same key: somebody else runs under this instance id.
        ttl: seconds after which a registration that is not renewed is forgotten.
    """

    unknown: list[Rank] = []
    superseded: list[Rank] = []
    ttl: float


class Registered(WireModel):
    """Answer to ``PUT /route``: ``ttl`` as in `HeartbeatReply`, ``replaced`` if the key was known before."""

    ttl: float
    replaced: bool


class Deleted(WireModel):
    """Answer to ``DELETE /route``: whether there was such a route. Deleting twice is harmless."""

    deleted: bool


class Health(WireModel):
    """Answer to ``GET /health``: the number of routes by role, and the ttl as in `HeartbeatReply`."""

    status: Literal["ok"] = "ok"
    prefill: int
    decode: int
    ttl: float


class ErrorReply(WireModel):
    """Every answer that is not 2xx. ``field`` names what is wrong in the request, if it is one field."""

    error: str
    field: str | None = None
