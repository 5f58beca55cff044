"""Whatever changes, in whatever order answers come: a client ends with exactly what is served, and never has what can't work."""

from hypothesis import given
from hypothesis import strategies as st

from tests.support.xds_client import CLUSTER, ROUTES
from tests.unit.control.test_discovery import Link, content, moment

NAMES = ("p", "q", "r")
VERSIONS = st.sampled_from(["1.1", "1.2", "2.1", "2.2"])
MOMENTS = st.builds(lambda routes, pools: moment(routes, **pools), st.sampled_from("12"), st.dictionaries(st.sampled_from(NAMES), VERSIONS))
STEPS = st.lists(st.one_of(MOMENTS, st.none()), max_size=25)
"""A new moment, or None: the client answers one response."""


@given(MOMENTS, STEPS, st.booleans())
def test_a_client_that_answers_ends_with_what_is_served(first, steps, delta):
    link = Link(first, delta=delta)
    for step in steps:
        if step is not None:
            link.publish(step)
        elif link.under_way:
            link.answer_one()
        assert len(link.under_way) <= 3
    link.answer_all()
    assert link.client.has == content(link.stream.snapshot)
    assert link.stream.settled
    assert all(each.in_sync for each in link.stream.status().types.values())
    before = len(link.client.order)
    link.publish(link.stream.snapshot)
    assert len(link.client.order) == before
    assert not link.under_way


@given(MOMENTS, STEPS, st.booleans(), st.sampled_from(NAMES))
def test_a_client_that_refuses_one_cluster_has_everything_else_and_is_not_asked_for_ever(first, steps, delta, name):
    bad = f"cluster {name} 2".encode()
    link = Link(first, delta=delta, refuses=frozenset({bad}))
    for step in steps:
        if step is not None:
            link.publish(step)
        elif link.under_way:
            link.answer_one()
    link.answer_all()
    served = content(link.stream.snapshot)
    assert link.client.has[ROUTES] == served[ROUTES]
    expected = {each: value for each, value in served[CLUSTER].items() if value != bad}
    assert {each: link.client.has[CLUSTER][each] for each in expected} == expected
    assert not link.under_way


@given(MOMENTS, MOMENTS, st.booleans())
def test_no_nodes_come_before_their_cluster_and_no_cluster_goes_before_the_new_routes_are_there(first, second, delta):
    link = Link(first, delta=delta)
    link.answer_all()
    link.client.order.clear()
    link.publish(second)
    link.answer_all()
    assert link.client.dangling == []
    removals = [at for at, (kind, _, removed) in enumerate(link.client.order) if kind == CLUSTER and removed]
    others = [at for at, (kind, resources, _) in enumerate(link.client.order) if kind == ROUTES and resources]
    assert all(at < removal for at in others for removal in removals)
