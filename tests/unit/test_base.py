"""KVPoll: which state may follow which."""

from __future__ import annotations

import itertools

import pytest

from sgl_pd_connector.base import (
    MAIN_KV,
    BaseKVManager,
    BaseKVReceiver,
    BaseKVSender,
    KVArgs,
    KVPoll,
    PoolTransferSpec,
)
from sgl_pd_connector.errors import IllegalTransitionError

pytestmark = pytest.mark.unit

LEGAL = {
    (KVPoll.Bootstrapping, KVPoll.WaitingForInput),
    (KVPoll.WaitingForInput, KVPoll.Transferring),
    (KVPoll.Transferring, KVPoll.Success),
    (KVPoll.Bootstrapping, KVPoll.Failed),
    (KVPoll.WaitingForInput, KVPoll.Failed),
    (KVPoll.Transferring, KVPoll.Failed),
}


@pytest.mark.parametrize(("start", "to"), list(itertools.product(KVPoll, KVPoll)))
def test_a_transition_is_legal_or_an_error_that_names_both_states(start: KVPoll, to: KVPoll) -> None:
    if (start, to) in LEGAL:
        assert start.next(to) is to
    else:
        with pytest.raises(IllegalTransitionError, match=f"{start.name} -> {to.name}"):
            start.next(to)


def test_only_success_and_failed_are_final() -> None:
    assert {state for state in KVPoll if state.is_final} == {KVPoll.Success, KVPoll.Failed}


class Manager(BaseKVManager):
    def register_runner(self, runner: object) -> None: ...
    def create_sender(self, room: int) -> BaseKVSender:
        raise NotImplementedError

    def create_receiver(self, room: int) -> BaseKVReceiver:
        raise NotImplementedError


def _pool(name: str) -> PoolTransferSpec:
    return PoolTransferSpec(name, "paged_kv", "bfloat16", (16, 2, 2, 128), (1, 1, 1, 1), {"num_layers": 2})


def test_a_manager_moves_exactly_the_attention_cache() -> None:
    assert Manager(KVArgs([_pool(MAIN_KV)], 16), "h:1").bootstrap_addr == "h:1"


@pytest.mark.parametrize("names", [[], ["mamba"], [MAIN_KV, "mamba"]])
def test_other_lists_of_pools_are_refused_by_name(names: list[str]) -> None:
    with pytest.raises(NotImplementedError, match=", ".join(names) or "none"):
        Manager(KVArgs([_pool(name) for name in names], 16), "h:1")
