"""Every metric by name, unit, labels and buckets: the only place where they are spelled. Dashboards and alert rules are made from it.

Rule: a label's values are bounded: by the configuration, by a table of codes, or by the cap of its family (`families.py`).

Names of `gen_ai.*` follow OpenTelemetry's semantic conventions for generative AI (status: development, as of semconv 1.37); ours begin
with `din.`. Prometheus sees them as OpenTelemetry translates names: dots become underscores, units and `_total` stand behind.
"""

from enum import StrEnum

from msgspec import Struct

SEMCONV = "https://opentelemetry.io/schemas/1.37.0"

OPERATION = "gen_ai.operation.name"
MODEL = "gen_ai.request.model"
"""The physical model: what clients call it is theirs to choose, and they may choose anything."""
TOKEN_TYPE = "gen_ai.token.type"  # noqa: S105 - a label's name
ERROR_TYPE = "error.type"
TENANT = "din.tenant.id"
POOL = "din.pool.name"
NODE = "din.node.id"
RULE = "din.rule.id"
OUTCOME = "din.outcome"
CODE = "din.refusal.code"
ESTIMATED = "din.usage.estimated"
STATE = "din.state"
XDS_TYPE = "din.xds.type"
VERDICT = "din.verdict"
POLICY = "din.policy"
SENSITIVE_KIND = "din.sensitive.kind"
AGREEMENT = "din.agreement"
LIMIT = "din.limit"
BUDGET = "din.budget.name"
LEVEL = "din.budget.level"
IDENTITY = "din.identity"
"""How a tenant was identified: `key`, `jwt`, `certificate` or `gateway`."""

OTHER = "other"
"""Replaces every label value beyond a cap."""


class InstrumentKind(StrEnum):
    """How values of an instrument add up."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


_SUFFIXES = {"s": "_seconds", "By": "_bytes"}


class Instrument(Struct, frozen=True):
    """One metric."""

    name: str
    kind: InstrumentKind
    unit: str
    """UCUM, as OpenTelemetry wants it: `s`, `By`, `1`, `{token}`."""
    about: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, the last bucket has none."""

    @property
    def prometheus(self) -> str:
        """Its name on the metrics page, without `_bucket`, `_sum` and `_count`."""
        name = self.name.replace(".", "_") + _SUFFIXES.get(self.unit, "")
        if self.kind is InstrumentKind.GAUGE and self.unit == "1":
            return f"{name}_ratio"
        return f"{name}_total" if self.kind is InstrumentKind.COUNTER else name


def label(attribute: str) -> str:
    """An attribute's name as Prometheus spells it."""
    return attribute.replace(".", "_")


_DURATION = tuple(0.01 * 2**step for step in range(14))
_TOKENS = tuple(float(4**step) for step in range(14))
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 60.0)
_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_SHORT = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_ERROR = (-1.0, -0.5, -0.25, -0.1, -0.05, -0.02, 0.0, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0)
DECISION_US = tuple(round(16 * 2 ** (step / 4)) for step in range(4 * 18 + 1))
"""Upper bounds of decision times: 16 microseconds to 4 seconds, each 19 % above the one before."""

# -- what finished exchanges tell --------------------------------------------------------------------------------------------------------

_EXCHANGE = (OPERATION, MODEL, TENANT)

