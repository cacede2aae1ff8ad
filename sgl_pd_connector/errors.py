"""Exceptions of the package: one root, one class per kind of remedy.

A message names what failed, between whom, after how long, and the setting that changes it.
"""

from typing import Self


class PDError(Exception):
    """Root of every error this package raises on purpose."""


class ConfigError(PDError):
    """A setting is missing, unknown, or does not fit another one. Raised at start-up, never per request."""


class BootstrapError(PDError):
    """The bootstrap registry could not be reached, or refused what it was sent."""


class ProtocolError(PDError):
    """A peer sent something that this version does not understand or accept."""


class IncompatiblePeerError(PDError):
    """The two sides do not lay out their KV cache, or run their transfer server, in the same way."""


class RequestError(PDError):
    """A request's PD fields cannot be used as they are: the client is to be answered 400."""


class ForbiddenPeerError(PDError):
    """A request named a server that this instance is not allowed to connect to."""


class TransferError(PDError):
    """One request's transfer failed; the request can still be recomputed locally."""


class TransferTimeoutError(TransferError):
    """A state of a transfer outlived its deadline."""

    @classmethod
    def after(cls, what: str, age: float, setting: str, limit: float) -> Self:
        """``what`` took ``age`` seconds; ``setting``, at ``limit`` seconds, is what allows more."""
        return cls(f"{what} {age:.1f} s (setting {setting} = {limit:g} s)")


class TransferAbortedError(TransferError):
    """One side gave the transfer up: client gone, request aborted, server stopping."""


class IllegalTransitionError(PDError):
    """A state machine was driven from a state into one that may not follow it: a bug, not an operating condition."""
