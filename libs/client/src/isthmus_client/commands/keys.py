"""API keys of clients: `isthmus keys`."""

from __future__ import annotations

import sys
from getpass import getpass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from isthmus_client.commands.shared import AsJson, console, fail, show_json, tell
from isthmus_core.api_keys import ApiKey, hash_key, new_key, read_keys, write_keys
from isthmus_core.errors import ConfigError

keys = typer.Typer(no_args_is_help=True, help="API keys that a router asks its clients for (router.clients.keys_file).")
Name = Annotated[str, typer.Argument(help="whose key: the tenant, in letters, digits, dots and dashes")]
File = Annotated[Path, typer.Argument(help="the router's file of keys; holds hashes, not keys")]
Requests = Annotated[float | None, typer.Option(help="this client's limit; default: router.clients.requests_per_s")]
Tokens = Annotated[float | None, typer.Option(help="this client's limit; default: router.clients.tokens_per_min")]


@keys.command()
def new(
    file: File, name: Name, requests_per_s: Requests = None, tokens_per_min: Tokens = None, as_json: AsJson = False
) -> None:
    """Make a key, add its hash to the file, and print the key: this once, it is kept nowhere."""
    key = new_key()
    _add(file, name, key, requests_per_s, tokens_per_min)
    if as_json:
        show_json({"name": name, "key": key})
    else:
        print(key)


@keys.command("hash")
def hash_(
    file: File, name: Name, requests_per_s: Requests = None, tokens_per_min: Tokens = None, as_json: AsJson = False
) -> None:
    """Add the hash of a key that you have to the file. The key is read from stdin, so that no history keeps it."""
    key = getpass("key: ") if sys.stdin.isatty() else sys.stdin.readline().strip()
    _add(file, name, key, requests_per_s, tokens_per_min)
    tell({"name": name}, f"{file}: {name} may ask now", as_json=as_json)


@keys.command("list")
def list_(file: File, as_json: AsJson = False) -> None:
    """Show whose keys there are, and their limits."""
    known = _read(file)
    if as_json:
        show_json([key.model_dump() for key in known])
        return
    table = Table(show_edge=False)
    for title in ("name", "requests/s", "tokens/min", "sha256"):
        table.add_column(title)
    for key in known:
        limits = ("" if one is None else f"{one:g}" for one in (key.requests_per_s, key.tokens_per_min))
        table.add_row(key.name, *limits, f"{key.sha256[:12]}…")
    console.print(table)


@keys.command()
def remove(file: File, name: Name, as_json: AsJson = False) -> None:
    """Take a client's key out of the file. Requests that run go on."""
    known = _read(file)
    left = [key for key in known if key.name != name]
    if len(left) == len(known):
        fail(f"{file}: no key of {name}; there are {', '.join(key.name for key in known)}", 1)
    if not left:
        fail(f"{file}: {name} has the last key; a router does not take an empty file, so add another one first", 1)
    _write(file, left)
    tell({"removed": name}, f"{file}: the key of {name} is gone; routers refuse it within a second", as_json=as_json)


def _add(file: Path, name: str, key: str, requests_per_s: float | None, tokens_per_min: float | None) -> None:
    known = _read(file) if file.exists() else []
    if any(one.name == name for one in known):
        fail(f"{file}: {name} has a key; remove it first, or give the new one another name", 1)
    try:
        entry = ApiKey(name=name, sha256=hash_key(key), requests_per_s=requests_per_s, tokens_per_min=tokens_per_min)
    except ConfigError as error:
        fail(str(error), error.exit_code)
    except ValueError as error:
        fail(f"{name}: {error}", 2)
    _write(file, [*known, entry])


def _read(file: Path) -> list[ApiKey]:
    try:
        return read_keys(file)
    except ConfigError as error:
        fail(str(error), error.exit_code)


def _write(file: Path, known: list[ApiKey]) -> None:
    try:
        write_keys(file, known)
    except ConfigError as error:
        fail(str(error), error.exit_code)
