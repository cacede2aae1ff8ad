"""The flags that this package adds to sgl-jax's own, and what of sgl-jax's own it refuses to run with.

Nothing here imports sgl-jax: flags are read, and refused, before the engine is loaded.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sgl_pd_connector.config import ConnectorConfig, load_config
from sgl_pd_connector.errors import ConfigError
from sgl_pd_connector.wire.address import Address

Mode = Literal["null", "prefill", "decode"]
FailurePolicy = Literal["recompute", "fail"]

PREFIX = "--disaggregation-"

# Flag of sgl-jax: value it must have, and why another one is refused.
_UNSUPPORTED: dict[str, tuple[Any, str]] = {
    "dp_size": (1, "the pools of several data-parallel ranks are one array; transfers address only one rank"),
    "nnodes": (1, "one scheduler per host would have to send its own part; not implemented"),
    "enable_single_process": (False, "the scheduler must be the only owner of its process"),
    "enable_engine_loop_run_forever_daemon": (None, "the scheduler must be the only owner of its process"),
    "multimodal": (False, "requests with images or audio are not transferred"),
    "is_embedding": (False, "an embedding model decodes nothing"),
    "speculative_algorithm": (None, "the draft model's cache is not transferred"),
    "enable_lora": (None, "adapters are numbered differently on each server"),
    "lora_paths": (None, "adapters are numbered differently on each server"),
    "hicache_storage": ("disable", "the host cache moves pages behind the scheduler's back; not tested"),
    "enable_unified_radix_tree": (False, "only sgl-jax's RadixCache and ChunkCache are tested"),
    "enable_mixed_chunk": (False, "prefill and decode in one forward are not tested"),
    "skip_tokenizer_init": (False, "only servers with a tokenizer are tested"),
    "pd_disaggregation": ("", "that is sgl-jax's own disaggregation inside one process"),
}


@dataclass(frozen=True)
class DisaggregationArgs:
    """What the flags say.

    Attributes:
        mode: ``null`` is sgl-jax as it is.
        config: settings of the connector.
        bootstrap_addr: on P the external bootstrap server (None: P runs its own); on D the one for requests that
            name none (None: those are refused).
        failure_policy: what becomes of a request whose transfer failed: prefilled by D, or answered with an error.
        decode_radix_cache: D keeps a radix cache and pulls only what it lacks; by default it has a ChunkCache.
    """

    mode: Mode
    config: ConnectorConfig
    bootstrap_addr: str | None
    failure_policy: FailurePolicy
    decode_radix_cache: bool


def parse(argv: Sequence[str]) -> tuple[DisaggregationArgs, list[str]]:
    """Splits a command line into our flags and the rest, which is sgl-jax's.

    Raises:
        ConfigError: a setting is wrong, or a flag of sgl-jax's own disaggregation is used.
    """
    options, rest = parser().parse_known_args(argv)
    foreign = [word.partition("=")[0] for word in rest if word.startswith((PREFIX, "--pd-"))]
    if foreign:
        raise ConfigError(
            f"{', '.join(foreign)}: of sgl-jax's own disaggregation, which this launcher replaces; its settings are "
            f"in {PREFIX}config, see --help"
        )
    flags = {
        "host": options.disaggregation_bootstrap_host,
        "bootstrap_port": options.disaggregation_bootstrap_port,
        "heartbeat_interval": options.disaggregation_bootstrap_heartbeat_interval,
        "heartbeat_ttl": options.disaggregation_bootstrap_heartbeat_ttl,
    }
    given = {name: value for name, value in flags.items() if value is not None}
    config = load_config({**options.disaggregation_config, **given}, where=f"{PREFIX}* flags")
    bootstrap_addr = config.bootstrap_addr
    if options.disaggregation_mode == "decode" and bootstrap_addr is None and "host" in given:
        bootstrap_addr = str(
            Address.of(config.host, config.bootstrap_port, setting=f"{PREFIX}bootstrap-host")
        )
    args = DisaggregationArgs(
        mode=options.disaggregation_mode,
        config=config,
        bootstrap_addr=bootstrap_addr,
        failure_policy=options.disaggregation_failure_policy,
        decode_radix_cache=options.disaggregation_decode_radix_cache,
    )
    return args, rest


def check(args: DisaggregationArgs, server_args: Any) -> None:
    """Refuses, by name and with the reason, what of sgl-jax's settings is not implemented with disaggregation.

    Args:
        args: ours.
        server_args: sgl-jax's ``ServerArgs``.

    Raises:
        ConfigError: one line per setting.
    """
    lines = [
        f"--{name.replace('_', '-')} {value}: not supported with {PREFIX}mode {args.mode}: {reason}"
        for name, (supported, reason) in _UNSUPPORTED.items()
        if (value := getattr(server_args, name)) != supported and (value or supported)
    ]
    if lines:
        raise ConfigError("\n".join(lines))


def parser() -> argparse.ArgumentParser:
    """Our flags. Abbreviations are off: they would swallow flags of sgl-jax."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    group = parser.add_argument_group("disaggregation (sgl-pd-connector)")
    defaults = ConnectorConfig.model_fields

    def add(name: str, help_text: str, **options: Any) -> None:
        group.add_argument(PREFIX + name, help=help_text, **options)

    add(
        "mode",
        "Role of this server; null is sgl-jax as it is.",
        choices=["null", "prefill", "decode"],
        default="null",
    )
    add("transfer-backend", "How KV pages travel.", choices=["jax"], default="jax")
    add(
        "bootstrap-host",
        "On P: address to bind and to advertise to peers (default 127.0.0.1: one machine). On D: where P's bootstrap "
        "server is, for requests that do not say.",
    )
    add("bootstrap-port", f"Its port (default {defaults['bootstrap_port'].default}).", type=int)
    add(
        "bootstrap-heartbeat-interval",
        f"Seconds between renewals of P's registration (default {defaults['heartbeat_interval'].default:g}).",
        type=float,
    )
    add(
        "bootstrap-heartbeat-ttl",
        f"Seconds after which an unrenewed registration is forgotten (default {defaults['heartbeat_ttl'].default:g}).",
        type=float,
    )
    add(
        "failure-policy",
        "When a transfer fails: D prefills the prompt itself (recompute), or the client gets an HTTP error (fail).",
        choices=["recompute", "fail"],
        default="recompute",
    )
    add(
        "decode-radix-cache",
        "D keeps a radix cache, and pulls only the pages it lacks (default: ChunkCache).",
        action="store_true",
    )
    add(
        "config",
        "Other settings as a JSON object, e.g. '{\"lease\": 60}'; the environment (SGL_PD_LEASE=60) works too.",
        type=_json_object,
        default={},
        metavar="JSON",
    )
    return parser


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, not {value!r}")
    return value
