"""From a granted request to what Envoy is told: where it goes, what changes on the way, and what comes back with the access log.

Rule: the body changes by splices only, and every label that settlement needs is in the metadata, so that no worker has to live until then.
"""

from functools import lru_cache

import msgspec
from msgspec import Struct

from din_extproc.admit.headers import standing_headers
from din_extproc.admit.ledger import Claim, Standing
from din_extproc.domain.node import Pool
from din_extproc.domain.request import Head, Intent, Operation
from din_extproc.domain.usage import Labels
from din_extproc.domain.verdict import Headers, Send
from din_extproc.flow.place import Picked, Target
from din_extproc.flow.timeouts import limits
from din_extproc.intent.read import Reading
from din_extproc.intent.splice import asking_for_usage, with_values
from din_extproc.route.table import Routed

_as_json = msgspec.json.Encoder().encode
_REPORTING = frozenset({Operation.CHAT, Operation.COMPLETIONS})
"""Operations whose streams report usage when `stream_options` asks for it."""


class Granted(Struct, frozen=True, gc=False):
    """Everything that was decided about one request."""

    trace_id: str
    key_id: str
    reading: Reading
    intent: Intent
    routed: Routed
    target: Target
    picked: Picked
    claim: Claim
    standing: Standing
    would_refuse: str = ""
    """The limit that would have refused it, were it enforced."""


def dispatch(granted: Granted, head: Head) -> Send:
    """The verdict that sends it."""
    reading, target = granted.reading, granted.target
    body = _body(reading, granted.intent, target.pool)
    answer_headers: Headers = (("x-din-trace-id", granted.trace_id), *standing_headers(granted.standing))
    if target.degraded:
        answer_headers = (*answer_headers, ("x-bxagent-degraded", "true"), ("x-din-degraded-reason", target.degraded))
    return Send(
        cluster=target.pool.name,
        endpoints=tuple([str(node.endpoint) for node in granted.picked.nodes]),
        request_headers=(
            ("x-din-trace-id", granted.trace_id),
            *_version(granted.routed, target.pool, granted.intent),
            *limits(granted.intent, target.pool, granted.picked).headers(),
        ),
        response_headers=answer_headers,
        metadata=_metadata(granted),
        body=body if body is not reading.body or reading.decoded else None,
        path=_path(head.path, granted.intent.operation.value),
        remove_headers=("content-encoding",) if reading.decoded else (),
    )


def _version(routed: Routed, pool: Pool, intent: Intent) -> Headers:
    """The whole constraint for the node to check, when alias or model name add to what the client's header says."""
    wanted = (routed.versions if pool is routed.pool else routed.fallback_versions).text
    return () if wanted == intent.version else (("x-din-model-version", wanted),)


def _body(reading: Reading, intent: Intent, pool: Pool) -> bytes:
    """The client's bytes, with the name that the engine answers to, and asking for usage."""
    edits: dict[str, bytes] = {}
    if intent.model != pool.served_model:
        edits["model"] = _quoted(pool.served_model)
    if _usage_is_ours(intent, pool):
        edits["stream_options"] = asking_for_usage(reading.outline.value(reading.body, "stream_options"))
    return with_values(reading.body, reading.outline, edits) if edits else reading.body


def _usage_is_ours(intent: Intent, pool: Pool) -> bool:
    """Whether the stream reports usage because we ask: the client is not to see it."""
    return intent.stream and not intent.wants_usage and pool.stream_usage and intent.operation in _REPORTING


def _metadata(granted: Granted) -> dict[str, str | float | bool]:
    """One field for settlement, because every field costs both Envoy and us; two more for the filter that reads the answer."""
    intent, target, claim = granted.intent, granted.target, granted.claim
    estimate, pool = intent.estimate, target.pool
    labels = Labels(
        claim.request_id,
        granted.trace_id,
        claim.tenant,
        granted.key_id,
        pool.model,
        granted.routed.name,
        pool.name,
        granted.routed.rule,
        claim.tokens,
        estimate.tokens,
        estimate.features,
        estimate.fixed,
        intent.stream,
        bool(target.degraded),
        intent.operation.value,
        granted.would_refuse,
        granted.reading.sensitive,
    )
    metadata: dict[str, str | float | bool] = {"request_id": claim.request_id, "labels": _as_json(labels).decode()}
    if _usage_is_ours(intent, pool):
        metadata["strip_usage"] = True
    return metadata


def _path(path: str, canonical: str) -> str | None:
    """The canonical path, None when that is what the client wrote. A query goes no further: engines read none, and some hold keys."""
    return None if path == canonical else canonical


@lru_cache(maxsize=1024)
def _quoted(text: str) -> bytes:
    """A text as JSON writes it."""
    return msgspec.json.encode(text)
