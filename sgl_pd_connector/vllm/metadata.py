"""What the two halves of the connector tell each other, once per engine step.

vLLM runs the scheduler side and the worker side apart, possibly in two processes. These records are all that
passes between them; both are picklable and hold no objects of either side.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Transfer:
    """One request's transfer: which prompt, in which room.

    Attributes:
        room: the router's room, 0 <= room < 2**63.
        prompt: digest of everything that decides the KV, see `prompt_digest`.
        num_tokens: length of the prompt.
        bootstrap_addr: where D looks P up, ``host:port``; None: the instance's own setting. Unused on P.
    """

    room: int
    prompt: bytes
    num_tokens: int
    bootstrap_addr: str | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """Where D wants a prompt's pages.

    Attributes:
        page_ids: pages to write, in prompt order.
        skip_pages: leading pages of the prompt that the local prefix cache holds; they are not in
            ``page_ids``.
    """

    page_ids: list[int]
    skip_pages: int


@dataclass(slots=True)
class StepMetadata:
    """Scheduler side to worker side. Everything is keyed by vLLM's request id and handled in this order.

    Attributes:
        opened: new transfers.
        refused: D: requests that the HTTP server refused, whose prompts are not known; P is told.
        dropped: transfers nobody wants any more, and why; the peer is told.
        preempted: P: sent requests that lost their pages: what was not copied out yet must not be.
        sends: P: all pages of prompts whose last chunk is computed in this step.
        loads: D: pages allocated for transfers that were reported ready.
        held: P: finished requests whose pages stay allocated until reported as sent.
    """

    opened: dict[str, Transfer] = field(default_factory=dict)
    refused: dict[str, Transfer] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)
    sends: dict[str, list[int]] = field(default_factory=dict)
    loads: dict[str, Load] = field(default_factory=dict)
    held: list[str] = field(default_factory=list)


@dataclass(slots=True)
class WorkerMetadata:
    """Worker side to scheduler side.

    Attributes:
        ready: D: requests whose KV waits on P, as long as it does; pages may be allocated for them.
        failed: D: requests whose transfer failed, at any stage, and why.
        released: P: requests whose pages were copied out (or will never be): they may be freed at once.
    """

    ready: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    released: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether it says anything; vLLM drops empty outputs."""
        return bool(self.ready or self.failed or self.released)
