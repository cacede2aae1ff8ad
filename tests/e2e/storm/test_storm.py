"""Faults that meet a real pair of the engine that is installed; see `python -m tests.faults -h`."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests.faults.engines.kinds import Fault, faults
from tests.faults.engines.storm import Storm

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(600),
    pytest.mark.keeps("the servers and their network serve all tests of the module"),
]


@pytest.fixture(scope="module")
def storm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Storm]:
    engine = "vllm" if importlib.util.find_spec("vllm") else "sgl-jax"
    with Storm(engine, tmp_path_factory.mktemp("storm")) as storm:
        yield storm


@pytest.mark.parametrize("fault", list(faults()), ids=lambda fault: fault.title)
def test_every_client_gets_an_end_and_the_next_one_is_served(storm: Storm, fault: Fault) -> None:
    assert not storm.problems(fault)
