"""The file of finished transfers."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from sgl_pd_connector.base import KVPoll
from sgl_pd_connector.errors import ConfigError
from sgl_pd_connector.transfer.stats import Recorder, TransferRecord
from sgl_pd_connector.transfer.transfer_log import TransferLog

pytestmark = pytest.mark.unit


def record(room: int) -> TransferRecord:
    times = {KVPoll.Bootstrapping: 1.0, KVPoll.Success: 2.0}
    return TransferRecord.of(
        role="decode", room=room, entered=times, error=None, num_tokens=17, pages=2, nbytes=64
    )


def test_each_record_is_a_line_that_is_there_at_once(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = TransferLog(str(path))
    recorder = Recorder(sink=log.write)
    for room in (2**63 - 1, 5):
        recorder.add(record(room))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    log.close()
    assert [
        (line["room"], line["outcome"], line["num_tokens"], line["pages"], line["nbytes"]) for line in lines
    ] == [
        (2**63 - 1, "ok", 17, 2, 64),
        (5, "ok", 17, 2, 64),
    ]


def test_a_restarted_server_goes_on_in_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for room in (1, 2):
        log = TransferLog(str(path))
        log.write(record(room))
        log.close()
        log.close()
        log.write(record(99))
    assert [json.loads(line)["room"] for line in path.read_text().splitlines()] == [1, 2]


def test_threads_do_not_tear_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = TransferLog(str(path))
    threads = [
        threading.Thread(target=lambda room=room: [log.write(record(room)) for _ in range(50)])
        for room in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    rooms = [json.loads(line)["room"] for line in path.read_text().splitlines()]
    assert sorted(rooms) == sorted([0, 1, 2, 3] * 50)


def test_a_file_that_cannot_be_written_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"transfer_log = .*missing/log: cannot be written: No such file"):
        TransferLog(str(tmp_path / "missing" / "log"))


def test_a_full_disk_ends_the_log_and_nothing_else() -> None:
    log = TransferLog("/dev/full")
    log.write(record(1))
    log.write(record(2))
