"""Limits under load that they forbid: two gateways over one Redis, tenants at three times what they may, a noisy neighbour, and a Redis
that restarts, forgets, falls silent and fails over.

Rule: what was admitted is counted where it arrives, at the engine; what clients saw, at the clients.
"""

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import redis
from msgspec import Struct

from tests.bench.field import Field, Figures
from tests.support.servers import EngineSim, RedisServer
from tests.support.stack import Stack, key_of, node, tenant

PATH = "/v1/chat/completions"
_TOKENS = 40
_RATE = 50.0
"""Tokens per second of one answer: it takes 0.8 s."""
_OVER = 3
_WANTED: dict[str, dict[str, int]] = {
    "by-requests": {"rpm": 60},
    "by-tokens": {"tpm": 3000},
    "by-streams": {"max_streams": 3},
    "by-all": {"rpm": 60, "tpm": 3000, "max_streams": 3},
}
_REPLICAS = 2
_FAULT_LIMIT = 120
_BRIEF_S = 10.0
"""Seconds below which only the limits are checked, because each fault of Redis needs its own replicas."""


class Arrivals(Struct, frozen=True):
    """The requests that a tenant got and its maximum."""

    requests: int
    tokens: int
    peak: int
    seconds: float
    """Seconds between the first and the last of them."""


def limits(field: Field) -> Figures:
    """The limits; and, unless it is to be brief, the noisy neighbour and the faults of Redis."""
    seconds = field.effort.limit_seconds
    with EngineSim(
        model="m", served_model=("m", *_WANTED), decode_rate=_RATE, batch_slowdown=0.0, prefill_rate=1e6, max_num_seqs=256
    ) as sim:
        if seconds < _BRIEF_S:
            return _held(sim, seconds)
        return {**_held(sim, seconds), **_noise(sim, seconds), **_faults(sim, seconds)}


@contextlib.contextmanager
def _replicas(sim: EngineSim, tenants: list[dict[str, Any]], server: RedisServer, **store: Any) -> Iterator[list[Stack]]:
    pools = {name: {"model": name, "engine": "vllm", "nodes": [node(name, sim.address)]} for name in ("m", *_WANTED)}
    config = {"pools": pools, "tenants": tenants, "store": {"on_error": "local_share", "timeout_ms": 300, **store}}
    with ExitStack() as stack:
        yield [stack.enter_context(Stack(config, server=server)) for _ in range(_REPLICAS)]


async def _one(client: httpx.AsyncClient, name: str, model: str, seen: Counter[int], waits: list[float], tokens: int = _TOKENS) -> None:
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": tokens, "min_tokens": tokens}
    began = time.perf_counter()
    try:
        reply = await client.post(PATH, json=body, headers={"authorization": f"Bearer {key_of(name)}"})
    except httpx.HTTPError:
        seen[0] += 1
        return
    seen[reply.status_code] += 1
    if reply.status_code == 200:
        waits.append(time.perf_counter() - began)


@contextlib.asynccontextmanager
async def _clients(stacks: list[Stack]) -> AsyncIterator[Callable[[], httpx.AsyncClient]]:
    """Return the replicas in turn."""
    async with contextlib.AsyncExitStack() as exits:
        made = [
            await exits.enter_async_context(
                httpx.AsyncClient(base_url=stack.url, timeout=30, verify=False, limits=httpx.Limits(max_connections=400))
            )
            for stack in stacks
        ]
        turn = iter(range(10**9))
        yield lambda: made[next(turn) % len(made)]


async def _open_loop(
    client: Callable[[], httpx.AsyncClient], name: str, model: str, rate: float, seconds: float, seen: Counter[int], **options: Any
) -> list[float]:
    """So many requests a second, whatever becomes of those before."""
    waits: list[float] = []
    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number in range(int(rate * seconds)):
            await asyncio.sleep(max(0.0, began + number / rate - time.perf_counter()))
            group.create_task(_one(client(), name, model, seen, waits, **options))
    return waits


