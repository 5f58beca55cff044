"""Requests for an adapter (LoRA) go where it is loaded, and never where it is not served."""

import pytest
from msgspec.structs import replace

from din_extproc.domain.membership import Heartbeat, HeartbeatReading, NodeState
from din_extproc.domain.node import Endpoint, Node
from din_extproc.domain.verdict import Refusal, RefusalCode
from din_extproc.schedule.adapter_affinity import AdapterAffinity
from din_extproc.schedule.load import LoadModel, NodeLease
from din_extproc.schedule.placement_request import PlacementRequest
from tests.support.adapter_fleet import FleetSpec, play, round_robin
from tests.support.steps import lines_run

SLOTS = 2


def node(number, max_concurrency=8):
    return Node(f"gpu-{number}", Endpoint("10.0.0.1", 1 + number), "m", "2025.3.1", "bf16", "", 1, 8192, max_concurrency)


class Fleet:
    def __init__(self, nodes=3, spread=0.5):
        self.nodes = tuple(node(number) for number in range(nodes))
        self.load = LoadModel()
        self.spread = spread
        self.affinities = {}

    def affinity(self, adapter):
        if adapter not in self.affinities:
            self.affinities[adapter] = AdapterAffinity(self.nodes, self.load, adapter, SLOTS, self.spread)
        return self.affinities[adapter]

    def pick(self, adapter, now=0.0, count=3):
        picked = self.affinity(adapter).pick(count, PlacementRequest(100, 50, now, chance=7))
        return picked if isinstance(picked, Refusal) else [each.id for each in picked]

    def send(self, adapter, now=0.0):
        """Send a request that is answered at once; return its node."""
        first = self.pick(adapter, now)[0]
        self.load.adapters.use(first, adapter, now, SLOTS)
        return first

    def report(self, node_id, at=0.0, **fields):
        self.load.on_reading(node_id, HeartbeatReading(Heartbeat(state=NodeState.READY, sequence=1, **fields), at))


def test_requests_for_an_adapter_stay_at_the_node_that_loaded_it():
    fleet = Fleet()
    first = fleet.send("sql")
    assert {fleet.send("sql", now) for now in (1.0, 2.0, 3.0)} == {first}


def test_an_adapter_is_loaded_where_there_is_room():
    fleet = Fleet()
    placed = [fleet.send(f"a{number}", number) for number in range(3 * SLOTS)]
    assert sorted(placed) == sorted(each.id for each in fleet.nodes for _ in range(SLOTS))


def test_without_room_the_adapter_that_is_asked_for_least_is_displaced():
    fleet = Fleet()
    homes = {f"a{number}": fleet.send(f"a{number}") for number in range(3 * SLOTS)}
    idle = "a0"
    for name in homes:
        for _ in range(5 if name != idle else 0):
            fleet.send(name, 1.0)
    assert fleet.send("new", 2.0) == homes[idle]


def test_a_busy_node_shares_its_adapter():
    fleet = Fleet()
    first = fleet.send("sql")
    for _ in range(3):
        fleet.load.add_lease(NodeLease(first, 100, 50), 0.0)
    assert fleet.pick("sql")[0] == first
    fleet.load.add_lease(NodeLease(first, 100, 50), 0.0)
    assert fleet.pick("sql")[0] != first


def test_a_node_without_a_free_slot_comes_last():
    fleet = Fleet(nodes=2, spread=1.0)
    first = fleet.send("sql")
    for _ in range(8):
        fleet.load.add_lease(NodeLease(first, 100, 50), 0.0)
    assert fleet.pick("sql")[-1] == first


def test_nodes_that_do_not_list_the_adapter_are_never_chosen():
    fleet = Fleet()
    fleet.report("gpu-0", adapters=("sql",))
    fleet.report("gpu-1", adapters=("other",))
    fleet.report("gpu-2", adapters=())
    assert fleet.pick("sql") == ["gpu-0"]
    fleet.report("gpu-0", adapters=())
    refusal = fleet.pick("sql")
    assert refusal.code is RefusalCode.NO_HEALTHY_NODE
    assert "'sql'" in refusal.message


