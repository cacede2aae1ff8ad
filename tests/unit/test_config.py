"""Settings: where a value comes from, and what is said of a wrong one."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from sgl_pd_connector.config import MIN_SILENCE, ConnectorConfig, load_config
from sgl_pd_connector.errors import ConfigError
from sgl_pd_connector.transfer.interest import RESUBSCRIBE
from tests.registrations import make_route

pytestmark = pytest.mark.unit

WHERE = "kv_connector_extra_config"


def load(explicit: dict[str, object] | None = None, **environ: str) -> ConnectorConfig:
    return load_config(explicit or {}, where=WHERE, environ=environ)


def test_the_defaults_serve_one_machine() -> None:
    config = load()
    assert config.host == "127.0.0.1"
    assert config.bootstrap_port == 8998
    assert config.lease == 30.0


def test_the_engine_outranks_the_environment_which_outranks_the_default() -> None:
    assert load().lease == 30.0
    assert load(SGL_PD_LEASE="20").lease == 20.0
    assert load({"lease": 10}, SGL_PD_LEASE="20").lease == 10.0


def test_the_environment_is_read_as_text_and_converted() -> None:
    config = load(SGL_PD_SIDE_CHANNEL_PORT="5000", SGL_PD_HOST="10.0.0.1", SGL_PD_MAX_CHUNK_PAGES="8")
    assert (config.side_channel_port, config.host, config.max_chunk_pages) == (5000, "10.0.0.1", 8)


def test_an_overridden_wrong_environment_value_does_no_harm() -> None:
    assert load({"lease": 10}, SGL_PD_LEASE="soon").lease == 10.0


def test_every_instance_has_a_name_of_its_own_unless_given_one() -> None:
    assert load().instance_id != load().instance_id
    assert load({"instance_id": "prefill-0"}).instance_id == "prefill-0"


def test_an_unknown_name_is_an_error_that_lists_the_settings() -> None:
    with pytest.raises(ConfigError, match=rf"{WHERE}: unknown setting 'leese'.*\blease\b"):
        load({"leese": 10})


def test_an_unknown_environment_variable_with_our_prefix_is_an_error_too() -> None:
    with pytest.raises(ConfigError, match=r"SGL_PD_LEESE: no such setting.*\blease\b"):
        load(SGL_PD_LEESE="10")


def test_variables_of_the_package_that_are_no_settings_and_those_of_others_are_left_alone() -> None:
    load(SGL_PD_CACHE="/tmp/x", SGL_PD_CPU_EMULATION="1", SGL_PDX="1", HOME="/root")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lease", 0),
        ("lease", -1),
        ("lease", float("nan")),
        ("lease", float("inf")),
        ("lease", "soon"),
        ("bootstrap_port", 65_536),
        ("bootstrap_port", -1),
        ("transfer_channels", 0),
        ("max_chunk_pages", 0),
        ("max_packed_bytes", 0),
        ("instance_id", ""),
        ("instance_id", "x" * 129),
        ("transfer_size", 2**40),
    ],
)
def test_a_bad_value_is_named_with_where_it_was_set(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{WHERE}: {name} = "):
        load({name: value})


def test_a_bad_value_from_the_environment_names_the_variable() -> None:
    with pytest.raises(ConfigError, match="environment variable SGL_PD_LEASE: lease = 'soon'"):
        load(SGL_PD_LEASE="soon")


def test_every_wrong_setting_has_a_line_of_its_own() -> None:
    with pytest.raises(ConfigError) as caught:
        load({"lease": 0, "leese": 1}, SGL_PD_TRANSFER_PORT="x")
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert sorted(
        name for name in ("lease =", "'leese'", "transfer_port =") for line in lines if name in line
    ) == [
        "'leese'",
        "lease =",
        "transfer_port =",
    ]


@pytest.mark.parametrize("name", ["lease", "peer_timeout"])
def test_no_deadline_is_so_short_that_one_lost_message_ends_a_transfer(name: str) -> None:
    assert MIN_SILENCE == 2 * RESUBSCRIBE
    with pytest.raises(ConfigError, match=rf"{WHERE}: {name} = 1\.9: must be at least 2 s: .* once a second"):
        load({name: 1.9})
    load({name: 2})


@pytest.mark.parametrize("name", ["prefill 0", "präfill", "prefill\n", "prefill\x7f", "", "x" * 129])
def test_a_name_that_could_not_be_registered_is_refused_at_once(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{WHERE}: instance_id = "):
        load({"instance_id": name})
    with pytest.raises(ValidationError, match="instance_id"):
        make_route(name)


@pytest.mark.parametrize("name", ["!", "~", "ns/prefill-0.svc:1", "x" * 128])
def test_every_name_that_is_taken_can_be_registered(name: str) -> None:
    assert make_route(load({"instance_id": name}).instance_id).instance_id == name


def test_settings_that_do_not_fit_each_other() -> None:
    with pytest.raises(ConfigError, match="heartbeat_ttl"):
        load({"heartbeat_interval": 10, "heartbeat_ttl": 15})
    with pytest.raises(ConfigError, match="power of two, not 48"):
        load({"max_chunk_pages": 48})


@pytest.mark.parametrize("value", ["1", "true", "yes"])
def test_staging_through_the_host_is_refused_not_ignored(value: str) -> None:
    with pytest.raises(ConfigError, match=f"TPU_ENABLE_D2H_TRANSFER={value}.*set it to 0"):
        load(TPU_ENABLE_D2H_TRANSFER=value)


@pytest.mark.parametrize("value", ["", "0"])
def test_staging_may_be_switched_off_explicitly(value: str) -> None:
    load(TPU_ENABLE_D2H_TRANSFER=value)


def test_settings_do_not_change_once_loaded() -> None:
    with pytest.raises(ValidationError):
        load().lease = 1.0  # type: ignore[misc]
