"""Nodes of one DNS name: A and AAAA records with a fixed port, or SRV records.

Invariant: a question that fails keeps its last good answer; so does a name that has no address any more.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from typing import Any

import dns.asyncresolver
import dns.exception
import dns.resolver
from msgspec import Struct

from din_extproc.domain.node import DnsName, Endpoint
from din_extproc.edge.discovery.source import FoundEndpoint, SourceAnswer

_TIMEOUT_S = 2.0
_ADDRESS_TYPES = ("A", "AAAA")


_REMEDY = "the last good answer stays in use; check the name and the DNS server"


class DnsAnswer(SourceAnswer, frozen=True):
    """The result of one query for a name. The weight of an endpoint without SRV records is 1."""

    pause_s: float = 0.0
    """Seconds until the next look: the lowest TTL, but at least the name's interval."""


class _Records(Struct, frozen=True):
    """The data of one question's records and their TTL in seconds."""

    data: tuple[Any, ...]
    ttl_s: float


class DnsSource:
    """Asks for the addresses of one name.

    Args:
        name: The name to ask for.
    """

    def __init__(self, name: DnsName) -> None:
        self._name = name
        self._resolver = dns.asyncresolver.Resolver(configure=name.server is None)
        if name.server is not None:
            self._resolver.nameservers = [name.server.host]
            self._resolver.port = name.server.port
        self._known: dict[tuple[str, str], _Records] = {}
        """The last good answer to each question."""
        self._found: dict[Endpoint, FoundEndpoint] = {}
        self._problems: list[str] = []
        self._asked: set[tuple[str, str]] = set()

    async def follow(self) -> AsyncGenerator[SourceAnswer, None]:
        """Yield an answer per look, for ever."""
        while True:
            answer = await self.look()
            yield answer
            await asyncio.sleep(answer.pause_s)

    async def look(self) -> DnsAnswer:
        """Ask for the name once, for at most a few seconds. It never raises because of the server or its answer."""
        self._problems, self._asked = [], set()
        found = await (self._look_up_services() if not self._name.port else self._look_up_hosts([(self._name.name, self._name.port, 1)]))
        if found:
            self._found = found
        elif not self._problems:
            self._problems.append(f"{self._name.name} has no address")
        self._known = {question: self._known[question] for question in self._asked & self._known.keys()}
        ttl_s = 0.0 if self._problems else min((records.ttl_s for records in self._known.values() if records.data), default=0.0)
        problem = "; ".join(dict.fromkeys(self._problems))
        return DnsAnswer(self._found, problem, _REMEDY if problem else "", max(self._name.every_s, ttl_s))

    async def _look_up_services(self) -> dict[Endpoint, FoundEndpoint]:
        """Return the endpoints of the SRV records with the best priority that have an address."""
        records = (await self._ask(self._name.name, "SRV")).data
        for priority in sorted({record.priority for record in records}):
            same = [record for record in records if record.priority == priority and record.port]
            hosts = [(str(record.target), record.port, record.weight) for record in same if str(record.target) != "."]
            found = await self._look_up_hosts(hosts)
            if found:
                return found
        return {}

    async def _look_up_hosts(self, hosts: Iterable[tuple[str, int, int]]) -> dict[Endpoint, FoundEndpoint]:
        """Return the endpoints of these (name, port, weight)."""
        wanted = [(name, port, weight, kind) for name, port, weight in hosts for kind in _ADDRESS_TYPES]
        answers = await asyncio.gather(*(self._ask(name, kind) for name, _, _, kind in wanted))
        found = {
            Endpoint(str(record.address), port): FoundEndpoint(weight)
            for (_, port, weight, _), records in zip(wanted, answers, strict=True)
            for record in records.data
        }
        return dict(sorted(found.items()))

    async def _ask(self, name: str, kind: str) -> _Records:
        """Return the answer to one question, the last good one if it fails."""
        self._asked.add((name, kind))
        try:
            answer = await self._resolver.resolve(name, kind, lifetime=_TIMEOUT_S, search=True)
        except dns.resolver.NoAnswer:
            self._known[name, kind] = _Records((), 0.0)
        except dns.resolver.NXDOMAIN:
            self._problems.append(f"{name} does not exist (NXDOMAIN)")
        except dns.exception.Timeout:
            self._problems.append(f"no answer for {name} {kind} in {_TIMEOUT_S:g} s")
        except (dns.exception.DNSException, OSError) as error:
            self._problems.append(f"{name} {kind}: {error}")
        else:
            self._known[name, kind] = _Records(tuple(answer), answer.chaining_result.minimum_ttl)
        return self._known.get((name, kind), _Records((), 0.0))
