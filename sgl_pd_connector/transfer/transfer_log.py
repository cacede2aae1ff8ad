"""The setting ``transfer_log``: a file that gets one JSON line per finished transfer."""

from __future__ import annotations

import json
import logging
import threading
from typing import BinaryIO

from sgl_pd_connector.errors import ConfigError
from sgl_pd_connector.transfer.stats import TransferRecord

logger = logging.getLogger(__name__)


class TransferLog:
    """Appends records, from any thread, each complete in the file as soon as `write` returns.

    The lock orders `write` and `close` and is a leaf. A line is one short system call on a local file; when it fails,
    the log ends and the transfers go on.
    """

    def __init__(self, path: str) -> None:
        """
        Raises:
            ConfigError: the file cannot be opened.
        """
        self._path = path
        self._lock = threading.Lock()
        try:
            self._file: BinaryIO | None = open(path, "ab", buffering=0)  # noqa: SIM115 # lives as long as this object
        except OSError as error:
            raise ConfigError(f"transfer_log = {path}: cannot be written: {error.strerror}") from None

    def write(self, record: TransferRecord) -> None:
        line = json.dumps(record.as_dict()).encode() + b"\n"
        with self._lock:
            if self._file is None:
                return
            try:
                self._file.write(line)
            except OSError as error:
                logger.warning("transfer_log = %s: no more is written: %s", self._path, error)
                self._end()

    def close(self) -> None:
        """Ends the log. Idempotent; what is written later is dropped."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
