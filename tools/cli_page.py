"""Writes docs/cli.md from the command itself. `python tools/cli_page.py [--check]`: exit code 1 when it is stale."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import typer

from isthmus_client.cli import app

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
HEAD = """# The isthmus command

Made by `tools/cli_page.py` from the command's own help.

Exit codes: 0 done, 1 failed, 2 wrong options or settings, 3 could not start, 4 `doctor` found something that will not
work, 130 interrupted. `--json` prints for programs on stdout and nothing else there. `isthmus --install-completion`
makes the shell complete. Certificates for every call: `--tls-ca`, `--tls-cert`, `--tls-key` before the command's name,
or `ISTHMUS_TLS_CA`, `ISTHMUS_TLS_CERT`, `ISTHMUS_TLS_KEY`; an API key: `--api-key`, or better `ISTHMUS_API_KEY`, which
does not show in the list of processes.
"""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _parameters(command: Any) -> Iterable[str]:
    rows = [
        ("/".join([*one.opts, *one.secondary_opts]), one.help or "", one.default)
        for one in command.params
        if "--help" not in one.opts
    ]
    if not rows:
        return
    yield "\n| option | default | |\n|---|---|---|\n"
    for names, text, default in rows:
        shown = "" if default is None or default is False or callable(default) else f"`{default}`"
        shown = "" if "Ellipsis" in shown or "Sentinel" in shown or "UNSET" in shown else shown
        yield f"| `{names}` | {shown} | {_cell(text)} |\n"


def page() -> str:
    """The whole page."""
    parts = [HEAD]

    def add(prefix: str, group: Any) -> None:
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                add(f"{prefix} {name}", command)
                continue
            text = " ".join((command.help or "").split())
            parts.append(f"\n## {prefix} {name}\n\n{text}\n")
            parts.extend(_parameters(command))

    add("isthmus", typer.main.get_command(app))
    return "".join(parts)


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(PAGE.read_text() != page())
    PAGE.write_text(page())
