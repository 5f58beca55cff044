"""How busy each node is, as far as this worker's own requests tell.

Rule: whoever takes tokens gives the same tokens back, once; what fell is noted so that rankings can follow without a scan.
"""


class Load:
    """Tokens and requests in flight per node id. A node nobody took anything from is idle."""

    __slots__ = ("fallen", "requests", "tokens")

    _REMEMBERED_FALLS = 65536

    def __init__(self) -> None:
        self.tokens: dict[str, int] = {}
        self.requests: dict[str, int] = {}
        self.fallen = Falls(limit=self._REMEMBERED_FALLS)

    def take(self, node_id: str, tokens: int) -> None:
        """A request of so many tokens goes to the node."""
        self.tokens[node_id] = self.tokens.get(node_id, 0) + tokens
        self.requests[node_id] = self.requests.get(node_id, 0) + 1

    def give(self, node_id: str, tokens: int) -> None:
        """That request has ended."""
        left = self.requests[node_id] - 1
        if left:
            self.requests[node_id] = left
            self.tokens[node_id] -= tokens
        else:  # an idle node costs no memory, and rounding can't pile up
            del self.requests[node_id], self.tokens[node_id]
        self.fallen.append(node_id)

    def tokens_in_use(self, node_id: str) -> int:
        """Tokens that this worker has in flight at the node."""
        return self.tokens.get(node_id, 0)


class Falls:
    """The last nodes whose load fell, numbered for ever: a reader that was away too long is told so."""

    __slots__ = ("_ids", "_limit", "_start")

    def __init__(self, limit: int) -> None:
        self._ids: list[str] = []
        self._start = 0
        self._limit = limit

    def append(self, node_id: str) -> None:
        """Note a fall."""
        if len(self._ids) >= self._limit:
            drop = self._limit // 2
            del self._ids[:drop]
            self._start += drop
        self._ids.append(node_id)

    @property
    def end(self) -> int:
        """The number that the next fall will have."""
        return self._start + len(self._ids)

    def since(self, number: int) -> list[str] | None:
        """The nodes that fell at or after that number. None: they are no longer known, look at all nodes again."""
        if number < self._start:
            return None
        return self._ids[number - self._start :]
