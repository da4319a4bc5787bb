"""Who a client is, and how much it may ask for: API keys that follow their file, and a quota for each client."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from isthmus_core.api_keys import ApiKey, KeyRing, read_keys
from isthmus_core.config import ClientsConfig
from isthmus_core.errors import ConfigError, Unauthenticated
from isthmus_router.affinity import tenant_of
from isthmus_router.quota import Quota

logger = logging.getLogger(__name__)

# How often the file of keys is looked at.
_LOOK_S = 1.0
# Clients without keys name themselves: so many are remembered, those that asked last.
_MOST_QUOTAS = 16_384


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: the name for fairness and logs ("" for everybody without one), and what it may ask for."""

    tenant: str = ""
    quota: Quota | None = None


class Gate:
    """Where both front ends ask who a client is. Raises ConfigError when the file of keys is wrong at the start;
    later a wrong file changes nothing, and the log says why."""

    def __init__(self, config: ClientsConfig, clock: Callable[[], float]) -> None:
        self._config, self._clock = config, clock
        self._stamp: tuple[int, int] | None = None
        self._looked_at = clock()
        self._ring: KeyRing | None = None
        self._quotas: OrderedDict[str, Quota] = OrderedDict()
        if config.keys_file is not None:
            self._stamp = _stamp(config.keys_file)
            self._ring = KeyRing(read_keys(config.keys_file))

    def enter(self, authorization: str, named: str) -> Caller:
        """A client has come with a request. `authorization`: as it stands in the header or metadata; `named`: the
        tenant that it names, which counts only where no keys are asked for. Raises Unauthenticated or RateLimited."""
        caller = self._who(authorization, named)
        if caller.quota is not None:
            caller.quota.count_request()
        return caller

    def _who(self, authorization: str, named: str) -> Caller:
        config = self._config
        ring = self._keys()
        if ring is None:
            tenant = tenant_of(named, authorization)
            return Caller(tenant, self._quota(tenant, config.requests_per_s, config.tokens_per_min))
        scheme, _, shown = authorization.partition(" ")
        key = ring.find(shown.strip()) if scheme.lower() == "bearer" else None
        if key is None:
            raise Unauthenticated
        return Caller(key.name, self._quota(key.name, *_limits(key, config)))

    def _quota(self, name: str, requests_per_s: float | None, tokens_per_min: float | None) -> Quota | None:
        if requests_per_s is None and tokens_per_min is None:
            return None
        quota = self._quotas.get(name)
        if quota is None or quota.limits != (requests_per_s, tokens_per_min):
            quota = self._quotas[name] = Quota(requests_per_s, tokens_per_min, self._clock)
        self._quotas.move_to_end(name)
        if len(self._quotas) > _MOST_QUOTAS:
            self._quotas.popitem(last=False)
        return quota

    def _keys(self) -> KeyRing | None:
        """The keys as the file has them now, or as it had them when it could last be read."""
        path, now = self._config.keys_file, self._clock()
        if path is None or now - self._looked_at < _LOOK_S:
            return self._ring
        self._looked_at = now
        stamp = _stamp(path)
        if stamp == self._stamp:
            return self._ring
        self._stamp = stamp
        try:
            keys = read_keys(path)
        except ConfigError as error:
            logger.warning("the API keys stay as they were: %s", error)
            return self._ring
        self._ring = KeyRing(keys)
        logger.info("API keys have changed", extra={"keys": len(keys)})
        return self._ring


def _limits(key: ApiKey, config: ClientsConfig) -> tuple[float | None, float | None]:
    return (
        config.requests_per_s if key.requests_per_s is None else key.requests_per_s,
        config.tokens_per_min if key.tokens_per_min is None else key.tokens_per_min,
    )


def _stamp(path: Path) -> tuple[int, int] | None:
    """What changes when a file is replaced or written."""
    try:
        about = path.stat()
    except OSError:
        return None
    return (about.st_mtime_ns, about.st_ino)
