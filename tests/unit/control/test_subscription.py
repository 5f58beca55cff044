"""The responses to one xDS client: the table of answers, subscriptions, removals, in both protocols."""

import pytest

from din_extproc.control.snapshot import ASSIGNMENT, CLUSTER, ROUTES, Resource, Snapshot
from din_extproc.control.subscription import SubscriptionPhase, XdsSubscription


def world(type_url: str = ASSIGNMENT, **versions: str) -> Snapshot:
    """A moment with these resources of one type, by name and version."""
    resources = {name: Resource(name, version, f"{name} {version}".encode()) for name, version in versions.items()}
    others = {each: {} for each in (CLUSTER, ASSIGNMENT, ROUTES)}
    return Snapshot({**others, type_url: resources}, {each: "-".join(sorted(versions.values())) for each in others})


def respond(subscription: XdsSubscription, snapshot: Snapshot, nonce: str = "1", *, removals: bool = True):
    """Names with versions and removed names of the next response; None when there is none."""
    offer = subscription.make_offer(snapshot, nonce, removals=removals)
    if offer is None:
        return None
    return {resource.name: resource.version for resource in offer.resources}, set(offer.removed)


def asks_for(*names: str, type_url: str = ASSIGNMENT) -> XdsSubscription:
    """A client of the state of the world that wants these."""
    subscription = XdsSubscription(type_url, delta=False)
    subscription.on_request(names, "", None)
    return subscription


def subscribes_to(*names: str, known: dict[str, str] | None = None, type_url: str = ASSIGNMENT) -> XdsSubscription:
    """A client that takes changes and wants these."""
    subscription = XdsSubscription(type_url, delta=True)
    subscription.on_delta_request(names, (), known or {}, "", None)
    return subscription


# -- answers -----------------------------------------------------------------------------------------------------------------------


def test_what_changes_while_a_response_is_under_way_waits_for_its_answer_and_comes_in_one_piece():
    client = asks_for("a")
    assert respond(client, world(a="1")) == ({"a": "1"}, set())
    assert respond(client, world(a="2"), "2") is None
    assert respond(client, world(a="3"), "2") is None
    client.on_request(("a",), "1", None)
    assert respond(client, world(a="3"), "2") == ({"a": "3"}, set())


def test_an_answer_moves_the_version_that_the_client_has():
    client = asks_for("a")
    respond(client, world(a="1"))
    assert (client.acked, client.refusal) == ("", "")
    client.on_request(("a",), "1", None)
    assert (client.acked, client.phase) == ("1", SubscriptionPhase.IDLE)
    assert respond(client, world(a="1"), "2") is None


@pytest.mark.parametrize("delta", [False, True])
def test_what_was_refused_is_not_offered_again_until_it_is_another(delta):
    client = subscribes_to("a") if delta else asks_for("a")
    respond(client, world(a="1"))
    say(client, "1", None, delta=delta)
    respond(client, world(a="broken"), "2")
    say(client, "2", "no such thing", delta=delta)
    assert (client.acked, client.refusal) == ("1", "no such thing")
    assert respond(client, world(a="broken"), "3") is None
    assert respond(client, world(a="1"), "3") == ({"a": "1"}, set())
    say(client, "3", None, delta=delta)
    assert (client.acked, client.refusal) == ("1", "")


def say(client: XdsSubscription, nonce: str, refusal: str | None, *, delta: bool) -> None:
    if delta:
        client.on_delta_request((), (), {}, nonce, refusal)
    else:
        client.on_request(("a",), nonce, refusal)


def test_a_refusal_without_a_reason_is_a_refusal():
    client = asks_for("a")
    respond(client, world(a="1"))
    client.on_request(("a",), "1", "")
    assert client.refusal
    assert client.acked == ""


def test_an_answer_to_a_response_that_was_replaced_says_nothing():
    client = asks_for("a")
    respond(client, world(a="1"))
    client.on_request(("a",), "1", None)
    respond(client, world(a="2"), "2")
    client.on_request(("b",), "1", None)
    assert client.phase is SubscriptionPhase.OFFERED
    assert client.acked == "1"
    client.on_request(("a",), "2", None)
    assert client.acked == "2"


def test_a_nonce_of_a_former_stream_is_an_ordinary_first_request():
    client = XdsSubscription(ASSIGNMENT, delta=False)
    client.on_request(("a",), "77", None)
    assert respond(client, world(a="1")) == ({"a": "1"}, set())


# -- state of the world ------------------------------------------------------------------------------------------------------------


def test_naming_no_cluster_at_first_means_all_of_them_and_an_empty_world_is_an_answer():
    client = asks_for(type_url=CLUSTER)
    assert respond(client, world(CLUSTER)) == ({}, set())
    client.on_request((), "1", None)
    assert respond(client, world(CLUSTER, a="1", b="1"), "2") == ({"a": "1", "b": "1"}, set())


def test_naming_none_after_some_means_none():
    client = asks_for("a", type_url=CLUSTER)
    respond(client, world(CLUSTER, a="1", b="1"))
    client.on_request((), "1", None)
    assert respond(client, world(CLUSTER, a="2", b="2"), "2") == ({}, set())
    client.on_request((), "2", None)
    assert respond(client, world(CLUSTER, a="3", b="3"), "3") is None


def test_naming_no_assignment_means_none():
    client = asks_for()
    assert respond(client, world(a="1")) is None


def test_a_response_with_clusters_names_all_there_are():
    client = asks_for(type_url=CLUSTER)
    respond(client, world(CLUSTER, a="1", b="1"))
    client.on_request((), "1", None)
    assert respond(client, world(CLUSTER, a="1", b="2"), "2") == ({"a": "1", "b": "2"}, set())
    client.on_request((), "2", None)
    assert respond(client, world(CLUSTER, b="2"), "3") == ({"b": "2"}, {"a"})