REQUEST_DURATION = Instrument(
    "gen_ai.server.request.duration", InstrumentKind.HISTOGRAM, "s", "Whole exchanges, first byte in to last byte out.",
    (*_EXCHANGE, ERROR_TYPE), bounds=_DURATION,
)  # fmt: skip
TIME_TO_FIRST_TOKEN = Instrument(
    "gen_ai.server.time_to_first_token", InstrumentKind.HISTOGRAM, "s", "Streams: request's first byte to first token in any channel.",
    _EXCHANGE, bounds=_FIRST,
)  # fmt: skip
TIME_PER_OUTPUT_TOKEN = Instrument(
    "gen_ai.server.time_per_output_token", InstrumentKind.HISTOGRAM, "s", "Completed streams: mean time of each token after the first.",
    _EXCHANGE, bounds=_PER_TOKEN,
)  # fmt: skip
TOKEN_USAGE = Instrument(
    "gen_ai.client.token.usage", InstrumentKind.HISTOGRAM, "{token}", "Tokens of an exchange, by type: input or output.",
    (*_EXCHANGE, TOKEN_TYPE), bounds=_TOKENS,
)  # fmt: skip
TOKENS = Instrument(
    "din.tokens", InstrumentKind.COUNTER, "{token}", "Tokens charged; cached ones count as input too. Estimated: not reported.",
    (TENANT, MODEL, TOKEN_TYPE, ESTIMATED),
)  # fmt: skip
COST = Instrument("din.cost", InstrumentKind.COUNTER, "{currency}", "Cost of requests, in the currency of `prices`.", (TENANT, MODEL))
SAVED = Instrument(
    "din.cost.saved", InstrumentKind.COUNTER, "{currency}",
    "Additional cost that the most expensive model of the requested name would have had.", (TENANT, MODEL),
)  # fmt: skip
BUDGET_USED = Instrument(
    "din.budget.used", InstrumentKind.GAUGE, "1", "Spent share of a budget in its current period, the larger of tokens and money.",
    (BUDGET, TENANT),
)  # fmt: skip
BUDGET_ALERTS = Instrument(
    "din.budget.alerts", InstrumentKind.COUNTER, "{alert}", "Budgets of which 80 % or 100 % were spent, by one replica of all.",
    (BUDGET, TENANT, LEVEL),
)  # fmt: skip
REQUESTS = Instrument("din.requests", InstrumentKind.COUNTER, "{request}", "Finished exchanges.", (TENANT, MODEL, POOL, OUTCOME))
IDENTITIES = Instrument(
    "din.requests.identified",
    InstrumentKind.COUNTER,
    "{request}",
    "Requests of known tenants, by identity.",
    (TENANT, IDENTITY),
)
DEGRADED = Instrument("din.requests.degraded", InstrumentKind.COUNTER, "{request}", "Answered by a fallback.", (TENANT, MODEL, RULE))
LEFT_SITE = Instrument(
    "din.left_site.requests",
    InstrumentKind.COUNTER,
    "{request}",
    "Requests to hosted APIs, at once or in flight.",
    (TENANT, POOL),
)
LEFT_SITE_TOKENS = Instrument(
    "din.left_site.tokens", InstrumentKind.COUNTER, "{token}", "Tokens of requests to hosted APIs.", (TENANT, POOL)
)
RETRIES = Instrument("din.requests.retries", InstrumentKind.COUNTER, "{attempt}", "Attempts after the first.", (MODEL, POOL))
TO_NODE = Instrument(
    "din.request.queue.duration", InstrumentKind.HISTOGRAM, "s",
    "Request's last byte in to its first byte at a node: decision, waiting for limits, connecting.", (MODEL, TENANT), bounds=_SHORT,
)  # fmt: skip
RESERVED = Instrument(
    "din.tokens.reserved", InstrumentKind.COUNTER, "{token}", "Tokens reserved for exchanges that are over.", (TENANT, MODEL)
)
ESTIMATE_ERROR = Instrument(
    "din.prompt.estimate.error", InstrumentKind.HISTOGRAM, "1", "(estimated - counted) / counted prompt tokens.", (MODEL,), bounds=_ERROR
)
NODE_REQUESTS = Instrument(
    "din.node.requests", InstrumentKind.COUNTER, "{request}", "Exchanges that ended at the node.", (NODE, MODEL, OUTCOME)
)
NODE_TOKENS = Instrument(
    "din.node.tokens", InstrumentKind.COUNTER, "{token}", "Tokens read and made by the node.", (NODE, MODEL, TOKEN_TYPE)
)
NODE_FIRST_TOKEN = Instrument(
    "din.node.time_to_first_token", InstrumentKind.HISTOGRAM, "s", "Request sent to the node to first token.", (NODE, MODEL), bounds=_FIRST
)
NODE_DURATION = Instrument(
    "din.node.duration", InstrumentKind.HISTOGRAM, "s", "Request sent to the node to its last byte.", (NODE, MODEL), bounds=_DURATION
)
BAD_EVENTS = Instrument("din.node.bad_events", InstrumentKind.COUNTER, "{event}", "Events of streams that were no JSON.", (NODE,))

# -- what the request plane counts -------------------------------------------------------------------------------------------------------

