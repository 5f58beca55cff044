"""The state of a node, from its agent's last observations of the engine. No clock, no socket: only the step.

Rule: a node takes requests when its engine answers and lists the model it registered with, and not before. An engine that is slow is
busy until it has been slow three times in a row; one that is gone or serves something else is not ready at once.
"""

from msgspec import Struct
from msgspec.structs import replace

from din_extproc.domain.membership import NodeState

_SLOW_LOOKS = 3


class NodeCondition(Struct, frozen=True):
    """A node's state and, unless it is ready, why."""

    state: NodeState = NodeState.LOADING
    reason: str = "starting"
    slow: int = 0
    """Consecutive readings to which the engine did not respond in time."""

    def with_reading(self, problem: str, *, slow: bool) -> "NodeCondition":
        """Return the state after a reading. `problem`: why the engine takes no requests, or ""; `slow`: it did not respond in time."""
        if self.state is NodeState.DRAINING:
            return self
        if not problem:
            return NodeCondition(NodeState.READY, "")
        if slow and self.state is NodeState.READY and self.slow + 1 < _SLOW_LOOKS:
            return replace(self, slow=self.slow + 1)
        return NodeCondition(NodeState.LOADING, problem, self.slow + slow)

    def with_drain(self, reason: str) -> "NodeCondition":
        """It ends what it has."""
        return NodeCondition(NodeState.DRAINING, reason)

    def with_undrain(self) -> "NodeCondition":
        """It is wanted again: the next look tells whether it can."""
        return NodeCondition(NodeState.LOADING, "called back") if self.state is NodeState.DRAINING else self
