"""`din-extproc simulate` against reality: four engine simulators, then llama.cpp, behind a real Envoy and sidecar, at several loads.

Rule: the simulation gets what a user would give it: the audit log of the real run, and how quick the nodes are. It never sees a time that
it is compared with.
"""

import asyncio
import json
import time
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
from msgspec import Struct

from din_extproc.tools.simulate.simulate import Simulated, SimulateOptions, simulate
from din_extproc.tools.simulate.stats import Outcomes, Percentiles
from tests.bench.field import Field, Figures
from tests.support.servers import EngineSim, LlamaServer
from tests.support.stack import Stack, key_of, node, tenant

_ENGINES = 4
_SPEED = {"prefill_rate": 1500.0, "decode_rate": 25.0, "kv_tokens": 32_768, "max_num_seqs": 4}
"""Slow ones, so that what is measured is theirs and not this machine's."""
LOADS = {"low": 2.0, "middle": 4.0, "over": 7.0}
"""Requests per second: a third, three quarters, and more than four such engines can do."""
_WARM_UP = 0.1
_LLAMA_SLOTS = 4
_LLAMA_OUTPUT = 24
_WORDS = ("river", "stone", "bridge", "cloud", "letter", "window", "garden")
_BODY_TOKENS = 0.9
"""Words per token, about."""


class Sent(Struct):
    """One request, as its client saw it. Seconds since the first."""

    at: float
    first: float | None = None
    end: float | None = None
    """Of an answer that came whole."""
    prompt: int = 0
    output: int = 0


class Figure(Struct, frozen=True):
    """One load: what was, and what the simulation says."""

    real_per_s: float
    simulated_per_s: float
    real_p99_s: float
    simulated_p99_s: float

    @property
    def throughput_error(self) -> float:
        """Relative."""
        return abs(self.simulated_per_s / self.real_per_s - 1.0)

    @property
    def first_token_error(self) -> float:
        """Relative, of the 99th percentile."""
        return abs(self.simulated_p99_s / self.real_p99_s - 1.0)


def calibrate(field: Field) -> Figures:
    """How far the simulation is from the real thing: throughput, and the 99th percentile of the time to the first token."""
    seconds, figures = field.effort.calibration_s, Figures()
    for name, rate in list(LOADS.items())[: field.effort.calibration_loads]:
        figures |= _flatten(name, _engines(rate, seconds))
    if field.effort.calibration_loads == len(LOADS):
        figures |= _flatten("llamacpp", _llamacpp(seconds))
    errors = [value for name, value in figures.items() if name.endswith("_error") and "llamacpp" not in name]
    return {**figures, "calibrate_worst_error": max(errors)}


def table(figures: Figures) -> str:
    """For the performance page."""
    lines = ["| run | requests/s | simulated | error | first token P99 s | simulated | error |", "|---|---|---|---|---|---|---|"]
    names = {**{name: f"four engine simulators, {rate:g} requests/s" for name, rate in LOADS.items()}, "llamacpp": "llama.cpp"}
    for name, title in names.items():
        if f"calibrate_{name}_real_per_s" not in figures:
            continue
        cells = []
        for figure in ("per_s", "p99_s"):
            real, simulated = (figures[f"calibrate_{name}_{side}_{figure}"] for side in ("real", "simulated"))
            cells += [f"{real:.3g}", f"{simulated:.3g}", f"{abs(simulated / real - 1.0):.1%}"]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _flatten(name: str, found: Figure) -> Figures:
    figures = {f"calibrate_{name}_{key}": value for key, value in ((key, getattr(found, key)) for key in found.__struct_fields__)}
    errors = {"throughput": found.throughput_error, "first_token": found.first_token_error}
    return {**figures, **{f"calibrate_{name}_{key}_error": error for key, error in errors.items()}}


def _engines(rate: float, seconds: float) -> Figure:
    with ExitStack() as exits:
        sims = [exits.enter_context(EngineSim(model="m", **_SPEED)) for _ in range(_ENGINES)]
        nodes = [node(f"n{at}", sim.address, max_concurrency=_SPEED["max_num_seqs"]) for at, sim in enumerate(sims)]
        stack = exits.enter_context(_stack({"model": "m", "engine": "vllm", "nodes": nodes}, exits))
        lengths = _lengths(rate, seconds, prompt=400, output=60, spread=0.6)
        sent = asyncio.run(_load(stack, lengths, seconds))
        return _compared(stack, sent, seconds, dict(_SPEED))