DECISION = Instrument(
    "din.decision.duration",
    InstrumentKind.HISTOGRAM,
    "s",
    "From a whole request to its verdict.",
    (),
    bounds=tuple(us / 1e6 for us in DECISION_US),
)
DECISIONS = Instrument("din.decisions", InstrumentKind.COUNTER, "{request}", "Verdicts: sent or refused.", (VERDICT,))
REFUSALS = Instrument("din.refusals", InstrumentKind.COUNTER, "{request}", "Refused requests by error code.", (CODE,))
FAULTS = Instrument("din.faults", InstrumentKind.COUNTER, "{fault}", "Faults of the gateway itself; the log has each.")
SENSITIVE = Instrument(
    "din.sensitive.findings",
    InstrumentKind.COUNTER,
    "{finding}",
    "Sensitive data found in prompts, by what was done.",
    (POLICY, SENSITIVE_KIND),
)
CACHE_HITS = Instrument("din.route_cache.hits", InstrumentKind.COUNTER, "{decision}", "Rankings found in the route cache.")
CACHE_MISSES = Instrument("din.route_cache.misses", InstrumentKind.COUNTER, "{decision}", "Rankings that had to be made.")

DOUBLE_CHECKS = Instrument(
    "din.double_checks",
    InstrumentKind.COUNTER,
    "{check}",
    "Requests asked once more of nodes that should agree, by what came of it.",
    (AGREEMENT,),
)

# -- how things stand --------------------------------------------------------------------------------------------------------------------

