"""Our flags: what they mean, what they leave to sgl-jax, and what of sgl-jax's is refused."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_pd_connector.errors import ConfigError
from sgl_pd_connector.sgl_jax import server_args
from sgl_pd_connector.sgl_jax.server_args import check, parse

pytestmark = pytest.mark.unit

SUPPORTED: dict[str, Any] = {name: value for name, (value, _) in server_args._UNSUPPORTED.items()}


def test_without_flags_sgl_jax_is_as_it_is() -> None:
    args, rest = parse(["--model-path", "m", "--tp-size", "2"])
    assert args.mode == "null"
    assert rest == ["--model-path", "m", "--tp-size", "2"]


def test_the_names_and_defaults_of_the_rfc() -> None:
    args, _ = parse(["--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", "jax"])
    assert args.mode == "prefill"
    assert args.failure_policy == "recompute"
    assert args.bootstrap_addr is None
    assert (args.config.host, args.config.bootstrap_port) == ("127.0.0.1", 8998)
    assert (args.config.heartbeat_interval, args.config.heartbeat_ttl) == (5.0, 15.0)


def test_flags_outrank_the_json_which_outranks_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGL_PD_LEASE", "7")
    monkeypatch.setenv("SGL_PD_BOOTSTRAP_TIMEOUT", "8")
    args, _ = parse(
        [
            "--disaggregation-bootstrap-port=1111",
            "--disaggregation-config",
            '{"bootstrap_port": 2222, "bootstrap_timeout": 9}',
        ]
    )
    assert args.config.bootstrap_port == 1111
    assert args.config.bootstrap_timeout == 9
    assert args.config.lease == 7


def test_on_a_decode_server_the_host_is_where_p_is_registered() -> None:
    flags = ["--disaggregation-bootstrap-host", "127.0.0.2", "--disaggregation-bootstrap-port", "9000"]
    assert parse([*flags, "--disaggregation-mode", "decode"])[0].bootstrap_addr == "127.0.0.2:9000"
    prefill = parse([*flags, "--disaggregation-mode", "prefill"])[0]
    assert prefill.bootstrap_addr is None
    assert prefill.config.host == "127.0.0.2"


@pytest.mark.parametrize("flag", ["--disaggregation-transfer-port=1", "--pd-disaggregation"])
def test_flags_of_sgl_jaxs_own_disaggregation_are_named(flag: str) -> None:
    with pytest.raises(ConfigError, match=flag.partition("=")[0]):
        parse(["--model-path", "m", flag])


def test_abbreviations_are_left_to_sgl_jax() -> None:
    with pytest.raises(ConfigError, match="--disaggregation-boot"):
        parse(["--disaggregation-boot", "x"])


@pytest.mark.parametrize("text", ["[1]", "{", '"x"'])
def test_the_json_must_be_an_object(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--disaggregation-config", text])
    assert "--disaggregation-config" in capsys.readouterr().err


def test_a_wrong_setting_is_named_with_its_source() -> None:
    with pytest.raises(ConfigError, match=r"--disaggregation-\* flags: unknown setting 'leese'"):
        parse(["--disaggregation-config", '{"leese": 1}'])


def test_the_scheduler_process_gets_the_arguments() -> None:
    args, _ = parse(["--disaggregation-mode", "decode"])
    assert pickle.loads(pickle.dumps(args)) == args


def test_supported_settings_are_accepted() -> None:
    check(parse(["--disaggregation-mode", "prefill"])[0], SimpleNamespace(**SUPPORTED))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dp_size", 2),
        ("nnodes", 2),
        ("speculative_algorithm", "EAGLE"),
        ("enable_lora", True),
        ("multimodal", True),
    ],
)
def test_unsupported_settings_are_refused_by_name_with_the_reason(name: str, value: Any) -> None:
    args, _ = parse(["--disaggregation-mode", "decode"])
    flag = f"--{name.replace('_', '-')} {value}: not supported with --disaggregation-mode decode: ."
    with pytest.raises(ConfigError, match=flag):
        check(args, SimpleNamespace(**{**SUPPORTED, name: value}))
