"""Reads an engine's load from its metrics page: one row per engine, and only the samples that it names.

Work is bounded: a page of any bytes gives numbers or None, and an impossible number is None.

Samples are located by `bytes.find`, so a page of 60 kB costs a third of a millisecond instead of thirty for a full parse. Several
samples of
one name (data-parallel ranks, models of a Triton) are added up if they are counts and averaged if they are shares.
"""

import math
import re
from collections.abc import Callable, Iterator
from contextlib import suppress

import msgspec
from msgspec import Struct

from din_extproc.domain.membership import Heartbeat, InstanceLoad
from din_extproc.southbound.listing import ModelNames

_HALF_LIFE_S = 300.0
_CACHE_HALF_LIFE_S = 30.0
"""Of the share of prompt tokens from the prefix cache."""
PAGE_LIMIT = 4 << 20
"""The largest part of a metrics page that is read, in bytes."""

_LABELLED = re.compile(rb'\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\}')
_VALUE = re.compile(rb"[ \t]+([^ \t\n\r]+)")


class EngineLoad(Struct, frozen=True, kw_only=True):
    """The load from one metrics page. None: the engine does not report it."""

    waiting: int | None = None
    running: int | None = None
    kv_cache_usage: float | None = None
    """0 to 1."""
    tokens_in_use: int | None = None
    prompt_tokens: float | None = None
    """Total since the engine's start."""
    prompt_seconds: float | None = None
    """Time spent on `prompt_tokens`, if the engine measures it; otherwise the time between two pages is used."""
    output_tokens: float | None = None
    """Total since the engine's start."""
    queues: tuple[InstanceLoad, ...] = ()
    """By model, under the engine's names, if it serves several."""
    cache_queries: float | None = None
    """Total of prompt tokens that were looked up in the prefix cache."""
    cache_hits: float | None = None
    """Total of those that it had."""
    cached_share: float | None = None
    """The recent share of such tokens, if the engine measures it itself, 0 to 1."""
    active_adapters: tuple[str, ...] = ()
    """The adapters (LoRA) of running and waiting requests."""
    adapter_slots: int | None = None
    """Adapters that the engine can have loaded at once."""


class Rates(Struct, frozen=True):
    """Peak rates of an engine in tokens per second, and what its prefix cache brings. None: not measured yet."""

    prefill: float | None = None
    decode: float | None = None
    cached_share: float | None = None
    """The share of prompt tokens from the prefix cache, recent ones counting more."""

    def update(self, before: EngineLoad, after: EngineLoad, seconds: float) -> "Rates":
        """Return the rates updated with two pages that are so many seconds apart.

        A lightly loaded node does not reach its peak: the higher rate is kept, and decays by half in five minutes of work, never while the
        engine idles.
        """
        prompt = _increase(before.prompt_tokens, after.prompt_tokens)
        spent = _increase(before.prompt_seconds, after.prompt_seconds) if after.prompt_seconds is not None else seconds
        output = _increase(before.output_tokens, after.output_tokens)
        return Rates(
            _peak(self.prefill, prompt, spent, seconds),
            _peak(self.decode, output, seconds, seconds),
            self._cached_share(before, after, seconds),
        )

    def _cached_share(self, before: EngineLoad, after: EngineLoad, seconds: float) -> float | None:
        if after.cached_share is not None:
            return after.cached_share
        queries, hits = _increase(before.cache_queries, after.cache_queries), _increase(before.cache_hits, after.cache_hits)
        if not queries or hits is None:
            return self.cached_share
        share, known = min(1.0, hits / queries), self.cached_share
        return share if known is None else share + (known - share) * 0.5 ** (seconds / _CACHE_HALF_LIFE_S)


class LoadSource(Struct, frozen=True):
    """The path, port and parser of an engine's metrics page."""

    path: str
    read: Callable[[bytes], EngineLoad]
    port: int | None = None
    """The metrics port if it differs from the inference port."""


