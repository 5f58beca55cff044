"""How busy an engine is, read from its own metrics page: one row per engine, and only the few samples that the row names.

Rule: bounded work and no surprise: a page of any bytes gives numbers or None, and a number that can't be true is None.

The names are found by `bytes.find`, so a page of 60 kB costs a third of a millisecond, not the thirty of a full parse. Samples of one
name are several when an engine has several parts (data-parallel ranks, models of a Triton): counts are added up, shares are averaged.
"""

import math
import re
from collections.abc import Callable, Iterator
from contextlib import suppress

import msgspec
from msgspec import Struct

from din_extproc.domain.membership import Heartbeat

_HALF_LIFE_S = 300.0
PAGE_LIMIT = 4 << 20
"""Bytes of a metrics page that are read at most."""

_LABELLED = re.compile(rb'\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\}')
_VALUE = re.compile(rb"[ \t]+([^ \t\n\r]+)")


class EngineLoad(Struct, frozen=True, kw_only=True):
    """What one page says. None: the engine does not tell."""

    waiting: int | None = None
    running: int | None = None
    kv_cache_usage: float | None = None
    """0 to 1."""
    tokens_in_use: int | None = None
    prompt_tokens: float | None = None
    """Since the engine's start."""
    prompt_seconds: float | None = None
    """Spent on `prompt_tokens`, where the engine measures it; else they are divided by the time between two pages."""
    output_tokens: float | None = None
    """Since the engine's start."""


class Rates(Struct, frozen=True):
    """What an engine has shown it can do, in tokens per second. None: it was not seen at work yet."""

    prefill: float | None = None
    decode: float | None = None

    def seen(self, before: EngineLoad, after: EngineLoad, seconds: float) -> "Rates":
        """These rates, and what two pages so many seconds apart add to them.

        A node that had little to do did not show what it can: the higher figure stays, and loses half of its weight in five minutes of
        work, never while the engine idles.
        """
        prompt = _difference(before.prompt_tokens, after.prompt_tokens)
        spent = _difference(before.prompt_seconds, after.prompt_seconds) if after.prompt_seconds is not None else seconds
        output = _difference(before.output_tokens, after.output_tokens)
        return Rates(_kept(self.prefill, prompt, spent, seconds), _kept(self.decode, output, seconds, seconds))


class LoadSource(Struct, frozen=True):
    """Where an engine keeps its metrics page, and how it is read."""

    path: str
    read: Callable[[bytes], EngineLoad]
    port: int | None = None
    """When it is another than that of inference."""


def told(load: EngineLoad, rates: Rates, beat: Heartbeat) -> Heartbeat:
    """A heartbeat with the engine's numbers in it."""
    return msgspec.structs.replace(
        beat,
        waiting=load.waiting,
        running=load.running,
        kv_cache_usage=load.kv_cache_usage,
        tokens_in_use=load.tokens_in_use,
        prefill_rate=rates.prefill,
        decode_rate=rates.decode,
    )


def _difference(before: float | None, after: float | None) -> float | None:
    """How much a counter grew; one that fell began anew."""
    if before is None or after is None:
        return None
    return after - before if after >= before else after


def _kept(known: float | None, tokens: float | None, spent: float | None, seconds: float) -> float | None:
    if not tokens or not spent or seconds <= 0:
        return known
    measured = tokens / spent
    return measured if known is None else max(measured, known * 0.5 ** (seconds / _HALF_LIFE_S))


def _samples(page: bytes, name: bytes, label: bytes = b"") -> Iterator[tuple[bytes, float]]:
    """Labels and value of each sample of exactly this name whose labels hold `label`; what is not a number is left out."""
    at = 0 if page.startswith(name) else page.find(b"\n" + name) + 1
    while at or page.startswith(name):
        end = at + len(name)
        labels = _LABELLED.match(page, end)
        value = _VALUE.match(page, labels.end() if labels else end)
        if value is not None and (not label or (labels is not None and label in labels[1].split(b","))):
            with suppress(ValueError):
                yield labels[1] if labels else b"", float(value[1])
        found = page.find(b"\n" + name, end)
        if found < 0:
            return
        at = found + 1


def _total(page: bytes, *names: bytes, label: bytes = b"") -> float | None:
    """The sum of the first of these names that the page has. None: it has none, or no sum that counts things."""
    for name in names:
        values = [value for _, value in _samples(page, name, label)]
        if values:
            total = sum(values)
            return total if math.isfinite(total) and total >= 0 else None
    return None


def _count(page: bytes, *names: bytes, label: bytes = b"") -> int | None:
    total = _total(page, *names, label=label)
    return None if total is None else round(total)


