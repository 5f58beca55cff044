"""Injected faults: parsed, drawn, used up."""

import pytest

from din_extproc.tools.engine_model.faults import Fault, FaultBoard, parse_faults


def test_faults_are_read_as_a_person_writes_them():
    assert parse_faults("reset:after=3,count=2; latency:ms=200;unavailable") == (
        Fault("reset", after=3, count=2),
        Fault("latency", ms=200),
        Fault("unavailable"),
    )
    assert parse_faults("") == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("explode", "explode"),
        ("reset:when=3", "when"),
        ("reset:after", "name=value"),
        ("stall:probability=2", "probability"),
        ("drip:bytes=0", "bytes"),
    ],
)
def test_a_fault_that_cannot_be_is_named(text, expected):
    with pytest.raises(ValueError, match=expected):
        parse_faults(text)


def test_a_counted_fault_strikes_so_often_and_no_more():
    board = FaultBoard(parse_faults("unavailable:count=2"))
    assert [bool(board.draw("/v1/completions")) for _ in range(4)] == [True, True, False, False]


def test_a_fault_strikes_its_path_only_and_health_is_drawn_by_health_alone():
    board = FaultBoard(parse_faults("reset:path=/v1/embeddings; health:status=500"))
    assert set(board.draw("/v1/embeddings")) == {"reset"}
    assert set(board.draw("/v1/completions")) == set()
    assert set(board.draw("/health")) == {"health"}


def test_draws_are_the_same_for_the_same_seed_and_as_frequent_as_asked():
    def strikes(seed: int) -> list[bool]:
        board = FaultBoard(parse_faults("unavailable:probability=0.25"), seed)
        return [bool(board.draw("/")) for _ in range(2000)]

    assert strikes(7) == strikes(7) != strikes(8)
    assert 0.2 < sum(strikes(7)) / 2000 < 0.3


def test_of_one_kind_the_first_that_is_left_strikes():
    board = FaultBoard(parse_faults("latency:ms=1,count=1; latency:ms=2"))
    assert [board.draw("/")["latency"].ms for _ in range(3)] == [1, 2, 2]
