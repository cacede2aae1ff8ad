"""Command lines of the engines: a plain server, a prefill server and a decode server of one model.

On a machine without a TPU they run under CPU emulation. `ENGINES` is where another engine is added.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from sgl_pd_connector.errors import ConfigError
from sgl_pd_connector.testing.checkpoints import cache_directory, make_checkpoint
from sgl_pd_connector.testing.hardware import tpu_chips
from sgl_pd_connector.testing.servers import LOCALHOST, Server

Role = Literal["plain", "prefill", "decode"]
FailurePolicy = Literal["fail", "recompute"]
"""What D does with a request whose KV does not arrive."""


class Engine(Protocol):
    """What the demo and the end-to-end tests need of an engine.

    Attributes:
        model: path or name of the model it serves.
        page_size: tokens per page.
        max_tokens: how long prompt and answer may be together.
        emulated: whether it runs on the CPU.
    """

    model: str
    page_size: int
    max_tokens: int
    emulated: bool

    def server(
        self, role: Role, *, port: int, directory: Path, settings: Mapping[str, Any] | None = None
    ) -> Server:
        """A server that is not started yet.

        Args:
            role: ``"plain"`` has no connector at all.
            port: of its HTTP API.
            directory: for its log, and whatever else it writes.
            settings: of the connector.
        """

    def request(self, prompt: Sequence[int], max_tokens: int) -> tuple[str, dict[str, Any]]:
        """Path and JSON body of a greedy request for a prompt given as token ids."""

    def token_ids(self, answer: Mapping[str, Any]) -> list[int]:
        """The generated tokens in the answer to such a request."""

    def moved_tokens(self, prompt_tokens: int) -> int:
        """How many tokens of a prompt's KV cache go from P to D."""


@dataclass
class VllmEngine:
    """vLLM on tpu-inference. Attributes as in `Engine`; ``extra_args`` are further flags of ``vllm serve``.

    ``failure_policy`` is its ``kv_load_failure_policy``.
    """

    model: str
    page_size: int
    max_tokens: int
    emulated: bool
    extra_args: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    failure_policy: FailurePolicy = "fail"

    def server(
        self, role: Role, *, port: int, directory: Path, settings: Mapping[str, Any] | None = None
    ) -> Server:
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", self.model]
        command += ["--host", LOCALHOST, "--port", str(port), "--block-size", str(self.page_size)]
        command += ["--max-model-len", str(self.max_tokens), *self.extra_args]
        if role != "plain":
            transfer = {
                "kv_connector": "SglJaxConnector",
                "kv_role": "kv_producer" if role == "prefill" else "kv_consumer",
                "kv_load_failure_policy": self.failure_policy,
                "kv_connector_extra_config": dict(settings or {}),
            }
            command += ["--kv-transfer-config", json.dumps(transfer)]
        environment = {**self.environment, **({} if self.emulated else one_chip(role))}
        return Server(f"vllm {role}", command, port, directory / f"{role}.log", environment)

    def request(self, prompt: Sequence[int], max_tokens: int) -> tuple[str, dict[str, Any]]:
        body = {"model": self.model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0}
        return "/v1/completions", {**body, "return_token_ids": True}

    def token_ids(self, answer: Mapping[str, Any]) -> list[int]:
        return list(answer["choices"][0]["token_ids"])

    def moved_tokens(self, prompt_tokens: int) -> int:
        return prompt_tokens


