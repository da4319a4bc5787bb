"""The dashboards: what a request goes through, the transfers, the workers."""

from __future__ import annotations

from dashboards import RATE, Dashboard, Panel, quantiles, rate

REQUESTS = Dashboard(
    "requests",
    "request flow",
    "What clients see: rates, latencies, errors; and where it is decided.",
    (
        (
            "Requests",
            (
                Panel("Requests by outcome", rate("isthmus_requests_total", "outcome"), "reqps", stacked=True),
                Panel("In flight", (("sum(isthmus_requests_in_flight)", "requests"),)),
                Panel(
                    "Tokens",
                    (
                        (f"sum(rate(isthmus_prompt_tokens_total{RATE}))", "prompt"),
                        (f"sum(rate(isthmus_generation_tokens_total{RATE}))", "generated"),
                    ),
                    "tokens/s",
                ),
            ),
        ),
        (
            "Latency",
            (
                Panel("Time to first token", quantiles("isthmus_time_to_first_token_seconds"), "s"),
                Panel("Time per output token", quantiles("isthmus_time_per_output_token_seconds"), "s"),
                Panel("Whole request", quantiles("isthmus_e2e_request_latency_seconds"), "s"),
            ),
        ),
        (
            "What goes wrong",
            (
                Panel("Refusals by reason", rate("isthmus_refusals_total", "reason"), "reqps"),
                Panel("Retries by reason", rate("isthmus_retries_total", "reason"), "reqps"),
                Panel("Schedule fallbacks", rate("isthmus_schedule_fallbacks_total"), "reqps"),
            ),
        ),
        (
            "Placement",
            (
                Panel("Route", quantiles("isthmus_route_time_seconds"), "s"),
                Panel("Decision", quantiles("isthmus_placement_time_seconds"), "s"),
                Panel("Decisions", rate("isthmus_placements_total", "policy, outcome"), "ops"),
                Panel("Open placements", (("sum(isthmus_placements_open)", "placements"),)),
            ),
        ),
    ),
)

TRANSFERS = Dashboard(
    "transfers",
    "transfer health",
    "How caches move: bytes, rates, where the time goes, and whether any page is in doubt.",
    (
        (
            "Hand-offs",
            (
                Panel("Hand-offs by outcome", rate("isthmus_handoffs_total", "outcome"), "ops", stacked=True),
                Panel("Hand-off time", quantiles("isthmus_handoff_time_seconds"), "s"),
                Panel("Offers by outcome", rate("isthmus_offers_total", "outcome"), "ops", stacked=True),
            ),
        ),
        (
            "Writes",
            (
                Panel("Bytes by path", rate("isthmus_transfer_bytes_total", "path"), "Bps"),
                Panel(
                    "Share that is bounced",
                    (
                        (
                            f'sum(rate(isthmus_transfer_bytes_total{{mode="bounced"}}{RATE}))'
                            f" / sum(rate(isthmus_transfer_bytes_total{RATE}))",
                            "bounced",
                        ),
                    ),
                    "percentunit",
                ),
                Panel(
                    "Rate on the wire, median by path",
                    quantiles("isthmus_transfer_rate_bytes_per_second", "path")[:1],
                    "Bps",
                    about="A path that falls to TCP or to host staging shows here.",
                ),
            ),
        ),
        (
            "Where the time goes",
            (
                Panel("Phases, p50", quantiles("isthmus_transfer_time_seconds", "phase")[:1], "s"),
                Panel(
                    "Descriptors of a write",
                    (
                        (
                            f"sum(rate(isthmus_transfer_descriptors_total{RATE}))"
                            f" / sum(rate(isthmus_transfers_total{RATE}))",
                            "mean",
                        ),
                    ),
                ),
                Panel("Measured over predicted", quantiles("isthmus_transfer_cost_error_ratio", "mode"), "none"),
            ),
        ),
        (
            "Pages",
            (
                Panel(
                    "Destination pages by state",
                    (("sum by (state) (isthmus_ledger_pages)", "{{state}}"),),
                    stacked=True,
                ),
                Panel("Oldest page in doubt", (("max(isthmus_in_doubt_age_seconds)", "age"),), "s"),
                Panel("Held for hand-offs", (("sum(isthmus_handoffs_held)", "requests"),)),
            ),
        ),
        (
            "Streams",
            (
                Panel("Pairs by state", (("sum by (state) (isthmus_peers)", "{{state}}"),), stacked=True),
                Panel("Stream breaks", rate("isthmus_stream_breaks_total"), "ops"),
                Panel(
                    "Repeated and recomputed",
                    (
                        (f"sum(rate(isthmus_handoff_retries_total{RATE}))", "repeated"),
                        (f"sum(rate(isthmus_recomputed_requests_total{RATE}))", "recomputed"),
                    ),
                    "ops",
                ),
            ),
        ),
    ),
)

WORKERS = Dashboard(
    "workers",
    "workers",
    "Queues, batches, caches and processes of the instances.",
    (
        (
            "Cluster",
            (
                Panel("Members", (("sum by (role, state) (isthmus_members)", "{{role}} {{state}}"),)),
                Panel("Routers", (("sum(isthmus_routers)", "routers"),)),
                Panel("Builds", (("count by (component, version) (isthmus_build_info)", "{{component}} {{version}}"),)),
            ),
        ),
        (
            "Load",
            (
                Panel("Running", (("sum by (instance) (isthmus_num_requests_running)", "{{instance}}"),)),
                Panel("Waiting", (("sum by (instance) (isthmus_num_requests_waiting)", "{{instance}}"),)),
                Panel("Legs by outcome", rate("isthmus_legs_total", "leg, outcome"), "ops"),
            ),
        ),
        (
            "Time",
            (
                Panel("Queue", quantiles("isthmus_request_queue_time_seconds", "leg")[1:2], "s"),
                Panel("Prefill", quantiles("isthmus_request_prefill_time_seconds"), "s"),
                Panel("Decode", quantiles("isthmus_request_decode_time_seconds"), "s"),
                Panel("Decoded tokens", rate("isthmus_decoded_tokens_total"), "tokens/s"),
            ),
        ),
        (
            "Cache",
            (
                Panel(
                    "KV cache in use",
                    (("max by (instance) (isthmus_kv_cache_usage_ratio)", "{{instance}}"),),
                    "percentunit",
                ),
                Panel("KV blocks", (("sum by (state) (isthmus_kv_blocks)", "{{state}}"),), stacked=True),
                Panel(
                    "Prefix hits",
                    (
                        (
                            f"sum(rate(isthmus_prefix_cache_hits_total{RATE}))"
                            f" / sum(rate(isthmus_prefix_cache_queries_total{RATE}))",
                            "share of prompt tokens",
                        ),
                    ),
                    "percentunit",
                ),
            ),
        ),
        (
            "Processes",
            (
                Panel(
                    "CPU", (("sum by (job, instance) (rate(process_cpu_seconds_total[1m]))", "{{job}} {{instance}}"),)
                ),
                Panel("Memory", (("process_resident_memory_bytes", "{{job}} {{instance}}"),), "bytes"),
                Panel(
                    "Lost telemetry",
                    (
                        (f"sum(rate(isthmus_spans_dropped_total{RATE}))", "spans"),
                        (f"sum(rate(isthmus_log_lines_lost_total{RATE}))", "log lines"),
                    ),
                    "ops",
                ),
                Panel("Connected to the coordinator", (("min by (job) (isthmus_coordinator_connected)", "{{job}}"),)),
            ),
        ),
    ),
)

DASHBOARDS = (REQUESTS, TRANSFERS, WORKERS)
