"""Rules about the sources: imports, declared dependencies, sizes, the list of options, generated code, places."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import typer.main

from isthmus_core.config import known_keys

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(
    path.parent for path in [*ROOT.glob("libs/*/pyproject.toml"), *ROOT.glob("services/*/pyproject.toml")]
)
MAX_LINES = 350
# Written by hand: a new option is a reviewed act.
OPTIONS = Path(__file__).with_name("options.txt")


def _sources(folder: Path) -> list[Path]:
    return sorted(folder.glob("src/**/*.py"))


def test_import_contracts():
    command = [Path(sys.executable).parent / "lint-imports", "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
    assert result.returncode == 0, result.stdout[-4000:]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _declared(pyproject: Path) -> set[str]:
    project = tomllib.loads(pyproject.read_text())["project"]
    lines = [
        *project["dependencies"],
        *(line for extra in project.get("optional-dependencies", {}).values() for line in extra),
    ]
    return {_normal(re.split(r"[\[<>=!~; ]", line, maxsplit=1)[0]) for line in lines}


def _imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module)
    return names


def _distributions(module: str, by_module: dict[str, list[str]]) -> set[str]:
    """Distributions that may provide a module; namespace packages need a second look."""
    top = module.split(".", maxsplit=1)[0]
    special = {"isthmus": "isthmus-protos", "google.rpc": "googleapis-common-protos", "google.protobuf": "protobuf"}
    for prefix, name in special.items():
        if module == prefix or module.startswith(prefix + "."):
            return {name}
    return {_normal(name) for name in by_module.get(top, [top])}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_every_dependency_in_use_is_declared(package: Path):
    declared = _declared(package / "pyproject.toml")
    own = {path.name for path in (package / "src").iterdir()}
    by_module = {key: list(value) for key, value in packages_distributions().items()}
    problems = [
        f"{path.relative_to(ROOT)}: {module}"
        for path in _sources(package)
        for module in sorted(_imported(path))
        if module.split(".")[0] not in sys.stdlib_module_names
        and module.split(".")[0] not in own
        and not _distributions(module, by_module) & declared
    ]
    assert not problems, f"not declared in {package.name}/pyproject.toml: {problems}"


def test_files_stay_readable():
    files = [path for package in PACKAGES for path in _sources(package)]
    assert len(files) > 40
    long = {str(path.relative_to(ROOT)): n for path in files if (n := len(path.read_text().splitlines())) > MAX_LINES}
    assert not long, f"longer than {MAX_LINES} lines: {long}"


def _command_options() -> list[str]:
    from isthmus_client.cli import app

    group = typer.main.get_command(app)
    commands = getattr(group, "commands")  # noqa: B009 - a click.Group, which the stubs do not say
    return [
        f"isthmus {name} {'/'.join([*parameter.opts, *parameter.secondary_opts])}"
        for name, command in sorted(commands.items())
        for parameter in command.params
    ]


def test_options_are_the_reviewed_ones():
    actual = sorted(known_keys()) + _command_options()
    expected = OPTIONS.read_text().splitlines()
    assert actual == expected, f"change {OPTIONS.name} with the option and say in the review why it is needed"


def test_no_asserts_for_validation_and_no_leftovers():
    problems: list[str] = []
    for path in (path for package in PACKAGES for path in _sources(package)):
        text = path.read_text()
        problems += [f"{path.name}: {word}" for word in ("TODO", "FIXME", "NotImplementedError") if word in text]
        problems += [
            f"{path.name}:{node.lineno}: assert" for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Assert)
        ]
    assert not problems


def test_constraints_hold_versions_only():
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert line.startswith("#") or re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9._]+", line), line
