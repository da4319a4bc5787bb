"""What the documentation says exists."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import yaml

from isthmus_core.config import parse_config

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]


def test_the_configuration_page_is_the_schema():
    page = runpy.run_path(str(ROOT / "tools" / "configuration_page.py"))
    assert page["PAGE"].read_text() == page["render_page"](), "run: python tools/configuration_page.py"


def test_the_command_page_is_the_command():
    page = runpy.run_path(str(ROOT / "tools" / "cli_page.py"))
    assert page["PAGE"].read_text() == page["page"](), "run: python tools/cli_page.py"


def test_the_reference_is_the_schema():
    page = runpy.run_path(str(ROOT / "tools" / "api_page.py"))
    assert page["PAGE"].read_text() == page["render_page"](), "run: python tools/api_page.py"


def test_the_site_builds_without_a_warning(tmp_path: Path):
    """Every page is in the navigation, every link and anchor leads somewhere."""
    command = [Path(sys.executable).parent / "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    environment = {"NO_MKDOCS_2_WARNING": "1", "PATH": os.environ["PATH"]}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "reference" / "index.html").is_file()


def test_links_between_pages_lead_somewhere():
    broken = [
        f"{page.name}: {target}"
        for page in PAGES
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert not broken


def test_make_targets_in_the_documentation_exist():
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    pages = [page for page in PAGES if page.name != "reference.md"]  # made of the schema's comments: prose
    named = {name for page in pages for name in re.findall(r"`?make ([a-z0-9-]+)", page.read_text())}
    named -= {"an", "every", "it", "no", "sure", "them", "up-to-date"}
    assert named <= targets, named - targets


def test_settings_in_the_documentation_are_valid():
    for page in PAGES:
        for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL):
            parse_config(yaml.safe_load(block))
