"""One of eight nodes stalls, and one comes back: real Envoy, real sidecar, modelled engines that are stopped and continued.

Rule: requests come at their times whatever becomes of those before them; what a client sees as an error is one.

The papers' experiment: eight nodes, one of which pauses for 30 s, a heartbeat every 3 s; a node is removed after 2 or 5 missed ones. They
do not say how long clients wait, what becomes of requests at a node that is removed, and over which time errors are counted. Their figures
(0.3 % and over 4 %) follow from 5 s, another try elsewhere, and the 30 s: a request fails if it has waited 5 s before the node is removed
after 6 or 15 s. The mode `papers` is that gateway alone, in front of the same engines.
"""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp
from msgspec import Struct

from tests.bench.field import Field, Figures
from tests.support.servers import EngineSim
from tests.support.stack import Stack, key_of, node, tenant

_NODES = 8
_RATE = 20.0
"""Requests per second."""
_PATIENCE_MS = 5000
"""Of a client, for the whole answer."""
_BEFORE_S = 2.0
_AFTER_S = 4.0
MODES = ("papers", "probes", "breaker")
_HEARTBEAT_S = 3.0
_ANSWER_S = 0.2
"""Within so long a heartbeat is answered."""
_BODY = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "stream": True}
_RAMP_S = 20.0
_RAMP_FROM = 0.1
_BAR = 40


class Seen(Struct, frozen=True):
    """One request as its client saw it."""

    at: float
    """Seconds since the first."""
    status: int
    """0: a broken connection."""
    node: str
    seconds: float


@contextmanager
def _engines(number: int) -> Iterator[list[EngineSim]]:
    sims = [EngineSim(model="m", decode_rate=400.0, prefill_rate=1e6, max_num_seqs=256, kv_tokens=10_000_000) for _ in range(number)]
    try:
        yield [sim.start() for sim in sims]
    finally:
        for sim in sims:
            sim.stop()


def _config(sims: list[EngineSim], health: dict, *, first_byte_s: float | None = None) -> dict:
    nodes = [node(f"n{index}", sim.address) for index, sim in enumerate(sims)]
    pool = {"model": "m", "engine": "vllm", "scheduler": "round_robin", "nodes": nodes}
    if first_byte_s is not None:
        pool["timeouts"] = {"first_byte_s": first_byte_s}
    return {"pools": {"p": pool}, "tenants": [tenant("acme")], "health": health, "envoy": {"health_check": False}}


async def _ask(session: aiohttp.ClientSession, url: str, began: float) -> Seen:
    headers = {"authorization": f"Bearer {key_of('acme')}", "x-din-timeout-ms": str(_PATIENCE_MS)}
    at = time.monotonic()
    try:
        async with session.post(f"{url}/v1/chat/completions", json=_BODY, headers=headers) as reply:
            whole = b"[DONE]" in await reply.read()
            status, name = reply.status, reply.headers.get("x-din-node-id", "")
    except (aiohttp.ClientError, TimeoutError):
        whole, status, name = False, 0, ""
    return Seen(at - began, status if whole or status != 200 else 0, name, time.monotonic() - at)


async def _load(url: str, seconds: float, events: list[tuple[float, int, int]]) -> list[Seen]:
    """Ask for so long. `events`: at which second which process gets which signal."""
    began, asked = time.monotonic(), []
    timeout = aiohttp.ClientTimeout(total=_PATIENCE_MS / 1000 + 5)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        for turn in range(int(seconds * _RATE)):
            while events and events[0][0] * _RATE <= turn:
                _, pid, number = events.pop(0)
                os.kill(pid, number)
            await asyncio.sleep(max(0.0, began + turn / _RATE - time.monotonic()))
            asked.append(asyncio.create_task(_ask(session, url, began)))
        return list(await asyncio.gather(*asked))


def stall(field: Field) -> Figures:
    """The share of errors while one of eight nodes is stopped, by threshold, of the papers' gateway and of ours."""
    effort, figures = field.effort, Figures()
    with _engines(_NODES) as sims:
        for threshold in effort.thresholds:
            for mode in MODES:
                if mode == "papers":
                    seen = asyncio.run(_stalled_in_the_papers(sims, threshold, effort.stall_s))
                else:
                    seen = _stalled(sims, threshold, mode, effort.stall_s)
                errors = sum(each.status != 200 for each in seen)
                took = sorted(each.seconds for each in seen)
                figures[f"stall_errors_{mode}_{threshold}"] = errors / len(seen)
                figures[f"stall_p99_s_{mode}_{threshold}"] = took[int(len(took) * 0.99)]
    return figures


def _stalled(sims: list[EngineSim], threshold: int, mode: str, stall_s: float) -> list[Seen]:
    ours = mode == "breaker"
    health = {"failover_threshold": {"standard": threshold}, "breaker": ours, "probe": {"every_s": 3, "timeout_s": 1}}
    with Stack(_config(sims, health, first_byte_s=1.0 if ours else None)) as stack:
        for _ in range(_NODES):
            stack.chat()
        pid = sims[-1].pid
        events = [(_BEFORE_S, pid, signal.SIGSTOP), (_BEFORE_S + stall_s, pid, signal.SIGCONT)]
        try:
            seen = asyncio.run(_load(stack.url, _BEFORE_S + stall_s + _AFTER_S, events))
        finally:
            os.kill(pid, signal.SIGCONT)
    return [each for each in seen if _BEFORE_S <= each.at < _BEFORE_S + stall_s]


