"""Nodes and pools that get less than everything, in the decisions of one worker."""

from collections import Counter

import pytest

from din_extproc.domain.health import BreakerSnapshot, BreakerSnapshots, BreakerState
from din_extproc.domain.node import Endpoint, Node, Pool
from din_extproc.domain.verdict import Refusal, RefusalCode
from din_extproc.flow.node_selector import InFlightFallback, NodeSelector, RequestSize
from din_extproc.flow.pool_membership import PoolMembership
from din_extproc.route.table import Routed
from din_extproc.route.versions import ANY
from din_extproc.schedule.load import LoadModel
from din_extproc.schedule.pick import STRATEGIES
from din_extproc.schedule.placement_request import PlacementRequest

SIZE = RequestSize(100, 100, 100)
OPEN = BreakerSnapshot(BreakerState.OPEN, 0.0, 30.0, 0.0, "3 consecutive failures")
HALF_OPEN = BreakerSnapshot(BreakerState.HALF_OPEN, 0.0, None, 0.05)
CLOSED = BreakerSnapshot(BreakerState.CLOSED, 0.0)


def node(name, max_seq_len=8192):
    return Node(name, Endpoint("10.0.0.1", 8000 + int(name[1:])), "m", "1.0", "bf16", "", 1, max_seq_len, 64)


def pool(name, *nodes, scheduler="round_robin"):
    return Pool(name=name, model="m", served_model="m", engine="vllm", scheduler=scheduler, nodes=nodes)


def routed(first, fallback=None):
    return Routed("r", "m", "m", first, ANY, fallback, ANY)


class Worker:
    """A placer that sends one request after the other, each of which ends at once."""

    def __init__(self, first, fallback=None):
        self.selector = NodeSelector(LoadModel(), PoolMembership.from_pools([each for each in (first, fallback) if each is not None]))
        self.routed = routed(first, fallback)
        self.asked = 0

    def set_breakers(self, nodes=None, **pools):
        self.selector.on_breakers(BreakerSnapshots(nodes or {}, pools))

    def send(self, now=1.0, size=SIZE):
        """The ids that Envoy gets, or the refusal; with the reason of the fallback in front."""
        self.asked += 1
        target = self.selector.select_target(self.routed, size, now)
        if isinstance(target, Refusal):
            return target
        picked = self.selector.select_nodes(target, PlacementRequest(100, 10, now, chance=self.asked * 0x9E3779B97F4A7C15))
        assert not isinstance(picked, Refusal)
        self.selector.release(picked.lease)
        return [target.degraded, *(each.id for each in picked.nodes)]

    def counts(self, requests, now=1.0):
        return Counter(self.send(now)[1] for _ in range(requests))


@pytest.mark.parametrize("scheduler", STRATEGIES)
def test_a_node_whose_breaker_is_open_is_never_named_from_the_next_decision_on(scheduler):
    worker = Worker(pool("p", *(node(f"n{index}") for index in range(4)), scheduler=scheduler))
    worker.send()
    worker.set_breakers({"n1": OPEN, "n2": OPEN})
    assert all(set(worker.send()[1:]) == {"n0", "n3"} for _ in range(20))
    worker.set_breakers({"n1": CLOSED})
    assert set(worker.send()[1:]) == {"n0", "n1", "n3"}


def test_a_pool_whose_nodes_are_all_open_gives_way_to_the_rule_s_fallback():
    worker = Worker(pool("p", node("n0")), pool("q", node("n9")))
    worker.set_breakers({"n0": OPEN})
    assert worker.send() == ["no_healthy_node", "n9"]


def test_without_a_fallback_the_refusal_says_when_a_node_is_tried_again():
    worker = Worker(pool("p", node("n0"), node("n1")))
    worker.set_breakers({"n0": OPEN, "n1": BreakerSnapshot(BreakerState.OPEN, 0.0, 6.0, 0.0)})
    refused = worker.send(now=1.0)
    assert refused.code is RefusalCode.NO_HEALTHY_NODE
    assert dict(refused.headers) == {"retry-after": "5", "retry-after-ms": "5000"}


