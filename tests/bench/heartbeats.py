"""What heartbeats cost the process that takes them, and what they do to decisions, with a hundred, a thousand and ten thousand nodes.

Rule: as many heartbeats per second for every size (a thousand: what ten thousand nodes send that beat every ten seconds), so that
whatever grows with the nodes shows. Sizes are measured in turn, round by round.
"""

import asyncio
import gc
import tempfile
import time
from collections import deque
from contextlib import AsyncExitStack
from functools import cache
from pathlib import Path
from typing import Self

import uvloop
import yaml
from google.protobuf.message import Message

from din_extproc._proto.din.v1 import registry_pb2 as pb
from din_extproc.admit.keys import ENTROPY_BYTES, NewKey, NodeTokens, make_node_token
from din_extproc.edge.background import Background
from din_extproc.edge.grpc.h2_server import H2Server
from din_extproc.edge.grpc.registry_service import NodeRegistryService
from din_extproc.edge.redis.nodes import NODE_SCRIPTS
from din_extproc.edge.redis.topology import make_carrier
from din_extproc.edge.registry.auth import RegistryAuth
from din_extproc.edge.telemetry.counters import DecisionCounters
from din_extproc.roles.serve.registry_service import RegistryService
from din_extproc.roles.serve.request_plane import RequestPlane
from din_extproc.settings.load import load
from din_extproc.settings.settings import Settings
from tests.bench.contenders import chat_body
from tests.bench.field import BODY_BYTES, Field, Figures
from tests.bench.growth import Free, decide
from tests.bench.harness import median
from tests.support.servers import RedisServer, free_port
from tests.support.stack import tenant

_RATE = 1_000
"""Heartbeats per second."""
_PER_TURN = 10
_JOINING = 100
"""At once."""


def heartbeats(field: Field) -> Figures:
    """CPU per heartbeat, everything included that runs beside it, and the time of a decision meanwhile."""
    many = field.effort.many_nodes
    sizes = sorted({100, min(1_000, many), many})
    spent, decided = uvloop.run(_measure(sizes, field.effort.rounds, max(2.0, 2 * field.effort.seconds)))
    few = sizes[0]
    return {
        "heartbeat_cpu_10k_nodes_vs_100": median([one / other for one, other in zip(spent[many], spent[few], strict=True)]),
        "decision_beside_10k_beating_nodes_vs_100": median([one / other for one, other in zip(decided[many], decided[few], strict=True)]),
        **{f"heartbeat_cpu_us_{size}_nodes": median(times) for size, times in spent.items()},
        **{f"decision_us_beside_{size}_beating_nodes": median(times) for size, times in decided.items()},
    }


async def _measure(sizes: list[int], rounds: int, seconds: float) -> tuple[dict[int, list[float]], dict[int, list[float]]]:
    spent: dict[int, list[float]] = {size: [] for size in sizes}
    decided: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(rounds):
        for size in sizes:
            async with _Fleet(size) as fleet:
                await fleet.beat(0.5)
                gc.collect()
                began = time.process_time()
                beats, times = await fleet.beat(seconds)
                spent[size].append((time.process_time() - began) / beats * 1e6)
                decided[size].append(median(times))
    return spent, decided


class _Answer:
    """Takes the answer of one call."""

    names: frozenset[str] = frozenset()

    def __init__(self, authorization: str) -> None:
        self.authorization = authorization
        self.done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def send(self, message: bytes) -> None:
        """The answer."""
        self.done.set_result(message)

    def fail(self, _status: int, detail: str) -> None:
        """A refusal: there should be none."""
        self.done.set_exception(RuntimeError(detail))

    def finish(self) -> None:
        """It was all."""