def _share(page: bytes, *names: bytes, label: bytes = b"") -> float | None:
    """The mean of the first of these names that the page has, 0 to 1."""
    for name in names:
        values = [value for _, value in _samples(page, name, label)]
        if values:
            mean = sum(values) / len(values)
            return min(mean, 1.0) if math.isfinite(mean) and mean >= 0 else None
    return None


_BLOCKS = re.compile(rb'(?:^|,)(block_size|num_gpu_blocks)="(\d{1,12})"')


def _vllm(page: bytes) -> EngineLoad:
    """For vLLM. Prefill is measured over finished requests: both sums grow when one ends."""
    usage = _share(page, b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc")
    room = 0
    for labels, _ in _samples(page, b"vllm:cache_config_info"):
        blocks = dict(_BLOCKS.findall(labels))
        room += int(blocks.get(b"block_size", 0)) * int(blocks.get(b"num_gpu_blocks", 0))
    spent = _total(page, b"vllm:request_prefill_time_seconds_sum")
    finished = _total(page, b"vllm:request_prompt_tokens_sum")
    return EngineLoad(
        waiting=_count(page, b"vllm:num_requests_waiting"),
        running=_count(page, b"vllm:num_requests_running"),
        kv_cache_usage=usage,
        tokens_in_use=round(usage * room) if usage is not None and room else None,
        prompt_tokens=finished if spent is not None else _total(page, b"vllm:prompt_tokens_total"),
        prompt_seconds=spent if finished is not None else None,
        output_tokens=_total(page, b"vllm:generation_tokens_total"),
    )


def _sglang(page: bytes) -> EngineLoad:
    return EngineLoad(
        waiting=_count(page, b"sglang:num_queue_reqs"),
        running=_count(page, b"sglang:num_running_reqs"),
        kv_cache_usage=_share(page, b"sglang:token_usage"),
        tokens_in_use=_count(page, b"sglang:num_used_tokens"),
        prompt_tokens=_total(page, b"sglang:prompt_tokens_total"),
        output_tokens=_total(page, b"sglang:generation_tokens_total"),
    )


def _tensorrt_llm(page: bytes) -> EngineLoad:
    """trtllm-serve."""
    return EngineLoad(
        waiting=_count(page, b"trtllm_num_requests_waiting"),
        running=_count(page, b"trtllm_num_requests_running"),
        kv_cache_usage=_share(page, b"trtllm_kv_cache_utilization"),
    )


def _triton(page: bytes) -> EngineLoad:
    """Triton, with the numbers of its TensorRT-LLM backend where it has that."""
    requests, blocks = b"nv_trt_llm_request_metrics", b"nv_trt_llm_kv_cache_block_metrics"
    waiting = _count(page, requests, label=b'request_type="waiting"')
    return EngineLoad(
        waiting=_count(page, b"nv_inference_pending_request_count") if waiting is None else waiting,
        running=_count(page, requests, label=b'request_type="scheduled"'),
        kv_cache_usage=_share(page, blocks, label=b'kv_cache_block_type="fraction"'),
    )


def _tgi(page: bytes) -> EngineLoad:
    return EngineLoad(
        waiting=_count(page, b"tgi_queue_size"),
        running=_count(page, b"tgi_batch_current_size"),
        prompt_tokens=_total(page, b"tgi_request_input_length_sum"),
        output_tokens=_total(page, b"tgi_request_generated_tokens_sum"),
    )


def _llamacpp(page: bytes) -> EngineLoad:
    """llama.cpp's server. `--metrics` must be on."""
    return EngineLoad(
        waiting=_count(page, b"llamacpp:requests_deferred"),
        running=_count(page, b"llamacpp:requests_processing"),
        prompt_tokens=_total(page, b"llamacpp:prompt_tokens_total"),
        prompt_seconds=_total(page, b"llamacpp:prompt_seconds_total"),
        output_tokens=_total(page, b"llamacpp:tokens_predicted_total"),
    )


def _ollama(_page: bytes) -> EngineLoad:
    """`/api/ps` tells which models are loaded, not how busy they are."""
    return EngineLoad()


SOURCES: dict[str, LoadSource] = {
    "vllm": LoadSource("/metrics", _vllm),
    "sglang": LoadSource("/metrics", _sglang),
    "tensorrt_llm": LoadSource("/prometheus/metrics", _tensorrt_llm),
    "triton": LoadSource("/metrics", _triton, port=8002),
    "tgi": LoadSource("/metrics", _tgi),
    "llamacpp": LoadSource("/metrics", _llamacpp),
    "ollama": LoadSource("/api/ps", _ollama),
}
"""By the engine's name in the configuration."""