OPEN = Instrument("din.exchanges.open", InstrumentKind.GAUGE, "{request}", "Requests in flight.")
UNSETTLED = Instrument(
    "din.exchanges.unsettled", InstrumentKind.GAUGE, "{request}", "Finished exchanges whose cost Redis has not been told."
)
GIVEN_UP = Instrument(
    "din.exchanges.given_up", InstrumentKind.COUNTER, "{request}", "Exchanges whose cost was never told: too many waited."
)
UNKNOWN = Instrument("din.exchanges.unknown", InstrumentKind.COUNTER, "{request}", "Settlements that Redis had before, or knew nothing of.")
LOGS_DROPPED = Instrument("din.access_logs.dropped", InstrumentKind.COUNTER, "{entry}", "Access-log entries that Envoy dropped.")
LOGS_UNREADABLE = Instrument(
    "din.access_logs.unreadable", InstrumentKind.COUNTER, "{message}", "Access-log messages that could not be read."
)
MIXED_DTYPE = Instrument("din.mixed_dtype.share", InstrumentKind.GAUGE, "1", "Answers outside the model's commonest dtype.", (MODEL,))
MIXED_CAPABILITY = Instrument(
    "din.mixed_capability.share", InstrumentKind.GAUGE, "1", "Answers outside the model's commonest compute capability.", (MODEL,)
)
REDIS_UP = Instrument("din.redis.up", InstrumentKind.GAUGE, "{state}", "1: Redis answers.")
LIMITS_SHARED = Instrument(
    "din.limits.shared", InstrumentKind.GAUGE, "{state}", "1: limits are counted in Redis; 0: the outage policy holds."
)
REPLICAS = Instrument(
    "din.replicas", InstrumentKind.GAUGE, "{process}", "Processes that decide by the shared limits: the workers of all sidecars."
)
CONFIG_SOUND = Instrument(
    "din.configuration.sound", InstrumentKind.GAUGE, "{state}", "1: the file as it is now is in use; 0: it was refused."
)
WORKERS = Instrument("din.workers", InstrumentKind.GAUGE, "{process}", "Worker processes that the configuration wants.")
WORKER_RESTARTS = Instrument("din.worker.restarts", InstrumentKind.COUNTER, "{process}", "Workers that died and were started again.")
READY = Instrument("din.ready", InstrumentKind.GAUGE, "{state}", "1: this sidecar takes requests.")
TABLE_STALE = Instrument(
    "din.registry.stale", InstrumentKind.GAUGE, "{state}", "1: the node table can't be shared; the last view is in use."
)
DISCOVERY_FAILING = Instrument(
    "din.discovery.failing",
    InstrumentKind.GAUGE,
    "{state}",
    "1: the source of the pool's nodes fails, and its last good answer is in use, or it has no node that is ready.",
    (POOL,),
)
DISCOVERY_REFUSED = Instrument(
    "din.discovery.refused",
    InstrumentKind.GAUGE,
    "{node}",
    "Endpoints that were found and can't be nodes: the log has the reasons.",
    (POOL,),
)
NODES = Instrument("din.nodes", InstrumentKind.GAUGE, "{node}", "Nodes by state.", (STATE,))
NODE_TRUST = Instrument("din.node.trust", InstrumentKind.GAUGE, "1", "Trust in the node, 0 to 1.", (NODE,))
NODE_MISIDENTIFIED = Instrument(
    "din.node.identity_mismatches", InstrumentKind.COUNTER, "{request}", "Answers of nodes that state another id or version.", (NODE,)
)
NODE_WAITING = Instrument("din.node.waiting", InstrumentKind.GAUGE, "{request}", "Requests in the engine's queue, as it says.", (NODE,))
NODE_RUNNING = Instrument("din.node.running", InstrumentKind.GAUGE, "{request}", "Requests that the engine works on, as it says.", (NODE,))
NODE_KV = Instrument("din.node.kv_cache.usage", InstrumentKind.GAUGE, "1", "Share of the engine's KV cache in use.", (NODE,))
NODE_SILENCE = Instrument("din.node.silence", InstrumentKind.GAUGE, "s", "Time since the node was last heard of.", (NODE,))
NODE_TAKEN = Instrument(
    "din.node.tokens_in_use", InstrumentKind.GAUGE, "{token}", "Tokens of this sidecar's requests in flight there.", (NODE,)
)
NODE_SHARE = Instrument(
    "din.node.share", InstrumentKind.GAUGE, "1", "Share of its requests that a node gets: 0 when its breaker is open.", (NODE,)
)
NODE_NO_CREDIT = Instrument(
    "din.node.no_credit", InstrumentKind.GAUGE, "{state}", "1: the provider of a hosted API says that the account has no credit.", (NODE,)
)
NODE_PROBE = Instrument("din.node.probe.time_to_first_token", InstrumentKind.GAUGE, "s", "Of the last probe that had a token.", (NODE,))
BREAKERS = Instrument("din.breakers", InstrumentKind.GAUGE, "{breaker}", "Breakers of nodes by state.", (STATE,))
POOL_SHARE = Instrument("din.pool.share", InstrumentKind.GAUGE, "1", "Share of its requests that a pool gets, when it is not all.", (POOL,))
WAITING = Instrument("din.queue.waiting", InstrumentKind.GAUGE, "{request}", "Requests that wait for tokens or slots of their tenants.")
WOULD_REFUSE = Instrument(
    "din.would_refuse", InstrumentKind.COUNTER, "{request}", "Requests that only limits in shadow mode refuse.", (LIMIT,)
)
XDS_ENVOYS = Instrument("din.xds.envoys", InstrumentKind.GAUGE, "{envoy}", "Envoys that are told their configuration.")
XDS_REFUSED = Instrument(
    "din.xds.refused", InstrumentKind.GAUGE, "{envoy}", "Envoys that refused the newest resources of a type.", (XDS_TYPE,)
)
AUDIT_RECORDS = Instrument("din.audit.records", InstrumentKind.COUNTER, "{record}", "Records of the audit log, written since the start.")
AUDIT_WAITING = Instrument("din.audit.waiting", InstrumentKind.GAUGE, "{event}", "Events that are not in the audit log yet.")
AUDIT_DROPPED = Instrument("din.audit.dropped", InstrumentKind.COUNTER, "{event}", "Events that the audit log lost; it says so itself.")
AUDIT_FAILING = Instrument("din.audit.failing", InstrumentKind.GAUGE, "{state}", "1: the audit log can't be written.")
SPANS = Instrument("din.spans.exported", InstrumentKind.COUNTER, "{span}", "Spans that the collector took.")
SPANS_DROPPED = Instrument("din.spans.dropped", InstrumentKind.COUNTER, "{request}", "Exchanges whose spans the collector did not take.")
SERIES_FOLDED = Instrument(
    "din.metrics.folded", InstrumentKind.COUNTER, "{measurement}", "Measurements counted as `other`: a family was full."
)

ALL: tuple[Instrument, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Instrument))
