"""Why a transfer fails: the one place where the errors are made that end one.

Their texts reach the engine's log, the other side's and the transfer log. Each begins with the room, names the instance
or server that it is about with its address, and, where a deadline has passed, says after how long and which setting
allows more. ``who`` is such a name, as `decode_instance` and `prefill_instance` write it.
"""

from __future__ import annotations

from sgl_pd_connector.errors import (
    IncompatiblePeerError,
    PDError,
    TransferAbortedError,
    TransferError,
    TransferTimeoutError,
)

MAX_TOLD = 2000
"""Characters of a reason that fit into a message."""


def decode_instance(instance_id: str, address: object) -> str:
    return f"decode instance {instance_id} at {address}"


def prefill_instance(instance_id: str, address: str) -> str:
    return f"prefill instance {instance_id} at {address}"


def for_peer(room: int, error: PDError) -> str:
    """The text for the other side. It knows the room, and puts it in front together with this side's name."""
    return str(error).removeprefix(f"room {room}: ")[:MAX_TOLD]


# On either side.


def given_up(room: int, who: str, reason: str) -> TransferAbortedError:
    """By this side's engine, or because the process stops. ``who`` is empty if the other side is not known yet."""
    other = f"with {who} given up" if who else "given up before the other side was known"
    return TransferAbortedError(f"room {room}: {reason} (transfer {other})")


def peer_failed(room: int, who: str, reason: str) -> TransferError:
    return TransferError(f"room {room}: {who} reports: {reason}")


def peer_gave_up(room: int, who: str, reason: str) -> TransferAbortedError:
    return TransferAbortedError(f"room {room}: {who} gave up: {reason}")


# On P.


def not_prefilled(room: int, who: str, age: float, limit: float) -> TransferTimeoutError:
    what = f"room {room}: not prefilled for {who or 'any decode instance'} in"
    return TransferTimeoutError.after(what, age, "prefill_timeout", limit)


def no_room(room: int, who: str, age: float, limit: float) -> TransferTimeoutError:
    """Since the request came: the prefill is a part of it."""
    d = who or "any decode instance"
    what = f"room {room}: prefilled, but there was no room in max_packed_bytes to copy it for {d} in"
    return TransferTimeoutError.after(what, age, "prefill_timeout", limit)


def not_asked_for(room: int, age: float, limit: float) -> TransferTimeoutError:
    what = f"room {room}: prefilled, and no decode instance has asked for it in"
    return TransferTimeoutError.after(what, age, "lease", limit)


def decode_silent(room: int, who: str, age: float, limit: float) -> TransferTimeoutError:
    return TransferTimeoutError.after(f"room {room}: {who} was not heard of for", age, "lease", limit)


def not_fetched(room: int, who: str, age: float, limit: float) -> TransferTimeoutError:
    """However long D says that it is still interested."""
    setting = "prefill_timeout + transfer_timeout"
    return TransferTimeoutError.after(f"room {room}: {who} has not fetched it in", age, setting, limit)


def not_copied(room: int, who: str, problem: object) -> TransferError:
    return TransferError(
        f"room {room}: cannot copy the pages of the prompt out of the pool for "
        f"{who or 'any decode instance'}: {problem}"
    )


def not_registered(room: int, who: str, problem: object) -> TransferError:
    return TransferError(
        f"room {room}: the native transfer server does not take the copy for {who}: {problem}"
    )


def other_version(room: int, who: str, theirs: int, ours: int) -> IncompatiblePeerError:
    return IncompatiblePeerError(
        f"room {room}: {who} speaks protocol version {theirs}, and only {ours} is spoken here: install the same "
        "version of sgl-pd-connector on both"
    )


def other_layout(room: int, who: str, theirs: str, ours: str) -> IncompatiblePeerError:
    return IncompatiblePeerError(
        f"room {room}: KV layout digest {theirs} of {who} differs from {ours} of this prefill instance: model, "
        "dtype, page size and sharding must be equal"
    )


# On D.


def not_at_bootstrap(room: int, who: str, cause: object, age: float, limit: float) -> TransferTimeoutError:
    """``who`` is the bootstrap server; ``cause`` is why the last look-up found nothing."""
    what = f"room {room}: no prefill instance at bootstrap server {who}: {cause}; tried"
    return TransferTimeoutError.after(what, age, "bootstrap_timeout", limit)


def look_up_refused(room: int, who: str, problem: PDError) -> PDError:
    """Repeating the look-up is useless. ``who`` is the bootstrap server."""
    return type(problem)(f"room {room}: look-up at bootstrap server {who}: {problem}")


def prefill_silent(room: int, who: str, age: float, limit: float) -> TransferTimeoutError:
    return TransferTimeoutError.after(f"room {room}: {who} has not answered for", age, "peer_timeout", limit)


def unknown_at_prefill(
    room: int, who: str, age: float, limit: float, *, other_prompt: bool
) -> TransferTimeoutError:
    hint = (
        "it has the room, but for another prompt: do both servers use the same tokenizer and chat template?"
        if other_prompt
        else "did the router send the request to both, and to this prefill instance?"
    )
    what = f"room {room}: {who} does not have this request ({hint}); waited"
    return TransferTimeoutError.after(what, age, "bootstrap_timeout", limit)


def prefill_slow(room: int, who: str, age: float, limit: float) -> TransferTimeoutError:
    what = f"room {room}: {who} has not finished the prompt in"
    return TransferTimeoutError.after(what, age, "prefill_timeout", limit)


def prefill_forgot(room: int, who: str) -> TransferError:
    return TransferError(f"room {room}: {who} no longer has the request: was it restarted?")


def does_not_fit(room: int, who: str, problem: PDError) -> IncompatiblePeerError:
    """What P offers is not what this side can use."""
    return IncompatiblePeerError(f"room {room}: offer of {who} refused: {problem}")


def no_pages(room: int, who: str, age: float, limit: float) -> TransferTimeoutError:
    what = f"room {room}: {who} is ready, but this engine had no pages to write it into for"
    return TransferTimeoutError.after(what, age, "prefill_timeout", limit)


def not_pulled(room: int, who: str, age: float, limit: float) -> TransferTimeoutError:
    what = f"room {room}: not all data of {who} has arrived in"
    return TransferTimeoutError.after(what, age, "transfer_timeout", limit)


def not_written(room: int, who: str, age: float, limit: float) -> TransferTimeoutError:
    what = f"room {room}: all data of {who} has arrived, but this engine has not written it in"
    return TransferTimeoutError.after(what, age, "transfer_timeout", limit)


def pull_failed(room: int, who: str, problem: object) -> TransferError:
    return TransferError(f"room {room}: pull from {who} failed: {problem}")


def not_offered_again(room: int, who: str, problem: object, age: float) -> TransferError:
    """After `pull_failed`, while D could still have got the rest. No setting: it delays the end of every dead P."""
    return TransferError(
        f"room {room}: pull from {who} failed: {problem}; it was not offered again in {age:.1f} s"
    )


def write_failed(room: int, who: str, problem: object) -> TransferError:
    return TransferError(f"room {room}: cannot write what came from {who} into the pool: {problem}")
