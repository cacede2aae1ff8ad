"""Addresses: what is read, how it is written, what is refused and in which words."""

from __future__ import annotations

import socket

import pytest

from sgl_pd_connector.errors import ConfigError
from sgl_pd_connector.wire.address import Address

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("text", "host", "port", "written"),
    [
        ("127.0.0.1:8998", "127.0.0.1", 8998, "127.0.0.1:8998"),
        ("[::1]:8998", "::1", 8998, "[::1]:8998"),
        ("[2001:DB8:0:0::1]:1", "2001:db8::1", 1, "[2001:db8::1]:1"),
        ("prefill-0.svc.local:65535", "prefill-0.svc.local", 65535, "prefill-0.svc.local:65535"),
        ("Prefill_1:0", "prefill_1", 0, "prefill_1:0"),
    ],
)
def test_an_address_with_a_port_is_read_and_written(text: str, host: str, port: int, written: str) -> None:
    address = Address.parse(text, setting="s")
    assert (address.host, address.port, str(address)) == (host, port, written)
    assert Address.parse(written, setting="s") == address


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("10.0.0.7", "10.0.0.7:8998"),
        ("::1", "[::1]:8998"),
        ("[::1]", "[::1]:8998"),
        ("p0", "p0:8998"),
        ("::", "[::]:8998"),
    ],
)
def test_a_host_alone_takes_the_default_port(text: str, written: str) -> None:
    assert str(Address.parse(text, setting="s", default_port=8998)) == written


def test_two_spellings_of_one_address_are_equal() -> None:
    one = Address.parse("[2001:db8:0::0:1]:5", setting="s")
    two = Address.of("2001:DB8::1", 5, setting="s")
    assert one == two
    assert hash(one) == hash(two)


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_mini_lb_hands_ipv6_hosts_over_in_brackets(host: str) -> None:
    assert Address.of(host, 8998, setting="bootstrap_host").url("/health") == "http://[::1]:8998/health"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "port is missing"),
        (":8998", "neither an IP address nor a host name"),
        ("127.0.0.1", "port is missing: write 127.0.0.1:PORT"),
        ("::1", r"port is missing: write \[::1\]:PORT"),
        ("::1:8998", r"write \[::1:8998\]:PORT"),
        ("[::1]", "port is missing"),
        ("[::1", "unbalanced brackets"),
        ("[::1]8998", "unbalanced brackets"),
        ("[127.0.0.1]:80", "not IPv6: write it without brackets"),
        ("127.0.0.1:", "'' is not a port"),
        ("127.0.0.1:-1", "'-1' is not a port"),
        ("127.0.0.1:65536", "out of range"),
        ("127.0.0.1:１２", "is not a port"),
        ("127.0.0.1:80 ", "is not a port"),
        ("127.1:80", "looks like an IPv4 address"),
        ("0x7f000001:80", "looks like an IPv4 address"),
        ("256.0.0.1:80", "looks like an IPv4 address"),
        ("host name:80", "neither an IP address nor a host name"),
        ("-host:80", "neither"),
        ("a..b:80", "neither"),
        ("a\x00b:80", "neither"),
        ("http://127.0.0.1:80", "not a URL"),
        ("127.0.0.1:80/route", "not a URL"),
        ("user@host:80", "neither"),
        ("[fe80::1%eth0]:80", "has a zone"),
        ("[:::]:80", "neither"),
        ("a" * 64 + ":80", "neither"),
        ("a." * 200 + ":80", "longer than any address"),
    ],
)
def test_junk_is_refused_with_the_setting_named(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        Address.parse(text, setting="bootstrap_addr")
    assert str(caught.value).startswith("bootstrap_addr")
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("host", "loopback", "wildcard", "family"),
    [
        ("127.0.0.1", True, False, socket.AF_INET),
        ("127.8.9.1", True, False, socket.AF_INET),
        ("::1", True, False, socket.AF_INET6),
        ("::ffff:127.0.0.1", True, False, socket.AF_INET6),
        ("0.0.0.0", False, True, socket.AF_INET),
        ("::", False, True, socket.AF_INET6),
        ("::ffff:0.0.0.0", False, True, socket.AF_INET6),
        ("10.0.0.1", False, False, socket.AF_INET),
        ("localhost", False, False, None),
    ],
)
def test_what_kind_of_address_it_is(
    host: str, loopback: bool, wildcard: bool, family: socket.AddressFamily | None
) -> None:
    address = Address.of(host, 1, setting="s")
    assert (address.is_loopback, address.is_wildcard, address.family) == (loopback, wildcard, family)


def test_a_name_becomes_numeric_when_resolved() -> None:
    address = Address.parse("localhost:8998", setting="s").resolved(setting="s", family=socket.AF_INET)
    assert address == Address("127.0.0.1", 8998)
    assert Address("::1", 7).resolved(setting="s") == Address("::1", 7)


def test_an_unknown_name_is_an_error_that_names_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"bootstrap_host: cannot resolve 'no-such-host\.invalid'"):
        Address.parse("no-such-host.invalid:1", setting="bootstrap_host").resolved(setting="bootstrap_host")
    with pytest.raises(ConfigError, match="to an IPv4 address"):
        Address("::1", 7).resolved(setting="s", family=socket.AF_INET)


def test_urls_and_zmq_endpoints() -> None:
    assert Address("::1", 80).url() == "http://[::1]:80"
    assert Address("10.0.0.1", 80).url("/list") == "http://10.0.0.1:80/list"
    assert Address("::1", 80).url(scheme="tcp") == "tcp://[::1]:80"
