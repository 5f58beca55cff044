"""Requests that break nodes: when their next tries are stopped, and for how long."""

from din_extproc.health.stopped import StoppedRequests


def test_a_request_that_breaks_two_attempts_and_fails_by_it_is_stopped_for_ten_minutes():
    requests = StoppedRequests()
    assert not requests.record_attempt("a1", 1.0)
    assert not requests.record_attempt("a1", 2.0)
    assert requests.stopped == frozenset()
    assert requests.record_failure("a1", 2.0)
    assert requests.stopped == {"a1"}
    assert not requests.expire(601.9)
    assert requests.expire(602.0)
    assert requests.stopped == frozenset()


def test_what_is_logged_of_an_exchange_may_come_before_its_last_attempt():
    requests = StoppedRequests()
    assert not requests.record_attempt("a1", 1.0)
    assert not requests.record_failure("a1", 2.0)
    assert requests.record_attempt("a1", 2.0)


def test_equal_requests_that_a_node_breaks_and_another_one_answers_are_not_stopped():
    requests = StoppedRequests()
    for now in range(20):
        assert not requests.record_attempt("a1", float(now))
    requests.record_answer("a1")
    assert not requests.record_failure("a1", 21.0)
    assert requests.record_attempt("a1", 21.0) is False
    assert requests.record_attempt("a1", 22.0) is True


def test_what_another_replica_stopped_is_stopped_and_known_already():
    requests = StoppedRequests()
    requests.record_attempt("a1", 0.0)
    assert requests.stop(("a1", "b2"), 5.0)
    assert not requests.stop(("a1",), 6.0)
    assert requests.stopped == {"a1", "b2"}
    requests.record_answer("a1")
    assert requests.stopped == {"a1", "b2"}, "an answer that was under way is not the end of it"


def test_a_thousand_requests_are_remembered_and_the_oldest_forgotten_first():
    requests = StoppedRequests()
    requests.stop([str(number) for number in range(1001)], 0.0)
    assert requests.stopped == {str(number) for number in range(1, 1001)}
