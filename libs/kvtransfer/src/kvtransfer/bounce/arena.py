"""Which bytes of an arena are taken: a buddy allocator over units, so that what comes back always joins again."""

from __future__ import annotations

from kvtransfer.errors import ArenaError


def check_room(what: str, size_bytes: int, unit_bytes: int, peers: int) -> None:
    """Raises ArenaError naming the least size when `what` can not hold a unit for each peer."""
    if size_bytes < unit_bytes * peers:
        raise ArenaError(
            f"{what} of {size_bytes} bytes is too small for {peers} peers with a chunk of {unit_bytes} bytes each: the "
            f"least is {unit_bytes * peers} bytes (transfer.arena_bytes, transfer.max_peers)"
        )


class Arena:
    """`size_bytes` from offset 0 in units of `unit_bytes`. Blocks are 2^k units and aligned to their size."""

    def __init__(self, size_bytes: int, unit_bytes: int) -> None:
        if unit_bytes <= 0 or size_bytes < unit_bytes:
            raise ArenaError(f"an arena of {size_bytes} bytes holds no unit of {unit_bytes} bytes; make it larger")
        self._unit = unit_bytes
        self._free: dict[int, set[int]] = {}
        self._taken: dict[int, int] = {}
        units = size_bytes // unit_bytes
        self._units = self._left = units
        at = 0
        for order in range(units.bit_length() - 1, -1, -1):
            self._free[order] = set()
            if units >> order & 1:
                self._free[order].add(at)
                at += 1 << order

    @property
    def units(self) -> int:
        """All units."""
        return self._units

    @property
    def free_units(self) -> int:
        """Units that are not taken; they may be apart."""
        return self._left

    @property
    def largest_free(self) -> int:
        """Units of the largest block that could be taken now."""
        return max((1 << order for order, blocks in self._free.items() if blocks), default=0)

    def units_of(self, nbytes: int) -> int:
        """Units of the block that `nbytes` need: a power of two."""
        units = max(1, -(-nbytes // self._unit))
        return 1 << (units - 1).bit_length()

    def take(self, units: int) -> int:
        """Offset in bytes of a block of `units`, a power of two. Raises ArenaError when there is none."""
        wanted = units.bit_length() - 1
        order = next((one for one in range(wanted, self._units.bit_length()) if self._free[one]), None)
        if order is None:
            raise ArenaError(f"no block of {units} units is free, the largest has {self.largest_free}")
        at = min(self._free[order])
        self._free[order].discard(at)
        while order > wanted:
            order -= 1
            self._free[order].add(at + (1 << order))
        self._taken[at] = wanted
        self._left -= units
        return at * self._unit

    def give_back(self, offset: int) -> None:
        """Raises ArenaError for a block that is not taken."""
        at = offset // self._unit
        order = self._taken.pop(at, None)
        if order is None:
            raise ArenaError(f"offset {offset} of the arena is not taken")
        self._left += 1 << order
        while order + 1 in self._free and (buddy := at ^ (1 << order)) in self._free[order]:
            self._free[order].discard(buddy)
            at, order = min(at, buddy), order + 1
        self._free[order].add(at)
