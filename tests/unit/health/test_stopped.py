"""Requests that break nodes: when their next tries are stopped, and for how long."""

from din_extproc.health.stopped import StoppedRequests


def broken(requests: StoppedRequests, origin: str, started_at: float, ended_at: float) -> bool:
    return requests.record_break(origin, started_at, ended_at, ended_at)


def test_a_request_that_breaks_a_second_node_is_stopped_for_ten_minutes():
    requests = StoppedRequests()
    assert not broken(requests, "a1", 0.0, 1.0)
    assert requests.stopped == frozenset()
    assert broken(requests, "a1", 1.0, 2.0)
    assert requests.stopped == {"a1"}
    assert not requests.expire(601.9)
    assert requests.expire(602.0)
    assert requests.stopped == frozenset()


def test_equal_requests_that_break_with_one_node_are_not_stopped():
    requests = StoppedRequests()
    for number in range(20):
        assert not broken(requests, "a1", number / 100, 1.0)


def test_a_request_that_another_node_answered_begins_anew():
    requests = StoppedRequests()
    for now in range(0, 100, 10):
        assert not broken(requests, "a1", now, now + 1)
        requests.record_answer("a1")


def test_what_another_replica_stopped_is_stopped_and_known_already():
    requests = StoppedRequests()
    broken(requests, "a1", 0.0, 1.0)
    assert requests.stop(("a1", "b2"), 5.0)
    assert not requests.stop(("a1",), 6.0)
    assert requests.stopped == {"a1", "b2"}
    requests.record_answer("a1")
    assert requests.stopped == {"a1", "b2"}, "an answer that was under way is not the end of it"


def test_a_thousand_requests_are_remembered_and_the_oldest_forgotten_first():
    requests = StoppedRequests()
    requests.stop([str(number) for number in range(1001)], 0.0)
    assert requests.stopped == {str(number) for number in range(1, 1001)}