def add_load(load: EngineLoad, rates: Rates, beat: Heartbeat) -> Heartbeat:
    """Return the heartbeat with the engine's load and rates."""
    return msgspec.structs.replace(
        beat,
        waiting=load.waiting,
        running=load.running,
        kv_cache_usage=load.kv_cache_usage,
        tokens_in_use=load.tokens_in_use,
        prefill_rate=rates.prefill,
        decode_rate=rates.decode,
        cached_share=rates.cached_share,
        instances=load.queues,
        active_adapters=load.active_adapters,
        adapter_slots=load.adapter_slots,
    )


ADAPTER_ENGINES = frozenset({"vllm", "sglang"})
"""Engines that load adapters (LoRA) beside their model and choose one by the name of a request's model."""


def add_adapters(names: ModelNames | None, engine: str, beat: Heartbeat) -> Heartbeat:
    """Return the heartbeat with the adapters that the engine lists, if it is one that has adapters and listed its models."""
    if names is None or engine not in ADAPTER_ENGINES:
        return beat
    return msgspec.structs.replace(beat, adapters=tuple(sorted(names.adapters)[:MAX_ADAPTERS]))


def _increase(before: float | None, after: float | None) -> float | None:
    """Return a counter's increase; a counter that fell was reset."""
    if before is None or after is None:
        return None
    return after - before if after >= before else after


def _peak(known: float | None, tokens: float | None, spent: float | None, seconds: float) -> float | None:
    if not tokens or not spent or seconds <= 0:
        return known
    measured = tokens / spent
    return measured if known is None else max(measured, known * 0.5 ** (seconds / _HALF_LIFE_S))


def _samples(page: bytes, name: bytes, label: bytes = b"") -> Iterator[tuple[bytes, float]]:
    """Yield labels and value of each sample of exactly this name with `label`; values that are not numbers are skipped."""
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
    """Return the sum of the first of these names on the page; None if it is missing, negative or not finite."""
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
    """Return the mean of the first of these names on the page, from 0 to 1."""
    for name in names:
        values = [value for _, value in _samples(page, name, label)]
        if values:
            mean = sum(values) / len(values)
            return min(mean, 1.0) if math.isfinite(mean) and mean >= 0 else None
    return None


def _queues(page: bytes, waiting: bytes, running: bytes, label: bytes) -> tuple[InstanceLoad, ...]:
    """Return the queue of each model on the page, if there are several."""
    named = re.compile(rb'(?:^|,)%b="([^"\\]{1,200})"' % label)
    found: dict[str, dict[str, int]] = {}
    for field, metric in (("waiting", waiting), ("running", running)):
        for labels, value in _samples(page, metric) if metric else ():
            model = named.search(labels)
            if model is not None and math.isfinite(value) and value >= 0:
                queue = found.setdefault(model[1].decode("utf-8", "replace"), {})
                queue[field] = queue.get(field, 0) + round(value)
    return tuple(InstanceLoad(model, **queue) for model, queue in found.items()) if len(found) > 1 else ()


_ADAPTERS = re.compile(rb'(?:^|,)(running_lora_adapters|waiting_lora_adapters|max_lora)="([^"\\]{0,65536})"')
MAX_ADAPTERS = 1024
"""The largest number of adapters of one engine that are taken note of."""


def _read_adapters(page: bytes) -> tuple[tuple[str, ...], int | None]:
    """Return the adapters of running and waiting requests and the slots, from vLLM's newest sample: each change adds one to the page."""
    samples = [(value, labels) for labels, value in _samples(page, b"vllm:lora_requests_info") if math.isfinite(value)]
    if not samples:
        return (), None
    found = {label: value.decode("utf-8", "replace") for label, value in _ADAPTERS.findall(max(samples)[1])}
    listed = f"{found.get(b'running_lora_adapters', '')},{found.get(b'waiting_lora_adapters', '')}".split(",")
    slots = found.get(b"max_lora", "")
    known = slots.isascii() and slots.isdigit() and 0 < int(slots[:9]) <= MAX_ADAPTERS
    return tuple(dict.fromkeys(filter(None, map(str.strip, listed))))[:MAX_ADAPTERS], int(slots) if known else None


_BLOCKS = re.compile(rb'(?:^|,)(block_size|num_gpu_blocks)="(\d{1,12})"')