async def _closed_loop(client: Callable[[], httpx.AsyncClient], name: str, lanes: int, seconds: float, seen: Counter[int]) -> None:
    """So many clients that each ask again when they were answered; one that was refused waits a little."""

    async def lane() -> None:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            refused = seen[429]
            await _one(client(), name, name, seen, [])
            if seen[429] > refused:
                await asyncio.sleep(0.2)

    await asyncio.gather(*(lane() for _ in range(lanes)))


def _held(sim: EngineSim, seconds: float) -> Figures:
    """Four tenants at three times their limits, over two replicas."""
    sim.forget()
    tenants = [tenant(name, **wanted) for name, wanted in _WANTED.items()]
    with RedisServer() as server, _replicas(sim, tenants, server) as stacks:
        asyncio.run(_three_times(stacks, seconds))
        leaked = _leaked(server)
    worst = {"requests": 0.0, "tokens": 0.0, "peak": 0.0}
    for name, wanted in _WANTED.items():
        got = _arrived(sim, name)
        bounds = {
            "requests": wanted.get("rpm"),
            "tokens": None if "tpm" not in wanted else wanted["tpm"] * (1 + got.seconds / 60),
            "peak": wanted.get("max_streams"),
        }
        for what, bound in bounds.items():
            number = getattr(got, what)
            if bound is not None:
                worst[what] = max(worst[what], number / bound)
                print(f"  {name:12} {what:9} {number:7.0f} of at most {bound:7.0f}")
    print(f"  leaked slots: {leaked}")
    return {"limits_held_" + what: over for what, over in worst.items()} | {"limits_leaked": float(leaked)}


async def _three_times(stacks: list[Stack], seconds: float) -> None:
    seen: Counter[int] = Counter()
    per_request = _TOKENS + 10
    async with _clients(stacks) as client, asyncio.TaskGroup() as group:
        for name, wanted in _WANTED.items():
            if "tpm" in wanted:
                rate = _OVER * wanted["tpm"] * (1 + seconds / 60) / per_request / seconds
            elif "rpm" in wanted:
                rate = _OVER * wanted["rpm"] / seconds
            else:
                group.create_task(_closed_loop(client, name, _OVER * wanted["max_streams"], seconds, seen))
                continue
            group.create_task(_open_loop(client, name, name, rate, seconds, seen))
    print(f"  answers: {dict(seen)}")


def _arrived(sim: EngineSim, model: str) -> Arrivals:
    """Return the requests that reached the engine for a model."""
    records = [record for record in sim.seen(2000)[1] if json.loads(record["body"] or b"{}").get("model") == model]
    moments = sorted([(record["started"], 1) for record in records] + [(record["ended"] or time.time(), -1) for record in records])
    running = peak = 0
    for _, step in moments:
        running += step
        peak = max(peak, running)
    began = [record["started"] for record in records]
    tokens = sum(record["prompt_tokens"] + record["completion_tokens"] for record in records)
    return Arrivals(len(records), tokens, peak, max(began, default=0.0) - min(began, default=0.0))


def _leaked(server: RedisServer, wait_s: float = 10.0) -> int:
    """Return the slots that are still held at the end."""
    with redis.Redis(port=server.port) as connection:
        deadline = time.monotonic() + wait_s
        while (held := sum(connection.zcard(key) for key in connection.scan_iter("*:lease:*"))) and time.monotonic() < deadline:
            time.sleep(0.1)
    return held


