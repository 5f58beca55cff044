"""`Ledger` in Redis, shared by all replicas: four Lua scripts over one client."""

import asyncio
import contextlib
import struct
from collections.abc import Iterable
from functools import lru_cache
from importlib.resources import files
from typing import Any, Final, Protocol

import msgspec

from din_extproc.admit.ledger import Claim, Denied, Granted, LimitsUnavailable, RateLimitStatus, Settlement
from din_extproc.edge.redis.calls import (
    PREFIX,
    EndCalls,
    EndedRequest,
    Names,
    RequestKeys,
    ReserveCall,
    make_end_calls,
    make_reserve_call,
    read_charges,
)
from din_extproc.edge.redis.connection import Argument, LuaScript, bulk, bulks


def load_script(name: str) -> LuaScript:
    """Load the script `lua/<name>.lua`."""
    return LuaScript(files("din_extproc.edge.redis").joinpath("lua", f"{name}.lua").read_bytes())


ADMIT: Final = load_script("admit")
SETTLE: Final = load_script("settle")
RELEASE: Final = load_script("release")
RENEW: Final = load_script("renew")
SCRIPTS: Final = (ADMIT, SETTLE, RELEASE, RENEW)

_DIMENSIONS: Final = ("", "rpm", "tpm", "max_streams", "oversize", "token_budget", "cost_budget")
_TOKEN_BUDGET: Final = 5
_pack_numbers: Final = struct.Struct(">3d").pack
_REMEMBERED: Final = 8192
"""Number of requests whose budgets are remembered; older requests cost one look-up when they end."""
_PLAIN: Final = Names()
_UNLIMITED: Final = Granted(RateLimitStatus(), roomy=True, recorded=False)


class Runner(Protocol):
    """A client that sends commands: a `Link`, or one link per master of a cluster."""

    def call(self, *command: Argument) -> asyncio.Future[Any]:
        """Send a command and return the future of its reply."""

    def run(self, script: LuaScript, count: int, tail: bytes) -> asyncio.Future[Any]:
        """Run a script with `count` bulk strings: number of keys, keys, arguments."""


