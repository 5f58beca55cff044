"""The input of a simulation: one configuration over modelled nodes, their incidents, and the clients' requests.

Rule: frozen, and complete: the same plan, traffic and seed give the same outcome on every machine.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Protocol

from msgspec import Struct

from din_extproc.domain.node import Pool
from din_extproc.flow.node_selector import InFlightFallback
from din_extproc.flow.view import DecisionView
from din_extproc.health.policy import BreakerPolicy
from din_extproc.tools.engine_model.engine import EngineSpec


class RandomSource(Protocol):
    """A source of chance: `random.Random` is one."""

    def random(self) -> float:
        """From 0 up to 1."""

    def expovariate(self, lambd: float, /) -> float:
        """Time until the next of events that come so many per second."""

    def gauss(self, mu: float, sigma: float, /) -> float:
        """Around the mean."""


class NodeProfile(Struct, frozen=True):
    """A sort of machine."""

    spec: EngineSpec
    prefixes: int = 0
    """Beginnings of prompts that its memory keeps for the next request."""


class ProbePlan(Struct, frozen=True):
    """The question of one token that nodes in doubt are asked. Seconds."""

    every_s: float
    timeout_s: float


class SimulationPlan(Struct, frozen=True, kw_only=True):
    """The network. Times in seconds."""

    view: DecisionView
    pools: tuple[Pool, ...]
    """With the nodes that are simulated."""
    kinds: Mapping[str, NodeProfile]
    """By node id."""
    node_policies: Mapping[str, BreakerPolicy]
    """By node id."""
    pool_policies: Mapping[str, BreakerPolicy]
    longest_open_s: float = BreakerPolicy().max_open_s
    """The longest pause that a busy node is given."""
    breaker: bool = True
    """Breakers count outcomes of requests, not only of probes."""
    probes: ProbePlan | None = None
    half_lives_s: Mapping[str, float] = {}
    """By pool: how quickly the pace of nodes is forgotten."""
    shared: bool = True
    """Several tenants are configured."""
    retried: tuple[int, ...] = ()
    """Statuses at which Envoy asks another node."""
    retries: int = 1
    """Further nodes that Envoy tries before the first byte of an answer."""
    moves: InFlightFallback = InFlightFallback()
    """Envoy's abilities for a request in flight."""
    replicas: int = 1
    """Gateways that know of each other's requests through the counters and what nodes say."""
    beat_s: float = 3.0
    """Interval of nodes' heartbeats; 0: they send none."""
    overhead_s: float = 0.0
    """The latency that network, Envoy and sidecar add to every answer."""
    start_ms: int = 0
    """When it begins: milliseconds since the epoch."""


class NodeIncident(StrEnum):
    """An incident of a node."""

    DOWN = "down"
    """Its process is gone: connections are refused, running requests break off; it restarts with an empty cache."""
    STALL = "stall"
    """It pauses, and continues afterwards."""
    SLOW = "slow"
    """Everything takes `factor` times as long."""
    ERRORS = "errors"
    """It answers a `share` of the requests with 503."""
    BUSY = "busy"
    """It answers a `share` of the requests with 429 and asks for `retry_after_s`."""


class PlannedFailure(Struct, frozen=True):
    """Trouble of one node. Seconds."""

    node: str
    kind: NodeIncident
    at_s: float
    for_s: float
    factor: float = 4.0
    share: float = 1.0
    retry_after_s: int = 1
