"""The wire schema: it lints, everything in it is explained, and an incompatible change is noticed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUF = Path(sys.executable).parent / "buf"


def _buf(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([BUF, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)


def _copy(folder: Path) -> Path:
    shutil.copytree(ROOT / "protos" / "isthmus", folder / "isthmus")
    shutil.copy(ROOT / "protos" / "buf.yaml", folder)
    return folder


def _against_baseline(folder: Path) -> subprocess.CompletedProcess[str]:
    return _buf("breaking", str(folder), "--against", str(ROOT / "protos" / "baseline.binpb"))


def test_lint():
    result = _buf("lint", "protos")
    assert result.returncode == 0, result.stdout


def test_lint_demands_a_comment_on_everything(tmp_path: Path):
    proto = _copy(tmp_path) / "isthmus" / "v1" / "common.proto"
    text = proto.read_text()
    assert "  // 16 bytes.\n" in text
    proto.write_text(text.replace("  // 16 bytes.\n", "", 1))
    result = _buf("lint", str(tmp_path))
    assert result.returncode != 0
    assert "trace_id" in result.stdout


def test_the_schema_is_compatible_with_the_last_release(tmp_path: Path):
    result = _against_baseline(_copy(tmp_path))
    assert result.returncode == 0, result.stdout


def test_removing_a_field_is_noticed(tmp_path: Path):
    proto = _copy(tmp_path) / "isthmus" / "v1" / "common.proto"
    text = proto.read_text()
    field = "  uint32 attempt = 2;\n"
    assert field in text
    proto.write_text(text.replace(field, "", 1))
    result = _against_baseline(tmp_path)
    assert result.returncode != 0
    assert "attempt" in result.stdout


def test_removing_a_field_with_its_number_and_name_reserved_is_the_only_way(tmp_path: Path):
    proto = _copy(tmp_path) / "isthmus" / "v1" / "common.proto"
    text = proto.read_text()
    proto.write_text(text.replace("  uint32 attempt = 2;\n", "  reserved 2;\n", 1))
    assert _against_baseline(tmp_path).returncode != 0, "the name must be reserved too"
