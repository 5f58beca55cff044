"""The inputs and outputs of the decision pipeline: its ports, the request on its way, and what is decided about it.

Rule: `PendingRequest` is the only one that changes, and only the stages and the caller that made it change it.
"""

from collections.abc import Callable, Coroutine
from collections.abc import Set as AbstractSet
from typing import Any, Protocol

from msgspec import Struct

from din_extproc.admit.keys import Authenticated
from din_extproc.admit.ledger import Claim, Denied, Granted, RateLimitStatus
from din_extproc.domain.node import Node
from din_extproc.domain.request import Intent, RequestHead
from din_extproc.flow.calibrators import TokenCalibrators
from din_extproc.flow.node_request import NodeRequest
from din_extproc.flow.node_selector import NodeSelection, NodeSelector, PlacementTarget
from din_extproc.flow.queueing import RequestQueue
from din_extproc.flow.trace import SpanContext
from din_extproc.flow.view import DecisionView
from din_extproc.intent.read import ParsedRequest
from din_extproc.route.table import Routed

_NO_HEAD = RequestHead(method="", path="", headers={})


class Clock(Protocol):
    """Both are read once or twice per request."""

    def wall(self) -> float:
        """Seconds since the epoch."""

    def monotonic(self) -> float:
        """Seconds that only grow."""


class ReservationLedger(Protocol):
    """The counters as a decision uses them. Both methods may raise `LimitsUnavailable`."""

    async def reserve(self, claim: Claim) -> Granted | Denied:
        """Check every budget, then charge every budget."""

    async def settle(self, tenant: str, request_id: str, tokens: int | None, cost: int = 0) -> bool:
        """Replace the reserved tokens by the actual ones and give back slots still held."""


class ExpectedOutputs(Protocol):
    """Estimates of the usual length of responses."""

    def expected_tokens(self, tenant: str, model: str) -> int | None:
        """Tokens that one answer to this tenant usually stays under; None: not known."""


class DecisionContext(Struct, kw_only=True):
    """The ports of the stages: what all decisions of one worker, or of one run of a tool, share."""

    view: DecisionView
    ledger: ReservationLedger
    selector: NodeSelector
    calibrators: TokenCalibrators
    outputs: ExpectedOutputs
    clock: Clock
    start: Callable[[Coroutine[Any, Any, None]], None]
    """Runs a coroutine in the background."""
    queue: RequestQueue
    """Where requests wait for tokens and slots."""
    lease_ms: int
    """How long a request keeps its slots without a renewal."""
    revoked: frozenset[str] = frozenset()
    """Ids of keys that are valid no more, whatever the view says."""
    stopped: AbstractSet[str] = frozenset()
    """Origins of requests that are not sent to a node now: each has broken two."""


class PendingRequest:
    """The state of one request between the stages."""

    __slots__ = (
        "account",
        "chance",
        "head",
        "inspected",
        "intent",
        "origin",
        "parsed",
        "prefix",
        "request_id",
        "session",
        "span",
        "trace_id",
        "waited_s",
        "who",
    )

    edits_body = True
    """False: the caller can't send another body on, so what would be masked is refused."""
    entry = ""
    """The Envoy filter that sent the request, as in its record: "" for ext_proc, else `ext_authz`."""

    def __init__(self) -> None:
        self.head = _NO_HEAD
        self.request_id = ""
        self.trace_id = ""
        self.span: SpanContext | None = None
        """None: it leaves no spans."""
        self.who: Authenticated | None = None
        """None: not authenticated yet."""
        self.account = ""
        """The tenant whose counters it is charged to."""
        self.origin = ""
        """Of failures that it causes, see `make_origin`; "": its body is not at hand."""
        self.parsed: ParsedRequest | None = None
        """None: the body is not read yet, or not at hand."""
        self.inspected = False
        """Its prompt was checked by the tenant's policy for sensitive data."""
        self.intent: Intent | None = None
        """None: not read yet. Counted exactly from stage 5 on."""
        self.prefix = 0
        """Of the prompt or of the session, for schedulers that send equal beginnings to one node."""
        self.session = ""
        """The source of the session's name: a header, `prompt_cache_key` or `conversation`; "": there is none."""
        self.chance = 0
        """Decides between equal nodes."""
        self.waited_s = 0.0
        """In line for tokens or slots."""


class CandidatePool(Struct, frozen=True, gc=False):
    """Stage 7: where a request can go."""

    target: PlacementTarget
    intent: Intent
    """The request by the measure of the model there."""
    node_request: NodeRequest
    """The request as a node there receives it."""


class LongReservation(Struct, frozen=True, gc=False):
    """Stage 8 of a long request, which knows its node already."""

    granted: Granted
    claim: Claim
    """With the slot at the first of the nodes."""
    nodes: tuple[Node, ...]


class Decision(Struct, frozen=True, gc=False, kw_only=True):
    """A request may go, and to this node. It holds its reservation and its place at the node from now on."""

    intent: Intent
    routed: Routed
    target: PlacementTarget
    node_request: NodeRequest
    claim: Claim
    rate_limit_status: RateLimitStatus
    recorded: bool
    """As of `Granted`."""
    would_refuse: str
    """The limit that would have refused it, were it enforced; "" when none would."""
    roomy: bool
    """Slots are plentiful: their release can wait for the settlement."""
    selection: NodeSelection


class Permit(Struct, frozen=True, gc=False, kw_only=True):
    """A request may go, and its proxy chooses where. It holds its reservation from now on."""

    intent: Intent
    routed: Routed | None
    """None: no pool of the configuration serves the model."""
    target: PlacementTarget | None
    """The pool that the gateway itself would choose; None: none."""
    model: str
    """The physical model that it is charged for; the name that was asked for where no pool serves it."""
    claim: Claim
    rate_limit_status: RateLimitStatus
    recorded: bool
    """As of `Granted`."""
    would_refuse: str
