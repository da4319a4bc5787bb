"""What the configuration says about the chunks of hand-offs, for the ranks of any engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isthmus_core.errors import ConfigError
from kvtransfer.bounce.settings import BounceSettings
from kvtransfer.cost.policies import StagingPolicy
from kvtransfer.errors import ArenaError

if TYPE_CHECKING:
    from isthmus_core.config import IsthmusConfig


def bounce_settings(config: IsthmusConfig) -> BounceSettings:
    """Raises ConfigError for an arena that is too small, naming the least size."""
    transfer = config.transfer
    try:
        return BounceSettings(
            transfer.max_peers,
            StagingPolicy(transfer.staging_policy),
            transfer.arena_bytes,
            transfer.bounce_chunk_bytes,
            transfer.bounce_depth,
            transfer.cost_file,
        )
    except ArenaError as error:
        raise ConfigError(str(error)) from error
