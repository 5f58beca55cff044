"""What the headers of an answer say, and which of them are missing."""

from din_extproc.measure.provenance import Provenance

WHOLE = {"x-din-node-id": "n", "x-din-model-version": "2.0.0", "x-din-exec-time-ms": "0", "x-din-trace-id": "t" * 8}


def test_a_whole_answer_lacks_nothing():
    found = Provenance.of(
        {**WHOLE, "x-bxagent-degraded": "true", "x-din-degraded-reason": "pool_empty", "x-din-dropped-parameters": "n, user"}
    )
    assert found.missing == ()
    assert found == Provenance("n", "2.0.0", 0, "t" * 8, degraded=True, degraded_reason="pool_empty", dropped_parameters=("n", "user"))


def test_each_header_that_is_missing_or_no_number_is_named():
    for name in WHOLE:
        assert Provenance.of({other: value for other, value in WHOLE.items() if other != name}).missing == (name,)
    assert Provenance.of({**WHOLE, "x-din-exec-time-ms": "soon"}).missing == ("x-din-exec-time-ms",)
    assert Provenance.of({}).missing == tuple(WHOLE)
