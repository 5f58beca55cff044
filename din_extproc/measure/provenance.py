"""Provenance headers of every successful response: node, model version and execution time.

Rule: a response without one of them was not sent by the network; the reader reports which header is missing.
"""

from collections.abc import Mapping

from msgspec import Struct

NODE, VERSION, EXEC_TIME, TRACE = "x-din-node-id", "x-din-model-version", "x-din-exec-time-ms", "x-din-trace-id"
STATED_NODE, STATED_VERSION = "x-din-stated-node", "x-din-stated-version"


class Provenance(Struct, frozen=True):
    """Of one answer."""

    node_id: str
    model_version: str
    exec_time_ms: int | None
    """From the first byte sent to the node to the first byte of its answer, without time spent in the gateway; None: the header is
    missing or no number."""
    trace_id: str
    degraded: bool
    """A fallback answered."""
    degraded_reason: str
    dropped_parameters: tuple[str, ...]
    """Parameters that the engine's interface has no place for."""
    stated_node: str = ""
    """The id that the node's own Envoy stated; "" where there is none."""
    stated_version: str = ""
    """The model version, likewise."""

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> "Provenance":
        """From an answer's headers, names in lower case."""
        exec_time = headers.get(EXEC_TIME, "")
        dropped = headers.get("x-din-dropped-parameters", "")
        return cls(
            node_id=headers.get(NODE, ""),
            model_version=headers.get(VERSION, ""),
            exec_time_ms=int(exec_time) if exec_time.isascii() and exec_time.isdigit() else None,
            trace_id=headers.get(TRACE, ""),
            degraded=headers.get("x-bxagent-degraded") == "true",
            degraded_reason=headers.get("x-din-degraded-reason", ""),
            dropped_parameters=tuple(name.strip() for name in dropped.split(",") if name.strip()),
            stated_node=headers.get(STATED_NODE, ""),
            stated_version=headers.get(STATED_VERSION, ""),
        )

    @property
    def missing(self) -> tuple[str, ...]:
        """The headers that every answer has, and this one has not."""
        found = ((NODE, self.node_id), (VERSION, self.model_version), (EXEC_TIME, self.exec_time_ms is not None), (TRACE, self.trace_id))
        return tuple(name for name, value in found if not value)