def _noise(sim: EngineSim, seconds: float) -> Figures:
    """A tenant within its limits, alone and beside one that asks ten times of what it may; turn by turn."""
    alone: list[float] = []
    beside: list[float] = []
    refused: Counter[int] = Counter()
    with RedisServer() as server, _replicas(sim, [tenant("quiet", rpm=600), tenant("noisy", rpm=120)], server) as stacks:

        async def turn(*, noise: bool) -> None:
            async with _clients(stacks) as client:
                tasks = [_open_loop(client, "quiet", "m", 8, seconds / 6, refused, tokens=10)]
                if noise:
                    tasks.append(_open_loop(client, "noisy", "m", 20, seconds / 6, Counter(), tokens=10))
                (beside if noise else alone).extend((await asyncio.gather(*tasks))[0])

        asyncio.run(turn(noise=True))
        beside.clear()
        for _ in range(3):
            asyncio.run(turn(noise=False))
            asyncio.run(turn(noise=True))
    ratio = _p99(beside) / _p99(alone)
    print(f"  quiet tenant: P99 {_p99(alone) * 1e3:.0f} ms alone, {_p99(beside) * 1e3:.0f} ms beside; answers {dict(refused)}")
    return {"limits_noise_p99": ratio, "limits_noise_refused": float(sum(refused.values()) - refused[200])}


def _p99(waits: list[float]) -> float:
    return sorted(waits)[max(0, int(len(waits) * 0.99) - 1)]


def _faults(sim: EngineSim, seconds: float) -> Figures:
    """What clients saw, and how much was admitted beyond the limit, while Redis had a fault."""
    figures: Figures = {}
    faults: dict[str, Callable[[RedisServer], None]] = {"restarted": RedisServer.restart, "flushed": _flush, "paused": _pause}
    for name, fault in faults.items():
        with RedisServer() as server:
            figures |= _fault(sim, name, server, {}, lambda server=server, fault=fault: fault(server), seconds)
    with _sentinels() as (master, url):
        figures |= _fault(sim, "failed_over", master, {"url": url}, master.end, seconds)
    return figures


def _flush(server: RedisServer) -> None:
    with redis.Redis(port=server.port) as connection:
        connection.flushall()


def _pause(server: RedisServer) -> None:
    with server.paused():
        time.sleep(5)


def _fault(sim: EngineSim, name: str, server: RedisServer, store: dict[str, Any], fault: Callable[[], None], seconds: float) -> Figures:
    sim.forget()
    seen: Counter[int] = Counter()
    with _replicas(sim, [tenant("acme", rpm=_FAULT_LIMIT)], server, **store) as stacks:

        async def story() -> None:
            async with _clients(stacks) as client:
                load = asyncio.create_task(_open_loop(client, "acme", "m", 2.5 * _FAULT_LIMIT / seconds, seconds, seen, tokens=2))
                await asyncio.sleep(seconds / 3)
                await asyncio.to_thread(fault)
                await load

        asyncio.run(story())
    admitted = _arrived(sim, "m").requests
    errors = sum(count for status, count in seen.items() if status not in {200, 429})
    most = 2 * _FAULT_LIMIT  # before and after what was forgotten, or here and in the shares of the replicas
    print(f"  redis {name:11} {admitted} admitted of {_FAULT_LIMIT} (policy: {most}), {errors} errors; answers {dict(seen)}")
    return {f"limits_redis_{name}_admitted": admitted / _FAULT_LIMIT, f"limits_redis_{name}_errors": float(errors)}


@contextlib.contextmanager
def _sentinels() -> Iterator[tuple[RedisServer, str]]:
    """A master with a replica, and a Sentinel that watches both."""
    with ExitStack() as stack:
        master = stack.enter_context(RedisServer("--repl-diskless-sync-delay", "0"))
        stack.enter_context(RedisServer("--replicaof", f"127.0.0.1 {master.port}"))
        watched = f"sentinel monitor limits 127.0.0.1 {master.port} 1\nsentinel down-after-milliseconds limits 500\n"
        sentinel = stack.enter_context(RedisServer("--sentinel", config=f"{watched}sentinel failover-timeout limits 3000"))
        with redis.Redis(port=sentinel.port) as watch:
            while not any(entry["master-link-status"] == "ok" for entry in watch.sentinel_slaves("limits")):
                time.sleep(0.05)
        yield master, f"redis+sentinel://127.0.0.1:{sentinel.port}/limits"
