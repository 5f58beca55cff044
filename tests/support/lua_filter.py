"""`envoy/lua/usage.lua` in a LuaJIT, with a hand-written fake of Envoy's stream handle.

Rule: bytes keep their encoding; the filter's dynamic metadata is returned as a dict.
"""

from pathlib import Path
from typing import Any

import lupa.luajit21
from msgspec import Struct

SCRIPT = Path(__file__).parents[2] / "envoy" / "lua" / "usage.lua"
_HANDLE = Path(__file__).parent / "envoy_handle.lua"
SSE = {":status": "200", "content-type": "text/event-stream; charset=utf-8"}
JSON = {":status": "200", "content-type": "application/json"}
TRUNCATED = (
    b'data: {"error":{"message":"The node ended the stream before the answer was complete.",'
    b'"type":"server_error","param":null,"code":"upstream_truncated"}}\n\n'
)


class Played(Struct, frozen=True):
    """The result of one answer."""

    out: bytes
    facts: dict[str, Any]
    log: str
    cost: str
    """`x-din-cost`; "": none was set."""


class UsageFilter:
    """The filter, ready to play answers through."""

    def __init__(self) -> None:
        self._lua = lupa.luajit21.LuaRuntime(encoding=None, unpack_returned_tuples=True)
        self._lua.execute(_HANDLE.read_bytes())
        self._lua.execute(SCRIPT.read_bytes())
        self._play = self._lua.globals().play
        self._every_split = self._lua.globals().every_split

    def play(
        self,
        chunks: list[bytes],
        *,
        headers: dict[str, str] = SSE,
        strip: bool = False,
        dialect: str = "",
        choices: int = 1,
        ending: str = "data",
        clock: list[int] | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> Played:
        """Play one answer. `ending`: see `envoy_handle.lua`; `clock`: microseconds at each chunk; `metadata`: instead of ext_proc's."""
        known = self._known(strip=strip, dialect=dialect, choices=choices) if metadata is None else self._table(metadata)
        out, facts, log, cost = self._play(
            self._lua.table(*chunks), known, self._table(headers), ending.encode(), clock and self._lua.table(*clock)
        )
        decoded = {key.decode(): value.decode() if isinstance(value, bytes) else value for key, value in facts.items()}
        for key in ("request_id", "strip_usage", "dialect", "choices", "ends", "price"):
            decoded.pop(key, None)
        return Played(out=out, facts=decoded, log=log.decode(), cost=(cost or b"").decode())

    def first_bad_split(self, body: bytes, *, headers: dict[str, str] = SSE, strip: bool = False, dialect: str = "") -> int:
        """Play the body cut in two at every place, and byte by byte (-1). Returns 0, or the first cut that changes bytes or facts."""
        return int(self._every_split(body, self._known(strip=strip, dialect=dialect), self._table(headers)))

    def _known(self, *, strip: bool, dialect: str = "", choices: int = 1) -> Any:
        known: dict[str, Any] = {"request_id": "r-1"}
        if strip:
            known["strip_usage"] = True
        if dialect:
            known["dialect"] = dialect
        if choices > 1:
            known["choices"] = choices
        return self._table(known)

    def _table(self, values: dict[str, Any]) -> Any:
        return self._lua.table_from({key.encode(): value.encode() if isinstance(value, str) else value for key, value in values.items()})


def capture(path: Path) -> tuple[dict[str, str], bytes]:
    """Return a recorded answer's headers (`:status` and names in lower case) and body."""
    head, _, body = path.read_bytes().partition(b"\r\n\r\n")
    if not body:
        head, _, body = path.read_bytes().partition(b"\n\n")
    status, *lines = head.decode().splitlines()
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return {":status": status.split()[1], **headers}, body
