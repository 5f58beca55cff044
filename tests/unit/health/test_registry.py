"""What failures of one tenant alone can take from the others: a request counts once, half of a pool's nodes stay, and every pool does."""

from itertools import count

import pytest

from din_extproc.domain.health import BreakerState, make_origin
from din_extproc.domain.usage import ExchangeRecord, Outcome, Usage
from din_extproc.health.breaker import BreakerEvent, BreakerEventKind
from din_extproc.health.exchanges import classify_exchange
from din_extproc.health.policy import BreakerPolicy
from din_extproc.health.registry import BreakerRegistry

POISONER, OTHER = "aaaaaaaa", "bbbbbbbb"


class Pool:
    """The breakers of one pool, and a clock that goes on by itself."""

    def __init__(self, nodes: str, *, shared: bool = True) -> None:
        self.registry = BreakerRegistry()
        self.registry.nodes.reload(dict.fromkeys(nodes, BreakerPolicy()))
        self.registry.pools.reload({"chat": BreakerPolicy(consecutive_failures=None)})
        self.registry.members = {"chat": set(nodes)}
        self.registry.shared = shared
        self._nodes, self._times = nodes, count(1)

    def event(self, node: str, kind: BreakerEventKind, origin: str = "") -> None:
        now = float(next(self._times))
        self.registry.on_node_event(node, BreakerEvent(kind, now, origin=origin))

    def fail_everywhere(self, tenant: str, bodies: range) -> None:
        for number in bodies:
            for node in self._nodes:
                self.event(node, BreakerEventKind.FAILED, make_origin(tenant, str(number).encode()))

    def exchange(self, outcome: Outcome, tenant: str, number: int) -> None:
        record = ExchangeRecord(
            request_id="r", trace_id="t", tenant=tenant, key_id="k", model="m", alias="m", pool="chat", rule="", node_id="a", status=502,
            outcome=outcome, stream=True, usage=Usage(1, 1), reserved_tokens=2, prompt_estimate=1, features=(), fixed=0, attempts=1,
            degraded=False, started_at=0.0, origin=make_origin(tenant, str(number).encode()),
        )  # fmt: skip
        now = float(next(self._times)) / 10
        self.registry.on_exchange(record, classify_exchange(record, now, attempts_reported=True, longest_open_s=60.0))

    @property
    def open(self) -> set[str]:
        return {name for name, each in self.registry.nodes.snapshot_not_closed().items() if each.state is BreakerState.OPEN}


def test_one_request_counts_once_however_often_it_fails():
    pool = Pool("abc")
    for _ in range(50):
        pool.fail_everywhere(POISONER, range(1))
    assert pool.open == set()


@pytest.mark.parametrize(("nodes", "most"), [("a", 0), ("ab", 1), ("abc", 1), ("abcd", 2), ("abcdefg", 3)])
def test_one_tenant_opens_at_most_half_of_a_pool(nodes, most):
    pool = Pool(nodes)
    pool.fail_everywhere(POISONER, range(50))
    assert len(pool.open) == most


def test_two_tenants_open_every_node_that_fails_for_both():
    pool = Pool("abc")
    pool.fail_everywhere(POISONER, range(2))
    pool.fail_everywhere(OTHER, range(1))
    assert pool.open == set("abc")


@pytest.mark.parametrize("kind", [BreakerEventKind.FAILED, BreakerEventKind.PROBE_FAILED])
def test_what_no_request_causes_opens_every_node(kind):
    pool = Pool("abc")
    pool.fail_everywhere(POISONER, range(2))
    for node in "abc":
        pool.event(node, kind)
    assert pool.open == set("abc"), "connections that can't be opened, and the gateway's own probes"


def test_a_tenant_spares_the_last_half_whoever_opened_the_first():
    pool = Pool("abcd")
    for node in "ab":
        for _ in range(3):
            pool.event(node, BreakerEventKind.PROBE_FAILED)
    pool.fail_everywhere(POISONER, range(50))
    assert pool.open == {"a", "b"}


def test_successes_of_others_do_not_let_many_bodies_of_one_tenant_open_the_last_half():
    pool = Pool("ab")
    for number in range(200):
        pool.fail_everywhere(POISONER, range(number, number + 1))
        for node in "ab":
            pool.event(node, BreakerEventKind.SUCCEEDED)
            if number % 20 == 0:
                pool.event(node, BreakerEventKind.FAILED, make_origin(OTHER, str(number).encode()))
    assert len(pool.open) <= 1


def test_another_replica_opens_no_more_than_half_on_one_tenants_account():
    pool = Pool("abc")
    for node in "abc":
        pool.event(node, BreakerEventKind.REMOTE_OPEN, POISONER)
    assert pool.open == {"a"}
    pool.event("b", BreakerEventKind.REMOTE_OPEN)
    assert pool.open == {"a", "b"}


def test_where_only_one_tenant_is_configured_its_failures_open_every_node():
    pool = Pool("abc", shared=False)
    pool.fail_everywhere(POISONER, range(3))
    assert pool.open == set("abc")


def test_a_node_in_two_pools_is_spared_when_one_of_them_needs_it():
    pool = Pool("abc")
    pool.registry.members = {"chat": set("abc"), "small": {"a"}}
    pool.fail_everywhere(POISONER, range(3))
    assert pool.open == {"b"}


def test_a_pool_opens_by_two_tenants_and_never_by_one():
    pool = Pool("abc")
    for number in range(100):
        pool.exchange(Outcome.UPSTREAM_ERROR, POISONER, number)
    assert pool.registry.snapshot_not_closed().pools == {}
    for number in range(20):
        pool.exchange(Outcome.UPSTREAM_ERROR, OTHER, number)
    assert pool.registry.snapshot_not_closed().pools["chat"].state is BreakerState.OPEN


def test_failures_of_a_request_that_another_node_answers_each_time_count_each():
    pool = Pool("ab")
    for _ in range(3):
        pool.event("b", BreakerEventKind.FAILED, make_origin(OTHER, b"1"))
        pool.exchange(Outcome.COMPLETED, OTHER, 1)
    assert pool.open == {"b"}
