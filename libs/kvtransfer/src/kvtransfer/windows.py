"""Which tokens of a layer group one chunk of a prompt sends.

prompt     |reused|────────────────────────────────────────|            [begin, P)
chunks            |── first ──|── middle ──|──── last ────|
sent              |─────────|────────────|────────────────|            full attention: cut at full source blocks
sent                                              |───────|            window < P: once, with the last chunk
sent                                                       ●            recurrent: the state after P tokens
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtransfer.errors import PlanError
from kvtransfer.page_table import AttentionGroup
from kvtransfer.ports import TokenRange

if TYPE_CHECKING:
    from kvtransfer.page_table import LayerGroup
    from kvtransfer.sharding import Shard


@dataclass(frozen=True, slots=True)
class Chunk:
    """`tokens`: what the context computed in this chunk. `prompt`: the window of the request, its end is the length of
    the prompt. The first chunk includes what the context had cached before; the last one must end at the prompt's end.
    """

    tokens: TokenRange
    prompt: TokenRange
    is_first: bool = True
    is_last: bool = True

    def __post_init__(self) -> None:
        for name, tokens in (("prompt", self.prompt), ("chunk", self.tokens)):
            if not 0 <= tokens.begin <= tokens.end < 1 << 31:
                raise PlanError(f"{name} tokens [{tokens.begin}, {tokens.end}) run backwards or leave [0, 2^31)")
        if self.tokens.end > self.prompt.end or (self.is_last and self.tokens.end != self.prompt.end):
            last = "the last chunk" if self.is_last else "a chunk"
            raise PlanError(f"{last} ends at token {self.tokens.end}, the prompt at {self.prompt.end}")

    @classmethod
    def of(cls, tokens: TokenRange | Chunk) -> Chunk:
        """A bare range is the whole prompt in one chunk."""
        return tokens if isinstance(tokens, Chunk) else cls(tokens, tokens)


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens [begin, end) to send. Those in [floor, begin) are nobody's: writing them does no harm."""

    begin: int
    end: int
    floor: int

    def __len__(self) -> int:
        return max(0, self.end - self.begin)

    @property
    def tokens(self) -> TokenRange:
        """As a range."""
        return TokenRange(self.begin, self.end)


NOTHING = Window(0, 0, 0)


def window_of(group: LayerGroup, src: Shard, src_block: int, begin: int | None, chunk: Chunk) -> Window:
    """What one source rank sends of the destination's `group`.

    src, src_block: the source's shard and tokens per block (full source blocks end the chunks that are not the last).
    begin: first token the destination wants, None or below the prompt's window = the begin of the prompt's window.
    """
    prompt = chunk.prompt.end
    wanted = max(chunk.prompt.begin, 0 if begin is None else begin)
    if wanted >= prompt:
        return NOTHING
    if not isinstance(group, AttentionGroup):
        return Window(wanted, prompt, wanted) if chunk.is_last else NOTHING
    if group.sliding_window is not None and group.sliding_window < prompt:
        if not chunk.is_last:
            return NOTHING
        seen = max(0, prompt - group.sliding_window + 1 - group.draft_slack)
        return Window(max(wanted, seen), prompt, wanted)
    first = chunk.prompt.begin if chunk.is_first else _full_blocks(src, src_block, chunk.tokens.begin, prompt)
    last = prompt if chunk.is_last else _full_blocks(src, src_block, chunk.tokens.end, prompt)
    first = max(first, wanted)
    return Window(first, last, first) if first < last else NOTHING


def _full_blocks(src: Shard, block: int, position: int, prompt: int) -> int:
    """The first token that is not in a full source block before `position`."""
    local = src.local_count(position, prompt)
    return src.position(local // block * block, prompt)
