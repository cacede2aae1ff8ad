"""The allow-list: which bootstrap servers a request may name."""

import pytest

from sgl_pd_connector.errors import ConfigError
from sgl_pd_connector.wire.address import Address
from sgl_pd_connector.wire.allow import AllowList

pytestmark = pytest.mark.unit


def address(text: str) -> Address:
    return Address.parse(text, setting="test")


@pytest.mark.parametrize(
    ("entry", "named", "resolved", "permitted"),
    [
        ("10.0.0.0/8", "10.1.2.3:8998", "10.1.2.3:8998", True),
        ("10.0.0.0/8", "11.1.2.3:8998", "11.1.2.3:8998", False),
        ("127.0.0.1", "localhost:1", "127.0.0.1:1", True),
        ("127.0.0.1", "[::ffff:127.0.0.1]:1", "[::ffff:127.0.0.1]:1", True),
        ("::1", "[::1]:8998", "[::1]:8998", True),
        ("[::1]", "[::1]:8998", "[::1]:8998", True),
        ("fd00::/8", "[fd12::1]:1", "[fd12::1]:1", True),
        ("prefill.svc", "prefill.svc:8998", "10.9.9.9:8998", True),
        ("prefill.svc", "Prefill.SVC:8998", "10.9.9.9:8998", True),
        ("prefill.svc", "evil.svc:8998", "10.9.9.9:8998", False),
        ("prefill.svc:8998", "prefill.svc:8998", "10.9.9.9:8998", True),
        ("prefill.svc:8998", "prefill.svc:22", "10.9.9.9:22", False),
        ("10.0.0.1:8998", "prefill.svc:8998", "10.0.0.1:8998", True),
    ],
)
def test_an_entry_permits(entry: str, named: str, resolved: str, permitted: bool) -> None:
    allowed = AllowList.parse([entry], setting="allowed_bootstrap_hosts")
    assert allowed.permits(address(named), address(resolved)) is permitted
    assert allowed.may_permit(address(named)) or not permitted


@pytest.mark.parametrize(
    ("entries", "named", "resolve"),
    [
        (["prefill.svc"], "evil.svc:8998", False),
        (["prefill.svc:8998"], "prefill.svc:22", False),
        (["10.0.0.1:8998"], "evil.svc:22", False),
        (["10.0.0.1:8998"], "evil.svc:8998", True),
        (["prefill.svc", "10.0.0.0/8"], "evil.svc:22", True),
        ([], "evil.svc:22", False),
    ],
)
def test_a_name_is_worth_resolving_only_if_that_can_permit_it(
    entries: list[str], named: str, resolve: bool
) -> None:
    assert AllowList.parse(entries, setting="x").may_permit(address(named)) is resolve


def test_an_empty_list_permits_nothing() -> None:
    assert not AllowList.parse([], setting="x").permits(address("127.0.0.1:1"), address("127.0.0.1:1"))


@pytest.mark.parametrize("entry", ["10.0.0.1/8", "host/8", "http://host", "", "a b", "host:99999"])
def test_junk_is_refused_by_the_name_of_the_setting(entry: str) -> None:
    with pytest.raises(ConfigError, match="allowed_bootstrap_hosts"):
        AllowList.parse([entry], setting="allowed_bootstrap_hosts")