class _Fleet:
    """A sidecar's registry and request plane in this process, and so many nodes. An asynchronous context manager."""

    def __init__(self, size: int) -> None:
        self._names = [f"n{at}" for at in range(size)]
        self._leases: dict[str, str] = {}
        self._sequence = 0
        self._exits = AsyncExitStack()

    async def __aenter__(self) -> Self:
        server, folder = self._exits.enter_context(RedisServer()), self._exits.enter_context(tempfile.TemporaryDirectory())
        settings = _settings(server.url, Path(folder), self._names)
        link = make_carrier(server.url, NODE_SCRIPTS, timeout_ms=20_000)
        assert await link.start()
        self._exits.push_async_callback(link.close)
        background = Background()
        self._exits.push_async_callback(background.close)
        self._plane = RequestPlane(settings, Free(), background, DecisionCounters())
        section = settings.gateway.registry
        assert section is not None
        selector = self._plane.selector
        membership = RegistryService(
            settings=settings,
            section=section,
            runner=link,
            server=H2Server,
            background=background,
            on_membership=selector.on_membership,
            on_readings=selector.load.on_readings,
        )
        await membership.start()
        self._exits.push_async_callback(membership.stop)
        self._methods = NodeRegistryService(
            RegistryAuth(membership.registrar, NodeTokens(settings.node_tokens), {}), background.start
        ).methods()
        for start in range(0, len(self._names), _JOINING):
            await asyncio.gather(*(self._join(at) for at in range(start, min(start + _JOINING, len(self._names)))))
        while len(self._plane.context.selector.members.get_nodes("p")) < len(self._names):  # noqa: ASYNC110 - arrives as changes, without an event
            await asyncio.sleep(0.05)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exits.aclose()

    async def beat(self, seconds: float) -> tuple[int, list[float]]:
        """Heartbeats at the rate, one node after the other, and decisions between them. Their number, and the decisions' microseconds."""
        body, running, times, beats = chat_body(BODY_BYTES), deque(), [], 0
        loop = asyncio.get_running_loop()
        due = loop.time()
        end = due + seconds
        while due < end:
            names = [self._names[(beats + at) % len(self._names)] for at in range(_PER_TURN)]
            await asyncio.gather(*map(self._beat, names))
            beats += len(names)
            began = time.perf_counter()
            decide(self._plane.context, body, running)
            times.append((time.perf_counter() - began) * 1e6)
            due += _PER_TURN / _RATE
            await asyncio.sleep(max(0.0, due - loop.time()))
        return beats, times

    async def _join(self, at: int) -> None:
        name, address = self._names[at], f"10.{at >> 16}.{at >> 8 & 255}.{at & 255}:8000"
        node = pb.Node(id=name, address=address, model="m", version="1.0.0", dtype="bf16", engine="vllm", max_seq_len=8192)
        answer = await self._ask("Register", name, pb.RegisterRequest(node=node))
        self._leases[name] = pb.RegisterResponse.FromString(answer).lease
        await self._beat(name)

    async def _beat(self, name: str) -> None:
        self._sequence += 1
        load = pb.Beat(state=pb.NODE_STATE_READY, sequence=self._sequence, waiting=0, running=self._sequence % 7, kv_cache_usage=0.4)
        await self._ask("Heartbeat", name, pb.HeartbeatRequest(node_id=name, lease=self._leases[name], beat=load))

    async def _ask(self, method: str, name: str, message: Message) -> bytes:
        answer = _Answer(f"Bearer {_token(name).text}")
        self._methods[method](answer).message(message.SerializeToString())
        return await answer.done


@cache
def _token(name: str) -> NewKey:
    return make_node_token(name, bytes(ENTROPY_BYTES))


def _settings(redis_url: str, folder: Path, names: list[str]) -> Settings:
    registry = {"http_address": f"127.0.0.1:{free_port()}", "node_tokens_file": "tokens.yaml", "heartbeat_s": 10, "dead_after_s": 60}
    content = {
        "version": 1,
        "gateway": {"registry": registry},
        "store": {"url": redis_url},
        "pools": {"p": {"model": "m", "engine": "vllm", "dtype": "bf16"}},
        "tenants": [tenant("acme")],
    }
    (folder / "tokens.yaml").write_text("".join(f'{name}: "{_token(name).hash}"\n' for name in names))
    (folder / "din.yaml").write_text(yaml.safe_dump(content))
    settings = load(folder / "din.yaml", {})
    assert isinstance(settings, Settings), str(settings)
    return settings
