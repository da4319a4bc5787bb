"""Stop strings over a stream of text: found wherever tokens and chunks cut them, with the least text held back."""

from __future__ import annotations

from collections.abc import Sequence


class _Pattern:
    """Knuth-Morris-Pratt over one stop string. `matched`: its longest prefix that ends the text so far."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        # fallback[i]: the longest proper prefix of stop[:i] that is also its suffix.
        self._fallback = [0, 0]
        length = 0
        for char in stop[1:]:
            while length and stop[length] != char:
                length = self._fallback[length]
            length += stop[length] == char
            self._fallback.append(length)

    def feed(self, char: str) -> bool:
        """True when the stop string is complete with this character."""
        matched = self.matched
        while matched and self.stop[matched] != char:
            matched = self._fallback[matched]
        self.matched = matched + (self.stop[matched] == char)
        return self.matched == len(self.stop)


class StopScanner:
    """Looks for the first of several stop strings (none empty) in a text that comes in pieces.

    The match that is complete first wins; of several that end together, the longest. So the answer does not depend on
    how the text was cut. After a match nothing more may be pushed.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._patterns = [_Pattern(stop) for stop in stops]
        self._first = {stop[0] for stop in stops}
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that may be shown now, the stop string that was found). Text before a match is shown, the rest not."""
        if not self._held and self._first.isdisjoint(text):
            return text, None
        buffer = self._held + text
        for position in range(len(self._held), len(buffer)):
            char = buffer[position]
            # Every pattern must see the character, so no short-circuit.
            found = [pattern.stop for pattern in self._patterns if pattern.feed(char)]
            if found:
                stop = max(found, key=len)
                self._held = ""
                return buffer[: position + 1 - len(stop)], stop
        keep = max(pattern.matched for pattern in self._patterns)
        cut = len(buffer) - keep
        self._held = buffer[cut:]
        return buffer[:cut], None

    def finish(self) -> str:
        """Text that was held back when the answer ends without a match."""
        held, self._held = self._held, ""
        return held
