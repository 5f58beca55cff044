"""The role `bench split`: requests through the network, taken apart by the clocks of client, gateway and nodes (R43).

Rule: one request at a time is measured; before that, short ones at many moments of a second find out how far the clocks are apart.
"""

import asyncio
import secrets
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from msgspec import Struct
from msgspec.structs import replace

from din_extproc.domain.timing import GatewayTimes
from din_extproc.measure.answer import TimedAnswer
from din_extproc.settings.settings import Settings
from din_extproc.tools.bench.clocks import TOLERANCE_MS, TimedExchange, gateway_offset, judged, node_offsets
from din_extproc.tools.bench.prompts import prompt
from din_extproc.tools.bench.run_baseline import aim_at, told
from din_extproc.tools.bench.split import Apart, Split
from din_extproc.tools.bench.split import split as taken_apart
from din_extproc.tools.bench.timed_client import TimedClient, TimedQuestion
from din_extproc.tools.http_client import OutsideClient

_STEP_S = 10**0.5 - 3
"""Between two short requests: whole steps fall on moments of a second that lie far from each other, every second or third step, too."""
_SHORT = "Say OK."
"""The quicker the answer, the closer it bounds the clocks."""
_EXACT = frozenset({"vllm", "sglang", "llamacpp"})
"""Engines that can be told to go on to the last token."""


class SplitOptions(Struct, frozen=True, kw_only=True):
    """What to ask, and whom."""

    url: str
    """Envoy, as clients reach it."""
    key: str
    """A tenant's."""
    model: str = ""
    """A name that the tenant may use; "": the first whose pool chats."""
    tokens: tuple[int, ...] = (1, 10, 50, 200, 500)
    """Of output: the lengths of the streams."""
    repeats: int = 2
    """Of each length."""
    clock_requests: int = 24
    """One token each, for the clocks; a pool of many nodes needs more."""
    tolerance_ms: float = TOLERANCE_MS
    timeout_s: float = 300.0
    """Of one answer."""


class SplitMeasurements(Struct, frozen=True):
    """Everything that was asked and told."""

    exchanges: tuple[TimedExchange, ...]
    """Those that are to be taken apart."""
    others: tuple[TimedExchange, ...]
    """Those that only tell of clocks."""
    untold: tuple[TimedAnswer, ...]
    """Answers of which the gateway knows nothing."""
    model: str


def split(settings: Settings, options: SplitOptions) -> Apart:
    """Ask, and take apart.

    Args:
        settings: What the deployment runs with.
        options: What to ask, and whom.

    Raises:
        Unmeasurable: the tenant can't ask.
        Unanswered: the admin port does not tell the gateway's times.
    """
    return apart(asyncio.run(ask(settings, options)), options)


def apart(asked: SplitMeasurements, options: SplitOptions) -> Apart:
    """What was asked, taken apart."""
    known = [*asked.exchanges, *asked.others]
    gateway = gateway_offset(known)
    found: list[Split] = []
    failed: dict[str, int] = {}
    for each in asked.exchanges:
        one = taken_apart(each, gateway, options.tolerance_ms)
        if isinstance(one, Split):
            found.append(one)
        else:
            failed[one] = failed.get(one, 0) + 1
    for answer in asked.untold:
        why = answer.trouble or "the sidecar that was asked knows nothing of it"
        failed[why] = failed.get(why, 0) + 1
    return Apart(
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        url=options.url,
        model=asked.model,
        tolerance_ms=options.tolerance_ms,
        splits=tuple(found),
        clocks=tuple(judged(gateway, node_offsets(known), options.tolerance_ms)),
        failed=failed,
    )


async def ask(settings: Settings, options: SplitOptions) -> SplitMeasurements:
    """Ask everything. Raises as `split` does."""
    aim = await asyncio.to_thread(aim_at, settings, options.key, options.model, "")
    trace = f"split-{secrets.token_hex(6)}-"
    more = {"ignore_eos": True} if aim.pool.engine in _EXACT else {}
    async with OutsideClient(options.url, options.key, options.timeout_s) as client:
        asker = TimedClient(client, aim.model, more)
        await asker.ask(TimedQuestion(f"warm-{trace}", _SHORT, 1))
        short = [TimedQuestion(f"{trace}clock-{number}", _SHORT, 1) for number in range(options.clock_requests)]
        others = await asyncio.gather(*(_asked_at(asker, each, number * _STEP_S) for number, each in enumerate(short)))
        telling = [_telling(settings, f"{trace}clock-", others)]
        measured = []
        for number, tokens in enumerate(tokens for tokens in options.tokens for _ in range(options.repeats)):
            measured.append(await _asked_at(asker, TimedQuestion(f"{trace}{number}.", prompt(number), tokens), 0.0))
            telling.append(_telling(settings, f"{trace}{number}.", measured[-1:]))
        times = {each.trace_id: each for told_of in await asyncio.gather(*telling) for each in told_of}
    native = aim.pool.api != "openai"

    def known(asked: Iterable[tuple[str, float, TimedAnswer]]) -> tuple[TimedExchange, ...]:
        """Of an answer that was translated, `created` is the gateway's own."""
        found = ((began_at, replace(answer, created=()) if native else answer, trace_id) for trace_id, began_at, answer in asked)
        return tuple(TimedExchange(began_at, answer, times[trace_id]) for began_at, answer, trace_id in found if trace_id in times)

    untold = tuple(answer for trace_id, _, answer in measured if trace_id not in times)
    return SplitMeasurements(known(measured), known(others), untold, aim.model)


def _telling(settings: Settings, trace: str, asked: Sequence[tuple[str, float, TimedAnswer]]) -> "asyncio.Task[list[GatewayTimes]]":
    """What the gateway says of them, asked at once: it forgets, and other requests pass as well."""
    good = sum(not answer.trouble for _, _, answer in asked)
    return asyncio.create_task(asyncio.to_thread(told, settings, trace, good))


async def _asked_at(asker: TimedClient, question: TimedQuestion, after_s: float) -> tuple[str, float, TimedAnswer]:
    """After a while: trace id, when it was sent by the client's clock, what came."""
    await asyncio.sleep(after_s)
    outcome, answer = await asker.ask(question)
    return question.trace_id, outcome.began_at, answer
