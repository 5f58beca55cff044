"""Process log: one JSON object per line on standard error.

Invariant: JSON escapes client input, so that a record is one line. Repeated messages are rate limited and counted.
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
    """Formatter of records as JSON: time, level, logger, message, and trace id and traceback if present."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record as one line."""
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
    """Rate limit of twenty records per message and ten seconds. The next record has the number `left_out`."""

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[tuple[str, str], tuple[float, int]] = {}
        """Start of the window and count, by logger and message template."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to write the record."""
        kind = (record.name, str(record.msg))
        began, came = self._kinds.get(kind, (record.created, 0))
        if record.created - began >= _WINDOW_S:
            if came > _AT_MOST:
                record.left_out = came - _AT_MOST
            began, came = record.created, 0
        self._kinds[kind] = (began, came + 1)
        return came < _AT_MOST


def configure(level: str) -> None:
    """Configure logging to standard error. `level`: debug, info, warning or error.

    Libraries never log at `debug`: an HPACK decoder would log every header, including keys.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    handler.addFilter(LogThrottle())
    own = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(level=max(own, logging.INFO), handlers=[handler], force=True)
    logging.getLogger(_OURS).setLevel(own)
