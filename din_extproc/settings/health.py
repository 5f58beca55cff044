"""`health:`: circuit breakers, ramp-up and probes of nodes and pools.

Defaults are those of `BreakerPolicy`; a policy that never opens or never closes again is rejected.
"""

from typing import Annotated

from msgspec.structs import replace
from pydantic import BeforeValidator, Field, model_validator

from din_extproc.control.topology import SlowStart
from din_extproc.domain.node import Pool, TrafficClass
from din_extproc.health.policy import BreakerPolicy
from din_extproc.settings.envoy import off_is_none
from din_extproc.settings.section import Section

_POLICY = BreakerPolicy()
_Share = Annotated[float, Field(strict=False, gt=0, le=1)]
_Seconds = Annotated[float, Field(strict=False, ge=0.1, le=86_400)]
_Row = Annotated[int, Field(ge=1, le=1000)]


class ThresholdSection(Section):
    """Failures in a row that open a node's breaker, by the pool's `traffic`."""

    realtime: _Row = 2
    standard: _Row = 3
    batch: _Row = 5


class RampSection(Section):
    """How a node or pool comes back."""

    start: Annotated[_Share, Field(alias="from")] = _POLICY.ramp_from
    """The share of its requests that it gets at first."""
    over_s: _Seconds = _POLICY.ramp_s
    """After so long it gets all of them."""


class ProbeSection(Section):
    """The question of one token that every node is asked again and again."""

    every_s: _Seconds = 10.0
    timeout_s: _Seconds = 5.0
    """A first token that comes later is none."""


class HealthSection(Section):
    """`health:`."""

    breaker: bool = True
    """False: only probes change a breaker, outcomes of requests do not. Switching it off, or `probe`,
    readmits the nodes that it had ejected."""
    failover_threshold: ThresholdSection = ThresholdSection()
    failure_share: _Share = _POLICY.failure_share
    least_answers: Annotated[int, Field(ge=1, le=1_000_000)] = _POLICY.min_outcomes
    window_s: _Seconds = _POLICY.window_s
    open_s: _Seconds = _POLICY.open_s
    backoff_factor: Annotated[float, Field(strict=False, ge=1, le=100)] = _POLICY.backoff_factor
    longest_open_s: _Seconds = _POLICY.max_open_s
    trial_share: _Share = _POLICY.trial_share
    trials: Annotated[int, Field(ge=1, le=1000)] = _POLICY.trials
    ramp: RampSection = RampSection()
    probe: Annotated[ProbeSection | None, BeforeValidator(off_is_none)] = ProbeSection()

    @model_validator(mode="after")
    def _check_consistency(self) -> "HealthSection":
        if self.longest_open_s < self.open_s:
            raise ValueError(f"longest_open_s is at least open_s ({self.open_s:g})")
        return self

    def slow_start(self) -> SlowStart:
        """The ramp, for Envoy's own choice of a node."""
        return SlowStart(round(self.ramp.over_s * 1000), 100 * self.ramp.start)

    def node_policy(self, traffic: TrafficClass) -> BreakerPolicy:
        """Return the breaker policy of nodes of pools with this traffic class."""
        return BreakerPolicy(
            consecutive_failures=int(getattr(self.failover_threshold, traffic.value)),
            failure_share=self.failure_share,
            min_outcomes=self.least_answers,
            window_s=self.window_s,
            open_s=self.open_s,
            backoff_factor=self.backoff_factor,
            max_open_s=self.longest_open_s,
            trial_share=self.trial_share,
            trials=self.trials,
            ramp_from=self.ramp.start,
            ramp_s=self.ramp.over_s,
        )

    def pool_policy(self, pool: Pool) -> BreakerPolicy:
        """Return the breaker policy of a whole pool: only the failure share opens it."""
        return replace(self.node_policy(pool.traffic), consecutive_failures=None)
