"""The process's own log: one JSON object per line on standard error.

Rule: nothing that came from a client is interpolated raw; JSON escapes it, and a line is a line.
"""

import logging
import sys
import traceback
from datetime import UTC, datetime

import msgspec


class JsonLines(logging.Formatter):
    """One object per record: time, level, logger, message, and the traceback of a fault."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info and record.exc_info[1] is not None:
            entry["error"] = "".join(traceback.format_exception(record.exc_info[1]))
        return msgspec.json.encode(entry).decode()


def configure(level: str) -> None:
    """Log to standard error from now on. `level`: debug, info, warning or error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
