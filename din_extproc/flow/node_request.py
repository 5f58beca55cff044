"""From a request to what its node is asked: OpenAI's bytes with a few of them spliced, or the same in the engine's own words.

Rule: for an engine with OpenAI's API the body changes by splices only; every byte that no splice names is the client's.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from din_extproc.domain.node import DROPPED, Pool
from din_extproc.domain.request import BodyKind, Intent, Operation, Priority
from din_extproc.domain.tenant import RANK
from din_extproc.domain.verdict import Headers, Refusal, RefusalCode
from din_extproc.intent.outline import build_outline, replace_lone_surrogates
from din_extproc.intent.read import ParsedRequest
from din_extproc.intent.splice import add_include_usage, splice_values
from din_extproc.southbound.dialect import ANSWER_FIELDS, Dialect, PlainRequest
from din_extproc.southbound.engines import find_dialect, find_engine
from din_extproc.southbound.parameters import CHAT_ONLY, Table, rename_parameters

_REPORTING = frozenset({Operation.CHAT, Operation.COMPLETIONS})
"""Operations whose streams report usage when `stream_options` asks for it."""
_decode = msgspec.json.Decoder().decode
_decode_elements = msgspec.json.Decoder(list[msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode
_NOTHING: Mapping[str, Any] = {}
_TOO_LARGE = Refusal(RefusalCode.INVALID_REQUEST, "The body holds a number that JSON readers can't hold, such as 1e400")


class NodeRequest(Struct, frozen=True, gc=False):
    """The request for the node, whichever of the pool's it will be."""

    operation: Operation
    stream: bool
    path: str
    body: bytes
    strips_usage: bool
    """The stream reports usage because we ask: the client is not to see it."""
    headers: Headers = ()
    """For the answer: what was left out."""
    edits: Mapping[str, bytes] | None = None
    """The values that were spliced in; None: more than values has changed."""
    dialect: Dialect | None = None
    """The answer's; None: the client's own."""
    model: str = ""
    """The engine's name of the model, for its dialect."""
    fields: Mapping[str, Any] = _NOTHING
    """The decoded request, for its dialect."""


def build_node_request(reading: ParsedRequest, intent: Intent, pool: Pool, priority: Priority = Priority.STANDARD) -> NodeRequest | Refusal:
    """The order for a node of this pool, or why its engine can't be asked. `priority`: the class by which an engine may schedule it."""
    if intent.operation.spec.body is BodyKind.MULTIPART:
        return _build_form(reading, intent, pool)
    dialect = find_dialect(pool.engine, pool.api, intent.operation)
    return _build_openai(reading, intent, pool, priority) if dialect is None else _translated(reading, intent, pool, dialect)


def answer_fields(reading: ParsedRequest) -> dict[str, Any]:
    """Those of the request by which an answer is translated."""
    names = ANSWER_FIELDS & reading.outline.spans.keys()
    return {name: _decode_value(reading.outline.value(reading.body, name)) for name in names}


def _build_form(reading: ParsedRequest, intent: Intent, pool: Pool) -> NodeRequest:
    """The client's form, with the name that the engine answers to."""
    renamed = intent.model != pool.served_model
    edits = {intent.operation.spec.model: pool.served_model.encode()} if renamed else {}
    return NodeRequest(
        operation=intent.operation,
        stream=intent.stream,
        path=intent.operation,
        body=splice_values(reading.body, reading.outline, edits) if edits else reading.body,
        strips_usage=False,
        edits=edits,
    )


def _build_openai(reading: ParsedRequest, intent: Intent, pool: Pool, priority: Priority) -> NodeRequest | Refusal:
    """The client's bytes, with the name that the engine answers to, its words for parameters, and asking for usage."""
    edits: dict[str, bytes] = {}
    removed: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    ours = intent.stream and not intent.wants_usage and pool.stream_usage and intent.operation in _REPORTING
    if intent.model != pool.served_model:
        edits[intent.operation.spec.model] = _quote_name(pool.served_model)
    if ours:
        edits["stream_options"] = add_include_usage(reading.outline.value(reading.body, "stream_options"))
    adapter = find_engine(pool.engine)
    spans = reading.outline.spans
    table = adapter.openai
    named = table.keys() & spans.keys()
    if intent.operation is Operation.COMPLETIONS:
        named -= CHAT_ONLY
    if named:
        changed = _rename_fields(reading, named, table, pool)
        if isinstance(changed, Refusal):
            return changed
        values, removed, dropped = changed
        edits |= values
    if not pool.stream_usage and "stream_options" in spans:
        removed = (*removed, "stream_options")  # of any value: the engine may know no such key
        has_options = reading.outline.value(reading.body, "stream_options") != b"null"
        dropped = (*dropped, "stream_options") if has_options else dropped
    if pool.priority_scheduling and adapter.first_priority:
        edits["priority"] = b"%d" % (adapter.first_priority * RANK[priority])
    elif "priority" in spans and adapter.first_priority:
        removed, dropped = (*removed, "priority"), (*dropped, "priority")
    if adapter.roles:
        edits |= _rename_roles(reading, intent, adapter.roles)
    body = splice_values(reading.body, reading.outline, edits, removed) if edits or removed else reading.body
    return NodeRequest(
        operation=intent.operation,
        stream=intent.stream,
        path=intent.operation,
        body=body,
        strips_usage=ours,
        headers=_format_dropped(dropped),
        edits=None if removed else edits,
    )


