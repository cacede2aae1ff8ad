"""The demo's own arithmetic: which prompts it sends, and when it says that all is well."""

from __future__ import annotations

import json
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from sgl_pd_connector.cli import demo, demo_results
from sgl_pd_connector.cli.demo import prompt_lengths
from sgl_pd_connector.cli.demo_results import Checked
from sgl_pd_connector.errors import ConfigError

pytestmark = pytest.mark.unit

RECORD = {"num_tokens": 17, "pages": 2, "nbytes": 8192, "pull_s": 0.0125, "outcome": "ok", "error": ""}


@pytest.mark.parametrize(("page_size", "longest"), [(16, 1012), (128, 2036), (256, 4084)])
def test_lengths_are_distinct_and_lie_around_the_page_boundaries(page_size: int, longest: int) -> None:
    lengths = prompt_lengths(page_size, longest)
    assert len(set(lengths)) == len(lengths) >= 40
    assert min(lengths) == 1
    assert max(lengths) <= longest
    assert {
        page_size - 1,
        page_size,
        page_size + 1,
        7 * page_size - 1,
        7 * page_size,
        7 * page_size + 1,
    } <= set(lengths)


def test_a_request_is_ok_when_its_tokens_are_equal_and_were_computed_from_a_transfer() -> None:
    assert Checked(17, [1, 2], [1, 2], RECORD, 17).ok


def test_a_prompt_of_which_nothing_has_to_move_is_ok_without_a_transfer() -> None:
    assert Checked(1, [1, 2], [1, 2], None, 0).ok


@pytest.mark.parametrize(
    ("got", "record"),
    [
        ([1, 3], RECORD),
        ([1], RECORD),
        ([1, 2], None),
        ([1, 2], {**RECORD, "outcome": "failed", "error": "why"}),
    ],
)
def test_everything_else_is_not(got: list[int], record: dict[str, Any] | None) -> None:
    assert not Checked(17, [1, 2], got, record, 17).ok


def test_the_json_names_every_request() -> None:
    out = demo_results.as_json([Checked(17, [1], [1], RECORD, 17), Checked(5, [1], [2], None, 5)])
    assert out == {
        "requests": 2,
        "mismatches": 1,
        "transferred_bytes": 8192,
        "per_request": [
            {"prompt_tokens": 17, "pages": 2, "bytes": 8192, "pull_ms": 12.5, "ok": True},
            {"prompt_tokens": 5, "pages": 0, "bytes": 0, "pull_ms": 0.0, "ok": False},
        ],
    }


def test_records_are_told_apart_by_the_length_of_their_prompt(tmp_path: Path) -> None:
    log = tmp_path / "transfers.jsonl"
    assert demo_results.read_records(log) == {}
    log.write_text("".join(json.dumps({**RECORD, "num_tokens": length}) + "\n" for length in (3, 1)))
    assert {length: record["num_tokens"] for length, record in demo_results.read_records(log).items()} == {
        3: 3,
        1: 1,
    }


def test_the_table_says_what_went_wrong() -> None:
    console = Console(record=True, width=120)
    failed = {
        **RECORD,
        "bootstrap_s": 0.0,
        "input_s": 0.0,
        "transfer_s": 0.0,
        "outcome": "failed",
        "error": "P [gone]",
    }
    demo_results.show([Checked(17, [1], [1], failed, 17), Checked(5, [1], [2], None, 5)], console)
    text = console.export_text()
    assert "17 tokens: right answer, but P [gone]" in text
    assert "5 tokens: plain [1], got [2]" in text
    assert "2 requests, 1 mismatches" in text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_is_raised_once_and_remembered(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with demo._Interrupt() as interrupt:
        interrupt.check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        signal.raise_signal(number)
        with pytest.raises(KeyboardInterrupt):
            interrupt.check()
    assert signal.getsignal(number) is before


def app_answer(*arguments: str) -> Any:
    from typer import Typer

    app = Typer()
    app.command()(demo.demo)
    return CliRunner().invoke(app, arguments)


def test_an_unknown_engine_is_named() -> None:
    answer = app_answer("--engine", "nope")
    assert answer.exit_code == 2
    assert "is not one of: vllm" in answer.output


def test_a_missing_extra_is_an_error_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    answer = app_answer()
    assert isinstance(answer.exception, ConfigError)
    assert str(answer.exception) == "vLLM is not installed here: pip install 'sgl-pd-connector[vllm,router]'"
    assert not list(tmp_path.iterdir())
