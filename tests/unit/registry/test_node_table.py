"""The node table: who joins, beats, drains, dies, comes back; who is refused and why."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from din_extproc.domain.membership import Heartbeat, ModelInstance, NodeState, Registration
from din_extproc.domain.node import Endpoint, Node, Pool
from din_extproc.registry.claims import CatalogEntry
from din_extproc.registry.row import (
    DenialReason,
    NodeRecord,
    RegistryDenial,
    quarantine,
    record_answers,
    record_comparison,
    record_drain,
    record_heartbeat,
    record_registration,
    reject_heartbeat,
)
from din_extproc.registry.table import NodeEventKind, NodeTable

SHA, OTHER_SHA = "a" * 64, "b" * 64
CATALOGUE = {"m": {"1.0": CatalogEntry("bf16", 8192, SHA), "1.1": CatalogEntry("bf16", 8192)}}
CHAT = Pool(name="chat", model="m", served_model="m", engine="vllm", scheduler="round_robin", nodes=(), dtype="bf16", tp_world_size=1)
WIDE = replace(CHAT, name="wide", tp_world_size=2)
READY, LOADING = NodeState.READY, NodeState.LOADING


def registration(name="a", *, port=8000, epoch=1, pool="", sha=SHA, host="10.0.0.1", **fields):
    node = {
        "model": "m",
        "version": "1.0",
        "dtype": "bf16",
        "compute_capability": "9.0",
        "tp_world_size": 1,
        "max_seq_len": 8192,
        "max_concurrency": 8,
    }
    made = Node(id=name, endpoint=Endpoint(host, port), **{**node, **fields})
    return Registration(node=made, engine="vllm", weights_sha256=sha, epoch=epoch, pool=pool)


class Network:
    """A table without a store: every accepted row is taken at once, with the next revision."""

    def __init__(self, *pools, catalogue=CATALOGUE):
        self.table = NodeTable(pools or (CHAT, WIDE), catalogue)
        self.now = 1000.0
        self.events = []
        self.revision = 0

    def _take(self, row):
        if isinstance(row, NodeRecord):
            self.revision += 1
            self.events += self.table.apply_row(replace(row, revision=self.revision), self.now)
        return row

    def register(self, what, lease="lease"):
        before = self.table.rows.get(what.node.id)
        alive = self.table.is_alive(what.node.id)
        row = record_registration(what, lease, before, alive=alive, catalogue=self.table.catalogue, now=self.now)
        return self._take(row)

    def beat(self, name="a", sequence=1, lease="lease", state=READY, **fields):
        beat = Heartbeat(state=state, sequence=sequence, **fields)
        return self._take(record_heartbeat(self.table.rows.get(name), lease, beat, interval_s=3.0, now=self.now))

    def die(self, name="a"):
        self.revision += 1
        self.events += self.table.apply_row(replace(self.table.rows[name], revision=self.revision), self.now, alive=False)

    def remove(self, name="a"):
        self.revision += 1
        self.events += self.table.remove_row(name, self.revision, self.now, "deregistered")

    def routed(self):
        return {pool: {node.id for node in nodes} for pool, nodes in self.table.snapshot().joined.items()}

    def take_events(self):
        kinds = [(event.kind, event.member.registration.node.id, event.member.state) for event in self.events]
        self.events = []
        return kinds


def test_a_node_is_not_routed_to_before_it_says_that_it_is_ready():
    net = Network()
    net.register(registration())
    assert net.routed() == {}
    net.beat(state=LOADING)
    assert net.routed() == {}
    net.beat(sequence=2)
    assert net.routed() == {"chat": {"a"}}
    assert net.take_events() == [(NodeEventKind.JOINED, "a", LOADING), (NodeEventKind.CHANGED, "a", READY)]
    net.beat(sequence=3, state=LOADING)
    assert net.routed() == {}


def test_a_node_that_comes_back_with_other_weights_is_refused_and_kept_out():
    net = Network()
    net.register(registration())
    net.beat()
    lie = net.register(registration(epoch=2, sha=OTHER_SHA))
    assert lie.kind is DenialReason.UNTRUE
    assert OTHER_SHA in lie.reason
    net._take(quarantine(net.table.rows["a"], lie.reason, net.now))
    member = net.table.get_member("a", net.now)
    assert member.state is NodeState.QUARANTINED
    assert member.trust < 0.6
    assert OTHER_SHA in member.reasons[-1]
    assert net.routed() == {}
    net.beat(sequence=2)
    assert net.routed() == {}, "a beat does not lift a quarantine"
    net.register(registration(epoch=3), "l3")
    net.beat(lease="l3")
    assert net.routed() == {"chat": {"a"}}, "a sound registration does"


def test_the_newest_registration_wins():
    net = Network()
    net.register(registration(epoch=5, port=8005), "new")
    old = net.register(registration(epoch=4, port=8004), "old")
    assert old == RegistryDenial(DenialReason.OUTDATED, "a newer registration is in force, epoch 5")
    net.beat(lease="new")
    assert net.beat(lease="old", sequence=9).kind is DenialReason.UNKNOWN
    assert net.table.snapshot().joined["chat"][0].endpoint.port == 8005


def test_a_dead_node_is_not_routed_to_and_may_come_back_under_any_epoch():
    net = Network()
    net.register(registration(epoch=5))
    net.beat()
    net.take_events()
    net.die()
    assert net.take_events() == [(NodeEventKind.LEFT, "a", NodeState.DEAD)]
    assert net.routed() == {}
    net.register(registration(epoch=1), "again")
    net.beat(lease="again")
    assert net.take_events() == [(NodeEventKind.JOINED, "a", LOADING), (NodeEventKind.CHANGED, "a", READY)]
    assert net.routed() == {"chat": {"a"}}


def test_a_late_row_changes_nothing():
    net = Network()
    net.register(registration())
    net.beat()
    old = net.table.rows["a"]
    net.beat(sequence=2, state=LOADING)
    assert net.table.apply_row(old, net.now) == []
    assert net.table.remove_row("a", 1, net.now, "late") == []
    assert net.table.get_member("a", net.now).state is LOADING


def test_draining_holds_whatever_the_node_says_then():
    net = Network()
    net.register(registration())
    net.beat()
    net._take(record_drain(net.table.rows["a"], "maintenance"))
    net.beat(sequence=2)
    member = net.table.get_member("a", net.now)
    assert member.state is NodeState.DRAINING
    assert member.reasons == ("drained: maintenance",)
    assert net.routed() == {}


@pytest.mark.parametrize(
    ("lie", "expected"),
    [
        ({"model": "x"}, "no model 'x'"),
        ({"version": "2.0"}, "versions 1.0, 1.1, not '2.0'"),
        ({"dtype": "fp8"}, "is bf16 in the catalogue, not fp8"),
        ({"max_seq_len": 9000}, "at most 8192 tokens"),
        ({"sha": OTHER_SHA}, OTHER_SHA),
        ({"sha": ""}, "not nothing"),
    ],
)
def test_what_the_catalogue_contradicts_is_refused_with_the_reason(lie, expected):
    denied = Network().register(registration(**lie))
    assert denied.kind is DenialReason.UNTRUE
    assert expected in denied.reason


def test_a_catalogue_that_changes_judges_those_who_are_in():
    net = Network()
    net.register(registration(version="1.1", sha=""))
    net.beat()
    net.take_events()
    net.events += net.table.reload((CHAT,), {"m": {"1.1": CatalogEntry("bf16", 8192, SHA)}}, net.now)
    assert net.take_events() == [(NodeEventKind.CHANGED, "a", NodeState.QUARANTINED)]
    assert net.routed() == {}
    assert "sha256" in net.table.get_member("a", net.now).reasons[-1]
    net.events += net.table.reload((CHAT,), CATALOGUE, net.now)
    assert net.routed() == {"chat": {"a"}}


@pytest.mark.parametrize(
    "garbage",
    [
        {"kv_cache_usage": 1.01},
        {"kv_cache_usage": math.nan},
        {"waiting": -1},
        {"running": 1 << 60},
        {"tokens_in_use": -5},
        {"prefill_rate": math.inf},
        {"decode_rate": math.nan},
        {"free_memory_bytes": 1 << 60},
        {"sequence": 1 << 53},
        {"prefill_rate": 0.0},
        {"decode_rate": 0.0},
        {"reason": "x" * 501},
        {"reason": "two\nlines"},
        {"state": NodeState.DEAD},
    ],
)
def test_an_impossible_heartbeat_is_refused_and_costs_trust(garbage):
    net = Network()
    net.register(registration())
    net.beat()
    denied = net.beat(**{"sequence": 2, **garbage})
    assert denied.kind is DenialReason.IMPOSSIBLE
    before = net.table.rows["a"]
    after = reject_heartbeat(before, denied.reason, net.now)
    assert after.beat == before.beat
    assert after.evidence.score_trust(net.now) < before.evidence.score_trust(net.now)
    assert denied.reason in after.reasons[-1]


def test_a_sequence_that_goes_back_is_refused():
    net = Network()
    net.register(registration())
    net.beat(sequence=7)
    assert net.beat(sequence=7).kind is DenialReason.OUTDATED
    assert net.beat(sequence=6).kind is DenialReason.OUTDATED
    assert isinstance(net.beat(sequence=8), NodeRecord)


def test_two_nodes_can_not_have_one_address_unless_the_first_is_dead():
    net = Network()
    net.register(registration("a"))
    row = record_registration(registration("b"), "l", None, alive=False, catalogue=CATALOGUE, now=net.now)
    assert net.table.find_owner(row).id == "a"
    net.die("a")
    assert net.table.find_owner(row) is None


def test_addresses_are_compared_as_addresses_not_as_text():
    net = Network()
    net.register(replace(registration("a"), node=replace(registration("a").node, endpoint=Endpoint.parse("[fd00:0::10]:8000"))))
    same_address = replace(registration("b"), node=replace(registration("b").node, endpoint=Endpoint.parse("[fd00::0010]:8000")))
    row = record_registration(same_address, "l", None, alive=False, catalogue=CATALOGUE, now=net.now)
    assert row.address_and_model == "[fd00::10]:8000 m"
    assert net.table.find_owner(row).id == "a"


def test_two_models_at_one_address_are_let_in_with_a_warning():
    net = Network(CHAT, replace(CHAT, name="n", model="n"), catalogue={})
    net.register(registration("a"))
    row = net.register(registration("b", model="n"))
    assert net.table.find_owner(row) is None
    assert any("two models" in warning for warning in net.table.list_warnings(row))


def test_a_node_joins_matching_pools_and_gets_the_reasons_for_the_others():
    net = Network(CHAT, WIDE, replace(CHAT, name="h100", compute_capability="9.0"), replace(CHAT, name="long", min_seq_len=16000))
    for name, fields in {"a": {}, "b": {"tp_world_size": 2}, "c": {"pool": "chat"}, "d": {"compute_capability": "8.0"}}.items():
        net.register(registration(name, host=f"10.0.0.{ord(name)}", **fields))
        net.beat(name)
    assert net.routed() == {"chat": {"a", "c", "d"}, "wide": {"b"}, "h100": {"a"}}
    lost = net.register(registration("e", host="10.0.0.9", pool="elsewhere"))
    assert "wants to join 'elsewhere'" in net.table.list_warnings(lost)[0]


def test_one_mismatch_halves_trust_and_time_gives_it_back():
    row = record_registration(registration(), "l", None, alive=False, catalogue=CATALOGUE, now=0.0)
    assert row.evidence.score_trust(0.0) == 1.0
    row = quarantine(row, "other weights", 0.0)
    assert row.evidence.score_trust(0.0) == pytest.approx(0.5)
    assert row.evidence.score_trust(600.0) == pytest.approx(0.5**0.5)
    assert row.evidence.score_trust(36_000.0) > 0.99


def test_a_node_that_mends_its_claim_is_admitted_at_once_however_often_it_repeated_the_wrong_one():
    row = record_registration(registration(), "l", None, alive=False, catalogue=CATALOGUE, now=0.0)
    for second in range(20):
        row = quarantine(row, "other weights", float(second))
    assert row.evidence.score_trust(20.0) == pytest.approx(0.5, abs=0.02)
    again = record_registration(registration(epoch=2), "l", row, alive=True, catalogue=CATALOGUE, now=20.0)
    assert isinstance(again, NodeRecord)
    assert again.state is LOADING


def differing(row, times, now, agreements=0):
    for _ in range(times):
        row = record_comparison(row, agreements=agreements, disagreements=1, reason="other tokens from the third on", now=now)
    return row


def test_answers_that_differ_cost_trust_and_only_again_and_again_the_place():
    row = record_registration(registration(), "l", None, alive=False, catalogue=CATALOGUE, now=0.0)
    once = differing(row, 1, 0.0)
    assert (once.evidence.score_trust(0.0), once.state) == (pytest.approx(0.5), LOADING)
    assert once.reasons == ("answers differ: other tokens from the third on",)
    thrice = differing(row, 3, 0.0)
    assert thrice.state is NodeState.QUARANTINED
    assert "quarantined, answers differ: other tokens from the third on" in thrice.reasons
    seldom = differing(row, 3, 0.0, agreements=40)
    assert seldom.state is LOADING, "three of a hundred and more are chance"
    assert seldom.evidence.score_trust(0.0) > 0.9


def test_a_quarantine_for_answers_is_lifted_by_time_and_not_by_registering():
    row = differing(record_registration(registration(), "l", None, alive=False, catalogue=CATALOGUE, now=0.0), 3, 0.0)
    again = record_registration(registration(epoch=2), "l2", row, alive=True, catalogue=CATALOGUE, now=10.0)
    assert again.state is NodeState.QUARANTINED
    beat = Heartbeat(state=READY, sequence=1)
    assert record_heartbeat(again, "l2", beat, interval_s=3.0, now=12.0).state is NodeState.QUARANTINED
    assert record_heartbeat(again, "l2", beat, interval_s=3.0, now=1200.0).state is READY


def test_missed_heartbeats_and_failures_cost_trust():
    net = Network()
    net.register(registration())
    for sequence in range(1, 20):
        net.now += 3
        net.beat(sequence=sequence)
    assert net.table.get_member("a", net.now).trust == pytest.approx(1.0)
    net.now += 9
    net.beat(sequence=20)
    assert 0.8 < net.table.get_member("a", net.now).trust < 1.0
    assert net.table.get_member("a", net.now).reasons == ("2 heartbeats missed",)
    failing = record_answers(net.table.rows["a"], answers=100, failures=100, now=net.now)
    assert 0.4 < failing.evidence.score_trust(net.now) < 0.6


operations = st.lists(
    st.tuples(
        st.sampled_from(["register", "beat", "die", "remove", "drain", "catch", "wait"]),
        st.sampled_from("abc"),
        st.integers(0, 3),
        st.sampled_from([READY, LOADING, NodeState.DRAINING, NodeState.DEAD]),
        st.sampled_from([0.5, 2.0, -1.0]),
    ),
    max_size=30,
)


def perform(net, what, name, number, state, usage):
    known = name in net.table.rows
    if what == "register":
        net.register(registration(name, epoch=number, port=8000 + ord(name), tp_world_size=1 + number % 2), f"l{number}")
    elif what == "beat":
        net.beat(name, number, f"l{number}", state, kv_cache_usage=usage)
    elif what == "wait":
        net.now += 3
    elif known:
        {
            "die": lambda: net.die(name),
            "remove": lambda: net.remove(name),
            "drain": lambda: net._take(record_drain(net.table.rows[name], "")),
            "catch": lambda: net._take(quarantine(net.table.rows[name], "x", net.now)),
        }[what]()


def follow(followed, turned):
    """What somebody knows who hears of turnovers only."""
    for pool, ids in turned.left.items():
        for gone in ids:
            followed[pool].remove(gone)
    for pool, nodes in turned.joined.items():
        for node in nodes:
            assert node.id not in followed.setdefault(pool, set())
            followed[pool].add(node.id)


@given(operations)
def test_whatever_happens_only_living_ready_nodes_are_routed_to_and_the_turnovers_add_up(steps):
    net = Network()
    followed: dict[str, set[str]] = {}
    for step in steps:
        perform(net, *step)
        turned = net.table.take_changes()
        if turned is not None:
            follow(followed, turned)
        assert {pool: ids for pool, ids in followed.items() if ids} == net.routed()
        for routed in set().union(*net.routed().values()):
            row = net.table.rows[routed]
            assert net.table.is_alive(routed)
            assert net.table.get_state(row) is row.beat.state is READY
            assert not row.draining
            assert not row.quarantine
        for member in net.table.iter_members(net.now):
            assert 0.0 <= member.trust <= 1.0
            assert len(member.reasons) <= 7


def test_a_node_of_another_compute_capability_joins_with_a_warning_unless_the_pool_names_one():
    network = Network()
    network.register(registration("a", compute_capability="7.5"))
    network.beat("a")
    newer = network.register(registration("b", port=8001, compute_capability="9.0"))
    (warning,) = network.table.list_warnings(newer)
    assert "pool 'chat' also has nodes of compute_capability 7.5, this one has 9.0" in warning
    strict = Network(replace(CHAT, compute_capability=">=8.0"))
    old = strict.register(registration("a", compute_capability="7.5"))
    assert strict.table.list_warnings(old) == ("no pool takes it (chat: compute_capability is 7.5, the pool's is >=8.0)",)


LAW = replace(CHAT, name="law", model="law", served_model="law")


def test_every_model_of_a_node_is_routed_to_by_its_own_pool_and_leaves_with_the_node():
    network = Network(CHAT, LAW, catalogue={})
    several = replace(registration("a"), instances=(ModelInstance("law", "2026.1.0", 4), ModelInstance("tax")))
    row = network.register(several)
    assert network.table.list_warnings(row) == ("no pool takes its model 'tax' (none serves its model)",)
    network.beat("a")
    assert network.table.get_pools("a") == ("chat", "law")
    joined = network.table.take_changes().joined
    assert {pool: (node.id, node.model, node.max_concurrency) for pool, (node,) in joined.items()} == {
        "chat": ("a", several.node.model, several.node.max_concurrency),
        "law": ("a", "law", 4),
    }
    network.table.remove_row("a", row.revision + 99, 0.0, "gone")
    assert network.table.take_changes().left == {"chat": ("a",), "law": ("a",)}


def test_a_further_model_that_another_node_serves_at_the_address_is_not_routed_to_and_keeps_the_node():
    listed = replace(registration("listed").node, model="law")
    network = Network(CHAT, replace(LAW, nodes=(listed,)), catalogue={})
    row = network.register(replace(registration("a"), instances=(ModelInstance("law"),)))
    network.beat("a")
    assert network.table.get_pools("a") == ("chat",)
    assert network.table.list_warnings(row) == ("no pool takes its model 'law' (another node serves it at this address)",)
