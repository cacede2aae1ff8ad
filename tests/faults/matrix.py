"""Runs faults against scenes and judges every cell."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from tests.faults.kinds import Fault
from tests.faults.requests import Request, drive, let_go, new_request, place
from tests.faults.scene import LONGEST, POOL, ROLES, SOCKET_IDLE, Scene
from tests.faults.verdict import Verdict

MARGIN = 6.0
"""Seconds that a busy machine may add to a deadline."""

UNTOUCHED = 0
NEXT_OWNER = 9


SIGNS = {"Success": "=", "Failed": "e", "lost": "x"}


@dataclass(kw_only=True)
class Cell(Verdict):
    """One fault that met one request.

    Attributes:
        p, d: how the request ended on either side, ``"lost"`` with its process.
        p_seconds, d_seconds: after how long.
    """

    p: str
    d: str
    p_error: str
    d_error: str
    p_seconds: float | None
    d_seconds: float | None

    @property
    def sign(self) -> str:
        return f"{SIGNS.get(self.p, '?')} / {SIGNS.get(self.d, '?')}"


class Matrix:
    """One scene, used for one fault after another."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._expected = scene.p.digests(range(POOL.num_pages))
        self._baseline: dict[str, dict[str, int]] = {}
        self._warm_up(ROLES)

    def run(self, fault: Fault) -> list[Cell]:
        """Eight cells: requests in all states at once, and one fault."""
        scene = self._scene
        scene.d.fill(range(POOL.num_pages), UNTOUCHED)
        requests = place(scene)
        fault.inject(scene)
        if fault.kills:
            _lose(requests, fault)
        let_go(scene)
        within = LONGEST + MARGIN
        drive(scene, requests, within if fault.lasts is None else fault.lasts, to_the_end=fault.lasts is None)
        fault.heal(scene)
        scene.d.stepping(True)
        drive(scene, requests, within)
        cells = [_cell(fault, request) for request in requests]
        self._check_bytes(requests, cells)
        common = [self._next_request_problem()]
        # What the silent network left half open at the native transfer, which has no keep-alive.
        for proxy in scene.view.proxies:
            if proxy not in scene.view.side_channels.values():
                proxy.close_dead()
        for cell in cells:
            cell.problems += [problem for problem in common if problem]
        leak = self._leak(fault)
        if leak:
            for cell in cells:
                cell.leak = True
                cell.problems.append(leak)
        self._check_late_writes(requests, cells)
        if fault.kills:
            self._warm_up(["P", "D"])
        return cells

    def _check_bytes(self, requests: list[Request], cells: list[Cell]) -> None:
        """D's pages hold what P's do if it reports success. Those of a failed request go to their next owner."""
        now = self._scene.d.digests(range(POOL.num_pages))
        for request, cell in zip(requests, cells, strict=True):
            right = all(
                now[d] == self._expected[p] for p, d in zip(request.p_pages, request.d_pages, strict=True)
            )
            if request.d.state == "Success" and not request.d.lost and not right:
                cell.wrong = True
                cell.problems.append("D reports success and holds wrong bytes")
        for request in requests:
            self._scene.d.fill(request.d_pages, NEXT_OWNER)

    def _check_late_writes(self, requests: list[Request], cells: list[Cell]) -> None:
        now = self._scene.d.digests(range(POOL.num_pages))
        for request, cell in zip(requests, cells, strict=True):
            if len({now[page] for page in request.d_pages}) != 1:
                cell.wrong = True
                cell.problems.append("something was written into pages after their request had ended")

    def _next_request_problem(self) -> str:
        """A request on the pages that no other one uses."""
        count = 4
        request = new_request(self._scene, "next", POOL.num_pages - count, count)
        drive(self._scene, [request], LONGEST + MARGIN)
        if (request.p.state, request.d.state) != ("Success", "Success"):
            return (
                f"the next request did not succeed: P {request.p.state} {request.p.error}; "
                f"D {request.d.state} {request.d.error}"
            )
        if self._scene.d.digests(request.d_pages) != [self._expected[page] for page in request.p_pages]:
            return "the next request has wrong bytes"
        return ""

    def _warm_up(self, roles: Iterable[str]) -> None:
        """What the processes hold when everything that a transfer opens is open."""
        problem = self._next_request_problem()
        assert not problem, problem
        requests = place(self._scene)
        let_go(self._scene)
        drive(self._scene, requests, LONGEST + MARGIN)
        assert {side.state for request in requests for side in (request.p, request.d)} == {"Success"}
        for role in roles:
            self._baseline[role] = self._scene.processes[role].resources()

    def _leak(self, fault: Fault) -> str:
        """What survivors still hold, after what is closed when idle has been."""
        deadline = time.monotonic() + SOCKET_IDLE + MARGIN
        while True:
            over = [f"{name}: {number}" for name, number in self._scene.held().items()]
            for role in ROLES:
                if fault.kills and role == fault.target:
                    continue
                for name, number in self._scene.processes[role].resources().items():
                    if number > self._baseline[role][name]:
                        over.append(f"{role} {name}: {number}, at first {self._baseline[role][name]}")
            if not over or time.monotonic() > deadline:
                return "; ".join(over)
            time.sleep(0.1)


def _lose(requests: list[Request], fault: Fault) -> None:
    """Their half died with its process; what had not reached it goes to the successor, if there is one."""
    for request in requests:
        side = {"P": request.p, "D": request.d}.get(fault.target)
        if side is not None and (side.transfer is not None or not fault.replaced):
            side.lost = True


def _cell(fault: Fault, request: Request) -> Cell:
    p, d = request.p, request.d
    cell = Cell(
        fault=fault.name,
        target=fault.target,
        state=request.name,
        p="lost" if p.lost else p.state,
        d="lost" if d.lost else d.state,
        p_error=p.error,
        d_error=d.error,
        p_seconds=p.over_after,
        d_seconds=d.over_after,
    )
    for name, side in (("P", p), ("D", d)):
        if not side.over:
            cell.hang = True
            cell.problems.append(f"{name} is still in {side.state}")
    if request.name in fault.harmless and d.state != "Success":
        cell.problems.append(f"must not be harmed, but D: {d.error}")
    if request.name in fault.harmless and fault.told and p.state != "Success":
        cell.problems.append(f"D has everything, but P: {p.error}")
    return cell
