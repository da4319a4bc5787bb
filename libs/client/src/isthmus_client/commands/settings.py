"""Before anything runs: config, certs, doctor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from isthmus_client.certificates import Authority
from isthmus_client.commands.shared import FOUND_SOMETHING, AsJson, console, fail, run, show_json, tell
from isthmus_client.doctor import Finding, Level, examine, render_findings
from isthmus_core.config import load_config
from isthmus_core.config_explain import explain_config
from isthmus_core.errors import ConfigError

config = typer.Typer(no_args_is_help=True, help="Look at a configuration.")
File = Annotated[Path | None, typer.Argument(help="YAML configuration; left out: the defaults")]
Set = Annotated[list[str] | None, typer.Option("--set", help="section.key=value; may be repeated")]


@config.command()
def validate(file: File = None, overrides: Set = None, as_json: AsJson = False) -> None:
    """Check every key and value; exit code 2 and every reason when something is wrong."""
    try:
        load_config(file, tuple(overrides or ()))
    except ConfigError as error:
        fail(str(error), error.exit_code)
    tell({"valid": True}, f"{file or 'the defaults'}: nothing is wrong", as_json=as_json)


@config.command()
def explain(
    file: File = None,
    overrides: Set = None,
    changed: Annotated[bool, typer.Option("--changed", help="only what is not the default")] = False,
    as_json: AsJson = False,
) -> None:
    """Show every setting that would be in force, where it comes from, and what it means."""
    try:
        rows = explain_config(file, tuple(overrides or ()))
    except ConfigError as error:
        fail(str(error), error.exit_code)
    rows = [row for row in rows if row.source != "default" or not changed]
    if as_json:
        show_json([{"key": row.key, "value": row.value, "source": row.source, "meaning": row.meaning} for row in rows])
        return
    table = Table(show_edge=False)
    for name in ("key", "value", "from", "meaning"):
        table.add_column(name, overflow="fold", no_wrap=name == "key")
    for row in rows:
        table.add_row(row.key, row.value, row.source, row.meaning)
    console.print(table)


def certs(
    folder: Annotated[Path, typer.Argument(help="where the files go; kept when they are there already")] = Path(
        "certs"
    ),
    host: Annotated[list[str] | None, typer.Option(help="name or address of a machine; may be repeated")] = None,
    days: Annotated[int, typer.Option(min=1, help="how long the certificates are valid")] = 365,
    as_json: AsJson = False,
) -> None:
    """Make a development CA and a certificate for every role. Not for production: keep real keys in a real PKI."""
    try:
        authority = Authority.open(folder, days)
        made = authority.issue_roles(host or ["localhost", "127.0.0.1"], days)
    except ConfigError as error:
        fail(str(error), error.exit_code)
    tell(
        {"ca": str(folder / "ca.crt"), "certificates": [str(one) for one in made]},
        f"{folder / 'ca.crt'} signs {', '.join(name.name for name in made)}",
        f"try: --set tls.ca={folder}/ca.crt --set tls.cert={folder}/worker.crt --set tls.key={folder}/worker.key",
        as_json=as_json,
    )


def doctor(
    file: File = None,
    overrides: Set = None,
    peer: Annotated[Path | None, typer.Option(help="configuration of the other side: are the two compatible?")] = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine and a configuration before anything is started; say what is wrong and what to do.

    Exit code 4 when something will not work.
    """
    found: list[Finding] = []

    async def main() -> None:
        found.extend(await examine(file, tuple(overrides or ()), peer))

    run(main())
    if as_json:
        show_json(
            [{"check": one.check, "level": one.level.value, "text": one.text, "remedy": one.remedy} for one in found]
        )
    else:
        console.print(render_findings(found))
    if any(one.level is Level.BROKEN for one in found):
        raise typer.Exit(FOUND_SOMETHING)