class _PapersGateway:
    """Round robin over nodes that answer heartbeats. When one is removed, what waits there is asked of the next.

    Args:
        session: Asks the nodes.
        urls: The nodes.
        threshold: A node is removed after so many missed heartbeats in a row.
    """

    def __init__(self, session: aiohttp.ClientSession, urls: list[str], threshold: int) -> None:
        self._session = session
        self._threshold = threshold
        self._nodes = urls
        self._missed = dict.fromkeys(urls, 0)
        self._waiting: dict[str, set[asyncio.Task[int]]] = {url: set() for url in urls}
        self._turn = 0

    async def ask(self, began: float) -> Seen:
        """Ask one node after the other until one answers, or the client gives up."""
        at = time.monotonic()
        while (left := at + _PATIENCE_MS / 1000 - time.monotonic()) > 0:
            self._turn += 1
            url = self._nodes[self._turn % len(self._nodes)]
            asked = asyncio.create_task(self._post(url))
            self._waiting[url].add(asked)
            await asyncio.wait({asked}, timeout=left)
            self._waiting[url].discard(asked)
            if asked.done() and not asked.cancelled():
                return Seen(at - began, asked.result(), url, time.monotonic() - at)
            asked.cancel()
        return Seen(at - began, 504, "", time.monotonic() - at)

    async def beat(self) -> None:
        """Ask every node for a heartbeat, and remove those that have missed too many."""
        for url, answered in zip(self._nodes, await asyncio.gather(*map(self._heartbeat, self._nodes)), strict=True):
            self._missed[url] = 0 if answered else self._missed[url] + 1
        self._nodes = [url for url in self._nodes if self._missed[url] < self._threshold]
        for url, missed in self._missed.items():
            if missed >= self._threshold:
                for task in self._waiting[url]:
                    task.cancel()

    async def _heartbeat(self, url: str) -> bool:
        try:
            async with self._session.get(f"{url}/health", timeout=aiohttp.ClientTimeout(total=_ANSWER_S)) as reply:
                return reply.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def _post(self, url: str) -> int:
        async with self._session.post(f"{url}/v1/chat/completions", json=_BODY) as reply:
            await reply.read()
            return reply.status


async def _stalled_in_the_papers(sims: list[EngineSim], threshold: int, stall_s: float) -> list[Seen]:
    """The papers' experiment: the node stops when it has just answered a heartbeat."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        gateway = _PapersGateway(session, [f"http://{sim.address}" for sim in sims], threshold)
        await gateway.beat()
        os.kill(sims[-1].pid, signal.SIGSTOP)
        try:
            began, asked, beats = time.monotonic(), [], []
            for turn in range(int(stall_s * _RATE)):
                await asyncio.sleep(max(0.0, began + turn / _RATE - time.monotonic()))
                if turn and turn % (_HEARTBEAT_S * _RATE) == 0:
                    beats.append(asyncio.create_task(gateway.beat()))
                asked.append(asyncio.create_task(gateway.ask(began)))
            await asyncio.gather(*beats)
            return list(await asyncio.gather(*asked))
        finally:
            os.kill(sims[-1].pid, signal.SIGCONT)


def table(figures: Figures) -> str:
    """For the performance page."""
    names = "as the papers | probes alone | with the breaker"
    lines = [f"| consecutive failures | {names} | P99 s, {names} |", "|---|---|---|---|---|---|---|"]
    for name in figures:
        if name.startswith("stall_errors_probes_"):
            threshold = name.rpartition("_")[2]
            errors = (figures[f"stall_errors_{mode}_{threshold}"] for mode in MODES)
            p99 = (figures[f"stall_p99_s_{mode}_{threshold}"] for mode in MODES)
            lines.append(f"| {threshold} | {' | '.join(f'{each:.2%}' for each in errors)} | {' | '.join(f'{each:.2f}' for each in p99)} |")
    return "\n".join(lines)


def ramp(field: Field) -> Figures:
    """A node's share of the traffic after it has come back, second by second, beside what its ramp says."""
    ramp_s = min(_RAMP_S, field.effort.stall_s)
    health = {"open_s": 1, "trial_share": 0.2, "trials": 2, "ramp": {"from": _RAMP_FROM, "over_s": ramp_s}, "probe": False}
    with _engines(4) as sims, Stack(_config(sims, health)) as stack:
        sims[0].fail("unavailable")
        stack.eventually(lambda: bool(stack.chat() and stack.status()["breakers"]["nodes"].get("n0")), "open")
        sims[0].fail("")
        stack.eventually(lambda: bool(stack.chat()) and _state(stack) == "ramping", "the ramp")
        began_s = stack.status()["breakers"]["nodes"]["n0"]["for_s"]
        seen = asyncio.run(_load(stack.url, ramp_s, []))
    parts = 5
    worst = 0.0
    print("share of its part that a node gets after it has come back (* measured, | its ramp)")
    for part in range(parts):
        begin, end = ramp_s * part / parts, ramp_s * (part + 1) / parts
        within = [each for each in seen if begin <= each.at < end]
        share = sum(each.node == "n0" for each in within) * 4 / len(within)
        due = _RAMP_FROM + (1 - _RAMP_FROM) * min(1.0, ((begin + end) / 2 + began_s) / ramp_s)
        worst = max(worst, abs(share - due))
        marks = {round(due * _BAR): "|", round(share * _BAR): "*"}
        print(f"{begin:5.1f} s {''.join(marks.get(place, ' ') for place in range(_BAR + 8))} {share:.0%} ({due:.0%})")
    return {"ramp_worst_deviation": worst}


def _state(stack: Stack) -> str:
    return stack.status()["breakers"]["nodes"].get("n0", {}).get("state", "")