def test_what_only_an_open_node_could_take_is_no_request_that_is_too_long():
    worker = Worker(pool("p", node("n0", 32768), node("n1", 8192)))
    worker.set_breakers({"n0": OPEN})
    refused = worker.send(size=RequestSize(10_000, 10_000, 10_000))
    assert (refused.code, refused.retry_after_ms) == (RefusalCode.NO_HEALTHY_NODE, 1000)
    assert worker.send(size=RequestSize(40_000, 40_000, 40_000)).code is RefusalCode.CONTEXT_LENGTH_EXCEEDED
    assert worker.send()[1] == "n1"


@pytest.mark.parametrize("scheduler", STRATEGIES)
def test_half_open_lets_exactly_a_twentieth_of_a_node_s_part_through_and_others_share_the_rest(scheduler):
    worker = Worker(pool("p", *(node(f"n{index}") for index in range(4)), scheduler=scheduler))
    worker.set_breakers({"n0": HALF_OPEN})
    counts = worker.counts(1600)
    assert 0 < counts["n0"] <= 1600 / 4 / 20
    if scheduler != "prefix_affinity":  # where the prefix decides, it decides
        assert max(counts.values()) < 1.3 * min(count for name, count in counts.items() if name != "n0")


def test_a_lone_node_that_is_half_open_takes_every_twentieth_and_the_fallback_the_rest():
    worker = Worker(pool("p", node("n0")), pool("q", node("n9")))
    worker.set_breakers({"n0": HALF_OPEN})
    sent = [worker.send() for _ in range(60)]
    assert [index for index, each in enumerate(sent, 1) if each == ["", "n0"]] == [20, 40, 60]
    assert all(each == ["half_open", "n9"] for index, each in enumerate(sent, 1) if index % 20)


def test_a_lone_node_on_trial_without_a_fallback_refuses_the_rest_with_a_time():
    worker = Worker(pool("p", node("n0")))
    worker.set_breakers({"n0": HALF_OPEN})
    sent = [worker.send() for _ in range(20)]
    assert sent[-1] == ["", "n0"]
    assert all(each.code is RefusalCode.NO_HEALTHY_NODE and each.retry_after_ms == 1000 for each in sent[:-1])


@pytest.mark.parametrize("scheduler", STRATEGIES)
def test_a_ramping_node_s_part_grows_from_a_tenth_to_everything(scheduler):
    worker = Worker(pool("p", *(node(f"n{index}") for index in range(4)), scheduler=scheduler))
    worker.set_breakers({"n0": BreakerSnapshot(BreakerState.RAMPING, 0.0, 60.0, 0.1)})
    shares = [worker.counts(800, now)["n0"] / 200 for now in (0.0, 30.0, 59.0)]
    limits = [0.1, 0.55, 1.0]
    if scheduler == "round_robin":
        assert shares == pytest.approx(limits, abs=0.05)
    else:
        assert all(share <= limit + 0.05 for share, limit in zip(shares, limits, strict=True))


def test_nodes_that_all_ramp_up_share_everything():
    worker = Worker(pool("p", node("n0"), node("n1")))
    ramp = BreakerSnapshot(BreakerState.RAMPING, 0.0, 60.0, 0.1)
    worker.set_breakers({"n0": ramp, "n1": ramp})
    counts = worker.counts(100)
    assert sum(counts.values()) == 100
    assert min(counts.values()) > 20


def test_a_retry_tries_whole_nodes_first_and_one_on_trial_only_where_there_is_no_other():
    worker = Worker(pool("p", *(node(f"n{index}") for index in range(3))))
    worker.set_breakers({"n1": HALF_OPEN})
    assert {tuple(worker.send()[1:]) for _ in range(10)} == {("n0", "n2"), ("n2", "n0")}
    worker.set_breakers({"n2": OPEN})
    assert worker.send()[1:] == ["n0", "n1"]


def test_a_pool_s_own_breaker_sends_its_requests_to_the_fallback_and_back_by_a_ramp():
    worker = Worker(pool("p", node("n0")), pool("q", node("n9")))
    worker.set_breakers(p=BreakerSnapshot(BreakerState.OPEN, 0.0, 30.0, 0.0))
    assert worker.send() == ["breaker_open", "n9"]
    worker.set_breakers(p=BreakerSnapshot(BreakerState.RAMPING, 0.0, 60.0, 0.1))
    assert worker.counts(100, 30.0)["n0"] == 55
    worker.set_breakers(p=CLOSED)
    assert worker.send() == ["", "n0"]


