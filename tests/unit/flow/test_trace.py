"""Trace ids: sortable, tellable, never twice."""

from din_extproc.flow.trace import TraceIds, kept


def test_an_id_tells_when_and_where_it_was_made():
    made = TraceIds(node_number=7, start=41).make(1_795_982_112.25)
    assert len(made) == 32
    assert int(made[:12], 16) == 1_795_982_112_250
    assert int(made[12:16], 16) == 7
    assert int(made[16:], 16) == 42


def test_ids_sort_by_time_and_never_repeat_even_where_the_count_wraps():
    ids = TraceIds(node_number=65535, start=(1 << 64) - 3)
    made = [ids.make(1000.0 + n / 1000) for n in range(10)]
    assert made == sorted(made)
    assert len(set(made)) == 10
    assert kept(made[0])


def test_a_clients_id_is_kept_only_when_it_is_harmless():
    assert kept("req-2026.11:29_abc")
    for bad in ("", "short", "has space in it", "a\r\nb-injected", "x" * 129, "-starts-with-dash", "ünïcode-id-1"):
        assert not kept(bad)
