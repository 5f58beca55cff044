"""The role `explain`: where a request would go and why, without Redis, nodes or Envoy.

Rule: the same reading, routing and placing as in service; only the counters are not asked.
"""

from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import Struct

from din_extproc.domain.request import Head, Intent
from din_extproc.domain.verdict import Refusal
from din_extproc.flow.gauges import Gauges
from din_extproc.flow.members import Members
from din_extproc.flow.place import Placer, Size
from din_extproc.intent.prefix import prefix
from din_extproc.intent.read import read
from din_extproc.roles.view import make_view
from din_extproc.schedule.ask import Ask
from din_extproc.schedule.load import Load
from din_extproc.settings.settings import Settings


class Unexplained(Exception):  # noqa: N818 - it says what the request is
    """There is nothing to explain: no such tenant, or the file holds no request."""


class Request(Struct, frozen=True):
    """A recorded request. `body` is the JSON body itself."""

    body: msgspec.Raw
    path: str = "/v1/chat/completions"
    method: str = "POST"
    headers: dict[str, str] = {}


class Explained(Struct, frozen=True, omit_defaults=True):
    """What would happen."""

    sent: bool
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    rule: str | None = None
    """"": no rule matched, the model's own pool takes it."""
    model: str | None = None
    pool: str | None = None
    fallback: str | None = None
    degraded: str | None = None
    """Why it is the fallback that takes it."""
    nodes: tuple[str, ...] = ()
    """In the order in which idle nodes would be tried."""
    refusal: str | None = None
    status: int | None = None
    message: str | None = None

    def lines(self) -> list[str]:
        """For a terminal."""
        shown = []
        if self.prompt_tokens is not None:
            output = "not limited by the client" if self.output_tokens is None else f"at most {self.output_tokens} tokens"
            shown.append(f"prompt    about {self.prompt_tokens} tokens; output {output}")
        if self.rule is not None:
            shown.append(f"rule      {self.rule or 'none matched: the first pool of the model'}")
            shown.append(f"model     {self.model}")
            shown.append(f"pool      {self.pool}" + (f", fallback {self.fallback}" if self.fallback else ""))
        if self.degraded:
            shown.append(f"degraded  the fallback takes it: {self.degraded}")
        if self.nodes:
            shown.append(f"nodes     {', '.join(self.nodes)}")
        if self.refusal is not None:
            shown.append(f"refused   {self.status} {self.refusal}: {self.message}")
        return shown


def explain(settings: Settings, tenant_id: str, text: bytes) -> Explained:
    """Explain one request.

    Args:
        settings: A sound configuration.
        tenant_id: Who asks.
        text: A JSON body for chat completions, or an object of `path`, `headers`, `method` and `body`.

    Raises:
        Unexplained: the tenant is unknown or the text is no request.
    """
    tenant = next((tenant for tenant in settings.tenants if tenant.id == tenant_id), None)
    if tenant is None:
        raise Unexplained(f"no tenant is called {tenant_id!r}; there are: {', '.join(tenant.id for tenant in settings.tenants)}")
    request = _request(text)
    head = Head(request.method, request.path, {name.lower(): value for name, value in request.headers.items()})
    view = make_view(settings, {})
    gauges = Gauges(view.table.preferred)
    reading = read(head, bytes(request.body), gauges.named, view.body_limit)
    if isinstance(reading, Refusal):
        return _refused(reading)
    intent = reading.intent
    members = Members.of(settings.pools)
    routed = view.table.route(intent, tenant, head, datetime.now(UTC).hour, members.versions)
    if isinstance(routed, Refusal):
        return _refused(routed, intent)
    placer = Placer(Load(), members)
    tokens = intent.prompt_tokens + (intent.output_tokens or 1)
    target = placer.target(routed, Size(tokens, tokens), 0.0)
    where: dict[str, Any] = {
        "prompt_tokens": intent.prompt_tokens,
        "output_tokens": intent.output_tokens,
        "rule": routed.rule,
        "model": routed.model,
        "pool": routed.pool.name,
        "fallback": None if routed.fallback is None else routed.fallback.name,
    }
    if isinstance(target, Refusal):
        return msgspec.structs.replace(_refused(target), **where)
    picked = placer.pick(target, Ask(intent.prompt_tokens, intent.output_tokens or 1, 0.0, prefix=prefix(reading.prompt)))
    if isinstance(picked, Refusal):
        return msgspec.structs.replace(_refused(picked), **where)
    nodes = tuple(node.id for node in picked.nodes)
    return Explained(sent=True, nodes=nodes, degraded=target.degraded or None, **where)


def _request(text: bytes) -> Request:
    try:
        parts = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError:
        return Request(body=msgspec.Raw(text))  # a body that is no JSON object is explained too: it is refused
    if "body" not in parts:
        return Request(body=msgspec.Raw(text))
    try:
        return msgspec.json.decode(text, type=Request)
    except msgspec.ValidationError as error:
        raise Unexplained(f"the request does not have the shape {{path, headers, method, body}}: {error}") from None


def _refused(refusal: Refusal, intent: Intent | None = None) -> Explained:
    return Explained(
        sent=False,
        prompt_tokens=None if intent is None else intent.prompt_tokens,
        output_tokens=None if intent is None else intent.output_tokens,
        refusal=refusal.code.code,
        status=refusal.code.status,
        message=refusal.message,
    )