def test_a_pool_s_own_breaker_refuses_nothing_where_there_is_no_other_pool():
    worker = Worker(pool("p", node("n0")))
    worker.set_breakers(p=BreakerSnapshot(BreakerState.OPEN, 0.0, 30.0, 0.0))
    assert worker.send() == ["", "n0"]


def test_a_fallback_that_is_open_itself_takes_nothing():
    worker = Worker(pool("p", node("n0")), pool("q", node("n9")))
    worker.set_breakers(p=BreakerSnapshot(BreakerState.OPEN, 0.0, 30.0, 0.0), q=BreakerSnapshot(BreakerState.OPEN, 0.0, 30.0, 0.0))
    assert worker.send() == ["", "n0"]


def test_other_nodes_do_not_change_what_is_known_of_those_that_stay():
    p = pool("p", node("n0"), node("n1"))
    worker = Worker(p)
    worker.set_breakers({"n0": OPEN})
    worker.selector.reset(PoolMembership.from_pools([pool("p", node("n0"), node("n1"), node("n2"))]))
    assert set(worker.send()[1:]) == {"n1", "n2"}
    worker.selector.reset(PoolMembership.from_pools([pool("p", node("n1"))]))
    worker.selector.reset(PoolMembership.from_pools([p]))
    assert set(worker.send()[1:]) == {"n0", "n1"}, "a node that went is a new one when it comes"


class Moving(Worker):
    """One whose requests can be moved to the fallback, after so many tries."""

    def __init__(self, first, fallback, tries=2):
        super().__init__(first, fallback)
        self.selector.in_flight = InFlightFallback(frozenset({(first.name, fallback.name)}), tries)

    def names(self, size=SIZE):
        """Of the nodes of its own pool, and of the other's."""
        target = self.selector.select_target(self.routed, size, 1.0)
        picked = self.selector.select_nodes(target, PlacementRequest(100, 10, 1.0, chance=7))
        self.selector.release(picked.lease)
        return tuple("".join(each.id for each in nodes) for nodes in (picked.nodes, picked.fallback_nodes))


@pytest.mark.parametrize(("tries", "own"), [(1, "n0"), (2, "n0n0"), (3, "n0n0n0")])
def test_a_request_that_can_move_names_a_node_for_every_try_before_those_of_the_other_pool(tries, own):
    assert Moving(pool("p", node("n0")), pool("q", node("n8"), node("n9")), tries).names() == (own, "n8n9")


def test_those_of_the_other_pool_are_chosen_by_its_own_scheduler():
    moving = Moving(pool("p", node("n0"), node("n1")), pool("q", *(node(f"n{index}") for index in (7, 8, 9))))
    names = [moving.names() for _ in range(24)]
    assert [own for own, _ in names] == ["n0n1", "n1n0"] * 12
    assert [others for _, others in names] == ["n7n8"] * 8 + ["n8n9"] * 8 + ["n9n7"] * 8, "it is asked for some at once"


def test_no_node_that_is_left_out_or_on_trial_takes_over():
    moving = Moving(pool("p", node("n0")), pool("q", node("n7"), node("n8"), node("n9")))
    moving.set_breakers({"n8": OPEN})
    assert {moving.names()[1] for _ in range(16)} == {"n7n9", "n9n7"}
    moving.set_breakers({"n7": HALF_OPEN})
    assert {moving.names()[1] for _ in range(40)} == {"n9"}
    moving.set_breakers({"n9": OPEN})
    assert {moving.names()[1] for _ in range(40)} == {""}, "nobody"


def test_only_a_node_with_room_for_it_takes_over():
    moving = Moving(pool("p", node("n0")), pool("q", node("n8", 4096), node("n9", 8192)))
    assert moving.names()[1] in {"n8n9", "n9n8"}
    assert moving.names(RequestSize(5000, 5000, 5000)) == ("n0n0", "n9")


def test_without_one_that_can_take_over_a_pool_names_its_own_as_ever():
    moving = Moving(pool("p", node("n0"), node("n1"), node("n2")), pool("q", node("n9", 64)))
    assert moving.names() == ("n0n1n2", "")