def _vllm(page: bytes) -> EngineLoad:
    """Read vLLM's page. Prefill is measured over finished requests: both sums grow when one ends."""
    usage = _share(page, b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc")
    room = 0
    for labels, _ in _samples(page, b"vllm:cache_config_info"):
        blocks = dict(_BLOCKS.findall(labels))
        room += int(blocks.get(b"block_size", 0)) * int(blocks.get(b"num_gpu_blocks", 0))
    spent = _total(page, b"vllm:request_prefill_time_seconds_sum")
    finished = _total(page, b"vllm:request_prompt_tokens_sum")
    active, slots = _read_adapters(page)
    return EngineLoad(
        queues=_queues(page, b"vllm:num_requests_waiting", b"vllm:num_requests_running", b"model_name"),
        waiting=_count(page, b"vllm:num_requests_waiting"),
        running=_count(page, b"vllm:num_requests_running"),
        kv_cache_usage=usage,
        tokens_in_use=round(usage * room) if usage is not None and room else None,
        prompt_tokens=finished if spent is not None else _total(page, b"vllm:prompt_tokens_total"),
        prompt_seconds=spent if finished is not None else None,
        output_tokens=_total(page, b"vllm:generation_tokens_total"),
        cache_queries=_total(page, b"vllm:prefix_cache_queries_total", b"vllm:gpu_prefix_cache_queries_total"),
        cache_hits=_total(page, b"vllm:prefix_cache_hits_total", b"vllm:gpu_prefix_cache_hits_total"),
        active_adapters=active,
        adapter_slots=slots,
    )


def _sglang(page: bytes) -> EngineLoad:
    return EngineLoad(
        queues=_queues(page, b"sglang:num_queue_reqs", b"sglang:num_running_reqs", b"model_name"),
        waiting=_count(page, b"sglang:num_queue_reqs"),
        running=_count(page, b"sglang:num_running_reqs"),
        kv_cache_usage=_share(page, b"sglang:token_usage"),
        tokens_in_use=_count(page, b"sglang:num_used_tokens"),
        cached_share=_share(page, b"sglang:cache_hit_rate"),
        prompt_tokens=_total(page, b"sglang:prompt_tokens_total"),
        output_tokens=_total(page, b"sglang:generation_tokens_total"),
    )


def _tensorrt_llm(page: bytes) -> EngineLoad:
    """Read trtllm-serve's page."""
    return EngineLoad(
        waiting=_count(page, b"trtllm_num_requests_waiting"),
        running=_count(page, b"trtllm_num_requests_running"),
        kv_cache_usage=_share(page, b"trtllm_kv_cache_utilization"),
    )


def _triton(page: bytes) -> EngineLoad:
    """Read Triton's page, with the metrics of its TensorRT-LLM backend if it has one."""
    requests, blocks = b"nv_trt_llm_request_metrics", b"nv_trt_llm_kv_cache_block_metrics"
    waiting = _count(page, requests, label=b'request_type="waiting"')
    return EngineLoad(
        queues=_queues(page, b"nv_inference_pending_request_count", b"", b"model"),
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
    """Read the page of llama.cpp's server, which needs `--metrics`."""
    return EngineLoad(
        waiting=_count(page, b"llamacpp:requests_deferred"),
        running=_count(page, b"llamacpp:requests_processing"),
        prompt_tokens=_total(page, b"llamacpp:prompt_tokens_total"),
        prompt_seconds=_total(page, b"llamacpp:prompt_seconds_total"),
        output_tokens=_total(page, b"llamacpp:tokens_predicted_total"),
    )


def _no_load(_page: bytes) -> EngineLoad:
    """Return an empty load: the page lists models only."""
    return EngineLoad()


SOURCES: dict[str, LoadSource] = {
    "vllm": LoadSource("/metrics", _vllm),
    "sglang": LoadSource("/metrics", _sglang),
    "tensorrt_llm": LoadSource("/prometheus/metrics", _tensorrt_llm),
    "triton": LoadSource("/metrics", _triton, port=8002),
    "tgi": LoadSource("/metrics", _tgi),
    "llamacpp": LoadSource("/metrics", _llamacpp),
    "ollama": LoadSource("/api/ps", _no_load),
}
"""By the engine's name in the configuration."""
