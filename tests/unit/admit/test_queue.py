"""Who waits, and whose turn it is: classes, weights, bounds, and what holds up whom."""

from din_extproc.admit.ledger import Claim, Denied, RateLimitStatus
from din_extproc.admit.queue import RECHECK_MS, QueueState, Ticket, is_queueable
from din_extproc.domain.request import Priority
from din_extproc.domain.tenant import Budget, Queueing, RateLimits

OWN, COMMON = Budget("tenant", RateLimits(tpm=1000)), Budget("network", RateLimits(tpm=1000), shared=True)


class Room(QueueState):
    """A queue with short words for joining, and a number for each ticket."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.now = 0

    def come(self, tenant="a", priority=Priority.STANDARD, *, tokens=100, weight=1, size=100, wait_ms=5000, budgets=(OWN, COMMON)):
        claim = Claim(f"{tenant}{len(self)}", tenant, budgets, tokens, 30_000)
        ticket = Ticket(claim, priority, Queueing(5000, size, weight), self.now + wait_ms)
        return ticket if self.join(ticket) else None

    def serve(self) -> str:
        """Grant whoever's turn it is."""
        ticket = self.next_ticket(self.now)
        assert ticket is not None
        self.leave(ticket, granted=True)
        return ticket.claim.tenant

    def deny(self, ticket, scope="network", dimension="tpm", wait_ms=200) -> None:
        self.record_denial(ticket, Denied(scope, dimension, 1000, wait_ms, RateLimitStatus()), self.now)


def test_only_what_comes_back_soon_is_waited_for():
    assert not is_queueable(Denied("long_tail:p:n", "max_streams", 1, 1, RateLimitStatus())), (
        "the tenant's short requests would wait behind it"
    )
    waited_for = [is_queueable(Denied("tenant", what, 1, 1, RateLimitStatus())) for what in ("tpm", "max_streams", "rpm", "oversize")]
    assert waited_for == [True, True, False, False]


def test_within_a_tenant_class_goes_before_arrival():
    room = Room()
    tickets = [room.come(priority=priority) for priority in (Priority.BATCH, Priority.STANDARD, Priority.CRITICAL, Priority.STANDARD)]
    order = []
    while room:
        ticket = room.next_ticket(0)
        order.append(tickets.index(ticket))
        room.leave(ticket, granted=True)
    assert order == [2, 1, 3, 0]


def test_tenants_that_compete_are_served_by_weight():
    room = Room()
    for _ in range(60):
        room.come("heavy", weight=3)
        room.come("light", weight=1)
    served = [room.serve() for _ in range(40)]
    assert served.count("heavy") == 30


def test_weights_hold_even_when_each_tenant_waits_with_one_request_at_a_time():
    room = Room()
    weights = {"heavy": 3, "light": 1}
    for tenant, weight in weights.items():
        room.come(tenant, weight=weight)
    served = []
    for _ in range(80):
        served.append(room.serve())
        room.come(served[-1], weight=weights[served[-1]])
    assert 58 <= served.count("heavy") <= 62


def test_a_tenant_that_was_away_gets_no_credit_for_it():
    room = Room()
    for _ in range(50):
        room.come("busy")
        room.serve()
    for _ in range(10):
        room.come("busy")
        room.come("late")
    served = [room.serve() for _ in range(10)]
    assert 4 <= served.count("late") <= 6


def test_what_a_tenant_is_granted_elsewhere_counts_against_its_weight_here():
    room = Room()
    for _ in range(40):
        room.come("here", tokens=10)
        room.come("both", tokens=10)
    served = []
    for _ in range(30):
        served.append(room.serve())
        room.record_remote_grant("both", 5)
    assert 8 <= served.count("both") <= 10, "half of what it is owed it gets elsewhere"


def after_so_many_grants_to_others(grants: int) -> list[str]:
    """Who is served when a tenant that was served once waits here again."""
    room = Room()
    room.come("returns", tokens=10)
    room.serve()
    for _ in range(grants):
        room.come("stays", tokens=10)
        room.serve()
    for _ in range(30):
        room.come("stays", tokens=10)
        room.come("returns", tokens=10)
    return [room.serve() for _ in range(16)]


