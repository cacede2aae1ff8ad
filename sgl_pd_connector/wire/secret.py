"""The shared secret of a deployment: what is derived from it, and when there must be one."""

from __future__ import annotations

import hashlib

from sgl_pd_connector.errors import ConfigError
from sgl_pd_connector.wire.address import Address


def derive_key(secret: str, purpose: str) -> bytes:
    """A 32-byte key for one purpose; the secret itself never leaves the process.

    Args:
        secret: the deployment's shared secret.
        purpose: at most 16 ASCII characters.
    """
    key = hashlib.sha256(secret.encode()).digest()
    return hashlib.blake2b(key=key, person=purpose.encode(), digest_size=32).digest()


def bearer_token(secret: str | None) -> str | None:
    """What authorises HTTP calls to the bootstrap server of a deployment with this secret."""
    return derive_key(secret, "bootstrap").hex() if secret is not None else None


def require_secret(host: Address, secret: str | None, *, allow_insecure: bool) -> None:
    """Lets an address be served that other machines can reach only with a secret.

    Raises:
        ConfigError: there is none, and nobody said that this is intended.
    """
    if secret is None and not host.is_loopback and not allow_insecure:
        raise ConfigError(
            f"host = {host.host!r} can be reached from other machines and there is no secret: set secret_file (or "
            "secret) to the same on every instance, or allow_insecure if the network keeps everybody else out"
        )
