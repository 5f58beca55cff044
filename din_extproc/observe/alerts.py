"""Prometheus' alert rules: what somebody is woken for, and what can wait until the morning.

Rule: an alert says what is wrong and where to look, and fires on what clients or auditors lose, not on how busy a machine is.
"""

from typing import Any, Literal

from msgspec import Struct

from din_extproc.observe import instruments as of
from din_extproc.observe.instruments import label
from din_extproc.observe.queries import failures, quantile, rate, select_series

_WINDOW = "5m"


class Alert(Struct, frozen=True):
    """One rule."""

    name: str
    expr: str
    lasts: str
    severity: Literal["page", "ticket"]
    summary: str
    look: str
    """Where to look next."""


def _grew(instrument: of.Instrument, window: str = "10m") -> str:
    return f"increase({instrument.prometheus}[{window}]) > 0"


def _without_state(samples: str) -> str:
    return f"sum without ({label(of.STATE)}) ({samples})"


_OPEN = select_series(of.BREAKERS, **{label(of.STATE): "open"})
_MOST_OPEN = f"{_without_state(_OPEN)} > 0.5 * {_without_state(of.NODES.prometheus)}"
ALERTS = (
    Alert("DinNotReady", f"{of.READY.prometheus} == 0", "1m", "page", "The sidecar takes no requests.", look="/readyz of its admin port"),
    Alert(
        "DinFailures", f"{failures(_WINDOW)} > 0.05", "5m", "page",
        "More than 5 % of the requests fail at nodes.", look="dashboard nodes",
    ),
    Alert(
        "DinNoNode", f"{rate(of.REFUSALS, window=_WINDOW, **{label(of.CODE): 'no_healthy_node'})} > 0", "2m", "page",
        "Requests are refused because no node is healthy.", look="din-extproc nodes",
    ),
    Alert(
        "DinFaults", _grew(of.FAULTS), "0m", "page",
        "The gateway itself failed.", look="its log, level error: each fault with its trace id",
    ),
    Alert(
        "DinSlowDecisions", f"{quantile(0.99, of.DECISION, window=_WINDOW)} > 0.05", "5m", "page",
        "One decision in a hundred takes more than 50 ms.", look="Redis, and how busy the workers are",
    ),
    Alert(
        "DinFirstTokenSlow", f"{quantile(0.95, of.TIME_TO_FIRST_TOKEN, of.MODEL, window='10m')} > 10", "10m", "ticket",
        "One stream of a model in twenty waits more than ten seconds for its first token.", look="the nodes' queues: din-extproc nodes",
    ),
    Alert(
        "DinTokensSlow", f"{quantile(0.95, of.TIME_PER_OUTPUT_TOKEN, of.MODEL, window='10m')} > 0.2", "10m", "ticket",
        "One stream of a model in twenty gets fewer than five tokens per second.", look="how many requests share a node",
    ),
    Alert("DinRedisAway", f"{of.REDIS_UP.prometheus} == 0", "1m", "page", "Redis does not answer.", look="/status; limits follow on_error"),
    Alert("DinLimitsNotShared", f"{of.LIMITS_SHARED.prometheus} == 0", "1m", "ticket", "Limits are not counted in Redis.", look="/status"),
    Alert(
        "DinConfigurationRefused", f"{of.CONFIG_SOUND.prometheus} == 0", "1m", "ticket",
        "The configuration as it is now is not in use.", look="din-extproc check",
    ),
    Alert(
        "DinUnsettled", f"{of.UNSETTLED.prometheus} > 1000", "2m", "page",
        "Finished exchanges can't be settled.", look="Redis; past 10,000 it is lost",
    ),
    Alert("DinAccountsLost", _grew(of.GIVEN_UP), "0m", "page", "Finished exchanges were never settled.", look="Redis was away too long"),
    Alert(
        "DinAccessLogsDropped", _grew(of.LOGS_DROPPED), "0m", "ticket",
        "Envoy dropped entries of its access log: these requests are not accounted for.", look="whether the accounting process keeps up",
    ),
    Alert("DinAccessLogsUnreadable", _grew(of.LOGS_UNREADABLE), "0m", "ticket", "Access logs can't be read.", look="the versions of both"),
    Alert(
        "DinAuditFailing", f"{of.AUDIT_FAILING.prometheus} == 1", "0m", "page",
        "The audit log can't be written.", look="the disk; /status",
    ),
    Alert(
        "DinAuditLost", _grew(of.AUDIT_DROPPED), "0m", "page",
        "The audit log lost events.", look="din-extproc audit verify says how many",
    ),
    Alert("DinWorkersDie", f"increase({of.WORKER_RESTARTS.prometheus}[15m]) > 2", "0m", "page", "Workers keep dying.", look="the log"),
    Alert(
        "DinNodeQuarantined", f"{select_series(of.NODES, **{label(of.STATE): 'quarantined'})} > 0", "1m", "ticket",
        "A node is kept out because of what it said or did.", look="din-extproc nodes: the reason",
    ),
    Alert(
        "DinNodesDisagree", f"increase({select_series(of.DOUBLE_CHECKS, **{label(of.AGREEMENT): 'differ'})}[10m]) > 0", "0m", "page",
        "Nodes that should give the same answer do not.", look="the log, level error; the audit log, mismatch",
    ),
    Alert(
        "DinNodeMisidentified", f"increase({of.NODE_MISIDENTIFIED.prometheus}[10m]) > 0", "0m", "page",
        "A node states another id or version than the gateway expects there.", look="the log, level error; din-extproc verify",
    ),
    Alert(
        "DinBreakersOpen", _MOST_OPEN,
        "2m", "page", "The breakers of more than half of the nodes are open.", look="din-extproc nodes: the reasons",
    ),
    Alert(
        "DinAccountWithoutCredit", f"{of.NODE_NO_CREDIT.prometheus} > 0", "0m", "page",
        "The account of a hosted API has no credit; its node is ejected.", look="the provider's billing page",
    ),
    Alert(
        "DinNodeUntrusted", f"{of.NODE_TRUST.prometheus} < 0.5", "5m", "ticket",
        "A node is trusted by less than half.", look="its reasons",
    ),
    Alert("DinNodeTableStale", f"{of.TABLE_STALE.prometheus} == 1", "2m", "ticket", "The node table can't be shared.", look="Redis"),
    Alert("DinEnvoyRefused", f"{of.XDS_REFUSED.prometheus} > 0", "1m", "page", "An Envoy refused its configuration.", look="/status, xds"),
    Alert(
        "DinMixedDtype", f"{of.MIXED_DTYPE.prometheus} > 0.01", "10m", "ticket",
        "A model is answered in more than one dtype.", look="the pools of that model",
    ),
    Alert(
        "DinMixedCapability", f"{of.MIXED_CAPABILITY.prometheus} > 0.01", "10m", "ticket",
        "A model is answered by GPUs of more than one compute capability.", look="the pools of that model",
    ),
    Alert(
        "DinEstimatesOff", f"abs({quantile(0.5, of.ESTIMATE_ERROR, of.MODEL, window='30m')}) > 0.25", "30m", "ticket",
        "Half of the prompt estimates of a model are off by more than a quarter.", look="a tokenizer in the catalogue",
    ),
    Alert(
        "DinLabelsFull", _grew(of.SERIES_FOLDED, "1h"), "0m", "ticket",
        "A metric has no room for more labels.", look="what comes and goes",
    ),
)  # fmt: skip


def build_rules() -> dict[str, Any]:
    """The file that Prometheus reads."""
    return {
        "groups": [
            {
                "name": "din-extproc",
                "rules": [
                    {
                        "alert": alert.name,
                        "expr": alert.expr,
                        "for": alert.lasts,
                        "labels": {"severity": alert.severity},
                        "annotations": {"summary": alert.summary, "description": f"Look at: {alert.look}."},
                    }
                    for alert in ALERTS
                ],
            }
        ]
    }
