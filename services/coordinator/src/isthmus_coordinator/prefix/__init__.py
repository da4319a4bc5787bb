"""The prefix index: which instance can reuse which KV blocks."""

from isthmus_coordinator.prefix.index import PrefixIndex as PrefixIndex
