"""The faults: what each does to the scene, for how long, and which requests it must not harm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.faults import side_channel
from tests.faults.network import Mode, Proxy
from tests.faults.requests import STATES
from tests.faults.scene import DEADLINES, ROLES, Scene

ALL = frozenset(STATES)
DELIVERED = frozenset({"pulled-not-acked", "decoding"})

TWICE = 2 * max(DEADLINES["peer_timeout"], DEADLINES["lease"], DEADLINES["transfer_timeout"])
"""Twice the deadline of whoever waits for a peer that is silent."""

MOMENT = 0.5


@dataclass(frozen=True)
class Fault:
    """One row of the matrix.

    Attributes:
        name, target: what happens to whom.
        inject: makes it happen.
        lasts: seconds until `heal`; None: until every request is over, or cannot end before.
        heal: ends it; None: it is over at once.
        kills: whether the target's process does not survive.
        signed: whether the processes share a secret. Damaged messages need it: without one a damaged number can be
            asked of the native transfer server, which then keeps the sockets of that connection for ever.
        replaced: whether its successor is there at once, and so receives requests that had not reached it.
        harmless: states whose requests must end with the right bytes at D.
        told: whether P must learn of that.
    """

    name: str
    target: str
    inject: Callable[[Scene], None]
    lasts: float | None = 0.0
    heal: Callable[[Scene], None] = lambda _scene: None
    kills: bool = False
    replaced: bool = False
    signed: bool = False
    harmless: frozenset[str] = DELIVERED
    told: bool = False

    @property
    def title(self) -> str:
        return f"{self.name} {self.target}"


def faults() -> Iterator[Fault]:
    """All of them, the harmless ones first."""
    yield Fault("none", "-", lambda _scene: None, None, harmless=ALL, told=True)
    yield from message_faults()
    yield from cuts()
    yield from stops()
    yield from deaths()


def message_faults() -> Iterator[Fault]:
    def heal(scene: Scene) -> None:
        scene.view.side_channel.rule = side_channel.untouched

    for name, rule, harmless, unsigned in (
        ("message lost", side_channel.losing, ALL, True),
        ("message duplicated", side_channel.repeating, ALL, True),
        ("message delayed", lambda: side_channel.delaying(seed=5), ALL, True),
        ("message corrupted", lambda: side_channel.damaging(seed=5), ALL, False),
    ):

        def inject(scene: Scene, rule: Callable[[], side_channel.Rule] = rule) -> None:
            scene.view.side_channel.rule = rule()

        for signed in (False, True) if unsigned else (True,):
            target = "P-D, signed" if signed else "P-D"
            yield Fault(name, target, inject, None, heal, harmless=harmless, told=True, signed=signed)


def cuts() -> Iterator[Fault]:
    links: dict[str, tuple[Callable[[Scene], list[Proxy]], frozenset[str], frozenset[str]]] = {
        # The link, and the states that must not be harmed when it is closed or swallows everything.
        "bootstrap": (lambda scene: [scene.view, scene.heartbeats], ALL, ALL),
        "side channel": (lambda scene: [scene.view.side_channel], ALL, DELIVERED),
        "transfer": (lambda scene: list(scene.view.transfers.values()), DELIVERED, DELIVERED),
    }
    for link, (proxies, if_closed, if_dropped) in links.items():
        for name, mode, lasts, harmless in (
            ("cut, closed", Mode.CLOSE, MOMENT, if_closed),
            ("cut, silent", Mode.DROP, TWICE, if_dropped),
        ):

            def inject(
                scene: Scene, proxies: Callable[[Scene], list[Proxy]] = proxies, mode: Mode = mode
            ) -> None:
                for proxy in proxies(scene):
                    proxy.set(mode)

            def heal(scene: Scene, proxies: Callable[[Scene], list[Proxy]] = proxies) -> None:
                for proxy in proxies(scene):
                    proxy.set(Mode.PASS)

            yield Fault(name, link, inject, lasts, heal, harmless=harmless)
    yield Fault("cut, closed", "transfer data", cut_data, harmless=ALL, told=True)


def cut_data(scene: Scene) -> None:
    """Every TCP connection of P, but for the side channel's."""
    side_channel_port = scene.identity["P"]["side_channel_port"]
    assert scene.p.cut_transfers([side_channel_port]) > 0


def stops() -> Iterator[Fault]:
    for role in ROLES:
        harmless = ALL if role == "bootstrap" else DELIVERED
        yield Fault(
            "SIGSTOP, SIGCONT",
            role,
            lambda scene, role=role: scene.stop(role),
            TWICE,
            lambda scene, role=role: scene.resume(role),
            harmless=harmless,
        )


def deaths() -> Iterator[Fault]:
    for role in ("bootstrap", "D", "P"):
        harmless = {"bootstrap": ALL, "P": DELIVERED, "D": frozenset[str]()}[role]
        yield Fault(
            "SIGKILL",
            role,
            lambda scene, role=role: scene.kill(role),
            None,
            lambda scene, role=role: scene.start(role, same_address=role == "bootstrap"),
            kills=True,
            harmless=harmless,
        )
        for name, same in (("restart, same address", True), ("restart, other address", False)):
            if role == "bootstrap" and not same:
                continue

            def inject(scene: Scene, role: str = role, same: bool = same) -> None:
                scene.kill(role)
                scene.start(role, same_address=same)

            yield Fault(
                name,
                role,
                inject,
                kills=True,
                replaced=True,
                harmless=harmless,
            )


SKIPPED = {
    "any fault x router": "the core has no router; the runs of real engines cover it",
    "restart, other address x bootstrap": "its address is part of P's and D's settings",
    "message lost, duplicated, delayed, corrupted x bootstrap": "HTTP over TCP: a request is answered, cut or silent, "
    "which the cuts cover; malformed bodies are the fuzzers'",
    "message faults x P, D separately": "a message has two ends: one row of both directions covers the two",
    "cut, silent x transfer data": "cannot be done without rights over the kernel's network; the control connection's "
    "silence stops the data as well",
}
"""Cells of the product that have no row, and why."""
