"""The demo's own arithmetic: which prompts it sends, and when it says that all is well."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sgl_pd_connector.cli import demo
from sgl_pd_connector.cli.demo import Checked, prompt_lengths
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
    out = demo._as_json([Checked(17, [1], [1], RECORD, 17), Checked(5, [1], [2], None, 5)])
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
    log.write_text("".join(json.dumps({**RECORD, "num_tokens": length}) + "\n" for length in (3, 1)))
    found = demo._records(log, [1, 3])
    assert [record and record["num_tokens"] for record in found] == [1, 3]


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