def emulation_environment() -> dict[str, str]:
    return {
        "SGL_PD_CPU_EMULATION": "1",
        "JAX_PLATFORMS": "cpu",
        "VLLM_HOST_IP": LOCALHOST,
        # Most of a start is imports: keep their byte code, and let the engine core inherit them.
        "PYTHONDONTWRITEBYTECODE": "",
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
        # The rest is compilation: keep the quick ones, too.
        "VLLM_XLA_CACHE_PATH": str(cache_directory() / "xla"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        # Where these are not set, tpu-inference asks a metadata server for them.
        "TPU_NAME": "none",
        "TPU_ACCELERATOR_TYPE": "none",
        "TPU_WORKER_ID": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }


_EMULATED_VLLM = ["--max-num-seqs", "8", "--max-num-batched-tokens", "512"]
_EMULATED_VLLM += ["--enforce-eager", "--dtype", "float32"]


def _vllm(model: str | None) -> VllmEngine:
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError("vLLM is not installed here: pip install 'sgl-pd-connector[vllm,router]'")
    if tpu_chips():
        if model is None:
            raise ConfigError("--model: name a model that fits one TPU chip")
        return VllmEngine(model, 128, 2048, emulated=False)
    environment = emulation_environment()
    if model is None:
        model, environment["HF_HUB_OFFLINE"] = str(make_checkpoint()), "1"
    return VllmEngine(model, 16, 1024, emulated=True, extra_args=_EMULATED_VLLM, environment=environment)


@dataclass
class SglJaxEngine:
    """sgl-jax. Attributes as in `Engine`; ``extra_args`` are further flags of its server.

    ``overlap`` is its overlap schedule, which gives wrong tokens under concurrency on the CPU, on a plain server too;
    ``failure_policy`` its ``--disaggregation-failure-policy``.
    """

    model: str
    page_size: int
    max_tokens: int
    emulated: bool
    overlap: bool = False
    extra_args: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    failure_policy: FailurePolicy = "recompute"

    def server(
        self, role: Role, *, port: int, directory: Path, settings: Mapping[str, Any] | None = None
    ) -> Server:
        launcher = "sgl_jax.launch_server" if role == "plain" else "sgl_pd_connector.sgl_jax.launch_server"
        command = [sys.executable, "-m", launcher, "--model-path", self.model]
        command += ["--host", LOCALHOST, "--port", str(port), "--page-size", str(self.page_size)]
        command += ["--skip-server-warmup", *([] if self.overlap else ["--disable-overlap-schedule"])]
        command += self.extra_args
        if role != "plain":
            command += ["--disaggregation-mode", role, "--disaggregation-failure-policy", self.failure_policy]
            command += ["--disaggregation-config", json.dumps(dict(settings or {}))]
        environment = {**self.environment, **({} if self.emulated else one_chip(role))}
        return Server(f"sgl-jax {role}", command, port, directory / f"{role}.log", environment)

    def request(self, prompt: Sequence[int], max_tokens: int) -> tuple[str, dict[str, Any]]:
        return "/generate", {
            "input_ids": list(prompt),
            "sampling_params": {"max_new_tokens": max_tokens, "temperature": 0},
        }

    def token_ids(self, answer: Mapping[str, Any]) -> list[int]:
        return list(answer["output_ids"])

    def moved_tokens(self, prompt_tokens: int) -> int:
        # D computes the last token itself: the ordinary extend of what is left samples the first answer token.
        return prompt_tokens - 1


_SGL_JAX_ON_CPU = [
    "--device",
    "cpu",
    "--dtype",
    "float32",
    "--attention-backend",
    "native",
    "--disable-precompile",
]
_SGL_JAX_ON_CPU += ["--max-total-tokens", "4096", "--max-running-requests", "8", "--random-seed", "0"]


def _sgl_jax(model: str | None) -> SglJaxEngine:
    if importlib.util.find_spec("sgl_jax") is None:
        raise ConfigError("sgl-jax is not installed here: pip install 'sgl-pd-connector[sgl-jax,router]'")
    if tpu_chips():
        if model is None:
            raise ConfigError("--model: name a model that fits one TPU chip")
        return SglJaxEngine(model, 128, 2048, emulated=False, overlap=True)
    compiled = cache_directory() / "xla" / "sgl-jax"
    environment = {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(compiled)}
    if model is None:
        model, environment["HF_HUB_OFFLINE"] = str(make_checkpoint()), "1"
    return SglJaxEngine(model, 16, 1024, emulated=True, extra_args=_SGL_JAX_ON_CPU, environment=environment)


ENGINES: dict[str, Callable[[str | None], Engine]] = {"vllm": _vllm, "sgl-jax": _sgl_jax}
"""By name: makes the engine for a model, or for a tiny random one."""


def one_chip(role: Role) -> dict[str, str]:
    """Environment that shows P (and the plain server, which runs before it) the first chip, and D the second."""
    chips = tpu_chips()
    if len(chips) < 2:
        raise ConfigError(f"P and D need a TPU chip each, and this machine has {len(chips)}")
    mine = chips[1] if role == "decode" else chips[0]
    one = "1,1,1"
    return {"TPU_VISIBLE_CHIPS": str(mine), "TPU_CHIPS_PER_PROCESS_BOUNDS": one, "TPU_PROCESS_BOUNDS": one}
