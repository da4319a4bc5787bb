"""vLLM's events about its prefix cache, with our names of the blocks: made from the token ids that the events carry."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from isthmus_core import token_ids
from isthmus_core.block_keys import chain
from isthmus_worker.engine import KvEvent

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = logging.getLogger(__name__)

_DEVICE = (None, "GPU")


class BlockKeys:
    """What vLLM's own hashes stand for. `root(salt, adapter)` gives the parent of first blocks.

    Blocks of another group, size or medium, and those that depend on more than tokens, salt and adapter (images) have
    no name here: they are left out, with all that follows them.
    """

    def __init__(self, root: Callable[[bytes, str], bytes], tokens_per_block: int) -> None:
        self._root, self._size = root, tokens_per_block
        self._keys: dict[Hashable, bytes] = {}
        # Two blocks of vLLM may hold the same tokens.
        self._held: Counter[bytes] = Counter()

    def apply(self, events: Iterable[Mapping[str, Any]]) -> KvEvent | None:
        """Events of one step, in order, as mappings with their `type`. None when nothing has changed."""
        # Keys that events have touched: whether they were there before.
        before: dict[bytes, bool] = {}
        for event in events:
            self._apply(event, before)
        stored = tuple(key for key, was in before.items() if self._held[key] and not was)
        removed = tuple(key for key, was in before.items() if not self._held[key] and was)
        for key in removed:
            del self._held[key]
        return KvEvent(stored, removed) if stored or removed else None

    def lost(self) -> KvEvent | None:
        """Some events were missed: nothing is known any more."""
        removed = tuple(key for key, count in self._held.items() if count)
        self._keys.clear()
        self._held.clear()
        return KvEvent((), removed) if removed else None

    def _apply(self, event: Mapping[str, Any], before: dict[bytes, bool]) -> None:
        match event["type"]:
            case "BlockStored":
                self._store(event, before)
            case "BlockRemoved" if event.get("medium") in _DEVICE and not event.get("group_idx"):
                for one in event["block_hashes"]:
                    self._drop(one, before)
            case "AllBlocksCleared":
                for one in tuple(self._keys):
                    self._drop(one, before)
            case _:
                pass

    def _store(self, event: Mapping[str, Any], before: dict[bytes, bool]) -> None:
        if event.get("medium") not in _DEVICE or event.get("group_idx") or event["block_size"] != self._size:
            return
        parent = self._parent(event)
        if parent is None:
            return
        keys = chain(parent, token_ids.pack(event["token_ids"]), self._size)
        for one, key in zip(event["block_hashes"], keys, strict=False):
            if one in self._keys:
                continue
            before.setdefault(key, self._held[key] > 0)
            self._keys[one] = key
            self._held[key] += 1

    def _parent(self, event: Mapping[str, Any]) -> bytes | None:
        above = event.get("parent_block_hash")
        adapter = event.get("lora_name") or ""
        salt = b""
        for extra in event.get("extra_keys") or ():
            known = _salt(extra or (), adapter)
            if known is None:
                return None
            salt = known or salt
        if above is None:
            return self._root(salt, adapter)
        return self._keys.get(above)

    def _drop(self, one: Hashable, before: dict[bytes, bool]) -> None:
        key = self._keys.pop(one, None)
        if key is not None:
            before.setdefault(key, self._held[key] > 0)
            self._held[key] -= 1


def salt_text(salt: bytes) -> str | None:
    """A salt of a request as vLLM takes it."""
    return f"isthmus-{salt.hex()}" if salt else None


def _salt(extra: Sequence[object], adapter: str) -> bytes | None:
    """The salt among what else decides about a block; None when there is something that has no place in our names."""
    salt = b""
    for one in extra:
        if isinstance(one, str) and one.startswith("isthmus-"):
            salt = bytes.fromhex(one.removeprefix("isthmus-"))
        elif one != adapter:
            return None
    return salt
