"""Continuous batching: which sequence computes which tokens, and when. Only `step` advances the engine, and only to the time it is given.

An iteration lasts as long as its work: the prefill tokens at the prefill rate, plus one decode pass that grows with the batch. Prompts are
prefilled in chunks beside the decoding sequences; key-value memory is taken in blocks; when it runs out, the youngest running sequence is
preempted and computed anew later. This is vLLM's scheduler (first come, first served, chunked prefill, recompute) without its kernels.

Without single tokens (`every_token=False`) equal iterations are taken in one step: the times are the same, the steps are fewer.
"""

from collections import deque
from dataclasses import dataclass, field

from msgspec import Struct


class EngineSpec(Struct, frozen=True, kw_only=True):
    """The size and speed of the engine."""

    max_model_len: int = 8192
    """Context length: prompt and output of one sequence, in tokens."""
    max_num_seqs: int = 64
    """Maximum sequences in one batch."""
    max_num_batched_tokens: int = 2048
    """Maximum tokens of one iteration, decode first."""
    prefill_rate: float = 8000.0
    """Prompt tokens per second, whole engine."""
    decode_rate: float = 60.0
    """Tokens per second of one sequence that runs alone."""
    batch_slowdown: float = 0.02
    """Share by which each further sequence lengthens the decode pass."""
    kv_tokens: int = 131072
    """Size of the key-value memory in tokens."""
    block_size: int = 16
    """Tokens per block of that memory."""

    def __post_init__(self) -> None:
        if min(self.max_model_len, self.max_num_seqs, self.max_num_batched_tokens, self.block_size) < 1:
            raise ValueError("max_model_len, max_num_seqs, max_num_batched_tokens and block_size are at least 1")
        if min(self.prefill_rate, self.decode_rate) <= 0:
            raise ValueError("prefill_rate and decode_rate are above 0 tokens per second")
        if self.batch_slowdown < 0:
            raise ValueError("batch_slowdown is not negative")
        if self.kv_tokens // self.block_size < -(-self.max_model_len // self.block_size):
            raise ValueError(f"kv_tokens={self.kv_tokens} can't hold one sequence of max_model_len={self.max_model_len}")


@dataclass(slots=True, eq=False)
class SimulatedSequence:
    """One prompt and its output. Times are those given to the engine, in seconds; None: not yet."""

    prompt_tokens: int
    output_tokens: int
    """Tokens to produce; 0 for a pooled (embedding) prompt, which ends with its prefill."""
    cached: int = 0
    """Tokens of the prompt that were in the prefix cache; they need no prefill, unless the sequence is preempted."""
    arrived: float = 0.0
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None
    produced: int = 0
    preemptions: int = 0
    computed: int = field(init=False, repr=False)
    """Tokens whose keys and values are in memory."""
    blocks: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        self.computed = self.cached

    @property
    def is_decoding(self) -> bool:
        """Whether the prompt is computed: each iteration yields one more token."""
        return self.computed >= self.prompt_tokens + self.produced - 1 and self.produced > 0


class Emission(Struct, frozen=True, gc=False):
    """One more token of a sequence, or (`is_last`) its end: a pooled one ends without any token."""

    sequence: SimulatedSequence
    at: float
    gap: float | None
    """Seconds since the sequence's previous token; None for the first."""
    is_last: bool