def _llamacpp(seconds: float) -> Figure:
    """One node with a real model. How quick it is, is measured first: alone, and with every slot in use."""
    with ExitStack() as exits:
        server = exits.enter_context(LlamaServer("--ctx", "8192", "--parallel", str(_LLAMA_SLOTS), alias="m"))
        nodes = [node("n0", server.address, max_seq_len=2048, max_concurrency=_LLAMA_SLOTS)]
        stack = exits.enter_context(_stack({"model": "m", "engine": "llamacpp", "nodes": nodes}, exits))
        alone = [asyncio.run(_load(stack, [(0.0, 150, _LLAMA_OUTPUT)], 0.0, seed=seed))[0] for seed in range(4)][1:]
        together = asyncio.run(_load(stack, [(0.0, 8, 2 * _LLAMA_OUTPUT)] * _LLAMA_SLOTS, 0.0, seed=9))
        prefill = sorted(each.prompt / (each.first or 1.0) for each in alone)[len(alone) // 2]
        one, all_of_them = (sorted(map(_per_token_s, group))[len(group) // 2] for group in (alone, together))
        slowdown = max(0.0, (all_of_them / one - 1.0) / (_LLAMA_SLOTS - 1))
        speed = {"prefill_rate": prefill, "decode_rate": 1.0 / one, "batch_slowdown": slowdown, "max_num_seqs": _LLAMA_SLOTS}
        for path in (stack.folder / "audit").iterdir():  # what was asked so far belongs to no load
            path.unlink()
        stack_again = exits.enter_context(_stack({"model": "m", "engine": "llamacpp", "nodes": nodes}, exits))
        rate = 0.5 / (150 / prefill + _LLAMA_OUTPUT * one)
        sent = asyncio.run(_load(stack_again, _lengths(rate, seconds, prompt=150, output=_LLAMA_OUTPUT, spread=0.4), seconds))
        return _compared(stack_again, sent, seconds, speed)


def _stack(pool: dict[str, Any], exits: ExitStack) -> Stack:
    stack = Stack({})
    exits.callback(stack.stop)
    (stack.folder / "audit.key").write_text("a key of this benchmark, long enough\n")
    audit = {"folder": "audit", "replica": "gw", "keys": {"k": {"file": "audit.key"}}, "flush_ms": 20}
    stack.write({"pools": {"p": pool}, "tenants": [tenant("acme")], "audit": audit, "envoy": {"health_check": False}})
    return stack


def _lengths(rate: float, seconds: float, *, prompt: int, output: int, spread: float) -> list[tuple[float, int, int]]:
    """When, words of the prompt, tokens of the answer."""
    chance, at, found = Random(7), 0.0, []
    while (at := at + chance.expovariate(rate)) < seconds:
        words, tokens = (int(median * chance.lognormvariate(0.0, spread)) for median in (prompt * _BODY_TOKENS, output))
        found.append((at, min(max(words, 4), 4 * prompt), min(max(tokens, 2), 6 * output)))
    return found


async def _load(stack: Stack, lengths: list[tuple[float, int, int]], seconds: float, seed: int = 0) -> list[Sent]:
    """Send them at their times. What has not ended a while after the last second is given up."""
    began = time.monotonic()
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        tasks, sent = [], []
        for number, (at, words, tokens) in enumerate(lengths):
            await asyncio.sleep(max(0.0, began + at - time.monotonic()))
            sent.append(Sent(time.monotonic() - began))
            tasks.append(asyncio.create_task(_ask(session, stack.url, sent[-1], f"{seed}.{number}", words, tokens, began)))
        await asyncio.sleep(max(0.0, began + seconds - time.monotonic()))
        await asyncio.gather(*tasks)
    first = sent[0].at
    return [Sent(each.at - first, _less(each.first, first), _less(each.end, first), each.prompt, each.output) for each in sent]


async def _ask(session: aiohttp.ClientSession, url: str, sent: Sent, name: str, words: int, tokens: int, began: float) -> None:
    text = f"{name} " + " ".join(_WORDS[at % len(_WORDS)] for at in range(words))
    body = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": tokens, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    async with session.post(f"{url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key_of('acme')}"}) as reply:
        assert reply.status == 200, await reply.text()
        async for line in reply.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if sent.first is None and any(choice["delta"].get("content") for choice in event["choices"]):
                sent.first = time.monotonic() - began
            if event.get("usage"):
                sent.prompt, sent.output = event["usage"]["prompt_tokens"], event["usage"]["completion_tokens"]
    sent.end = time.monotonic() - began


def _compared(stack: Stack, sent: list[Sent], seconds: float, speed: dict[str, Any]) -> Figure:
    stack.settled(len(sent))
    folder = stack.folder / "audit"
    stack.eventually(lambda: _recorded(folder) >= len(sent), "every request is in the audit log")
    given = {"seconds": seconds, "warm_up_s": seconds * _WARM_UP, **{f"nodes.p.{name}": value for name, value in speed.items()}}
    simulated = simulate(SimulateOptions(config=stack.config_file, given=given, record=(folder,)), {})
    assert isinstance(simulated, Simulated), str(simulated)
    found: Outcomes = simulated.rows[0].outcomes
    begin = seconds * _WARM_UP
    firsts = [(seconds if each.first is None or each.first > seconds else each.first) - each.at for each in sent if each.at >= begin]
    whole = sum(each.end is not None and begin <= each.end <= seconds for each in sent)
    return Figure(whole / (seconds - begin), found.requests_per_s, Percentiles.of(firsts).p99 or 0.0, found.first_token_s.p99 or 0.0)


def _recorded(folder: Path) -> int:
    return sum(path.read_text().count('"settled"') for path in folder.glob("*.jsonl"))


def _per_token_s(sent: Sent) -> float:
    return ((sent.end or 0.0) - (sent.first or 0.0)) / max(1, sent.output - 1)


def _less(time_s: float | None, by: float) -> float | None:
    return None if time_s is None else time_s - by
