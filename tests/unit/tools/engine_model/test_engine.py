"""Continuous batching in virtual time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from din_extproc.tools.engine_model.engine import Emission, EngineSpec, SimulatedEngine, SimulatedSequence

SPEC = EngineSpec(max_model_len=1000, max_num_seqs=4, prefill_rate=1000, decode_rate=100, batch_slowdown=0.1, kv_tokens=4000)


def run(engine: SimulatedEngine, until: float = 1e9) -> list[Emission]:
    """Step from event to event until idle or `until`."""
    emissions: list[Emission] = []
    while engine.next_at is not None and engine.next_at <= until:
        emissions += engine.step(engine.next_at)
    return emissions


def test_the_first_token_comes_after_the_prefill_and_the_others_at_the_decode_rate():
    engine = SimulatedEngine(SPEC)
    sequence = SimulatedSequence(prompt_tokens=200, output_tokens=5)
    engine.submit(sequence, 10.0)
    times = [emission.at for emission in run(engine)]
    assert times == pytest.approx([10.2, 10.21, 10.22, 10.23, 10.24])
    assert sequence.finished == times[-1]
    assert sequence.produced == 5


def test_a_fuller_batch_is_slower_for_each_and_quicker_for_all():
    def seconds(streams: int) -> float:
        engine = SimulatedEngine(SPEC)
        for _ in range(streams):
            engine.submit(SimulatedSequence(1, 100), 0.0)
        return run(engine)[-1].at

    assert seconds(1) < seconds(4) < 4 * seconds(1)


def test_no_more_sequences_run_than_the_batch_holds_and_the_first_come_is_served_first():
    engine = SimulatedEngine(SPEC)
    sequences = [SimulatedSequence(10, 20) for _ in range(6)]
    for sequence in sequences:
        engine.submit(sequence, 0.0)
    engine.step(engine.next_at)
    assert (len(engine.running), len(engine.waiting)) == (4, 2)
    run(engine)
    assert all(sequence.produced == 20 for sequence in sequences)
    assert sequences[4].scheduled >= sequences[0].finished


def test_a_pooled_prompt_ends_with_its_prefill():
    engine = SimulatedEngine(SPEC)
    sequence = SimulatedSequence(prompt_tokens=500, output_tokens=0)
    engine.submit(sequence, 0.0)
    (emission,) = run(engine)
    assert emission.is_last
    assert (sequence.produced, sequence.finished) == (0, pytest.approx(0.5))


def test_a_long_prompt_is_prefilled_in_chunks_beside_a_running_stream():
    engine = SimulatedEngine(EngineSpec(max_model_len=4000, max_num_batched_tokens=100, prefill_rate=1000, decode_rate=100, kv_tokens=8000))
    short, long = SimulatedSequence(10, 50), SimulatedSequence(1000, 1)
    engine.submit(short, 0.0)
    run(engine, until=0.05)
    engine.submit(long, 0.05)
    emissions = run(engine)
    before = [emission for emission in emissions if emission.sequence is short and emission.at < long.first_token]
    assert len(before) >= 5, "the stream went on while the prompt was read"


def test_memory_runs_out_and_the_youngest_is_preempted_and_finishes_later():
    engine = SimulatedEngine(EngineSpec(max_model_len=100, max_num_seqs=4, kv_tokens=128, block_size=16))
    old, young = SimulatedSequence(50, 40), SimulatedSequence(50, 40)
    engine.submit(old, 0.0)
    engine.submit(young, 0.0)
    highest = 0.0
    emissions: list[Emission] = []
    while engine.next_at is not None:
        emissions += engine.step(engine.next_at)
        highest = max(highest, engine.kv_usage)
    assert (old.preemptions, young.preemptions) == (0, 1)
    assert engine.preemptions == 1
    assert highest == 1.0
    assert (old.produced, young.produced) == (40, 40)
    assert engine.kv_usage == 0.0
    assert old.finished < young.finished


def test_an_aborted_sequence_gives_back_its_slot_and_memory_at_once():
    engine = SimulatedEngine(SPEC)
    sequences = [SimulatedSequence(100, 500) for _ in range(5)]
    for sequence in sequences:
        engine.submit(sequence, 0.0)
    run(engine, until=1.0)
    assert engine.abort(sequences[0], 1.0)
    assert len(engine.running) == 3
    produced = sequences[0].produced
    run(engine, until=1.5)
    assert sequences[4] in engine.running
    assert sequences[0].produced == produced
    assert not engine.abort(sequences[0], 2.0)


def test_the_last_abort_leaves_the_engine_idle():
    engine = SimulatedEngine(SPEC)
    sequence = SimulatedSequence(100, 500)
    engine.submit(sequence, 0.0)
    engine.abort(sequence, 0.01)
    assert engine.next_at is None
    assert engine.kv_usage == 0.0
    engine.submit(SimulatedSequence(100, 1), 5.0)
    assert run(engine)[0].at == pytest.approx(5.1)


def test_steps_that_come_late_keep_the_rate():
    engine = SimulatedEngine(SPEC)
    engine.submit(SimulatedSequence(100, 11), 0.0)
    assert [emission.at for emission in engine.step(1.0)] == pytest.approx([0.1 + 0.01 * n for n in range(11)])


def test_a_sequence_longer_than_the_context_never_starts():
    with pytest.raises(ValueError, match="max_model_len"):
        SimulatedEngine(SPEC).submit(SimulatedSequence(900, 200), 0.0)


@pytest.mark.parametrize("wrong", [{"kv_tokens": 999}, {"max_num_seqs": 0}, {"decode_rate": 0}, {"batch_slowdown": -1}])
def test_an_engine_that_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        EngineSpec(**{"max_model_len": 1000, **wrong})


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 40), st.floats(0, 2), st.none() | st.floats(0, 2)), max_size=12),
    st.integers(100, 400),
)
def test_whatever_comes_and_goes_every_token_is_made_once_and_all_memory_comes_back(load, kv_tokens):
    engine = SimulatedEngine(
        EngineSpec(max_model_len=100, max_num_seqs=3, max_num_batched_tokens=32, kv_tokens=kv_tokens + 100, block_size=16)
    )
    moments: list[tuple[float, int, str, SimulatedSequence]] = []
    for number, (prompt, output, arrives, leaves) in enumerate(load):
        sequence = SimulatedSequence(prompt, output)
        moments.append((arrives, number, "submit", sequence))
        if leaves is not None:
            moments.append((arrives + leaves, number, "abort", sequence))
    counts: dict[SimulatedSequence, int] = {}
    emissions: list[Emission] = []
    for at, _, what, sequence in sorted(moments, key=lambda moment: moment[:2]):
        emissions += run(engine, until=at)
        if what == "submit":
            engine.submit(sequence, at)
        else:
            engine.abort(sequence, at)
        assert 0.0 <= engine.kv_usage <= 1.0
        assert len(engine.running) <= 3
    emissions += run(engine)
    for emission in emissions:
        counts[emission.sequence] = counts.get(emission.sequence, 0) + 1
    assert engine.kv_usage == 0.0
    assert not engine.running
    assert not engine.waiting
    assert [emission.at for emission in emissions] == sorted(emission.at for emission in emissions)
    for _, _, what, sequence in moments:
        if what == "submit":
            assert sequence.finished is not None
            assert sequence.produced == (counts.get(sequence, 0) if sequence.output_tokens else 0)


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 40), st.floats(0, 2), st.none() | st.floats(0, 2)), max_size=12),
    st.integers(100, 400),
)
def test_iterations_taken_together_give_every_sequence_the_times_that_single_ones_give(load, kv_tokens):
    spec = EngineSpec(max_model_len=100, max_num_seqs=3, max_num_batched_tokens=32, kv_tokens=kv_tokens + 100, block_size=16)
    moments = sorted(
        (at, number, what)
        for number, (_, _, arrives, leaves) in enumerate(load)
        for at, what in ((arrives, "submit"), *([] if leaves is None else [(arrives + leaves, "withdraw")]))
    )

    def played(*, every_token: bool) -> tuple[SimulatedEngine, list[SimulatedSequence]]:
        engine = SimulatedEngine(spec, every_token=every_token)
        sequences = [SimulatedSequence(prompt, output) for prompt, output, _, _ in load]
        for at, number, what in moments:
            run(engine, until=at)
            (engine.submit if what == "submit" else engine.abort)(sequences[number], at)
        run(engine)
        return engine, sequences

    (single, slow), (together, quick) = played(every_token=True), played(every_token=False)
    for one, other in zip(slow, quick, strict=True):
        assert (one.produced, one.preemptions) == (other.produced, other.preemptions)
        assert other.first_token == (None if one.first_token is None else pytest.approx(one.first_token, abs=1e-6))
        assert other.finished == (None if one.finished is None else pytest.approx(one.finished, abs=1e-6))
    assert (single.tokens, single.iterations, single.kv_usage) == (together.tokens, together.iterations, together.kv_usage)


def test_iterations_taken_together_are_few_and_can_be_looked_into():
    engine = SimulatedEngine(SPEC, every_token=False)
    engine.submit(SimulatedSequence(100, 101), 0.0)
    steps = 0
    while engine.next_at is not None and engine.next_at < 1.0:
        engine.step(engine.next_at)
        steps += 1
    engine.catch_up(0.605)
    assert (steps, engine.tokens) == (1, 51)
    assert engine.kv_usage == pytest.approx(10 * 16 / 4000)


def test_an_engine_that_becomes_slower_does_so_at_its_next_token():
    engine = SimulatedEngine(SPEC, every_token=False)
    sequence = SimulatedSequence(100, 101)
    engine.submit(sequence, 0.0)
    engine.step(0.1)
    engine.change_spec(
        EngineSpec(max_model_len=1000, max_num_seqs=4, prefill_rate=1000, decode_rate=50, batch_slowdown=0.1, kv_tokens=4000), 0.595
    )
    run(engine)
    assert sequence.finished == pytest.approx(0.6 + 50 * 0.02)
