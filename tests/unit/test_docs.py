"""The documentation is true: its commands parse, its links lead somewhere, its table of settings is the code's."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.core
import typer.main

from sgl_pd_connector.cli.main import app
from sgl_pd_connector.config import ConnectorConfig, load_config
from sgl_pd_connector.sgl_jax import server_args
from sgl_pd_connector.vllm import compat, stats

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PLAIN_MODULES = ("sgl_pd_connector.testing.sequential_proxy", "tests.faults")
"""Whose options are those that ``-h`` tells."""
LINK = re.compile(r"\]\(([^)\s]+)\)")


def shell_blocks() -> list[tuple[str, str]]:
    return [
        (f"{page.name}: {body.splitlines()[0][:60]}", body)
        for page in PAGES
        for language, body in BLOCK.findall(page.read_text())
        if language in ("sh", "bash")
    ]


def commands(block: str) -> Iterator[list[str]]:
    """The commands of a block, as words. Quoted newlines stay in their word."""
    lexer = shlex.shlex(block.replace("\\\n", " "), posix=True, punctuation_chars="\n;")
    lexer.whitespace = " \t"
    lexer.whitespace_split = True
    words: list[str] = []
    for token in lexer:
        if set(token) <= set("\n;"):
            if words:
                yield words
            words = []
        else:
            words.append(token)
    if words:
        yield words


@pytest.mark.parametrize(("where", "block"), shell_blocks(), ids=[where for where, _ in shell_blocks()])
class TestCommands:
    def test_bash_can_read_them(self, where: str, block: str) -> None:
        subprocess.run(["bash", "-n"], input=block, text=True, check=True)

    def test_their_options_exist(self, where: str, block: str) -> None:
        for words in commands(block):
            check_command(words)


def check_command(words: list[str]) -> None:
    program = words[0]
    if program == "sgl-pd":
        group = typer.main.get_command(app)
        assert isinstance(group, typer.core.TyperGroup)
        subcommand = group.commands[words[1]]
        subcommand.make_context(words[1], words[2:]).close()
    elif program.startswith(("scripts/", "examples/")):
        text = subprocess.run([ROOT / program, "-h"], capture_output=True, text=True, check=True).stdout
        assert all(word in text for word in words[1:] if word.startswith("-"))
    elif program == "export":
        name, _, value = words[1].partition("=")
        assert name.removeprefix("SGL_PD_").lower() in ConnectorConfig.model_fields
        load_config({}, where=name, environ={name: value})
    elif words[:2] == ["python", "-m"] and words[2] in PLAIN_MODULES:
        help_text = subprocess.run(
            [sys.executable, *words[1:3], "-h"], capture_output=True, text=True, check=True, cwd=ROOT
        ).stdout
        assert all(word in help_text for word in words[3:] if word.startswith("--"))
    elif words[:3] == ["python", "-m", "sgl_pd_connector.sgl_jax.launch_server"]:
        _, for_sgl_jax = server_args.parse(words[3:])
        assert not [word for word in for_sgl_jax if word.startswith(server_args.PREFIX)]
    elif program == "vllm":
        assert words[1] == "serve"
        check_transfer_config(json.loads(words[words.index("--kv-transfer-config") + 1]))
    else:
        assert words[:3] == ["python", "-m", "sglang_router.launch_router"] or program in ("pip", "curl"), (
            f"not checked by this test: {shlex.join(words)}"
        )


def check_transfer_config(config: dict[str, Any]) -> None:
    assert config.pop("kv_connector") == compat.CONNECTOR
    assert config.pop("kv_role") in compat.ROLES
    load_config(config.pop("kv_connector_extra_config", {}), where="docs", environ={})
    assert config.pop("kv_load_failure_policy", "fail") in ("fail", "recompute")
    assert not config


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
            anchors = {
                re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings
            }
            assert anchor in anchors, link


def settings_table() -> str:
    rows = ["| setting | default | meaning |", "|---|---|---|"]
    for name, field in ConnectorConfig.model_fields.items():
        factory = field.default_factory is not None
        default = (
            "made at start" if factory else "none" if field.default in (None, ()) else f"{field.default}"
        )
        if isinstance(field.default, bool):
            default = str(field.default).lower()
        rows.append(f"| `{name}` | {default} | {field.description} |")
    return "\n".join(rows) + "\n"


def test_the_table_of_settings_is_the_codes() -> None:
    written = (ROOT / "docs" / "settings.md").read_text()
    assert settings_table() in written, f"docs/settings.md needs this table:\n{settings_table()}"


def metrics_table() -> str:
    rows = ["| metric | type | meaning |", "|---|---|---|"]
    rows += [f"| `vllm:sgl_pd_{name}_total` | counter | {text} |" for name, text in stats.COUNTERS.items()]
    rows += [f"| `vllm:sgl_pd_{name}` | gauge | {text} |" for name, text in stats.GAUGES.items()]
    return "\n".join(rows) + "\n"


def test_the_table_of_metrics_is_the_codes() -> None:
    written = (ROOT / "docs" / "operations.md").read_text()
    assert metrics_table() in written, f"docs/operations.md needs this table:\n{metrics_table()}"
    for name in (*stats.OUTCOMES, *stats.STAGES):
        assert f"`{name}`" in written


def test_the_navigation_names_every_page() -> None:
    listed = set(re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert listed == {page.name for page in PAGES[1:]}


def test_the_demo_script_tells_the_commands_options() -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    options = {name for param in group.commands["demo"].params for name in param.opts}
    told = subprocess.run(
        [ROOT / "scripts" / "demo", "-h"], capture_output=True, text=True, check=True
    ).stdout
    assert options
    assert not [name for name in options if name not in told]
