"""Metrics of routers and of the coordinator, and what every process says about itself."""

from __future__ import annotations

from isthmus_core.metrics.definitions import (
    HANDOFF_S,
    REQUEST_S,
    TOKENS,
    TPOT_S,
    TTFT_S,
    Definition,
    Kind,
    Label,
)

ROUTER, COORDINATOR, WORKER = "router", "coordinator", "worker"
_EVERY = (ROUTER, COORDINATOR, WORKER)

MODEL = Label("model", limit=64)
OUTCOME = Label(
    "outcome",
    (
        *("ok", "cancelled", "invalid_argument", "not_found", "already_exists", "resource_exhausted", "unavailable"),
        *("failed_precondition", "deadline_exceeded", "permission_denied", "unauthenticated", "internal"),
    ),
)
ROLE = Label("role", ("context", "generation", "context_and_generation"))
POLICY = Label("policy", limit=16)

# --- router

REQUESTS = Definition(
    "isthmus.requests", Kind.COUNTER, "{request}", "Requests that have ended.", (ROUTER,), (MODEL, OUTCOME)
)
IN_FLIGHT = Definition("isthmus.requests_in_flight", Kind.GAUGE, "{request}", "Requests being served.", (ROUTER,))
TIME_TO_FIRST_TOKEN = Definition(
    "isthmus.time_to_first_token",
    Kind.HISTOGRAM,
    "s",
    "From the arrival of a request at the router to its first token.",
    (ROUTER,),
    (MODEL,),
    TTFT_S,
)
TIME_PER_OUTPUT_TOKEN = Definition(
    "isthmus.time_per_output_token",
    Kind.HISTOGRAM,
    "s",
    "Mean time between the tokens of a request, the first one left out.",
    (ROUTER,),
    (MODEL,),
    TPOT_S,
)
REQUEST_LATENCY = Definition(
    "isthmus.e2e_request_latency",
    Kind.HISTOGRAM,
    "s",
    "From the arrival of a request at the router to its end.",
    (ROUTER,),
    (MODEL,),
    REQUEST_S,
)
ROUTE_TIME = Definition(
    "isthmus.route_time",
    Kind.HISTOGRAM,
    "s",
    "From the arrival of a request until its placement is known: tokenising, queue, coordinator.",
    (ROUTER,),
    (MODEL,),
    HANDOFF_S,
)
PROMPT_TOKENS = Definition(
    "isthmus.prompt_tokens", Kind.COUNTER, "{token}", "Prompt tokens of finished requests.", (ROUTER,), (MODEL,)
)
GENERATION_TOKENS = Definition(
    "isthmus.generation_tokens", Kind.COUNTER, "{token}", "Tokens sent to clients.", (ROUTER,), (MODEL,)
)
REQUEST_PROMPT_TOKENS = Definition(
    "isthmus.request_prompt_tokens", Kind.HISTOGRAM, "{token}", "Prompt tokens of a request.", (ROUTER,), (), TOKENS
)
REQUEST_GENERATION_TOKENS = Definition(
    "isthmus.request_generation_tokens",
    Kind.HISTOGRAM,
    "{token}",
    "Tokens of all answers of a request.",
    (ROUTER,),
    (),
    TOKENS,
)
REFUSALS = Definition(
    "isthmus.refusals",
    Kind.COUNTER,
    "{request}",
    "Requests that were refused before anything was computed, by the kind of error: also those without a key, with a "
    "body that is none, too large or too late, and connections beyond the limit.",
    (ROUTER,),
    (Label("reason", limit=32),),
)
RETRIES = Definition(
    "isthmus.retries",
    Kind.COUNTER,
    "{attempt}",
    "Attempts after the first one, by what ended the one before.",
    (ROUTER,),
    (Label("reason", limit=16),),
)
SCHEDULE_FALLBACKS = Definition(
    "isthmus.schedule_fallbacks",
    Kind.COUNTER,
    "{request}",
    "Requests that were served context_first although generation_first was wanted.",
    (ROUTER,),
)
COORDINATOR_CONNECTED = Definition(
    "isthmus.coordinator_connected", Kind.GAUGE, "", "1 while the stream to the coordinator stands.", (ROUTER, WORKER)
)

# --- coordinator

MEMBERS = Definition(
    "isthmus.members",
    Kind.GAUGE,
    "{instance}",
    "Registered instances.",
    (COORDINATOR,),
    (ROLE, Label("state", ("active", "draining"))),
)
ROUTERS = Definition("isthmus.routers", Kind.GAUGE, "{router}", "Connected router processes.", (COORDINATOR,))
PLACEMENTS = Definition(
    "isthmus.placements",
    Kind.COUNTER,
    "{placement}",
    "Decisions where a request goes.",
    (COORDINATOR,),
    (POLICY, OUTCOME),
)
PLACEMENTS_OPEN = Definition(
    "isthmus.placements_open", Kind.GAUGE, "{placement}", "Placements that have not been finished.", (COORDINATOR,)
)
PLACEMENT_TIME = Definition(
    "isthmus.placement_time", Kind.HISTOGRAM, "s", "Time of one decision.", (COORDINATOR,), (), HANDOFF_S
)

# --- every process

BUILD_INFO = Definition(
    "isthmus.build_info",
    Kind.GAUGE,
    "",
    "1; the labels say which build this is.",
    _EVERY,
    (Label("component", _EVERY), Label("version", limit=1), Label("python", limit=1)),
)
SPANS_DROPPED = Definition(
    "isthmus.spans_dropped",
    Kind.OBSERVED_COUNTER,
    "{span}",
    "Spans lost because the OTLP receiver was slower than they came, or could not be reached.",
    _EVERY,
)
LOG_LINES_LOST = Definition(
    "isthmus.log_lines_lost",
    Kind.OBSERVED_COUNTER,
    "{line}",
    "Log lines that could not be written, for example to a full disk.",
    _EVERY,
)
