"""Metrics of workers: legs, cache, hand-offs."""

from __future__ import annotations

from isthmus_core.metrics.definitions import HANDOFF_S, RATE_BYTES_PER_S, RATIO, REQUEST_S, Definition, Kind, Label
from isthmus_core.metrics.services import OUTCOME

_WORKER = ("worker",)
LEG = Label("leg", ("context", "generation", "unsplit"))
PATH = Label("path", limit=16)
MODE = Label("mode", ("direct", "bounced"))
HANDOFF_OUTCOME = Label(
    "outcome",
    (
        *("delivered", "cancelled", "expired", "not_held", "peer_unknown", "peer_lost", "write_failed", "timed_out"),
        *("checksum_mismatch",),
    ),
)

LEGS = Definition("isthmus.legs", Kind.COUNTER, "{leg}", "Legs that have ended.", _WORKER, (LEG, OUTCOME))
QUEUE_TIME = Definition(
    "isthmus.request_queue_time", Kind.HISTOGRAM, "s", "Waiting for a place in the batch.", _WORKER, (LEG,), REQUEST_S
)
PREFILL_TIME = Definition(
    "isthmus.request_prefill_time", Kind.HISTOGRAM, "s", "Computing a prompt.", _WORKER, (), REQUEST_S
)
DECODE_TIME = Definition(
    "isthmus.request_decode_time",
    Kind.HISTOGRAM,
    "s",
    "From the first decode step of a request to its last token.",
    _WORKER,
    (),
    REQUEST_S,
)
DECODED_TOKENS = Definition(
    "isthmus.decoded_tokens", Kind.COUNTER, "{token}", "Tokens made by decode steps of finished legs.", _WORKER
)
RUNNING = Definition("isthmus.num_requests_running", Kind.GAUGE, "{request}", "Requests in the batch.", _WORKER)
WAITING = Definition("isthmus.num_requests_waiting", Kind.GAUGE, "{request}", "Requests in the queue.", _WORKER)
HELD = Definition(
    "isthmus.handoffs_held", Kind.GAUGE, "{request}", "Finished context legs whose pages wait for a hand-off.", _WORKER
)
KV_BLOCKS = Definition(
    "isthmus.kv_blocks",
    Kind.GAUGE,
    "{block}",
    "KV blocks. Free ones may hold reusable prefixes; those in doubt are among the used ones.",
    _WORKER,
    (Label("state", ("free", "used", "in_doubt")),),
)
KV_USAGE = Definition("isthmus.kv_cache_usage", Kind.GAUGE, "1", "Share of the KV blocks that are used.", _WORKER)
PREFIX_QUERIES = Definition(
    "isthmus.prefix_cache_queries", Kind.COUNTER, "{token}", "Prompt tokens looked for in the cache.", _WORKER
)
PREFIX_HITS = Definition(
    "isthmus.prefix_cache_hits", Kind.COUNTER, "{token}", "Prompt tokens found in the cache.", _WORKER
)

# --- hand-offs

HANDOFFS = Definition(
    "isthmus.handoffs",
    Kind.COUNTER,
    "{handoff}",
    "Caches that a generation instance has asked for, by what came of it.",
    _WORKER,
    (HANDOFF_OUTCOME,),
)
HANDOFF_TIME = Definition(
    "isthmus.handoff_time",
    Kind.HISTOGRAM,
    "s",
    "From asking for a cache to its complete manifest.",
    _WORKER,
    (),
    HANDOFF_S,
)
HANDOFF_RETRIES = Definition(
    "isthmus.handoff_retries", Kind.COUNTER, "{handoff}", "Hand-offs that failed and were repeated.", _WORKER
)
RECOMPUTED = Definition(
    "isthmus.recomputed_requests",
    Kind.COUNTER,
    "{request}",
    "Requests whose prompt was computed again at the generation instance because no hand-off came through.",
    _WORKER,
)
OFFERS = Definition(
    "isthmus.offers",
    Kind.COUNTER,
    "{offer}",
    "Caches that a context instance has offered, by what came of it.",
    _WORKER,
    (HANDOFF_OUTCOME,),
)
TRANSFERS = Definition(
    "isthmus.transfers",
    Kind.COUNTER,
    "{transfer}",
    "Writes of one rank to one rank.",
    _WORKER,
    (PATH, MODE, Label("outcome", ("delivered", "never_started", "quiesced"))),
)
TRANSFER_BYTES = Definition(
    "isthmus.transfer_bytes", Kind.COUNTER, "By", "Payload written by this instance.", _WORKER, (PATH, MODE)
)
TRANSFER_DESCRIPTORS = Definition(
    "isthmus.transfer_descriptors", Kind.COUNTER, "{descriptor}", "Descriptors given to the agent.", _WORKER, (PATH,)
)
TRANSFER_TIME = Definition(
    "isthmus.transfer_time",
    Kind.HISTOGRAM,
    "s",
    "Parts of a write: queue, plan, gather, post, wire (post included), scatter.",
    _WORKER,
    (PATH, Label("phase", ("queue", "plan", "gather", "post", "wire", "scatter"))),
    HANDOFF_S,
)
TRANSFER_RATE = Definition(
    "isthmus.transfer_rate", Kind.HISTOGRAM, "By/s", "Payload over wire time.", _WORKER, (PATH,), RATE_BYTES_PER_S
)
COST_ERROR = Definition(
    "isthmus.transfer_cost_error",
    Kind.HISTOGRAM,
    "1",
    "Measured time of a write over the time that the cost model predicted.",
    _WORKER,
    (MODE,),
    RATIO,
)
LEDGER_PAGES = Definition(
    "isthmus.ledger_pages",
    Kind.GAUGE,
    "{page}",
    "Destination pages by state; free ones are not counted.",
    _WORKER,
    (Label("state", ("reserved", "exposed", "in_doubt", "settled")),),
)
IN_DOUBT_AGE = Definition(
    "isthmus.in_doubt_age",
    Kind.GAUGE,
    "s",
    "How long the oldest pages have been in doubt; 0 when there are none.",
    _WORKER,
)
PEERS = Definition(
    "isthmus.peers",
    Kind.GAUGE,
    "{peer}",
    "Context instances that this instance keeps a stream to, by the state of the pair.",
    _WORKER,
    (Label("state", ("connecting", "ready", "incompatible")),),
)
STREAM_BREAKS = Definition(
    "isthmus.stream_breaks", Kind.COUNTER, "{stream}", "Streams to peers that were usable and broke.", _WORKER
)
