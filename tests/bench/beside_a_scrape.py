"""Decision times with and without a scrape of 100,000 series, at a real sidecar over its sockets.

Rule: both are measured in turn, pair by pair, with decisions asked for at the same moments; the figure is the median of the pairs' ratios,
and says within which bounds it would lie in nine of ten other samples of as many pairs. The sidecar, Redis and who asks go before
whatever else runs on the machine, where the kernel lets them: what others do is not what is measured.
"""

import http.client
import json
import random
from concurrent.futures import ThreadPoolExecutor

from msgspec import Struct

from din_extproc.admit.keys import ENTROPY_BYTES, make_key
from tests.bench.contenders import chat_body, configuration
from tests.bench.field import BODY_BYTES, Field, Figures
from tests.bench.harness import Child, ahead, cpu_s, median, pin
from tests.support.stack import Stack, tenant

_PAIRS_PER_ROUND = 4
_STREAMS = 100
"""At once, while the page is filled."""
_WARM_S = 2.0
_WARM_RATE = 200.0
_RESAMPLINGS = 1000


class _Pair(Struct, frozen=True):
    """Waits for decisions, sorted, in seconds."""

    alone: list[float]
    beside: list[float]

    def ratio(self, share: float) -> float:
        return _quantile(self.beside, share) / _quantile(self.alone, share)


def beside_a_scrape(field: Field) -> Figures:
    """Decisions at half load, beside scrapes that follow each other ÷ alone; and what a scrape takes."""
    many, effort = field.effort.many_tenants // _STREAMS, field.effort
    keys = {f"tenant-{at}": make_key(f"tenant-{at}", random.Random(at).randbytes(ENTROPY_BYTES)) for at in range(many)}
    made = configuration(field.node_ports)
    made["tenants"] += [tenant(name) | {"keys": [{"id": name, "hash": key.hash}]} for name, key in keys.items()]
    with Stack(made) as stack:
        with ThreadPoolExecutor(_STREAMS) as clients:
            list(clients.map(lambda key: _stream(stack.port, key.text), keys.values()))
        stack.settled(many)
        assert stack.sidecar is not None
        pin(stack.sidecar.pid, "server")
        asking, scraping = Child.module("decisions", stack.folder / "ext_proc.sock"), Child.module("scraper", stack.admin_port)
        with asking, scraping:
            for pid in (stack.redis.pid, asking.pid, scraping.pid):
                pin(pid, "envoy")  # which has nothing to do
            undisturbed = all(ahead(pid) for pid in (stack.sidecar.pid, stack.redis.pid, asking.pid, scraping.pid))
            _decide(asking, _WARM_RATE, _WARM_S, 0)
            rate = _half_load(asking, stack.sidecar.pid)
            pages: list[dict] = []
            pairs = [_pair(asking, scraping, rate, 1.5 * effort.seconds, turn, pages) for turn in range(_PAIRS_PER_ROUND * effort.rounds)]
    if not undisturbed:
        print("the kernel does not let these processes go before others (root may): what else runs on the machine is in the figures")
    return _figures(pairs) | {
        "scrape_series": median(page["lines"] for page in pages),
        "scrape_s": median(took for page in pages for took in page["seconds"]),
        "scrape_decisions_per_s": rate,
    }


def _figures(pairs: list[_Pair]) -> Figures:
    ratios = [pair.ratio(0.99) for pair in pairs]
    rng = random.Random(0)
    medians = sorted(median(rng.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLINGS))
    name = "decision_p99_beside_a_scrape_vs_alone"
    figures = {name: median(ratios), f"{name}_lowest": _quantile(medians, 0.05), f"{name}_highest": _quantile(medians, 0.95)}
    for state in ("alone", "beside"):
        waits = sorted(wait for pair in pairs for wait in getattr(pair, state))
        figures |= {f"decision_p{percent}_ms_{state}": _quantile(waits, percent / 100) * 1e3 for percent in (50, 90, 99)}
        figures[f"decisions_{state}"] = len(waits)
    return figures


def _pair(asking: Child, scraping: Child, rate: float, seconds: float, turn: int, pages: list[dict]) -> _Pair:
    """One of each; every second time the other one is first."""
    waits: dict[bool, list[float]] = {}
    for beside in (bool(turn % 2), not turn % 2):
        if beside:
            scraping.ask("begin", 10)
        waits[beside] = _decide(asking, rate, seconds, turn)
        if beside:
            pages.append(json.loads(scraping.ask("end", 60)))
    return _Pair(waits[False], waits[True])


def _half_load(asking: Child, sidecar: int) -> float:
    """Decisions per second that take half of the sidecar's core."""
    used = cpu_s(sidecar)
    waits = _decide(asking, _WARM_RATE, _WARM_S, 1)
    return 0.5 * len(waits) / (cpu_s(sidecar) - used)


def _decide(asking: Child, rate: float, seconds: float, seed: int) -> list[float]:
    waits = json.loads(asking.ask(json.dumps({"rate": rate, "seconds": seconds, "seed": seed}), seconds + 60))
    return sorted(waits)


def _stream(port: int, key: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json", "accept": "text/event-stream"}
    connection.request("POST", "/v1/chat/completions", chat_body(BODY_BYTES, stream=True), headers)
    reply = connection.getresponse()
    metrics_page = reply.read()
    assert reply.status == 200, metrics_page[:200]
    connection.close()


def _quantile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