def test_a_node_that_is_said_to_serve_other_adapters_is_never_chosen():
    fleet = Fleet()
    fleet.nodes = (replace(fleet.nodes[0], adapters=("sql",)), replace(fleet.nodes[1], adapters=()), fleet.nodes[2])
    assert sorted(fleet.pick("sql")) == ["gpu-0", "gpu-2"]
    assert fleet.pick("contracts") == ["gpu-2"]


def test_a_node_that_answers_404_is_asked_again_when_it_lists_the_adapter_or_after_ten_seconds():
    fleet = Fleet(nodes=2)
    fleet.load.adapters.on_missing("gpu-0", "sql", 100.0)
    assert fleet.pick("sql", 100.0) == ["gpu-1"]
    assert set(fleet.pick("other", 100.0)) == {"gpu-0", "gpu-1"}
    fleet.report("gpu-0", at=101.0, adapters=("sql",))
    assert fleet.pick("sql", 101.0) == ["gpu-1"], "the list may have been read before the adapter went"
    fleet.report("gpu-0", at=103.0, adapters=("sql",))
    assert set(fleet.pick("sql", 103.0)) == {"gpu-0", "gpu-1"}
    fleet.load.adapters.on_missing("gpu-1", "sql", 200.0)
    assert fleet.pick("sql", 209.0) == ["gpu-0"]
    assert set(fleet.pick("sql", 210.0)) == {"gpu-0", "gpu-1"}


def test_an_engine_that_reports_active_adapters_and_slots_is_believed():
    fleet = Fleet()
    fleet.report("gpu-2", adapters=("sql", "law"), active_adapters=("sql",), adapter_slots=1)
    assert fleet.pick("sql")[0] == "gpu-2"
    fleet.load.adapters.use("gpu-2", "law", 1.0, SLOTS)
    assert "gpu-2" not in fleet.load.adapters.find_holders("sql")


def test_an_adapter_that_was_taken_off_a_node_is_no_longer_loaded_there():
    fleet = Fleet()
    first = fleet.send("sql")
    fleet.report(first, adapters=("law",))
    assert fleet.pick("sql")[0] != first
    fleet.report(first, at=5.0, adapters=("law", "sql"))
    assert first not in fleet.load.adapters.find_holders("sql")


def test_a_node_that_left_has_no_adapters():
    fleet = Fleet()
    first = fleet.send("sql")
    fleet.load.retain({each.id for each in fleet.nodes if each.id != first})
    assert list(fleet.load.adapters.find_holders("sql")) == []


def test_scores_say_what_a_node_has_of_the_adapter():
    fleet = Fleet()
    ask = PlacementRequest(100, 50, 0.0)
    fleet.report("gpu-1", adapters=())
    fleet.load.adapters.use("gpu-0", "sql", 0.0, SLOTS)
    why = [fleet.affinity("sql").score(each, ask)[1] for each in fleet.nodes]
    assert why == [
        "has the adapter loaded; 0 of 8 slots in use",
        "it does not serve the adapter sql",
        "has room for the adapter; 0 of 8 slots in use",
    ]


def steps_of_a_pick(nodes, adapters):
    fleet = Fleet(nodes)
    for number in range(adapters):
        fleet.load.adapters.use(f"gpu-{number % nodes}", f"a{number}", 0.0, SLOTS)
    fleet.pick("a0")
    return lines_run(lambda: fleet.pick("a0"))


def test_a_choice_takes_no_more_steps_with_more_nodes_and_adapters():
    assert steps_of_a_pick(1000, 1000) <= steps_of_a_pick(20, 40)


@pytest.mark.parametrize(("zipf", "least"), [(1.3, 0.9), (1.5, 0.93)])
def test_most_requests_meet_a_loaded_adapter_though_half_of_them_fit(zipf, least):
    spec = FleetSpec(zipf=zipf, requests=8000)
    ours, turns = play(spec), play(spec, round_robin(spec))
    assert ours.failed == 0
    assert ours.loaded >= least
    assert turns.loaded < 0.6
    assert ours.mean_s < turns.mean_s


def test_no_request_fails_while_adapters_come_and_go():
    calm = play(FleetSpec(zipf=1.5, requests=8000))
    result = play(FleetSpec(zipf=1.5, requests=8000, changes_per_s=5.0))
    assert result.failed == 0
    assert result.retried > 0, "some request met a node that had just lost its adapter"
    assert result.loaded > calm.loaded - 0.05
