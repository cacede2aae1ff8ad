"""Which bootstrap servers a request may name: clients of the inference API must not choose whom D connects to."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field

from sgl_pd_connector.errors import ConfigError
from sgl_pd_connector.wire.address import Address

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass
class AllowList:
    """Hosts, networks and ``host:port`` pairs.

    A name in the list matches the same name in a request; an address or network matches what the request's name
    resolves to, and that resolved address is what is then connected to.
    """

    networks: list[_Network] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)
    addresses: set[Address] = field(default_factory=set)

    @classmethod
    def parse(cls, entries: Sequence[str], *, setting: str) -> AllowList:
        """
        Raises:
            ConfigError: an entry is neither a host, a network nor a host:port.
        """
        allowed = cls()
        for entry in entries:
            try:
                allowed.networks.append(ipaddress.ip_network(entry.strip("[]")))
                continue
            except ValueError:
                if "/" in entry:
                    raise ConfigError(
                        f"{setting}: {entry!r} is not a network: write ADDRESS/BITS, no host bits set"
                    ) from None
            address = Address.parse(entry, setting=setting, default_port=0)
            if address.port:
                allowed.addresses.add(address)
            else:
                allowed.hosts.add(address.host)
        return allowed

    def may_permit(self, named: Address) -> bool:
        """Whether `permits` can be true, whatever ``named`` resolves to. Asked first: a client must not have this
        machine resolve names for nothing."""
        return (
            named.host in self.hosts
            or named in self.addresses
            or bool(self.networks)
            or any(address.ip is not None and address.port == named.port for address in self.addresses)
        )

    def permits(self, named: Address, resolved: Address) -> bool:
        """Whether a request may name ``named``, which resolves to ``resolved``."""
        if named.host in self.hosts or not self.addresses.isdisjoint((named, resolved)):
            return True
        ip = resolved.ip
        return ip is not None and any(ip in network for network in self.networks)
