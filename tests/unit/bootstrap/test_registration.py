"""Staying registered, without threads and sockets: a `Registration` against a `Registry` on one fake
clock."""

from __future__ import annotations

import pytest

from sgl_pd_connector.bootstrap.heartbeat import Registration, RegistrationStatus
from sgl_pd_connector.bootstrap.registry import Registry, RegistryFullError
from sgl_pd_connector.wire.routes import Heartbeat, HeartbeatReply, Registered, Route
from tests.registrations import make_route, make_routes

pytestmark = pytest.mark.unit

TTL = 15.0


class Network:
    """Carries calls of registrations to a registry, which can be down, restarted, or of ill will."""

    def __init__(self) -> None:
        self.now = 0.0
        self.up = True
        self.refusing = False
        self.calls: list[str] = []
        self.restart()

    def restart(self) -> None:
        self.registry = Registry(ttl=TTL, max_routes=100, clock=lambda: self.now)

    def step(self, registration: Registration) -> float:
        """One call; returns the pause until the next."""
        call = registration.next_call(self.now)
        self.calls.append("put" if isinstance(call, Route) else "heartbeat")
        if not self.up or self.refusing:
            return registration.on_failure(answered=self.up)
        if isinstance(call, Route):
            try:
                replaced = self.registry.put(call)
            except RegistryFullError:
                return registration.on_failure(answered=True)
            return registration.on_registered(call, Registered(ttl=TTL, replaced=replaced), self.now)
        assert isinstance(call, Heartbeat)
        unknown, superseded = self.registry.heartbeat(call)
        reply = HeartbeatReply(unknown=unknown, superseded=superseded, ttl=TTL)
        return registration.on_heartbeat(reply, self.now)

    def run(self, registration: Registration, seconds: float) -> None:
        end = self.now + seconds
        while True:
            pause = self.step(registration)
            if self.now + pause > end:
                break
            self.now += pause
        self.now = end

    def listed(self) -> list[Route]:
        return list(self.registry.routes("prefill"))


def make(*routes: Route, interval: float = 5.0) -> Registration:
    return Registration(routes or (make_route(),), interval=interval, jitter=lambda: 0.5)


@pytest.fixture
def network() -> Network:
    return Network()


def test_it_registers_once_and_then_sends_heartbeats(network: Network) -> None:
    registration = make()
    assert registration.status is RegistrationStatus.PENDING
    network.run(registration, 16.0)
    assert network.calls == ["put", "heartbeat", "heartbeat", "heartbeat"]
    assert registration.status is RegistrationStatus.REGISTERED
    network.run(registration, 10 * TTL)
    assert len(network.listed()) == 1


def test_all_ranks_of_a_process_are_put_one_by_one_and_renewed_together(network: Network) -> None:
    routes = make_routes(3)
    registration = make(*routes)
    assert [network.step(registration) for _ in routes] == [0.0, 0.0, 5.0]
    assert network.listed() == routes
    network.run(registration, 6.0)
    assert network.calls == ["put"] * 3 + ["heartbeat"] * 2


def test_a_server_that_lost_its_memory_is_refilled_by_the_next_heartbeat(network: Network) -> None:
    routes = make_routes(3)
    registration = make(*routes)
    network.run(registration, 6.0)
    network.restart()
    assert network.step(registration) == 0.0
    assert registration.status is RegistrationStatus.PENDING
    network.run(registration, 0.0)
    assert network.listed() == routes
    assert registration.status is RegistrationStatus.REGISTERED


def test_only_what_was_forgotten_is_registered_again(network: Network) -> None:
    routes = make_routes(3)
    registration = make(*routes)
    network.run(registration, 1.0)
    network.registry.delete(routes[1].key)
    network.calls.clear()
    network.run(registration, 0.0)
    assert network.calls == ["heartbeat", "put"]
    assert len(network.listed()) == 3


def test_ranks_already_put_are_renewed_while_the_others_are_still_being_put(network: Network) -> None:
    routes = make_routes(100)
    registration = make(*routes)
    for _ in range(200):
        if registration.status is RegistrationStatus.REGISTERED:
            break
        network.step(registration)
        network.now += 1.0  # a slow server: all of them take longer than the ttl
    assert network.listed() == routes
    assert network.calls.count("put") == 100


