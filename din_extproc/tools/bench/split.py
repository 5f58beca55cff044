"""The role of `bench split`: splits the time of requests by the clocks of client, gateway and nodes.

Rule: requests are measured one at a time, after short ones at many fractions of a second have measured the clock offsets.
"""

import asyncio
import secrets
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from msgspec import Struct
from msgspec.structs import replace

from din_extproc.domain.progress import ShareDone, ignore_progress
from din_extproc.domain.timing import GatewayTimes
from din_extproc.measure.answer import TimedAnswer
from din_extproc.settings.settings import Settings
from din_extproc.tools.bench.baseline import fetch_reports, find_target
from din_extproc.tools.bench.clocks import TOLERANCE_MS, TimedExchange, check_clocks, measure_gateway, measure_nodes
from din_extproc.tools.bench.prompts import make_prompt
from din_extproc.tools.bench.split_parts import Split, SplitReport
from din_extproc.tools.bench.split_parts import split_request as taken_apart
from din_extproc.tools.bench.timed_client import TimedClient, TimedQuestion
from din_extproc.tools.http_client import OutsideClient

_STEP_S = 10**0.5 - 3
"""Seconds between two short requests: multiples of it spread well over the fractions of a second."""
_SHORT = "Say OK."
"""Requests of one token: the quicker the answer, the tighter the bounds of clocks."""
_EXACT = frozenset({"vllm", "sglang", "llamacpp"})
"""Engines that can be forced to produce the exact number of tokens."""


class SplitOptions(Struct, frozen=True, kw_only=True):
    """The options of `bench split`."""

    url: str
    """Envoy's URL, as clients reach it."""
    key: str
    """The API key of a tenant."""
    model: str = ""
    """A model that the tenant may use; "": the first one whose pool serves chats."""
    tokens: tuple[int, ...] = (1, 10, 50, 200, 500)
    """Output tokens of the streams."""
    repeats: int = 2
    """Streams of each length."""
    clock_requests: int = 24
    """One-token requests that measure clock offsets; a pool of many nodes needs more."""
    tolerance_ms: float = TOLERANCE_MS
    timeout_s: float = 300.0
    """Time limit of one answer, in seconds."""


class SplitMeasurements(Struct, frozen=True):
    """All measurements."""

    exchanges: tuple[TimedExchange, ...]
    """The exchanges to split."""
    others: tuple[TimedExchange, ...]
    """The exchanges that only measure clocks."""
    untold: tuple[TimedAnswer, ...]
    """Number of answers of which the gateway has no record."""
    model: str


def split(settings: Settings, options: SplitOptions, progress: ShareDone = ignore_progress) -> SplitReport:
    """Send the requests and split their times.

    Args:
        settings: The configuration of the deployment.
        options: The target and the load.
        progress: Takes the share done.

    Raises:
        BaselineFailed: the tenant can't send these requests.
        SidecarUnreachable: the admin port does not report the gateway's times.
    """
    return make_report(asyncio.run(measure(settings, options, progress)), options)


def make_report(measured: SplitMeasurements, options: SplitOptions) -> SplitReport:
    """Split measured requests."""
    known = [*measured.exchanges, *measured.others]
    gateway = measure_gateway(known)
    found: list[Split] = []
    failed: dict[str, int] = {}
    for each in measured.exchanges:
        one = taken_apart(each, gateway, options.tolerance_ms)
        if isinstance(one, Split):
            found.append(one)
        else:
            failed[one] = failed.get(one, 0) + 1
    for answer in measured.untold:
        why = answer.trouble or "the sidecar that was asked knows nothing of it"
        failed[why] = failed.get(why, 0) + 1
    return SplitReport(
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        url=options.url,
        model=measured.model,
        tolerance_ms=options.tolerance_ms,
        splits=tuple(found),
        clocks=tuple(check_clocks(gateway, measure_nodes(known), options.tolerance_ms)),
        failed=failed,
    )


async def measure(settings: Settings, options: SplitOptions, progress: ShareDone = ignore_progress) -> SplitMeasurements:
    """Send all requests. Raises as `split` does."""
    aim = await asyncio.to_thread(find_target, settings, options.key, options.model, "")
    trace = f"split-{secrets.token_hex(6)}-"
    more = {"ignore_eos": True} if aim.pool.engine in _EXACT else {}
    async with OutsideClient(options.url, options.key, options.timeout_s) as sender:
        client = TimedClient(sender, aim.model, more)
        await client.send(TimedQuestion(f"warm-{trace}", _SHORT, 1))
        short = [TimedQuestion(f"{trace}clock-{number}", _SHORT, 1) for number in range(options.clock_requests)]
        others = await asyncio.gather(*(_send_after(client, each, number * _STEP_S) for number, each in enumerate(short)))
        fetches = [_fetch_reports(settings, f"{trace}clock-", others)]
        measured = []
        streams = [tokens for tokens in options.tokens for _ in range(options.repeats)]
        for number, tokens in enumerate(streams):
            progress(number / len(streams))
            measured.append(await _send_after(client, TimedQuestion(f"{trace}{number}.", make_prompt(number), tokens), 0.0))
            fetches.append(_fetch_reports(settings, f"{trace}{number}.", measured[-1:]))
        times = {each.trace_id: each for node_times in await asyncio.gather(*fetches) for each in node_times}
    native = aim.pool.api != "openai"

    def known(answers: Iterable[tuple[str, float, TimedAnswer]]) -> tuple[TimedExchange, ...]:
        """Drop `created` of a translated answer: it is the gateway's own time."""
        found = ((began_at, replace(answer, created=()) if native else answer, trace_id) for trace_id, began_at, answer in answers)
        return tuple(TimedExchange(began_at, answer, times[trace_id]) for began_at, answer, trace_id in found if trace_id in times)

    untold = tuple(answer for trace_id, _, answer in measured if trace_id not in times)
    return SplitMeasurements(known(measured), known(others), untold, aim.model)


def _fetch_reports(settings: Settings, trace: str, answers: Sequence[tuple[str, float, TimedAnswer]]) -> "asyncio.Task[list[GatewayTimes]]":
    """Fetch the gateway's records at once, because it keeps only recent ones."""
    good = sum(not answer.trouble for _, _, answer in answers)
    return asyncio.create_task(asyncio.to_thread(fetch_reports, settings, trace, good))


async def _send_after(client: TimedClient, question: TimedQuestion, after_s: float) -> tuple[str, float, TimedAnswer]:
    """Send one request after a delay; return trace id, sending time by the client's clock, and result."""
    await asyncio.sleep(after_s)
    outcome, answer = await client.send(question)
    return question.trace_id, outcome.began_at, answer