def _rename_roles(reading: ParsedRequest, intent: Intent, roles: Mapping[str, str]) -> dict[str, bytes]:
    """The messages with roles that the engine knows; nothing when they have no others."""
    key = "input" if intent.operation is Operation.RESPONSES else "messages"
    value = reading.outline.value(reading.body, key)
    if not value.startswith(b"[") or not any(role.encode() in value for role in roles):
        return {}
    elements = _split_elements(value)
    if elements is None:
        return {}
    made = [_with_role(bytes(element), roles) for element in elements]
    return {key: b"[%b]" % b",".join(made)}


def _with_role(message: bytes, roles: Mapping[str, str]) -> bytes:
    at = build_outline(replace_lone_surrogates(message)) if message.startswith(b"{") else None
    if at is None or isinstance(at, Refusal):
        return message
    role = roles.get(at.value(message, "role").decode(errors="replace").strip('"'))
    return message if role is None else splice_values(message, at, {"role": _quote_name(role)})


def _split_elements(value: bytes) -> list[msgspec.Raw] | None:
    try:
        return _decode_elements(value)
    except msgspec.DecodeError:
        try:
            return _decode_elements(replace_lone_surrogates(value))
        except msgspec.DecodeError:
            return None


def _rename_fields(
    reading: ParsedRequest, named: set[str], table: Table, pool: Pool
) -> tuple[dict[str, bytes], tuple[str, ...], tuple[str, ...]] | Refusal:
    """New values, keys that go, and those of them that are lost."""
    given: dict[str, Any] = {}
    for name in reading.outline.spans:
        if name in named:
            value = _decode_value(reading.outline.value(reading.body, name), name)
            if isinstance(value, Refusal):
                return value
            given[name] = value

    def beside(name: str) -> Any:
        value = reading.outline.value(reading.body, name)
        return None if name in named or not value else _decode_value(value)

    changed = rename_parameters(given, table, drop=pool.unmappable == "drop", beside=beside)
    if isinstance(changed, Refusal):
        return changed
    return {name: _encode(value) for name, value in changed.values.items()}, changed.removed, changed.dropped


def _translated(reading: ParsedRequest, intent: Intent, pool: Pool, dialect: Dialect) -> NodeRequest | Refusal:
    fields = _decode_value(reading.body)
    if isinstance(fields, Refusal):
        return fields
    plain = PlainRequest(
        intent.operation,
        fields,
        pool.served_model,
        intent.stream,
        drop=pool.unmappable == "drop",
        stream_usage=pool.stream_usage,
    )
    made = dialect.build_request(plain)
    if isinstance(made, Refusal):
        return made
    return NodeRequest(
        operation=intent.operation,
        stream=intent.stream,
        path=made.path,
        body=made.body,
        strips_usage=intent.stream and not intent.wants_usage and intent.operation is not Operation.MESSAGES,
        headers=_format_dropped(made.dropped),
        dialect=dialect,
        model=pool.served_model,
        fields=fields,
    )


def _decode_value(raw: bytes, param: str | None = None) -> Any | Refusal:
    """Valid JSON as Python has it; halves of surrogate pairs as the replacement character, for they can't be written again.

    Refused: a number that no double holds, such as 1e400. It is legal JSON, but there is no writing it again.
    """
    try:
        return _decode(raw)
    except msgspec.ValidationError:
        return replace(_TOO_LARGE, param=param)
    except msgspec.DecodeError:
        return _decode_whole(raw, param)


def _decode_whole(raw: bytes, param: str | None) -> Any | Refusal:
    try:
        return _decode(replace_lone_surrogates(raw))
    except msgspec.DecodeError:
        return replace(_TOO_LARGE, param=param)


def _format_dropped(names: tuple[str, ...]) -> Headers:
    return ((DROPPED, ", ".join(names)),) if names else ()


@lru_cache(maxsize=1024)
def _quote_name(text: str) -> bytes:
    """A text as JSON writes it."""
    return _encode(text)
