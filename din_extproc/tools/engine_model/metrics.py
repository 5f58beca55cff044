"""The metrics page of the engine, with vLLM's exact names. It counts and renders, and has no clock."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from din_extproc.tools.engine_model.engine import Emission, SimulatedEngine, SimulatedSequence
from din_extproc.tools.engine_model.prefix_cache import PrefixCache

_SECONDS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
_FIRST = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_GAPS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_TOKENS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0, 20000.0, 50000.0, 100000.0)
_BATCH = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)

HISTOGRAMS: Mapping[str, tuple[str, Sequence[float]]] = {
    "request_prompt_tokens": ("Number of prefill tokens processed.", _TOKENS),
    "request_generation_tokens": ("Number of generation tokens processed.", _TOKENS),
    "iteration_tokens_total": ("Histogram of number of tokens per engine_step.", _BATCH),
    "request_max_num_generation_tokens": ("Histogram of maximum number of requested generation tokens.", _TOKENS),
    "request_params_n": ("Histogram of the n request parameter.", (1.0, 2.0, 5.0, 10.0, 20.0)),
    "request_params_max_tokens": ("Histogram of the max_tokens request parameter.", _TOKENS),
    "time_to_first_token_seconds": ("Histogram of time to first token in seconds.", _FIRST),
    "inter_token_latency_seconds": ("Histogram of inter-token latency in seconds.", _GAPS),
    "request_time_per_output_token_seconds": ("Histogram of time_per_output_token_seconds per request.", _GAPS),
    "e2e_request_latency_seconds": ("Histogram of e2e request latency in seconds.", _SECONDS),
    "request_queue_time_seconds": ("Histogram of time spent in WAITING phase for request.", _SECONDS),
    "request_inference_time_seconds": ("Histogram of time spent in RUNNING phase for request.", _SECONDS),
    "request_prefill_time_seconds": ("Histogram of time spent in PREFILL phase for request.", _SECONDS),
    "request_decode_time_seconds": ("Histogram of time spent in DECODE phase for request.", _SECONDS),
    "request_num_preemptions": ("Histogram of the number of times a request was preempted.", (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)),
    "request_prefill_kv_computed_tokens": ("Histogram of new KV tokens computed during prefill.", _TOKENS),
}
FINISHED_REASONS = ("stop", "length", "abort", "error", "repetition")


class Histogram:
    """Observations by bucket."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class EngineMetrics:
    """The counters and histograms of one engine."""

    def __init__(self, model_name: str, started: float) -> None:
        self._labels = f'engine="0",model_name="{model_name}"'
        self._created = started
        """Start time for the `_created` samples, seconds since the epoch."""
        self.histograms = {name: Histogram(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
        self.finished = dict.fromkeys(FINISHED_REASONS, 0)
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.prefix_cache = PrefixCache()

    def on_request(self, n: int, max_tokens: int) -> None:
        """Count a generation request."""
        self.histograms["request_params_n"].observe(n)
        self.histograms["request_params_max_tokens"].observe(max_tokens)

    def on_tokens(self, emissions: Sequence[Emission]) -> None:
        """Count emitted tokens."""
        gaps = self.histograms["inter_token_latency_seconds"]
        for emission in emissions:
            if emission.gap is not None:
                gaps.observe(emission.gap)
                self.generation_tokens += 1
            else:
                sequence = emission.sequence
                self.prompt_tokens += sequence.prompt_tokens
                self.generation_tokens += sequence.produced
                self.histograms["time_to_first_token_seconds"].observe(emission.at - sequence.arrived)

    def on_iteration(self, tokens: int) -> None:
        """Count an iteration and its tokens."""
        self.histograms["iteration_tokens_total"].observe(tokens)

    def on_end(self, sequence: SimulatedSequence, reason: str) -> None:
        """Count the end of a sequence; `reason` is one of FINISHED_REASONS, a tool call counts as `stop`."""
        reason = reason if reason in self.finished else "stop"
        self.finished[reason] += 1
        if reason == "abort" or sequence.finished is None:
            return
        scheduled = sequence.arrived if sequence.scheduled is None else sequence.scheduled
        first = sequence.finished if sequence.first_token is None else sequence.first_token
        decode = sequence.finished - first
        values = {
            "request_prompt_tokens": sequence.prompt_tokens,
            "request_generation_tokens": sequence.produced,
            "request_max_num_generation_tokens": sequence.produced,
            "request_time_per_output_token_seconds": decode / max(1, sequence.produced - 1),
            "e2e_request_latency_seconds": sequence.finished - sequence.arrived,
            "request_queue_time_seconds": scheduled - sequence.arrived,
            "request_inference_time_seconds": sequence.finished - scheduled,
            "request_prefill_time_seconds": first - scheduled,
            "request_decode_time_seconds": decode,
            "request_num_preemptions": sequence.preemptions,
            "request_prefill_kv_computed_tokens": sequence.prompt_tokens - sequence.cached,
        }
        for name, value in values.items():
            self.histograms[name].observe(value)

    def render(self, engine: SimulatedEngine) -> str:
        """Return the current Prometheus text."""
        waiting, running = len(engine.waiting), len(engine.running)
        lines: list[str] = []
        self._render_gauge(lines, "num_requests_running", "Number of requests in model execution batches.", {"": running})
        self._render_gauge(lines, "num_requests_waiting", "Number of requests waiting to be processed.", {"": waiting})
        by_reason = {',reason="capacity"': waiting, ',reason="deferred"': 0}
        self._render_gauge(lines, "num_requests_waiting_by_reason", "Number of waiting requests by reason.", by_reason)
        states = {f',sleep_state="{state}"': float(state == "awake") for state in ("awake", "weights_offloaded", "discard_all")}
        self._render_gauge(lines, "engine_sleep_state", "Engine sleep state.", states)
        self._render_gauge(lines, "kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", {"": engine.kv_usage})
        cache = self.prefix_cache
        self._render_counter(
            lines, "prefix_cache_queries", "Prefix cache queries, in terms of number of queried tokens.", {"": cache.queries}
        )
        self._render_counter(lines, "prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens.", {"": cache.hits})
        self._render_counter(lines, "num_preemptions", "Cumulative number of preemption from the engine.", {"": engine.preemptions})
        self._render_counter(lines, "prompt_tokens", "Number of prefill tokens processed.", {"": self.prompt_tokens})
        self._render_counter(lines, "generation_tokens", "Number of generation tokens processed.", {"": self.generation_tokens})
        reasons = {f',finished_reason="{reason}"': count for reason, count in self.finished.items()}
        self._render_counter(lines, "request_success", "Count of successfully processed requests.", reasons)
        for name, histogram in self.histograms.items():
            self._render_histogram(lines, name, histogram)
        spec = engine.spec
        config = f',block_size="{spec.block_size}",num_gpu_blocks="{spec.kv_tokens // spec.block_size}"'
        self._render_gauge(lines, "cache_config_info", "Information of the LLMEngine CacheConfig", {config: 1})
        return "\n".join(lines) + "\n"

    def _render_gauge(self, lines: list[str], name: str, text: str, samples: Mapping[str, float]) -> None:
        lines += [f"# HELP vllm:{name} {text}", f"# TYPE vllm:{name} gauge"]
        lines += [f"vllm:{name}{{{self._labels}{extra}}} {float(value)}" for extra, value in samples.items()]

    def _render_counter(self, lines: list[str], name: str, text: str, samples: Mapping[str, float]) -> None:
        lines += [f"# HELP vllm:{name}_total {text}", f"# TYPE vllm:{name}_total counter"]
        lines += [f"vllm:{name}_total{{{self._labels}{extra}}} {float(value)}" for extra, value in samples.items()]
        lines += [f"# HELP vllm:{name}_created {text}", f"# TYPE vllm:{name}_created gauge"]
        lines += [f"vllm:{name}_created{{{self._labels}{extra}}} {self._created}" for extra in samples]

    def _render_histogram(self, lines: list[str], name: str, histogram: Histogram) -> None:
        text = HISTOGRAMS[name][0]
        lines += [f"# HELP vllm:{name} {text}", f"# TYPE vllm:{name} histogram"]
        seen = 0
        for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
            seen += count
            bound_text = "+Inf" if bound == float("inf") else str(float(bound))
            lines.append(f'vllm:{name}_bucket{{engine="0",le="{bound_text}",{self._labels.partition(",")[2]}}} {float(seen)}')
        lines += [f"vllm:{name}_count{{{self._labels}}} {float(seen)}", f"vllm:{name}_sum{{{self._labels}}} {histogram.total}"]
        lines += [f"# HELP vllm:{name}_created {text}", f"# TYPE vllm:{name}_created gauge"]
        lines.append(f"vllm:{name}_created{{{self._labels}}} {self._created}")
