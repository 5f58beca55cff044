"""The process's own log: one JSON object per line on standard error.

Rule: nothing that came from a client is interpolated raw; JSON escapes it, and a line is a line. A fault that comes with every request
is told a few times and then counted: a log must not be what brings a gateway down.
"""

import logging
import sys
import traceback
from datetime import UTC, datetime

import msgspec

_OURS = "din_extproc"
_AT_MOST = 20
_WINDOW_S = 10.0
_LONGEST = 8_000
_LONGEST_TRACEBACK = 16_000


class JsonLines(logging.Formatter):
    """One object per record: time, level, logger, message, the request's trace id and the traceback of a fault where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage()[:_LONGEST],
        }
        for name in ("trace_id", "left_out"):
            if hasattr(record, name):
                entry[name] = getattr(record, name)
        if record.exc_info and record.exc_info[1] is not None:
            entry["error"] = "".join(traceback.format_exception(record.exc_info[1]))[-_LONGEST_TRACEBACK:]
        return msgspec.json.encode(entry).decode()


class LogThrottle(logging.Filter):
    """Lets each kind of message through twenty times in ten seconds. The next one that passes says how many were `left_out`."""

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[tuple[str, str], tuple[float, int]] = {}
        """By logger and unfilled text: when the window began, and how many came since. There are as many as there are lines of code."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether it is written."""
        kind = (record.name, str(record.msg))
        began, came = self._kinds.get(kind, (record.created, 0))
        if record.created - began >= _WINDOW_S:
            if came > _AT_MOST:
                record.left_out = came - _AT_MOST
            began, came = record.created, 0
        self._kinds[kind] = (began, came + 1)
        return came < _AT_MOST


def configure(level: str) -> None:
    """Log to standard error from now on. `level`: debug, info, warning or error.

    Libraries are not heard at `debug`: an HPACK decoder tells every header there, keys and tokens among them.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    handler.addFilter(LogThrottle())
    own = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(level=max(own, logging.INFO), handlers=[handler], force=True)
    logging.getLogger(_OURS).setLevel(own)
