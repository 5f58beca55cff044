"""Double checks of one worker: sends one request to two nodes and compares the responses, outside of client requests.

Invariant: one check runs at a time; a failure of a node affects only this check.
"""

from collections.abc import Callable, Iterable
from http import HTTPStatus

import aiohttp
from msgspec.structs import replace

from din_extproc.domain.agreement import Agreement, DoubleCheckResult
from din_extproc.domain.node import Node
from din_extproc.flow.double_check import CheckSampler, DoubleCheck
from din_extproc.observe.agreement import TokenizedAnswer, compare_answers, read_tokenized_answer

_TIMEOUT_S = 120.0
_LONGEST_ANSWER = 4 << 20


class DoubleChecker:
    """Runs the sampled checks.

    Args:
        sampler: Source of checks.
        nodes: Returns the available nodes of a pool.
        trace_id: Creates an id per request; a node's own Envoy requires one.
    """

    def __init__(self, sampler: CheckSampler, nodes: Callable[[str], Iterable[Node]], trace_id: Callable[[], str]) -> None:
        self._sampler = sampler
        self._nodes = nodes
        self._trace_id = trace_id
        self._found: list[DoubleCheckResult] = []

    def take_results(self) -> list[DoubleCheckResult]:
        """Return the results since the last call."""
        found, self._found = self._found, []
        return found

    async def run_checks(self) -> None:
        """Run pending checks. Failures of nodes raise nothing."""
        waiting, self._sampler.waiting = self._sampler.waiting, []
        if not waiting:
            return
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as session:
            for check in waiting:
                answers, compared = await self._compare(session, check)
                self._sampler.refund_unused(check, answers)
                if compared is not None:
                    self._found.append(compared)

    async def _compare(self, session: aiohttp.ClientSession, check: DoubleCheck) -> tuple[int, DoubleCheckResult | None]:
        """Return the number of nodes queried, and the result; None: no second node responded."""
        peers = check.select_peers(self._nodes(check.pool))
        if not peers:
            return 0, None
        first, second = await self._ask_node(session, check, check.node), await self._ask_node(session, check, peers[0])
        if first is None or second is None:
            return 2, _make_result(check, peers[0], Agreement.UNANSWERED)
        agreement, at = compare_answers(first, second, sampled=check.sampled)
        compared = _make_result(check, peers[0], agreement, at, max(len(first.tokens), len(second.tokens)))
        if agreement is not Agreement.DIFFER:
            return 2, compared
        blamed = [check.node.id, peers[0].id]
        third = await self._ask_node(session, check, peers[1]) if len(peers) > 1 else None
        if third is not None:
            blamed_answers = zip(blamed, (first, second), strict=True)
            odd = [
                node_id
                for node_id, answer in blamed_answers
                if compare_answers(answer, third, sampled=check.sampled)[0] is Agreement.DIFFER
            ]
            blamed = odd if len(odd) == 1 else blamed
        return 2 + (len(peers) > 1), replace(compared, blamed=tuple(blamed))

    async def _ask_node(self, session: aiohttp.ClientSession, check: DoubleCheck, node: Node) -> TokenizedAnswer | None:
        headers = {"content-type": "application/json", "x-din-trace-id": self._trace_id()}
        try:
            url = f"http://{node.endpoint}{check.path}"
            async with session.post(url, data=check.body, headers=headers, allow_redirects=False) as reply:
                if reply.status != HTTPStatus.OK:
                    return None
                body = await reply.content.read(_LONGEST_ANSWER)
                while part := await reply.content.read(_LONGEST_ANSWER):
                    body += part
                    if len(body) > _LONGEST_ANSWER:
                        return None
        except (aiohttp.ClientError, OSError, TimeoutError):
            return None
        return read_tokenized_answer(body)


def _make_result(check: DoubleCheck, second: Node, agreement: Agreement, at: int = 0, tokens: int = 0) -> DoubleCheckResult:
    node = check.node
    return DoubleCheckResult(
        trace_id=check.trace_id,
        model=node.model,
        version=node.version,
        dtype=node.dtype,
        node_id=node.id,
        second_node_id=second.id,
        agreement=agreement,
        at_token=at,
        tokens=tokens,
    )