def test_a_refused_rank_does_not_cost_the_others_their_place(network: Network) -> None:
    network.registry.max_routes = 2
    registration = make(*make_routes(3))
    for _ in range(20):
        network.now += network.step(registration)
    assert network.now > 2 * TTL
    assert len(network.listed()) == 2
    assert registration.status is RegistrationStatus.REFUSED


def test_an_unreachable_server_is_tried_again_soon_then_at_the_interval(network: Network) -> None:
    registration = make()
    network.up = False
    assert [network.step(registration) for _ in range(6)] == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]
    assert registration.status is RegistrationStatus.UNREACHABLE
    network.up = True
    assert network.step(registration) == 5.0
    assert registration.status is RegistrationStatus.REGISTERED
    network.up = False
    assert network.step(registration) == 0.5, "the pauses start anew after a success"


def test_an_outage_of_hours_changes_nothing_about_that(network: Network) -> None:
    registration = make()
    network.up = False
    assert {network.step(registration) for _ in range(5000)} == {0.5, 1.0, 2.0, 4.0, 5.0}
    network.up = True
    assert network.step(registration) == 5.0
    assert registration.status is RegistrationStatus.REGISTERED


def test_a_refusal_is_not_hurried(network: Network) -> None:
    registration = make()
    network.refusing = True
    assert [network.step(registration) for _ in range(3)] == [5.0, 5.0, 5.0]
    assert registration.status is RegistrationStatus.REFUSED


def test_the_interval_gives_way_to_a_shorter_ttl(network: Network) -> None:
    registration = make(interval=60.0)
    network.run(registration, 10 * TTL)
    assert len(network.listed()) == 1
    assert network.step(registration) == TTL / 3


@pytest.mark.parametrize("ttl", [0.0, -15.0, 1e-9, float("nan")])
def test_a_ttl_without_sense_keeps_nobody_busy(ttl: float) -> None:
    registration = make()
    assert registration.on_registered(make_route(), Registered(ttl=ttl, replaced=False), 0.0) == 0.1
    assert registration.on_heartbeat(HeartbeatReply(ttl=ttl), 0.0) == 0.1


def test_an_interval_below_the_shortest_ttl_is_ours_to_choose() -> None:
    registration = make(interval=0.05)
    assert registration.on_registered(make_route(), Registered(ttl=TTL, replaced=False), 0.0) == 0.05


def test_what_a_server_says_of_ranks_that_are_not_ours_is_ignored(network: Network) -> None:
    registration = make()
    network.step(registration)
    foreign = make_routes(2)[1].rank
    assert registration.on_heartbeat(HeartbeatReply(unknown=[foreign], ttl=TTL), network.now) == 5.0
    assert registration.status is RegistrationStatus.REGISTERED


def test_pauses_are_spread_by_a_tenth_either_way(network: Network) -> None:
    spread = [Registration([make_route()], interval=5.0, jitter=lambda x=x: x) for x in (0.0, 0.999)]
    assert [network.step(registration) for registration in spread] == pytest.approx([4.5, 5.5], abs=0.01)


def test_two_processes_under_one_instance_id_do_not_fight(network: Network) -> None:
    first, second = make(make_route(epoch=1)), make(make_route(epoch=2))
    network.step(first)
    network.step(second)
    network.calls.clear()
    for _ in range(5):
        network.step(first)
        network.step(second)
        network.now += 5.0
    assert set(network.calls) == {"heartbeat"}
    assert first.status is RegistrationStatus.SUPERSEDED
    assert second.status is RegistrationStatus.REGISTERED
    assert [route.epoch for route in network.listed()] == [2]


def test_a_superseded_instance_takes_over_when_the_other_falls_silent(network: Network) -> None:
    first, second = make(make_route(epoch=1)), make(make_route(epoch=2))
    network.step(first)
    network.step(second)
    network.run(first, TTL + 5.0)
    assert [route.epoch for route in network.listed()] == [1]
    assert first.status is RegistrationStatus.REGISTERED


@pytest.mark.parametrize(
    "routes",
    [
        [],
        [make_route(), make_route()],
        [make_route("a"), make_route("b")],
        [make_route(epoch=1), *make_routes(2, epoch=2)[1:]],
        make_routes(1025),
    ],
    ids=["none", "same rank twice", "two instances", "two epochs", "too many"],
)
def test_one_registration_is_for_different_ranks_of_one_instance(routes: list[Route]) -> None:
    with pytest.raises(ValueError, match="routes"):
        make(*routes) if routes else Registration([], interval=5.0)
