"""Inverts conditions of rules: which requests meet them.

Rule: a sample request is a guess, checked by routing it. Conditions that can't be inverted (CEL, `not`, tenants) are ignored.
"""

from collections.abc import Iterator
from decimal import Decimal

from msgspec import Struct
from msgspec.structs import replace

from din_extproc.domain.price import UNITS
from din_extproc.domain.request import Priority
from din_extproc.route.rules import RuleCondition

_SOME_VALUE = "verify"


class SampleRequest(Struct, frozen=True):
    """The properties of a sample request. None and empty fields are unconstrained."""

    operations: tuple[str, ...] = ()
    lowest: int = 0
    """Estimated prompt tokens."""
    highest: int | None = None
    headers: dict[str, str] = {}
    stream: bool | None = None
    priority: Priority | None = None


def both(one: SampleRequest, other: SampleRequest) -> SampleRequest | None:
    """Combine two sample requests; None: they contradict each other."""
    operations = one.operations or other.operations
    if one.operations and other.operations:
        operations = tuple(operation for operation in one.operations if operation in other.operations)
    joined = SampleRequest(
        operations=operations,
        lowest=max(one.lowest, other.lowest),
        highest=min((bound for bound in (one.highest, other.highest) if bound is not None), default=None),
        headers={**one.headers, **other.headers},
        stream=other.stream if one.stream is None else one.stream,
        priority=one.priority or other.priority,
    )
    agree = (
        (joined.operations or not one.operations)
        and all(joined.headers[name] == value for name, value in one.headers.items())
        and other.stream in (None, joined.stream)
        and other.priority in (None, joined.priority)
        and (joined.highest is None or joined.lowest <= joined.highest)
    )
    return joined if agree else None


def invertible(condition: RuleCondition) -> bool:
    """Whether the condition can be inverted completely, but for tenants and models."""
    own = not condition.cel and condition.negated is None
    return own and all(invertible(inner) for inner in (*condition.any, *condition.all))


def variants(sample: SampleRequest, priorities: tuple[Priority, ...]) -> Iterator[SampleRequest]:
    """Yield the sample request, then variants of its unconstrained properties: streamed, and of another priority."""
    for priority in (None, *priorities) if sample.priority is None else (sample.priority,):
        for stream in (None, True) if sample.stream is None else (sample.stream,):
            yield replace(sample, stream=stream, priority=priority)


def find_samples(condition: RuleCondition) -> Iterator[SampleRequest]:
    """Yield a sample request for each alternative that meets the condition."""
    own = SampleRequest(
        operations=condition.path,
        lowest=0 if condition.estimated_tokens is None else condition.estimated_tokens.min_tokens,
        highest=None if condition.estimated_tokens is None else condition.estimated_tokens.max_tokens,
        headers={
            **{name: _SOME_VALUE if wanted is True else wanted[0] for name, wanted in condition.header.items() if wanted is not False},
            **_limits(condition),
        },
        stream=condition.stream,
        priority=condition.priority[0] if condition.priority else None,
    )
    found = [own]
    for alternatives in (*([condition.any] if condition.any else []), *((inner,) for inner in condition.all)):
        choices = [sample for inner in alternatives for sample in find_samples(inner)]
        found = [joined for one in found for other in choices if (joined := both(one, other)) is not None]
    yield from found


def _limits(condition: RuleCondition) -> dict[str, str]:
    """The largest deadline and budgets that meet the condition, as their headers; where there is no largest one, none at all."""
    found = {}
    for name, bounds, units in (
        ("x-din-timeout-ms", condition.timeout_ms, 1),
        ("x-din-budget-tokens", condition.budget_tokens, 1),
        ("x-din-budget-cost", condition.budget_cost, UNITS),
    ):
        if bounds is not None and bounds.max_tokens is not None:
            found[name] = format(Decimal(bounds.max_tokens) / units, "f")
    return found