def test_who_waited_elsewhere_a_moment_ago_is_owed_what_others_got_and_who_was_away_is_not():
    assert set(after_so_many_grants_to_others(10)[:9]) == {"returns"}
    assert 7 <= after_so_many_grants_to_others(200).count("returns") <= 9


def test_who_waits_for_what_all_share_holds_up_whoever_comes_behind_however_small():
    room = Room()
    large = room.come("large", tokens=900)
    small = room.come("small", tokens=1)
    apart = room.come("apart", budgets=(OWN,))
    room.deny(large)
    assert room.next_ticket(0) is apart
    room.leave(apart)
    assert room.next_ticket(0) is None
    assert room.must_queue(small.claim, Priority.STANDARD)
    assert not room.must_queue(Claim("x", "other", (OWN, COMMON), 1, 1), Priority.CRITICAL), "class goes first"
    room.now = 200
    assert room.next_ticket(200) is large, "its tokens are there"


def test_what_is_short_for_one_tenant_holds_up_nobody_else():
    room = Room()
    room.deny(room.come("short"), scope="tenant")
    other = room.come("other")
    assert room.next_ticket(0) is other
    assert not room.must_queue(Claim("x", "third", (OWN, COMMON), 1, 1), Priority.STANDARD)
    assert room.must_queue(Claim("x", "short", (OWN,), 1, 1), Priority.STANDARD)


def test_what_comes_back_wakes_those_that_it_concerns():
    room = Room()
    own, common = room.come("own"), room.come("common")
    room.deny(own, scope="tenant", dimension="max_streams", wait_ms=30_000)
    room.deny(common, dimension="max_streams", wait_ms=30_000)
    assert room.next_ticket(0) is None
    room.on_freed("own")
    assert room.next_ticket(0) is own
    room.deny(own, scope="tenant", dimension="max_streams")
    room.on_shared_freed()
    assert room.next_ticket(0) is common
    room.deny(common, dimension="max_streams")
    assert (room.next_ticket(RECHECK_MS - 1), room.next_ticket(RECHECK_MS)) == (None, own), "a lost wakeup is made up for"


def test_the_next_in_line_asks_when_the_first_has_left():
    room = Room()
    first, second = room.come(), room.come()
    room.deny(first, wait_ms=100_000)
    room.leave(first)
    assert room.next_ticket(0) is second


def test_places_are_bounded_per_tenant_and_in_all_and_the_last_ones_are_for_critical_requests():
    room = Room(5, 2)
    assert room.come("a", size=2)
    assert room.come("a", size=2)
    assert room.come("a", size=2) is None
    assert room.come("b")
    assert room.come("c") is None, "two places are kept"
    assert room.come("c", Priority.CRITICAL)
    assert room.come("d", Priority.CRITICAL)
    assert room.come("e", Priority.CRITICAL) is None
    assert len(room) == 5


def test_a_full_queue_says_when_somebody_will_have_left_it():
    room = Room(2, 0)
    room.come("a", wait_ms=700)
    room.come("b", wait_ms=300)
    assert room.next_vacancy_ms(Claim("x", "a", (OWN,), 1, 1), 100) == 600
    assert room.next_vacancy_ms(Claim("x", "new", (OWN,), 1, 1), 100) == 200
    assert room.next_vacancy_ms(Claim("x", "new", (OWN,), 1, 1), 5000) == 1


def test_the_overdue_are_found_in_the_order_of_their_deadlines():
    room = Room()
    late, early, gone = room.come("a", wait_ms=400), room.come("b", wait_ms=200), room.come("c", wait_ms=100)
    room.leave(gone)
    assert room.next_expired(199) is None
    assert room.next_action_ms(0) == 200
    assert room.next_expired(500) is early
    room.leave(early)
    assert room.next_expired(500) is late
