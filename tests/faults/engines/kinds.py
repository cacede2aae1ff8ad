"""The faults: what each does to the pair, and which requests it must not harm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from sgl_pd_connector.testing.engines import FailurePolicy
from tests.faults.engines.calls import FRONTS
from tests.faults.engines.pair import ROUTERS, TWICE, Pair
from tests.faults.network import Mode, Proxy

Requests = Callable[[str, str], bool]
"""Which requests, by their state and front."""

MOMENT = 0.5


def everything(_state: str, _front: str) -> bool:
    return True


def nothing(_state: str, _front: str) -> bool:
    return False


def recomputable(state: str, front: str) -> bool:
    """What P's death must not harm, if D recomputes: mini_lb and the Rust router answer with P's error, too."""
    return state == "decoding" or front == "direct"


def delivered(state: str, _front: str) -> bool:
    return state == "decoding"


@dataclass(frozen=True)
class Fault:
    """One row of the matrix.

    Attributes:
        name, target: what happens to whom.
        inject: makes it happen.
        lasts: seconds until `heal`.
        heal: ends it.
        harmless: requests that must be answered right.
        fatal: requests that must be answered with an error.
        dies: the part whose process does not survive.
        told: fronts that serve afterwards without a restart; the others cannot be told of a new address.
        leave: whether the clients do.
        policy: what D must do with requests whose KV does not arrive, if that matters.
        noticed: whether P and D are told what happens, so that no transfer may need a deadline to end.
    """

    name: str
    target: str
    inject: Callable[[Pair], None] = lambda _pair: None
    lasts: float = 0.0
    heal: Callable[[Pair], None] = lambda _pair: None
    harmless: Requests = everything
    fatal: Requests = nothing
    dies: str | None = None
    told: tuple[str, ...] = FRONTS
    leave: bool = False
    noticed: bool = False
    policy: FailurePolicy | None = None

    @property
    def title(self) -> str:
        return f"{self.name} {self.target}"


def faults() -> Iterator[Fault]:
    """All of them; those that cost a start of an engine last."""
    yield Fault("none", "-", noticed=True)
    yield Fault("clients leave", "all", harmless=nothing, leave=True, noticed=True)
    yield from cuts()
    for name in ("bootstrap", *ROUTERS, "P", "D"):
        yield stopped(name)
    for name in ("bootstrap", *ROUTERS):
        yield killed(name)
    for name in ROUTERS:
        yield killed(name, same_address=False)
    yield killed("P")
    yield killed("P", same_address=False)
    yield killed("D")
    yield killed("D", same_address=False, next_policy="fail")
    yield killed_under_policy_fail()


def stopped(name: str) -> Fault:
    return Fault(
        "SIGSTOP, SIGCONT", name, lambda pair: pair.stop(name), TWICE, lambda pair: pair.resume(name)
    )


def killed(name: str, *, same_address: bool = True, next_policy: FailurePolicy | None = None) -> Fault:
    """``next_policy``: that of the D that comes after."""
    harmless: dict[str, Requests] = {
        "P": recomputable,
        "D": nothing,
        "bootstrap": everything,
        **{router: lambda _state, front, router=router: front != router for router in ROUTERS},
    }

    def heal(pair: Pair) -> None:
        pair.policy = next_policy or pair.policy
        pair.start(name, same_address=same_address)

    return Fault(
        f"SIGKILL, {'same' if same_address else 'other'} address",
        name,
        lambda pair: pair.kill(name),
        heal=heal,
        harmless=harmless[name],
        dies=name,
        noticed=name in ROUTERS,
        told=FRONTS if same_address or name in ROUTERS else ("rust", "direct"),
    )


def killed_under_policy_fail() -> Fault:
    """D answers with an error instead of recomputing."""

    def lost(state: str, _front: str) -> bool:
        return state == "transferring"

    return replace(killed("P"), name="SIGKILL, policy fail", harmless=delivered, fatal=lost, policy="fail")


def cuts() -> Iterator[Fault]:
    links: dict[str, Callable[[Pair], list[Proxy]]] = {
        "bootstrap": lambda pair: [pair.view],
        "side channel": lambda pair: list(pair.view.side_channels.values()),
        "transfer": lambda pair: list(pair.view.transfers.values()),
    }
    for link, proxies in links.items():

        def change(pair: Pair, mode: Mode, proxies: Callable[[Pair], list[Proxy]] = proxies) -> None:
            for proxy in proxies(pair):
                proxy.set(mode)

        yield Fault(
            "cut, closed",
            link,
            lambda pair, change=change: change(pair, Mode.CLOSE),
            MOMENT,
            lambda pair, change=change: change(pair, Mode.PASS),
        )


SKIPPED = {
    "other address x bootstrap": "its address is part of P's and D's settings",
    "other address of P or D x mini_lb": "it reads its list of servers once; the Rust router is told while it runs",
    "cut, silent": "SIGSTOP of the peer is the same silence; the core's matrix cuts every link both ways",
}
"""Cells of the product that have no row, and why."""
