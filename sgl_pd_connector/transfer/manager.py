"""`JaxTransferKVManager`: one per engine process, wires everything together.

Threads of a prefill process: the engine's (not ours), the side channel's, the registrar's, the bootstrap server's. Of
a decode process: the engine's, the side channel's, the pull thread, the registrar's, and a few for look-ups. Each is
made and joined by the object named after it; each owns its data, and the others queue commands for it. The only locks
are leaves: nothing is called while one is held.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from sgl_pd_connector import ops
from sgl_pd_connector.base import BaseKVManager, KVArgs
from sgl_pd_connector.bootstrap.heartbeat import Registrar
from sgl_pd_connector.bootstrap.server import HTTPBootstrapServer
from sgl_pd_connector.config import ConnectorConfig
from sgl_pd_connector.errors import ConfigError
from sgl_pd_connector.transfer.decode import DecodeSide
from sgl_pd_connector.transfer.engine import JaxTransferKVEngine, new_uuid
from sgl_pd_connector.transfer.peers import PrefillFinder, describe
from sgl_pd_connector.transfer.plan import ChunkPlanner
from sgl_pd_connector.transfer.pool import KVRunner
from sgl_pd_connector.transfer.prefill import PrefillSide
from sgl_pd_connector.transfer.receiver import JaxTransferKVReceiver
from sgl_pd_connector.transfer.sender import JaxTransferKVSender
from sgl_pd_connector.transfer.stats import Recorder, TransferRecord, TransferStats
from sgl_pd_connector.transfer.transfer_log import TransferLog
from sgl_pd_connector.wire.address import Address, advertised
from sgl_pd_connector.wire.layout import KVLayout
from sgl_pd_connector.wire.rooms import DIGEST_BYTES, MAX_ROOM, RoomKey
from sgl_pd_connector.wire.routes import Role
from sgl_pd_connector.wire.secret import bearer_token, require_secret

logger = logging.getLogger(__name__)


class JaxTransferKVManager(BaseKVManager):
    """The KV manager over `jax.experimental.transfer`.

    `register_runner`, `create_sender`, `create_receiver` and `step` are called on the engine's thread; `stats` and
    `take_records` on any; none of them blocks, `register_runner` excepted, which compiles.
    """

    def __init__(
        self, args: KVArgs, bootstrap_addr: str | None, *, role: Role, config: ConnectorConfig
    ) -> None:
        """Binds every port at once, so that a port in use or a wrong setting is an error here.

        Args:
            args: the pools, as `kv_args` describes them.
            bootstrap_addr: ``host:port`` of the bootstrap server. None: the setting ``bootstrap_addr``; and without
                that, a prefill instance serves its own, while a decode instance takes each request's.
            role: prefill or decode.
            config: the settings.

        Raises:
            ConfigError: a port is in use, or a setting does not fit this machine.
        """
        host = advertised(config.host)
        secret = config.read_secret()
        require_secret(host, secret, allow_insecure=config.allow_insecure)
        token = bearer_token(secret)
        self.config = config = config.model_copy(update={"host": host.host})
        self.role = role
        self._token = token
        self._closed = False
        self._epoch = new_uuid()
        self._log = None if config.transfer_log is None else TransferLog(config.transfer_log)
        self._recorder = Recorder(sink=None if self._log is None else self._log.write)
        self._layout = layout = KVLayout.from_args(args)
        planner = ChunkPlanner(layout, config.chunk_bytes, config.max_chunk_pages)
        self._bootstrap_server: HTTPBootstrapServer | None = None
        self._engine: JaxTransferKVEngine | None = None
        self._prefill: PrefillSide | None = None
        self._decode: DecodeSide | None = None
        self._registrar: Registrar | None = None

        known = bootstrap_addr or config.bootstrap_addr
        if known is None and role == "prefill":
            self._bootstrap_server = HTTPBootstrapServer(
                host.host, config.bootstrap_port, ttl=config.heartbeat_ttl, auth_token=token
            )
            self._bootstrap_server.start()
            known = str(self._bootstrap_server.address)
        super().__init__(args, known or "")
        try:
            self._engine = engine = JaxTransferKVEngine(
                host=host.host,
                port=config.transfer_port,
                channels=config.transfer_channels,
                transfer_size=config.transfer_size,
                serve=role == "prefill",
                stall_timeout=config.peer_timeout,
            )
            if role == "prefill":
                address = replace(host, port=config.side_channel_port)
                self._prefill = PrefillSide(
                    planner,
                    transport=engine,
                    config=config,
                    address=address,
                    epoch=self._epoch,
                    secret=secret,
                    recorder=self._recorder,
                )
            else:
                finder = PrefillFinder(config, layout, own_bootstrap=known, auth_token=token)
                self._decode = DecodeSide(
                    planner,
                    transport=engine,
                    config=config,
                    look_up=finder,
                    secret=secret,
                    recorder=self._recorder,
                )
        except BaseException:
            self.close()
            raise

    def register_runner(self, runner: KVRunner) -> None:
        """Compiles every shape that transfers will use; P then registers with the bootstrap server."""
        began = time.monotonic()
        if self._prefill is not None:
            self._prefill.start(runner)
        if self._decode is not None:
            self._decode.start(runner)
        logger.info(
            "%s instance %s: %d shapes compiled in %.1f s",
            self.role,
            self.config.instance_id,
            ops.compilations(),
            time.monotonic() - began,
        )
        if self._prefill is not None and self._engine is not None:
            route = describe(
                config=self.config,
                layout=self._layout,
                epoch=self._epoch,
                transfer_addr=self._engine.transfer_addr,
                transfer_ports=self._engine.transfer_ports,
                zmq_addr=self._prefill.channel.zmq_addr,
            )
            self._registrar = Registrar(
                Address.parse(self.bootstrap_addr, setting="bootstrap_addr"),
                [route],
                interval=self.config.heartbeat_interval,
                auth_token=self._token,
            )
            self._registrar.start()

    def create_sender(self, room: int, prompt: bytes = b"", num_tokens: int = 0) -> JaxTransferKVSender:
        """The prefill side of one request.

        Args:
            room: the router's room, 0 <= room < 2**63.
            prompt: `prompt_digest` of its tokens.
            num_tokens: tokens of the prompt, >= 1.
        """
        if self._prefill is None:
            raise ConfigError("this is a decode instance: it creates receivers, not senders")
        if num_tokens < 1:
            raise ValueError(f"num_tokens = {num_tokens}: a prompt has at least one token")
        return self._prefill.create_sender(_key(room, prompt), num_tokens)

    def create_receiver(
        self, room: int, prompt: bytes = b"", num_tokens: int | None = None, bootstrap_addr: str | None = None
    ) -> JaxTransferKVReceiver:
        """The decode side of one request.

        Args:
            room: the router's room, 0 <= room < 2**63.
            prompt: `prompt_digest` of its tokens.
            num_tokens: tokens of the prompt; what P says is checked against it.
            bootstrap_addr: ``host:port`` where P is registered; None: the manager's own.
        """
        decode, key = self._of_decode(), _key(room, prompt)
        receiver = JaxTransferKVReceiver(
            self,
            bootstrap_addr or self.bootstrap_addr,
            key.room,
            side=decode,
            prompt=prompt,
            num_tokens=num_tokens,
        )
        decode.add(receiver)
        return receiver

    def refuse(self, room: int, reason: str, bootstrap_addr: str | None = None) -> None:
        """Of an HTTP request that this decode server refused before its engine had it: P is told. Never blocks.

        P pairs by prompt, and such a request may never have had one: all of the room that no D has asked for ends.

        Args:
            room: the router's room, 0 <= room < 2**63.
            reason: for P's log.
            bootstrap_addr: as for `create_receiver`.
        """
        self._of_decode().refuse(_key(room, b""), bootstrap_addr or self.bootstrap_addr, reason)

    def _of_decode(self) -> DecodeSide:
        if self._decode is None:
            raise ConfigError("this is a prefill instance: it creates senders, not receivers")
        return self._decode

    def step(self) -> None:
        """One engine step: writes what has arrived (D), gathers what waited for room (P). Never blocks."""
        if self._decode is not None:
            self._decode.step()
        if self._prefill is not None:
            self._prefill.step()

    def stats(self) -> TransferStats:
        """Counters since start and gauges of now."""
        stats = replace(self._recorder.totals, compilations=ops.compilations())
        if self._prefill is not None:
            self._prefill.fill(stats)
        if self._decode is not None:
            self._decode.fill(stats)
        return stats

    def take_records(self) -> list[TransferRecord]:
        """The transfers that finished since the last call."""
        return self._recorder.take()

    def close(self) -> None:
        """Aborts every transfer, tells the peers, unregisters, ends every thread. Idempotent."""
        if self._closed:
            return
        self._closed = True
        # A bootstrap server that hangs keeps the registrar for seconds. Peers must not wait for that, nor the process
        # be killed before they are told.
        if self._registrar is not None:
            self._registrar.stop()
        if self._decode is not None:
            self._decode.close()
        if self._prefill is not None:
            self._prefill.close()
        if self._registrar is not None:
            self._registrar.close()
        if self._bootstrap_server is not None:
            self._bootstrap_server.stop()
        if self._log is not None:
            self._log.close()


def _key(room: int, prompt: bytes) -> RoomKey:
    if not 0 <= room <= MAX_ROOM:
        raise ValueError(f"room {room}: rooms are 0 to 2**63 - 1")
    if len(prompt) > DIGEST_BYTES:
        raise ValueError(f"room {room}: prompt is a digest of {DIGEST_BYTES} bytes, not {len(prompt)} bytes")
    return RoomKey(room, prompt)
