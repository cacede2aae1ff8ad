"""The whole matrix, one test per fault; `python -m tests.faults` shows it as a table."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.kinds import Fault, faults
from tests.faults.matrix import Matrix
from tests.faults.scene import SECRET, Scene

pytestmark = [
    pytest.mark.integration,
    pytest.mark.keeps("the processes and their network serve all tests of the module"),
]


@pytest.fixture(scope="module")
def plain(fork_server: None) -> Iterator[Matrix]:
    with Scene() as scene:
        yield Matrix(scene)


@pytest.fixture(scope="module")
def signed(fork_server: None) -> Iterator[Matrix]:
    with Scene(secret=SECRET) as scene:
        yield Matrix(scene)


@pytest.mark.parametrize("fault", list(faults()), ids=lambda fault: fault.title)
def test_every_request_ends_and_the_next_one_is_served(fault: Fault, request: pytest.FixtureRequest) -> None:
    matrix: Matrix = request.getfixturevalue("signed" if fault.signed else "plain")
    problems = {cell.state: cell.problems for cell in matrix.run(fault) if not cell.passed}
    assert not problems
