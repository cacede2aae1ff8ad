"""The life of one side of one transfer: a `KVPoll` state machine with a deadline in every state.

It does no I/O and reads no clock; whoever drives it says what time it is. Several threads may end a life (the engine
by an abort, the puller by an error, the channel by a deadline): the first one wins and everybody else is told so.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from sgl_pd_connector.base import KVPoll
from sgl_pd_connector.errors import PDError


class Lifecycle:
    """State, reason of failure and the times at which states were entered.

    The lock makes "is it over? then end it" one step. It is a leaf: nothing else is locked or called while it is held.
    """

    def __init__(self, now: float) -> None:
        self._lock = threading.Lock()
        self._state = KVPoll.Bootstrapping
        self._error: PDError | None = None
        self._entered = {KVPoll.Bootstrapping: now}

    @property
    def state(self) -> KVPoll:
        return self._state

    @property
    def is_final(self) -> bool:
        return self._state.is_final

    @property
    def error(self) -> PDError | None:
        """Why it failed; None unless the state is `KVPoll.Failed`."""
        return self._error

    @property
    def entered(self) -> Mapping[KVPoll, float]:
        """When each state was entered, in the caller's clock."""
        return self._entered

    def age(self, now: float) -> float:
        """Seconds spent in the present state."""
        return now - self._entered[self._state]

    def advance(self, to: KVPoll, now: float) -> bool:
        """Enters ``to``, the next state. False if the life was ended meanwhile by somebody else.

        Raises:
            IllegalTransitionError: ``to`` does not follow the present state.
        """
        with self._lock:
            if self._state is KVPoll.Failed:
                return False
            state = self._state.next(to)
            # Before the state: who sees the new state without the lock finds its time too.
            self._entered[to] = now
            self._state = state
            return True

    def fail(self, error: PDError, now: float) -> bool:
        """Ends the life with ``error``. False, and nothing changes, if it had ended already."""
        with self._lock:
            if self._state.is_final:
                return False
            self._error = error
            self._entered[KVPoll.Failed] = now
            self._state = KVPoll.Failed
            return True

    def failure_exception(self) -> PDError:
        """The error. Raises `RuntimeError` if there is none."""
        if self._error is None:
            raise RuntimeError(f"not failed: the state is {self._state.name}")
        return self._error
