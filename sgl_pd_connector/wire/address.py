"""Every ``host:port`` that is read from or written to anything goes through `Address`.

IPv6 hosts are bracketed wherever a port follows (``[::1]:8998``) and bare everywhere else, as in RFC 3986.
Host names stay names until `Address.resolved`; what goes to the native transfer library must be resolved: it
silently turns names into ``0.0.0.0``.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass
from typing import Self

from sgl_pd_connector.errors import ConfigError

# Underscores are not in RFC 952, but container platforms hand out such names.
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?", re.ASCII)
_MAX_HOST = 253
_MAX_TEXT = _MAX_HOST + len("[]:65535")

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True)
class Address:
    """A host, without brackets, and a TCP port. Numeric hosts are in canonical form.

    Build one with `parse` or `of`; both raise `ConfigError` naming the setting that holds the junk.
    """

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, *, setting: str, default_port: int | None = None) -> Self:
        """Reads ``host:port``, ``[v6]:port`` and, with ``default_port``, a host alone (v6 bare or bracketed).

        Args:
            text: what the user or peer wrote.
            setting: name of the setting or field it came from, for messages.
            default_port: the port if ``text`` has none; without it a missing port is an error.

        Raises:
            ConfigError: ``text`` is not an address.
        """
        host, port = _split(text, setting)
        if port is None:
            if default_port is None:
                hint = f"[{host}]:PORT" if ":" in host else f"{host or 'HOST'}:PORT"
                raise ConfigError(f"{setting} = {_shown(text)}: the port is missing: write {hint}")
            return cls.of(host, default_port, setting=setting)
        if not (port.isascii() and port.isdigit() and len(port) <= 5):
            raise ConfigError(f"{setting} = {_shown(text)}: {port!r} is not a port (0 to 65535)")
        return cls.of(host, int(port), setting=setting)

    @classmethod
    def of(cls, host: str, port: int, *, setting: str) -> Self:
        """An address from its two parts; the host may be bracketed, as sglang's mini_lb hands it over.

        Raises:
            ConfigError: the host is neither an IP address nor a host name, or the port is out of range.
        """
        if not 0 <= port <= 65_535:
            raise ConfigError(f"{setting}: port {port} is out of range (0 to 65535)")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
            if ":" not in host:
                raise ConfigError(f"{setting}: {_shown(host)} is not IPv6: write it without brackets")
        return cls(_canonical_host(host, setting), port)

    def __str__(self) -> str:
        """``host:port``, IPv6 bracketed: the form used in registrations, messages and ``connect()``."""
        return f"{self.bracketed_host}:{self.port}"

    @property
    def bracketed_host(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host

    def url(self, path: str = "", *, scheme: str = "http") -> str:
        """``http://host:port`` followed by ``path``; ``scheme="tcp"`` gives a ZMQ endpoint."""
        return f"{scheme}://{self}{path}"

    @property
    def ip(self) -> IPAddress | None:
        """The numeric host with IPv4-mapped IPv6 unwrapped, or None for a host name."""
        try:
            ip = ipaddress.ip_address(self.host)
        except ValueError:
            return None
        return (ip.ipv4_mapped or ip) if isinstance(ip, ipaddress.IPv6Address) else ip

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it. False for every host name: resolve first."""
        return self.ip is not None and self.ip.is_loopback

    @property
    def is_wildcard(self) -> bool:
        """Whether it means "all interfaces", which can be bound but not connected to."""
        return self.ip is not None and self.ip.is_unspecified

    @property
    def family(self) -> socket.AddressFamily | None:
        """``AF_INET`` or ``AF_INET6`` as written, or None for a host name."""
        if self.ip is None:
            return None
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET

    def resolved(self, *, setting: str, family: socket.AddressFamily = socket.AF_UNSPEC) -> Self:
        """The same with a numeric host. Asks the system's resolver and may block: not for an engine's thread.

        Args:
            setting: where the host was written, for messages.
            family: take an address of this family only; by default the resolver's first choice.

        Raises:
            ConfigError: the name is unknown, or has no address of that family.
        """
        try:
            found = socket.getaddrinfo(self.host, self.port, family, socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            kind = {socket.AF_INET: "an IPv4", socket.AF_INET6: "an IPv6"}.get(family, "an")
            raise ConfigError(f"{setting}: cannot resolve {self.host!r} to {kind} address: {error}") from None
        return type(self).of(str(found[0][4][0]), self.port, setting=setting)


def _split(text: str, setting: str) -> tuple[str, str | None]:
    """Host and port as written. Two colons without brackets are an IPv6 address without a port."""
    if len(text) > _MAX_TEXT:
        raise ConfigError(f"{setting} = {_shown(text)}: longer than any address ({_MAX_TEXT} characters)")
    if "://" in text or "/" in text:
        raise ConfigError(f"{setting} = {_shown(text)}: expected host:port, not a URL")
    if text.startswith("["):
        host, bracket, rest = text.partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ConfigError(f"{setting} = {_shown(text)}: unbalanced brackets: write [ADDRESS]:PORT")
        return host + bracket, rest[1:] if rest else None
    if text.count(":") == 1:
        host, _, port = text.partition(":")
        return host, port
    return text, None


def _canonical_host(host: str, setting: str) -> str:
    if "%" in host:
        raise ConfigError(f"{setting}: {_shown(host)} has a zone, which only means something on one machine")
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass
    labels = host.removesuffix(".").split(".")
    if len(host) > _MAX_HOST or not all(_LABEL.fullmatch(label) for label in labels):
        raise ConfigError(f"{setting}: {_shown(host)} is neither an IP address nor a host name")
    # Resolvers read "127.1" or "0x7f000001" as IPv4; no host name ends in a number (RFC 3696).
    if labels[-1].isdigit() or labels[-1].lower().startswith("0x"):
        raise ConfigError(f"{setting}: {_shown(host)} looks like an IPv4 address but is none")
    return host.lower()


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")


def advertised(host: str) -> Address:
    """The setting ``host``, resolved, with port 0: what an instance binds, and what peers are told to connect to.

    Raises:
        ConfigError: it is no address, its name cannot be resolved, or it means all interfaces.
    """
    address = Address.of(host, 0, setting="host").resolved(setting="host")
    if address.is_wildcard:
        raise ConfigError(
            f"host = {host!r}: peers are told to connect to this address, so it cannot mean all interfaces: "
            "name the one that they reach"
        )
    return address
