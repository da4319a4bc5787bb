"""Who a client is and how much it may ask for."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus_core.api_keys import ApiKey, hash_key, new_key, read_keys, write_keys
from isthmus_core.config import ClientsConfig
from isthmus_core.errors import ConfigError, RateLimited, Unauthenticated
from isthmus_router.clients import Gate
from isthmus_router.quota import Quota


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(name="clock")
def _clock() -> Clock:
    return Clock()


def keys_of(path: Path, **entries: str) -> Path:
    write_keys(path, [ApiKey(name=name, sha256=hash_key(key)) for name, key in entries.items()])
    return path


def test_the_file_holds_hashes_only_and_is_its_owners(tmp_path: Path):
    key = new_key()
    path = keys_of(tmp_path / "keys.yaml", alice=key)
    assert key not in path.read_text()
    assert path.stat().st_mode & 0o077 == 0
    (read,) = read_keys(path)
    assert (read.name, read.sha256) == ("alice", hash_key(key))


def test_keys_are_long_and_never_the_same():
    assert len({new_key() for _ in range(100)}) == 100
    assert len(new_key()) > 40
    with pytest.raises(ConfigError, match="at least 24"):
        hash_key("secret")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "no keys"),
        ("- {name: a, sha256: abc}", "0.sha256"),
        (f"- {{name: a, sha256: {'a' * 64}, rate: 3}}", "0.rate"),
        (f"- {{name: a, sha256: {'a' * 64}}}\n- {{name: a, sha256: {'b' * 64}}}", "name a is there twice"),
        (f"- {{name: a, sha256: {'a' * 64}}}\n- {{name: b, sha256: {'a' * 64}}}", "sha256 aaa"),
        ("a: [", "not YAML"),
    ],
)
def test_a_wrong_file_is_refused_by_entry(tmp_path: Path, text: str, says: str):
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_keys(path)


def test_what_is_not_a_hash_is_not_repeated_in_the_error(tmp_path: Path):
    path = tmp_path / "keys.yaml"
    path.write_text("- {name: a, sha256: isk-the-key-itself}")
    with pytest.raises(ConfigError) as caught:
        read_keys(path)
    assert "isk-" not in str(caught.value)


def test_a_key_opens_and_its_name_is_the_tenant(tmp_path: Path, clock: Clock):
    key = new_key()
    gate = Gate(ClientsConfig(keys_file=keys_of(tmp_path / "k", alice=key, bob=new_key())), clock)
    assert gate.enter(f"Bearer {key}", "somebody-else").tenant == "alice"
    assert gate.enter(f"bearer  {key} ", "").tenant == "alice"
    for shown in ("", "Bearer ", f"Bearer {key}x", f"Bearer {key[:-1]}", key, f"Basic {key}", "Bearer \udcff"):
        with pytest.raises(Unauthenticated):
            gate.enter(shown, "alice")


def test_keys_change_without_a_restart_and_a_broken_file_changes_nothing(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
):
    old, new = new_key(), new_key()
    path = keys_of(tmp_path / "k", alice=old)
    gate = Gate(ClientsConfig(keys_file=path), clock)
    keys_of(path, alice=new)
    clock.now += 1.1
    assert gate.enter(f"Bearer {new}", "").tenant == "alice"
    with pytest.raises(Unauthenticated):
        gate.enter(f"Bearer {old}", "")
    path.write_text("- half a li")
    clock.now += 1.1
    assert gate.enter(f"Bearer {new}", "").tenant == "alice"
    path.unlink()
    clock.now += 1.1
    assert gate.enter(f"Bearer {new}", "").tenant == "alice"
    assert caplog.text.count("the API keys stay as they were") == 2


def test_without_keys_everybody_may_ask_and_tenants_have_quotas(clock: Clock):
    assert Gate(ClientsConfig(), clock).enter("", "team").quota is None
    gate = Gate(ClientsConfig(requests_per_s=1), clock)
    gate.enter("", "team")
    with pytest.raises(RateLimited):
        gate.enter("", "team")
    gate.enter("", "others")


def test_a_key_may_have_its_own_limits_and_keeps_what_it_used(tmp_path: Path, clock: Clock):
    rich, poor = new_key(), new_key()
    path = tmp_path / "k"
    entries = [
        ApiKey(name="rich", sha256=hash_key(rich), requests_per_s=5),
        ApiKey(name="poor", sha256=hash_key(poor)),
    ]
    write_keys(path, entries)
    gate = Gate(ClientsConfig(keys_file=path, requests_per_s=0.1), clock)
    for _ in range(5):
        gate.enter(f"Bearer {rich}", "")
    gate.enter(f"Bearer {poor}", "")
    write_keys(path, entries)  # read again: what was used stays used
    clock.now += 1.1
    with pytest.raises(RateLimited, match=r"requests_per_s = 0\.1"):
        gate.enter(f"Bearer {poor}", "")


def test_requests_come_back_at_their_rate_and_the_hint_is_exact(clock: Clock):
    quota = Quota(2.0, None, clock)
    quota.count_request()
    quota.count_request()
    with pytest.raises(RateLimited) as caught:
        quota.count_request()
    assert caught.value.retry_after_s == 0.5
    clock.now += 0.5
    quota.count_request()
    clock.now += 1000
    quota.count_request()
    quota.count_request()
    with pytest.raises(RateLimited):
        quota.count_request()


def test_tokens_may_be_overdrawn_once_and_are_waited_for(clock: Clock):
    quota = Quota(None, 600.0, clock)  # ten a second
    quota.check_tokens()
    quota.spend_tokens(800)
    with pytest.raises(RateLimited) as caught:
        quota.check_tokens()
    assert caught.value.retry_after_s == pytest.approx(20.1)
    clock.now += 20.2
    quota.check_tokens()


def test_quotas_of_clients_that_name_themselves_are_bounded(clock: Clock, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("isthmus_router.clients._MOST_QUOTAS", 3)
    gate = Gate(ClientsConfig(requests_per_s=1), clock)
    for number in range(9):
        gate.enter("", f"tenant-{number}")
    with pytest.raises(RateLimited):
        gate.enter("", "tenant-8")
    gate.enter("", "tenant-0")  # forgotten: it begins anew
