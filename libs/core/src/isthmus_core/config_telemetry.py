"""Sections `telemetry` and `logging`: what a process tells about itself, and to whom."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from isthmus_core.config_section import Section


class TelemetryConfig(Section):
    """Traces and metrics (OpenTelemetry), and the workers' own record of recent requests."""

    otlp_endpoint: str | None = Field(default=None, description="OTLP/gRPC receiver, for example http://127.0.0.1:4317")
    sample_ratio: float = Field(
        default=1.0, ge=0, le=1, description="share of requests without a parent that are traced"
    )
    metrics_listen: str | None = Field(
        default=None,
        description="host:port where Prometheus finds /metrics; port 0 takes a free one (the log says which); "
        "default: no metrics endpoint",
    )
    push_metrics: bool = Field(
        default=False,
        description="send metrics to otlp_endpoint too; leave it off when that is Jaeger, which takes traces only",
    )
    push_interval_s: float = Field(default=15.0, ge=1, le=3600, description="how often metrics are sent")
    timelines: int = Field(
        default=1000, ge=0, le=1 << 20, description="recent requests of which a worker keeps the timeline in memory"
    )

    @model_validator(mode="after")
    def _pushes_somewhere(self) -> TelemetryConfig:
        if self.push_metrics and self.otlp_endpoint is None:
            raise ValueError("push_metrics is set but otlp_endpoint is not; set it, or scrape metrics_listen")
        return self


class LoggingConfig(Section):
    """Logs go to stderr."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(default="INFO", description="least severe level shown")
    format: Literal["console", "json"] = Field(default="console", description="console for people, json for collectors")
    log_prompts: bool = Field(
        default=False, description="the router logs what clients ask; without it no log line holds a prompt"
    )
