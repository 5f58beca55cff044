"""The session that a request belongs to, as its client names it: a configured header, else `prompt_cache_key`, else `conversation`.

Any body gives a name or none; a name of another shape than its API's is none.
"""

from zlib import crc32

import msgspec

from din_extproc.domain.request import Operation, RequestHead
from din_extproc.intent.prefix import hash_prefix
from din_extproc.intent.read import ParsedRequest

_MAX_BYTES = 1024
"""A longer name is none."""
_KEYS = ("prompt_cache_key", "conversation")


class _Conversation(msgspec.Struct):
    id: str


_decode = msgspec.json.Decoder(str | _Conversation).decode


def find_session(parsed: ParsedRequest, head: RequestHead, header: str) -> bytes:
    """Return the name of the request's session with where it stands; b"" if it names none.

    Args:
        parsed: The request.
        head: Its headers.
        header: The configured header in lower case, "" without one.
    """
    if header and (named := head.header(header)):
        return b"%b %b" % (header.encode(), named.encode()[:_MAX_BYTES])
    spans = parsed.outline.spans
    for key in _KEYS:
        if key in spans and (key != "conversation" or parsed.intent.operation == Operation.RESPONSES):
            name = _read(parsed.outline.value(parsed.body, key))
            if name:
                return b"%b %b" % (key.encode(), name.encode("utf-8", "replace"))
    return b""


def find_affinity(parsed: ParsedRequest, head: RequestHead, header: str, account: str) -> tuple[str, int]:
    """Return what names the request's session ("": nothing), and the hash of the tenant's session, else of the prompt's prefix.

    The hash is equal in every process; 0: there is neither session nor text. The arguments are those of `find_session` and the tenant.
    """
    session = find_session(parsed, head, header)
    if not session:
        return "", hash_prefix(parsed.prompt)
    return session.partition(b" ")[0].decode(), crc32(session, crc32(account.encode())) or 1


def _read(value: bytes) -> str:
    """A text, or a conversation's id."""
    if len(value) > _MAX_BYTES:
        return ""
    try:
        found = _decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
    return found if isinstance(found, str) else found.id