class SimulatedEngine:
    """The batch, the queue and the memory of one engine. Not thread safe; owns no clock.

    Args:
        spec: Its size and speed.
        every_token: Whether `step` returns every token; False: only first and last ones, with equal iterations taken together.
    """

    def __init__(self, spec: EngineSpec, *, every_token: bool = True) -> None:
        self.spec = spec
        self.running: list[SimulatedSequence] = []
        self.waiting: deque[SimulatedSequence] = deque()
        self.preemptions = 0
        self.iterations = 0
        self.tokens = 0
        """Output tokens so far."""
        self.next_at: float | None = None
        """When the iterations under way end; None: idle."""
        self._total_blocks = spec.kv_tokens // spec.block_size
        self._free_blocks = self._total_blocks
        self._chunks: list[tuple[SimulatedSequence, int]] = []
        """Sequences and tokens of the current iteration."""
        self._every_token = every_token
        self._alike = 1
        """Number of equal iterations in a row."""
        self._decodes_only = False
        self._began = 0.0
        self._iteration_s = 0.0

    @property
    def free_blocks(self) -> int:
        """Blocks of the key-value memory that no running sequence holds."""
        return self._free_blocks

    @property
    def kv_usage(self) -> float:
        """The used share of the key-value memory, 0 to 1."""
        return 1.0 - self._free_blocks / self._total_blocks

    @property
    def iteration_tokens(self) -> int:
        """The tokens of the current iteration."""
        return sum(tokens for _, tokens in self._chunks)

    def submit(self, sequence: SimulatedSequence, now: float) -> None:
        """Queue a sequence; an idle engine starts at once.

        Raises:
            ValueError: the sequence is longer than `max_model_len`, so that it could never run.
        """
        if sequence.prompt_tokens + sequence.output_tokens > self.spec.max_model_len:
            raise ValueError("the sequence is longer than max_model_len")
        sequence.arrived = now
        self.waiting.append(sequence)
        if self.next_at is None:
            self._begin(now)
        elif self._alike > 1:
            self._keep_current(now)

    def abort(self, sequence: SimulatedSequence, now: float) -> bool:
        """Remove a sequence and free its memory at once. False: it had already ended."""
        if self._alike > 1:
            self._keep_current(now)
        if sequence in self.running:
            self.running.remove(sequence)
            self._release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            return False
        sequence.finished = now
        if not self.running and not self.waiting:
            self._chunks = []
            self.next_at = None
        return True

    def step(self, now: float) -> list[Emission]:
        """Finish every iteration that ends by `now`, each at its own time, and start the next. Return the tokens in order."""
        emissions: list[Emission] = []
        while self.next_at is not None and self.next_at <= now:
            at = self.next_at
            self._complete(at, emissions)
            self._begin(at)
        return emissions

    def change_spec(self, spec: EngineSpec, now: float) -> None:
        """Use another spec from the next iteration on. The memory keeps its size."""
        if self._alike > 1:
            self._keep_current(now)
        self.spec = spec

    def catch_up(self, now: float) -> None:
        """Account for the iterations that have ended by now, so that memory and tokens are current."""
        if self._alike > 1:
            self._allocate_blocks(min(int((now - self._began) / self._iteration_s), self._alike - 1))

    def _begin(self, now: float) -> None:
        """Plan an iteration: running sequences first, then as many queued ones as batch, budget and memory allow."""
        budget = self.spec.max_num_batched_tokens
        self._chunks = []
        for sequence in list(self.running):
            if budget > 0 and sequence.blocks > 0:
                budget -= self._schedule(sequence, budget)
        while self.waiting and budget > 0 and len(self.running) < self.spec.max_num_seqs:
            sequence = self.waiting[0]
            if self._count_blocks(sequence.prompt_tokens + sequence.produced) > self._free_blocks:
                break
            self.waiting.popleft()
            self.running.append(sequence)
            if sequence.scheduled is None:
                sequence.scheduled = now
            budget -= self._schedule(sequence, budget)
        if not self._chunks:
            self.next_at = None
            return
        self._began, self._iteration_s = now, self._compute_duration()
        self._alike = 1 if self._every_token else self._count_alike()
        self.next_at = now + self._alike * self._iteration_s

    def _count_alike(self) -> int:
        """Return how many equal iterations follow: while all sequences decode, none ends and memory suffices."""
        if not self._decodes_only:
            return 1
        number = min([sequence.output_tokens - sequence.produced for sequence, _ in self._chunks])
        return min(number, 1 + self._free_blocks // len(self._chunks) * self.spec.block_size)

    def _keep_current(self, now: float) -> None:
        """End a run of equal iterations after the current one, because something changes."""
        self.catch_up(now)
        self._alike = 1
        self.next_at = self._began + self._iteration_s

    def _allocate_blocks(self, number: int) -> None:
        """Account for iterations that have ended, none of them the last of the run."""
        if number <= 0:
            return
        self._began += number * self._iteration_s
        self._alike -= number
        self.iterations += number
        for sequence, _ in self._chunks:
            if sequence.finished is None:
                sequence.computed += number
                sequence.produced += number
                sequence.last_token = self._began
                self.tokens += number
                blocks = self._count_blocks(sequence.computed + 1)
                self._free_blocks -= blocks - sequence.blocks
                sequence.blocks = blocks

    def _schedule(self, sequence: SimulatedSequence, budget: int) -> int:
        """Allocate a sequence's tokens and memory of this iteration. Return the tokens: 0 if the sequence itself was preempted."""
        tokens = min(budget, max(1, sequence.prompt_tokens + sequence.produced - sequence.computed))
        needed = self._count_blocks(sequence.computed + tokens) - sequence.blocks
        while needed > self._free_blocks:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return 0
        self._free_blocks -= needed
        sequence.blocks += needed
        self._chunks.append((sequence, tokens))
        return tokens

    def _preempt(self, victim: SimulatedSequence) -> None:
        """Preempt a running sequence: it loses its memory, moves to the head of the queue and is computed anew."""
        self.running.remove(victim)
        self._chunks = [chunk for chunk in self._chunks if chunk[0] is not victim]
        self._release(victim)
        victim.computed = 0
        victim.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(victim)

    def _compute_duration(self) -> float:
        decoding = tokens = 0
        for sequence, chunk in self._chunks:
            tokens += chunk
            decoding += sequence.is_decoding
        self._decodes_only = decoding == len(self._chunks)
        seconds = (tokens - decoding) / self.spec.prefill_rate
        if decoding:
            seconds += (1.0 + self.spec.batch_slowdown * (decoding - 1)) / self.spec.decode_rate
        return seconds

    def _complete(self, at: float, emissions: list[Emission]) -> None:
        """Finish the current iterations: every sequence that is computed to its end has a new token."""
        self._allocate_blocks(self._alike - 1)
        self.iterations += 1
        for sequence, tokens in self._chunks:
            if sequence.finished is not None:
                continue
            sequence.computed += tokens
            if sequence.computed < sequence.prompt_tokens + sequence.produced:
                continue
            if self._every_token or not sequence.produced or sequence.produced + 1 >= sequence.output_tokens:
                emissions.append(self._emit(sequence, at))
            else:
                sequence.produced += 1
                sequence.last_token = at
                self.tokens += 1

    def _emit(self, sequence: SimulatedSequence, at: float) -> Emission:
        gap = None if sequence.last_token is None else at - sequence.last_token
        if sequence.output_tokens:
            sequence.produced += 1
            self.tokens += 1
            sequence.last_token = at
            if sequence.first_token is None:
                sequence.first_token = at
        is_last = sequence.produced >= sequence.output_tokens
        if is_last:
            sequence.finished = at
            self.running.remove(sequence)
            self._release(sequence)
        return Emission(sequence, at, gap, is_last)

    def _release(self, sequence: SimulatedSequence) -> None:
        self._free_blocks += sequence.blocks
        sequence.blocks = 0

    def _count_blocks(self, tokens: int) -> int:
        return -(-tokens // self.spec.block_size)
