"""What a router decides by: its configuration, as the rules that the pure parts take."""

from __future__ import annotations

from dataclasses import dataclass, field

from isthmus_core.config import RouterConfig
from isthmus_router.retry import RetryPolicy
from isthmus_router.schedules import LocalPrefillRule, ScheduleRule


@dataclass(frozen=True, slots=True)
class AdmissionRule:
    """How many requests are worked on, and how many wait for how long (`router.admission`)."""

    max_running: int = 1 << 20
    max_waiting: int = 0
    max_waiting_per_tenant: int = 0
    max_wait_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Rules:
    """All of them. `breaker_failures` in a row open an instance's circuit breaker for `breaker_s` seconds."""

    schedule: ScheduleRule = field(default_factory=ScheduleRule)
    local_prefill: LocalPrefillRule = field(default_factory=LocalPrefillRule)
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    admission: AdmissionRule = field(default_factory=AdmissionRule)
    breaker_failures: int = 3
    breaker_s: float = 1.0

    @classmethod
    def of(cls, config: RouterConfig) -> Rules:
        """The rules of a router's configuration."""
        retry, local, admission = config.retry, config.local_prefill, config.admission
        return cls(
            ScheduleRule.of(config.schedule, config.generation_first_tokens),
            LocalPrefillRule(local.enabled, local.prefill_us_per_token, local.handoff_us, local.handoff_us_per_token),
            RetryPolicy(retry.max_attempts, retry.pause_s, retry.longest_pause_s, retry.budget_share),
            AdmissionRule(
                admission.max_running,
                admission.max_waiting,
                admission.max_waiting_per_tenant,
                admission.max_wait_s,
            ),
            retry.breaker_failures,
            retry.breaker_s,
        )
