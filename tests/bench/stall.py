"""One of eight nodes stalls, and one comes back: real Envoy, real sidecar, modelled engines that are stopped and continued.

Rule: requests come at their times whatever becomes of those before them; what a client sees as an error is one.
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
_PATIENCE_MS = 4000
"""Of a client, for the whole answer."""
_BEFORE_S = 2.0
_AFTER_S = 4.0
MODES = ("probes", "breaker")
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
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "stream": True}
    headers = {"authorization": f"Bearer {key_of('acme')}", "x-din-timeout-ms": str(_PATIENCE_MS)}
    at = time.monotonic()
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as reply:
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
    """The share of errors while one of eight nodes is stopped, by threshold, with probes alone and with the breaker."""
    effort, figures = field.effort, Figures()
    with _engines(_NODES) as sims:
        for threshold in effort.thresholds:
            for mode in MODES:
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
            return asyncio.run(_load(stack.url, _BEFORE_S + stall_s + _AFTER_S, events))
        finally:
            os.kill(pid, signal.SIGCONT)


def table(figures: Figures) -> str:
    """For the performance page."""
    lines = ["| consecutive failures | probes alone | with the breaker | P99 s, probes alone | with the breaker |", "|---|---|---|---|---|"]
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
