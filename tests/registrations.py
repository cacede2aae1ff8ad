"""Registrations for tests: one complete payload and routes made from it."""

from __future__ import annotations

from typing import Any

from sgl_pd_connector.wire.routes import Rank, Role, Route

PAYLOAD: dict[str, Any] = {
    "role": "prefill",
    "instance_id": "prefill-0",
    "epoch": 7,
    "tp_rank": 1,
    "tp_size": 4,
    "cp_rank": 0,
    "cp_size": 1,
    "dp_rank": 2,
    "dp_size": 3,
    "pp_rank": 0,
    "pp_size": 1,
    "transfer_addr": "10.0.0.1:40001",
    "transfer_ports": [40001, 40002],
    "zmq_addr": "10.0.0.1:40002",
    "scheduler_addr": None,
    "page_size": 16,
    "kv_dtype": "bfloat16",
    "mesh_meta": {"axes": {"data": 1, "tensor": 4}, "kind": "TPU v5e"},
    "layout_digest": "sha256:abc",
    "transfer_channels": 4,
    "transfer_size": 16777216,
}


def make_route(
    instance_id: str = "prefill-0",
    *,
    role: Role = "prefill",
    epoch: int = 1,
    rank: Rank | None = None,
    **changes: Any,
) -> Route:
    """A route of rank 0 0 0 0, or of ``rank`` in an instance with room for 10,000 of them on each axis."""
    ranks = {f"{axis}_rank": index for axis, index in (rank or Rank(0, 0, 0, 0))._asdict().items()}
    sizes = {f"{axis}_size": 10_000 for axis in Rank._fields}
    return Route.model_validate(
        PAYLOAD | {"role": role, "instance_id": instance_id, "epoch": epoch} | ranks | sizes | changes
    )


def make_routes(count: int, instance_id: str = "prefill-0", *, epoch: int = 1) -> list[Route]:
    return [make_route(instance_id, epoch=epoch, rank=Rank(tp, 0, 0, 0)) for tp in range(count)]