def test_a_cluster_that_is_to_go_stays_in_the_response_that_adds_another():
    client = asks_for("*", type_url=CLUSTER)
    respond(client, world(CLUSTER, old="1"))
    client.on_request(("*",), "1", None)
    after = world(CLUSTER, new="1")
    assert respond(client, after, "2", removals=False) == ({"old": "1", "new": "1"}, set())
    client.on_request(("*",), "2", None)
    assert respond(client, after, "3", removals=False) is None
    assert respond(client, after, "3") == ({"new": "1"}, {"old"})


def test_a_response_with_assignments_names_only_what_is_new_to_the_client():
    client = asks_for("a", "b")
    respond(client, world(a="1", b="1"))
    client.on_request(("a", "b"), "1", None)
    assert respond(client, world(a="1", b="2"), "2") == ({"b": "2"}, set())
    client.on_request(("a", "b", "c"), "2", None)
    assert respond(client, world(a="1", b="2", c="1"), "3") == ({"c": "1"}, set())


def test_a_resource_that_is_subscribed_again_is_sent_again():
    client = asks_for("a", "b")
    respond(client, world(a="1", b="1"))
    client.on_request(("a",), "1", None)
    assert respond(client, world(a="1", b="1"), "2") is None
    client.on_request(("a", "b"), "1", None)
    assert respond(client, world(a="1", b="1"), "2") == ({"b": "1"}, set())


# -- changes -----------------------------------------------------------------------------------------------------------------------


def test_only_changes_are_sent():
    client = subscribes_to("a", "b")
    assert respond(client, world(a="1", b="1")) == ({"a": "1", "b": "1"}, set())
    client.on_delta_request((), (), {}, "1", None)
    assert respond(client, world(a="1", b="2"), "2") == ({"b": "2"}, set())


def test_a_removed_resource_is_named_once_and_sent_when_it_is_back():
    client = subscribes_to("a")
    respond(client, world(a="1"))
    client.on_delta_request((), (), {}, "1", None)
    assert respond(client, world(), "2") == ({}, {"a"})
    client.on_delta_request((), (), {}, "2", None)
    assert respond(client, world(), "3") is None
    assert respond(client, world(a="1"), "3") == ({"a": "1"}, set())


def test_what_never_was_is_named_as_missing():
    client = subscribes_to("a", "ghost")
    assert respond(client, world(a="1")) == ({"a": "1"}, {"ghost"})


def test_a_client_that_reconnects_gets_only_what_it_missed():
    client = subscribes_to("*", known={"a": "1", "b": "1", "gone": "1"}, type_url=CLUSTER)
    assert respond(client, world(CLUSTER, a="1", b="2", c="1")) == ({"b": "2", "c": "1"}, {"gone"})


def test_a_client_that_reconnects_with_everything_gets_an_empty_response():
    client = subscribes_to("a", known={"a": "1"})
    assert respond(client, world(a="1")) == ({}, set())
    client.on_delta_request((), (), {}, "1", None)
    assert client.acked == "1"


def test_asking_again_for_what_it_has_tells_it_again():
    client = subscribes_to("a")
    respond(client, world(a="1"))
    client.on_delta_request((), (), {}, "1", None)
    client.on_delta_request(("a",), (), {}, "", None)
    assert respond(client, world(a="1"), "2") == ({"a": "1"}, set())


def test_an_unsubscribed_resource_is_not_sent_any_more():
    client = subscribes_to("a", "b")
    respond(client, world(a="1", b="1"))
    client.on_delta_request((), ("a",), {}, "1", None)
    assert respond(client, world(a="2", b="1"), "2") is None


def test_a_change_of_subscriptions_with_a_stale_nonce_counts():
    client = subscribes_to("a")
    respond(client, world(a="1", b="1"))
    client.on_delta_request((), (), {}, "1", None)
    respond(client, world(a="2", b="1"), "2")
    client.on_delta_request(("b",), (), {}, "1", None)
    assert client.phase is SubscriptionPhase.OFFERED
    client.on_delta_request((), (), {}, "2", None)
    assert respond(client, world(a="2", b="1"), "3") == ({"b": "1"}, set())


def test_everything_and_a_name_then_only_the_name():
    client = subscribes_to("*", "a", type_url=CLUSTER)
    assert respond(client, world(CLUSTER, a="1", b="1")) == ({"a": "1", "b": "1"}, set())
    client.on_delta_request((), ("*",), {}, "1", None)
    assert respond(client, world(CLUSTER, a="1", b="2"), "2") is None
    assert respond(client, world(CLUSTER, a="2", b="2"), "2") == ({"a": "2"}, set())


def test_a_forgotten_resource_is_sent_again():
    client = subscribes_to("a", "b")
    respond(client, world(a="1", b="1"))
    client.on_delta_request((), (), {}, "1", None)
    client.forget(("b", "unknown"))
    assert respond(client, world(a="1", b="1"), "2") == ({"b": "1"}, set())


@pytest.mark.parametrize("delta", [False, True])
def test_a_client_that_asks_for_a_world_of_names_is_none_of_ours(delta):
    client = XdsSubscription(ASSIGNMENT, delta=delta)
    names = [str(number) for number in range(10_001)]
    ask = (lambda: client.on_delta_request(names, (), {}, "", None)) if delta else (lambda: client.on_request(names, "", None))
    with pytest.raises(ValueError, match="10000"):
        ask()
    with pytest.raises(ValueError, match="10000"):
        XdsSubscription(ASSIGNMENT, delta=True).on_delta_request((), (), dict.fromkeys(names, "1"), "", None)
