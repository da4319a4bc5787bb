"""W3C trace context: what a request carries from process to process."""

from __future__ import annotations

from dataclasses import dataclass

SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    """W3C trace context: 16-byte trace id, 8-byte span id, flags (bit 0: sampled)."""

    trace_id: bytes
    span_id: bytes
    flags: int = SAMPLED

    def to_traceparent(self) -> str:
        """As the `traceparent` header."""
        return f"00-{self.trace_id.hex()}-{self.span_id.hex()}-{self.flags & 0xFF:02x}"

    @property
    def sampled(self) -> bool:
        """True when the trace is recorded."""
        return bool(self.flags & SAMPLED)


def parse_traceparent(header: str) -> TraceContext | None:
    """The context in a `traceparent` header; None when it is malformed (W3C: ignore it then)."""
    parts = header.strip().split("-")
    if len(parts) < 4 or [len(part) for part in parts[:4]] != [2, 32, 16, 2] or parts[0] == "ff":
        return None
    try:
        trace_id, span_id, flags = bytes.fromhex(parts[1]), bytes.fromhex(parts[2]), int(parts[3], 16)
    except ValueError:
        return None
    if not any(trace_id) or not any(span_id):
        return None
    return TraceContext(trace_id, span_id, flags)
