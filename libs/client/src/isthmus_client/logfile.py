"""A log file that can not fill the disk: a full one becomes NAME.1, NAME.1 becomes NAME.2, … the oldest goes."""

from __future__ import annotations

from pathlib import Path


class RotatingLog:
    """Appends bytes to `path`; keeps at most `keep` old files of at most about `max_bytes` bytes each."""

    def __init__(self, path: Path, *, max_bytes: int = 10 << 20, keep: int = 3) -> None:
        if max_bytes < 1 or keep < 0:
            raise ValueError(f"max_bytes = {max_bytes}, keep = {keep}: at least 1 and 0")
        self.path = path
        self._max_bytes, self._keep = max_bytes, keep
        self._file = path.open("ab", buffering=0)
        self._size = path.stat().st_size

    def write(self, data: bytes) -> None:
        """Append; a file that has reached its size is moved on first."""
        if self._size >= self._max_bytes:
            self._rotate()
        self._file.write(data)
        self._size += len(data)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _old(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")

    def _rotate(self) -> None:
        self._file.close()
        if self._keep == 0:
            self.path.unlink()
        for number in range(self._keep, 0, -1):
            newer = self.path if number == 1 else self._old(number - 1)
            if newer.exists():
                newer.replace(self._old(number))
        self._file = self.path.open("ab", buffering=0)
        self._size = 0
