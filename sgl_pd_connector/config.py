"""Every setting of the connector, validated in one place.

A setting comes from the engine's own configuration (``kv_connector_extra_config`` in vLLM, flags in sgl-jax), else from
the environment as ``SGL_PD_<NAME>``, else from the default below. An unknown name is an error, not a typo that is
silently ignored.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)

from sgl_pd_connector.errors import ConfigError

ENV_PREFIX = "SGL_PD_"
D2H_ENV = "TPU_ENABLE_D2H_TRANSFER"
MIN_SECRET = 16

MIN_SILENCE = 2.0
"""Seconds: twice the period in which D and P hear of each other (`transfer.interest.RESUBSCRIBE`)."""

NAME = r"^[!-~]+$"
"""What a name may consist of, here and in a registration."""

# Environment variables with our prefix that are not settings of a connector.
_ENV_NOT_SETTINGS = frozenset({"SGL_PD_CACHE", "SGL_PD_CPU_EMULATION", "SGL_PD_OPS_BACKEND"})

# Kubernetes gives every container variables for each Service of its namespace: one named "sgl-pd-bootstrap" appears as
# SGL_PD_BOOTSTRAP_SERVICE_HOST and, of all things, SGL_PD_BOOTSTRAP_PORT=tcp://10.0.0.1:8998.
_SERVICE_NAME = re.compile(r"_SERVICE_(HOST|PORT)|_PORT_\d+_(TCP|UDP|SCTP)")
_SERVICE_VALUE = re.compile(r"(tcp|udp|sctp)://")

Seconds = Annotated[float, Field(gt=0, le=86_400)]
Port = Annotated[int, Field(ge=0, le=65_535)]
Bytes = Annotated[int, Field(gt=0)]


def _new_instance_id() -> str:
    return f"{socket.gethostname()}-{secrets.token_hex(4)}"


class ConnectorConfig(BaseModel):
    """Settings of one instance. Durations are seconds, sizes bytes."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    host: str = Field(
        "127.0.0.1",
        description="Address to bind and to advertise to peers. Numeric or resolvable; the default serves one machine.",
    )
    instance_id: str = Field(
        default_factory=_new_instance_id,
        min_length=1,
        max_length=128,
        description="Name of this server, unique in the deployment; printable ASCII without spaces. Keep it over "
        "restarts (a StatefulSet's pod name).",
    )

    bootstrap_addr: str | None = Field(
        None,
        description="host:port of a bootstrap server that runs by itself (`sgl-pd bootstrap`). Without it a prefill "
        "instance runs its own on bootstrap_port.",
    )
    bootstrap_port: Port = Field(8998, description="Port of the bootstrap server inside a prefill instance.")
    heartbeat_interval: Seconds = Field(5.0, description="How often an instance renews its registration.")
    heartbeat_ttl: Seconds = Field(15.0, description="A registration not renewed for so long is forgotten.")

    side_channel_port: Port = Field(
        0, description="Port of the ready/done side channel on P; 0 takes a free one."
    )
    transfer_port: Port = Field(0, description="Port of the native transfer server on P; 0 takes a free one.")
    transfer_channels: int = Field(
        4, ge=1, le=64, description="TCP connections per peer. Must be equal on P and D."
    )
    transfer_size: Bytes = Field(
        16 << 20, lt=2**40, description="Bytes per message on them. Must be equal on P and D."
    )
    chunk_bytes: Bytes = Field(
        2 << 20, description="Size aimed at for one buffer on the wire. Must be equal on P and D."
    )
    max_chunk_pages: int = Field(64, ge=1, le=4096, description="Largest chunk in pages; a power of two.")

    secret: SecretStr | None = Field(
        None,
        min_length=MIN_SECRET,
        description="Shared by all instances; signs the side channel and authorises HTTP calls.",
    )
    secret_file: str | None = Field(
        None, description="File that holds the secret (a mounted Kubernetes Secret)."
    )
    allow_insecure: bool = Field(
        False,
        description="Serve addresses other than loopback without a secret. Whoever reaches them is trusted.",
    )
    allowed_bootstrap_hosts: tuple[str, ...] = Field(
        (),
        description="Hosts, networks (10.0.0.0/8) or host:port that a request may name as bootstrap server, instead "
        "of loopback and this instance's host. bootstrap_addr is always allowed.",
    )

    lease: Seconds = Field(
        30.0,
        description="P keeps a packed copy for so long after D was last heard of, or after prefill if never. "
        "At least 2.",
    )
    peer_timeout: Seconds = Field(
        10.0, description="A peer whose side channel is silent for so long is taken as dead. At least 2."
    )
    bootstrap_timeout: Seconds = Field(
        30.0, description="How long D looks for P, and for its room on P, before it gives up."
    )
    prefill_timeout: Seconds = Field(
        600.0, description="How long D waits for P to queue and prefill a prompt, while P is seen alive."
    )
    transfer_timeout: Seconds = Field(
        60.0, description="How long the pull of one request may take, written included."
    )

    max_packed_bytes: Bytes = Field(
        1 << 30,
        description="P's device memory for packed copies. Above it prefilled pages stay where they are.",
    )
    max_pulled_bytes: Bytes = Field(
        512 << 20,
        description="D's device memory for data pulled and not yet written. Above it further pulls wait.",
    )

    transfer_log: str | None = Field(
        None, description="File that gets one JSON line per finished transfer, for debugging and benchmarks."
    )

    @field_validator("allowed_bootstrap_hosts", mode="before")
    @classmethod
    def _split_list(cls, value: Any) -> Any:
        """A list in an environment variable is separated by commas."""
        return (
            [item.strip() for item in value.split(",") if item.strip()] if isinstance(value, str) else value
        )

    @field_validator("instance_id")
    @classmethod
    def _is_name(cls, value: str) -> str:
        if not re.fullmatch(NAME, value):
            raise ValueError(
                "must be printable ASCII without spaces: it goes into URLs, logs and metrics as it is"
            )
        return value

    @field_validator("lease", "peer_timeout")
    @classmethod
    def _outlasts_a_lost_message(cls, value: float) -> float:
        if value < MIN_SILENCE:
            raise ValueError(
                f"must be at least {MIN_SILENCE:g} s: a live peer is heard of once a second, so that one lost message "
                "would end its transfers"
            )
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.heartbeat_ttl < 2 * self.heartbeat_interval:
            raise ValueError(
                f"heartbeat_ttl ({self.heartbeat_ttl:g} s) must be at least twice heartbeat_interval "
                f"({self.heartbeat_interval:g} s), or one lost heartbeat unregisters a healthy instance"
            )
        if self.max_chunk_pages & (self.max_chunk_pages - 1):
            raise ValueError(f"max_chunk_pages must be a power of two, not {self.max_chunk_pages}")
        if self.secret is not None and self.secret_file is not None:
            raise ValueError("secret and secret_file are both set: choose one")
        return self

    def read_secret(self) -> str | None:
        """The shared secret, from wherever it is.

        Raises:
            ConfigError: the file cannot be read or is too short.
        """
        if self.secret_file is None:
            return self.secret.get_secret_value() if self.secret is not None else None
        try:
            secret = Path(self.secret_file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"secret_file = {self.secret_file!r}: cannot be read: {error}") from None
        if len(secret) < MIN_SECRET:
            raise ConfigError(
                f"secret_file = {self.secret_file!r}: at least {MIN_SECRET} characters are needed"
            )
        return secret


