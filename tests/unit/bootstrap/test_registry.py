"""The registry on a fake clock: who is listed, until when, and who wins."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from sgl_pd_connector.bootstrap.registry import Registry, RegistryFullError
from sgl_pd_connector.wire.routes import Heartbeat, Rank, Route
from tests.registrations import make_route, make_routes

pytestmark = pytest.mark.unit

TTL = 15.0
R0 = Rank(0, 0, 0, 0)


class World:
    """A registry, its clock, and what it reported as expired."""

    def __init__(self, max_routes: int = 100) -> None:
        self.now = 1000.0
        self.expired: list[Route] = []
        self.registry = Registry(
            ttl=TTL, max_routes=max_routes, clock=lambda: self.now, on_expired=self.expired.extend
        )

    def beat(
        self, epoch: int = 1, instance_id: str = "prefill-0", ranks: Sequence[Rank] = (R0,)
    ) -> tuple[list[Rank], list[Rank]]:
        return self.registry.heartbeat(
            Heartbeat(role="prefill", instance_id=instance_id, epoch=epoch, ranks=list(ranks))
        )

    def listed(self) -> list[Route]:
        return list(self.registry.routes("prefill"))


@pytest.fixture
def world() -> World:
    return World()


def test_a_route_is_found_by_its_exact_key_only(world: World) -> None:
    route = make_route(rank=Rank(1, 2, 3, 4))
    assert world.registry.put(route) is False
    assert world.registry.get(route.key) is route
    for other in (
        make_route(rank=Rank(0, 2, 3, 4)),
        make_route(rank=Rank(1, 2, 3, 0)),
        make_route("other", rank=Rank(1, 2, 3, 4)),
        make_route(role="decode", rank=Rank(1, 2, 3, 4)),
    ):
        assert world.registry.get(other.key) is None


def test_routes_are_listed_by_role_in_order_of_registration(world: World) -> None:
    first, second, decode = make_route("a"), make_route("b"), make_route("c", role="decode")
    for route in (first, decode, second):
        world.registry.put(route)
    assert world.listed() == [first, second]
    assert list(world.registry.routes("decode")) == [decode]
    assert (world.registry.count("prefill"), world.registry.count("decode")) == (2, 1)


def test_a_silent_route_is_forgotten_after_its_ttl(world: World) -> None:
    route = make_route()
    world.registry.put(route)
    world.now += TTL - 0.001
    assert world.registry.get(route.key) is route
    world.now += 0.001
    assert world.registry.get(route.key) is None
    assert world.listed() == []
    assert world.registry.count("prefill") == 0
    assert world.expired == [route]


def test_a_heartbeat_renews_for_a_whole_ttl(world: World) -> None:
    world.registry.put(make_route())
    for _ in range(3):
        world.now += TTL - 1
        assert world.beat() == ([], [])
    world.now += TTL - 1
    assert len(world.listed()) == 1


def test_only_the_silent_ones_expire(world: World) -> None:
    quiet, alive = make_route("quiet"), make_route("alive")
    world.registry.put(alive)
    world.registry.put(quiet)
    world.now += TTL - 1
    world.beat(instance_id="alive")
    world.now += 2
    assert world.listed() == [alive]
    assert world.expired == [quiet]


def test_a_route_put_again_does_not_keep_older_ones_alive(world: World) -> None:
    again, quiet = make_route("again"), make_route("quiet")
    world.registry.put(again)
    world.registry.put(quiet)
    world.now += TTL - 1
    world.registry.put(again)
    world.now += 1
    assert world.listed() == [again]


def test_a_heartbeat_of_an_unknown_route_asks_for_registration(world: World) -> None:
    assert world.beat() == ([R0], [])
    world.registry.put(make_route())
    world.now += TTL
    assert world.beat() == ([R0], []), "an expired route is not revived: what it said may be stale"
    assert world.listed() == []


def test_a_batch_of_ranks_is_answered_rank_by_rank(world: World) -> None:
    routes = make_routes(3)
    world.registry.put(routes[0])
    world.registry.put(make_route(epoch=2, rank=Rank(1, 0, 0, 0)))
    assert world.beat(ranks=[route.rank for route in routes]) == ([Rank(2, 0, 0, 0)], [Rank(1, 0, 0, 0)])


def test_the_newest_registration_wins_whatever_its_epoch(world: World) -> None:
    old, new = make_route(epoch=9), make_route(epoch=3, transfer_addr="10.0.0.2:7")
    world.registry.put(old)
    assert world.registry.put(new) is True
    assert world.listed() == [new]
    assert world.registry.get(old.key) is new


def test_a_heartbeat_of_the_predecessor_neither_renews_nor_revives(world: World) -> None:
    world.registry.put(make_route(epoch=1))
    world.now += 1
    world.registry.put(make_route(epoch=2))
    world.now += TTL - 1
    assert world.beat(epoch=1) == ([], [R0])
    world.now += 1
    assert world.listed() == []
    assert world.beat(epoch=1) == ([R0], []), "once the successor is gone it may register again"


def test_delete_is_immediate_and_harmless_twice(world: World) -> None:
    route = make_route()
    world.registry.put(route)
    assert world.registry.delete(route.key) is True
    assert world.listed() == []
    assert world.registry.delete(route.key) is False
    assert world.beat() == ([R0], [])
    assert world.expired == [], "a deregistration is no expiry"


def test_a_late_goodbye_of_the_predecessor_does_not_remove_its_successor(world: World) -> None:
    new = make_route(epoch=2)
    world.registry.put(new)
    assert world.registry.delete(new.key, epoch=1) is False
    assert world.listed() == [new]
    assert world.registry.delete(new.key, epoch=2) is True


def test_the_number_of_routes_is_bounded_and_room_returns() -> None:
    world = World(max_routes=3)
    routes = make_routes(4)
    for route in routes[:3]:
        world.registry.put(route)
    with pytest.raises(RegistryFullError, match="max_routes"):
        world.registry.put(routes[3])
    assert world.listed() == routes[:3], "a refused registration changes nothing"
    assert world.registry.put(make_route(epoch=2)) is True, "a known key is always taken"
    world.now += TTL
    assert world.registry.put(routes[3]) is False


def test_expiry_costs_what_expires_not_what_is_registered() -> None:
    """Counted, not timed: a sweep looks at the expired entries and one more."""
    world = World(max_routes=10_000)
    for route in make_routes(5_000, "old"):
        world.registry.put(route)
    world.now += TTL - 1
    for route in make_routes(5_000, "new"):
        world.registry.put(route)
    heard = 0

    class Counting(float):
        def __rsub__(self, other: float) -> float:
            nonlocal heard
            heard += 1
            return other - float(self)

    for entry in world.registry._entries.values():
        entry.heard = Counting(entry.heard)
    world.now += 1
    assert world.registry.get(make_route("new").key) is not None
    assert heard == 5_001
    world.registry.get(make_route("new").key)
    assert heard == 5_002