class RedisLedger:
    """A `Ledger` shared by all replicas.

    Args:
        runner: The started client.
        now: Tests only: the time in ms that replaces Redis TIME in the scripts; "" in production.
        names: Prefixes of its keys.
    """

    def __init__(self, runner: Runner, now: Argument = "", names: Names = _PLAIN) -> None:
        self._runner = runner
        self._prefix_of = lru_cache(maxsize=262_144)(names.of)
        self._shared = names.shared
        self._channel = bulk(names.channel.encode())
        self._held: dict[tuple[str, str], tuple[RequestKeys, EndCalls]] = {}
        """Calls of the latest requests, by tenant and request id."""
        self.read_clock(now)

    def read_clock(self, now: Argument) -> None:
        """Set the time in ms; tests only."""
        self._now = bulks(now)[1]

    async def reserve(self, claim: Claim) -> Granted | Denied:
        """Check every budget, then charge every budget. If the caller is cancelled before the reply, the charge is undone."""
        request = RequestKeys.of(self._prefix_of(claim.tenant), claim.request_id)
        plan = make_reserve_call(len(request.prefix), self._shared, claim.budgets, claim.spending)
        if not plan.scopes:
            return _UNLIMITED
        keys = plan.keys.replace(PREFIX, request.prefix)
        numbers = bulk(_pack_numbers(claim.tokens, claim.lease_ms, claim.cost))
        tail = b"".join((plan.start, request.record, keys, plan.limits, self._now, request.id, numbers, plan.periods))
        future = self._runner.run(ADMIT, plan.count, tail)
        try:
            reply = await future
        except LimitsUnavailable:
            raise
        except BaseException:
            future.cancel()
            self._undo(plan.end, request)
            raise
        if not reply[0]:
            return _read_denial(plan, reply)
        if reply[0] != 1 or not reply[1]:
            if len(self._held) >= _REMEMBERED:
                del self._held[next(iter(self._held))]
            self._held[claim.tenant, claim.request_id] = request, plan.end
        if reply[0] == 1:
            return Granted(_read_status(reply), roomy=reply[2] == 1)
        denied = _read_denial(plan, reply)
        if reply[2] >= _TOKEN_BUDGET:
            denied = msgspec.structs.replace(denied, status=msgspec.structs.replace(denied.status, exceeded=denied.scope))
        return Granted(denied.status, denied)

    async def renew(self, tenant: str, request_id: str, lease_ms: int) -> bool:
        """Extend the lease of a running request. Return False if it is unknown or has ended."""
        held = self._held.get((tenant, request_id)) or await self._look_up(tenant, request_id)
        if held is None:
            return False
        request, end = held
        return bool(await self._runner.run(RENEW, *end.renewal(request, self._now, bulk(b"%d" % lease_ms))))

    async def release(self, tenant: str, request_id: str) -> None:
        """Release the slots of a request that has ended."""
        held = self._held.get((tenant, request_id)) or await self._look_up(tenant, request_id)
        if held is not None:
            request, end = held
            await self._runner.run(RELEASE, *end.release(request, self._now, self._channel))

    async def settle(self, tenant: str, request_id: str, tokens: int | None, cost: int = 0) -> bool:
        """Replace the reserved tokens and cost with the actual ones, once, and release its slots. Return False if unknown or settled.

        Tokens None: no node was reached, so the request's places in the windows come back as well.
        """
        return bool(await self.settle_all([Settlement(tenant, request_id, tokens, cost)]))

    async def settle_all(self, settlements: Iterable[Settlement]) -> int:
        """Settle several requests, those of one tenant and the same budgets in one call.

        Returns:
            The number of requests that were neither unknown nor settled before.
        """
        calls: dict[tuple[bytes, int, bool], tuple[EndCalls, list[EndedRequest]]] = {}
        for each in settlements:
            held = self._held.pop((each.tenant, each.request_id), None) or await self._look_up(each.tenant, each.request_id)
            if held is not None:
                request, end = held
                _, ended = calls.setdefault((request.prefix, id(end), each.tokens is None), (end, []))
                ended.append(EndedRequest(request, each.tokens, each.cost))
        replies: list[asyncio.Future[int]] = []
        try:
            for (prefix, _, _), (end, ended) in calls.items():
                replies.append(self._runner.run(SETTLE, *end.settlement(prefix, ended, self._now, self._channel)))
            return sum([await reply for reply in replies])
        except LimitsUnavailable:
            for reply in replies:
                reply.add_done_callback(ignore_result)
            raise

    async def _look_up(self, tenant: str, request_id: str) -> tuple[RequestKeys, EndCalls] | None:
        """Build the calls of a request that is not remembered from its record."""
        request = RequestKeys.of(self._prefix_of(tenant), request_id)
        found = await self._runner.call("GET", request.record[request.record.index(b"\n") + 1 : -2])
        if not found:
            return None
        return request, make_end_calls(len(request.prefix), self._shared, read_charges(found))

    def _undo(self, end: EndCalls, request: RequestKeys) -> None:
        """Undo a reservation whose caller was cancelled. Redis runs this after the reservation on the same connection."""
        with contextlib.suppress(LimitsUnavailable):
            ended = [EndedRequest(request, None, 0)]
            self._runner.run(SETTLE, *end.settlement(request.prefix, ended, self._now, self._channel)).add_done_callback(ignore_result)


def ignore_result(future: asyncio.Future[Any]) -> None:
    """Retrieve the exception, so that asyncio does not log it as never retrieved."""
    if not future.cancelled():
        future.exception()


def _read_denial(plan: ReserveCall, reply: list[int]) -> Denied:
    return Denied(plan.scopes[reply[1] - 1], _DIMENSIONS[reply[2]], reply[3], reply[4], _read_status(reply))


def _read_status(reply: list[int]) -> RateLimitStatus:
    limit_requests, remaining_requests, reset_requests, limit_tokens, remaining_tokens, reset_tokens = reply[5:]
    return RateLimitStatus(
        limit_requests=limit_requests if limit_requests >= 0 else None,
        remaining_requests=remaining_requests if limit_requests >= 0 else None,
        reset_requests_ms=reset_requests if limit_requests >= 0 else None,
        limit_tokens=limit_tokens if limit_tokens >= 0 else None,
        remaining_tokens=remaining_tokens if limit_tokens >= 0 else None,
        reset_tokens_ms=reset_tokens if limit_tokens >= 0 else None,
    )