def load_config(
    explicit: Mapping[str, Any], *, where: str, environ: Mapping[str, str] | None = None
) -> ConnectorConfig:
    """Merges and validates the settings: ``explicit``, then the environment, then defaults.

    Args:
        explicit: settings given by the user through the engine.
        where: what the user knows that place by, for messages: ``"kv_connector_extra_config"``.
        environ: the environment; ``os.environ`` by default.

    Raises:
        ConfigError: one line per wrong setting, each with its name, where it was set, and what would be accepted.
    """
    environ = os.environ if environ is None else environ
    if environ.get(D2H_ENV, "0") not in ("", "0"):
        raise ConfigError(
            f"{D2H_ENV}={environ[D2H_ENV]}: staging through host memory is not in this version; set it to 0"
        )
    known = set(ConnectorConfig.model_fields)
    from_env: dict[str, str] = {}
    sources = dict.fromkeys(explicit, where)
    for variable, value in environ.items():
        if not variable.startswith(ENV_PREFIX) or variable in _ENV_NOT_SETTINGS:
            continue
        if not _SERVICE_NAME.search(variable) and not _SERVICE_VALUE.match(value):
            name = variable.removeprefix(ENV_PREFIX).lower()
            if name not in known:
                raise ConfigError(
                    f"environment variable {variable}: no such setting; settings: {', '.join(sorted(known))}"
                )
            if name not in explicit:
                from_env[name] = value
                sources[name] = f"environment variable {variable}"
    try:
        return ConnectorConfig.model_validate({**from_env, **explicit})
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(item, sources, known) for item in error.errors())) from None


def _explain(item: Any, sources: Mapping[str, str], known: set[str]) -> str:
    name = str(item["loc"][0]) if item["loc"] else ""
    source = sources.get(name, "settings")
    if item["type"] == "extra_forbidden":
        return f"{source}: unknown setting {name!r}; settings: {', '.join(sorted(known))}"
    message = str(item["msg"]).removeprefix("Value error, ")
    value = "" if name == "secret" else f" = {item['input']!r}"
    return f"{source}: {name}{value}: {message}" if name else f"{source}: {message}"
