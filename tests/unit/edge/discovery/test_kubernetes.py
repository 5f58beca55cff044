"""Nodes of a Kubernetes cluster, listed and watched at an API server on loopback."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator

import pytest

from din_extproc.domain.membership import NodeState
from din_extproc.domain.node import Endpoint, KubernetesObjects
from din_extproc.edge.discovery.kubernetes import KubernetesSource
from din_extproc.edge.discovery.source import SourceAnswer
from tests.support.kube_server import KubeServer, make_pod, make_slice
from tests.support.waiting import until

READY, LOADING, DRAINING = NodeState.READY, NodeState.LOADING, NodeState.DRAINING
UP = {"ready": True, "serving": True, "terminating": False}
GOES = {"ready": False, "serving": True, "terminating": True}
SERVICE = {"service": "vllm", "port": "http"}
PODS = {"selector": "app=vllm", "port": "http"}


class Followed:
    """The latest answer of a source, as whoever follows it has it."""

    def __init__(self, source: KubernetesSource) -> None:
        self._source = source
        self.answer = SourceAnswer({})
        self.problems: list[str] = []
        """Every problem so far."""
        self.task = asyncio.get_running_loop().create_task(self._follow())

    async def _follow(self) -> None:
        async with contextlib.aclosing(self._source.follow()) as answers:
            async for answer in answers:
                self.answer = answer
                self.problems += [answer.problem] if answer.problem else []

    @property
    def states(self) -> dict[str, NodeState]:
        return {str(endpoint): found.state for endpoint, found in self.answer.endpoints.items()}


@pytest.fixture
def server() -> Iterator[KubeServer]:
    with KubeServer() as running:
        yield running


@pytest.fixture
async def follow(server, tmp_path) -> AsyncIterator:
    started = []

    def start(**wanted: str | int) -> Followed:
        file = server.write_kubeconfig(tmp_path / "kubeconfig")
        started.append(Followed(KubernetesSource(KubernetesObjects("inference", **{"kubeconfig": str(file), **wanted}), {})))
        return started[-1]

    yield start
    for each in started:
        each.task.cancel()
    await asyncio.gather(*(each.task for each in started), return_exceptions=True)


def put(server: KubeServer, *hosts: str) -> None:
    server.put(make_slice("vllm-a", "vllm", [(host, UP) for host in hosts], 8000))


async def test_conditions_of_endpoints_are_states_and_an_unknown_one_is_ready(server, follow):
    conditions = {"1": UP, "2": {"ready": False}, "3": GOES, "4": {}, "5": {**UP, "terminating": True}}
    server.put(make_slice("vllm-a", "vllm", [(f"10.0.0.{at}", each) for at, each in conditions.items()], 8000))
    server.put(make_slice("other-a", "other", [("10.0.0.9", UP)], 8000))
    followed = follow(**SERVICE)
    await until(lambda: followed.states)
    assert list(followed.states.values()) == [READY, LOADING, DRAINING, READY, DRAINING]
    assert next(iter(followed.states)) == "10.0.0.1:8000"


async def test_changes_arrive_by_the_watch_without_another_list(server, follow):
    put(server, "10.0.0.1")
    followed = follow(**SERVICE)
    await until(lambda: server.watching)
    put(server, "10.0.0.1", "10.0.0.2")
    await until(lambda: len(followed.states) == 2)
    server.put(make_slice("vllm-b", "vllm", [("fd00::7", UP)], 9000))
    await until(lambda: "[fd00::7]:9000" in followed.states)
    server.delete("endpointslices", "vllm-a")
    await until(lambda: list(followed.states) == ["[fd00::7]:9000"])
    assert (server.lists, followed.problems) == (1, [])


async def test_a_long_list_is_read_page_by_page(server, follow):
    server.page = 2
    server.put(*(make_slice(f"vllm-{at}", "vllm", [(f"10.0.0.{at}", UP)], 8000) for at in range(5)))
    followed = follow(**SERVICE)
    await until(lambda: len(followed.states) == 5)
    assert [query.get("continue") for _, query in server.asked[:3]] == [None, "2", "4"]


async def test_an_endpoint_in_two_slices_has_the_better_state(server, follow):
    server.put(make_slice("vllm-a", "vllm", [("10.0.0.1", GOES)], 8000), make_slice("vllm-b", "vllm", [("10.0.0.1", UP)], 8000))
    server.put(make_slice("vllm-c", "vllm", [("10.0.0.1", {"ready": False})], 8000))
    followed = follow(**SERVICE)
    await until(lambda: followed.states)
    assert followed.states == {"10.0.0.1:8000": READY}


@pytest.mark.parametrize("end", ["end_watches", "drop_connections"])
async def test_a_watch_that_ends_goes_on_where_it_was(server, follow, end):
    put(server, "10.0.0.1")
    followed = follow(**SERVICE)
    for at in range(2, 5):
        await until(lambda: server.watching)
        getattr(server, end)()
        put(server, *(f"10.0.0.{host}" for host in range(1, at + 1)))
        await until(lambda at=at: len(followed.states) == at)
    assert server.lists == 1


async def test_the_next_watch_begins_at_the_latest_bookmark(server, follow):
    put(server, "10.0.0.1")
    follow(**SERVICE)
    await until(lambda: server.watching)
    begun = int(server.asked[-1][1]["resourceVersion"])
    server.bookmark()
    server.bookmark()
    server.end_watches()
    await until(lambda: server.watches == 2)
    assert int(server.asked[-1][1]["resourceVersion"]) == begun + 2


async def test_what_was_compacted_is_listed_again_and_deletions_are_noticed(server, follow):
    put(server, "10.0.0.1")
    server.put(make_slice("vllm-b", "vllm", [("10.0.0.2", UP)], 8000))
    followed = follow(**SERVICE)
    await until(lambda: server.watching and len(followed.states) == 2)
    server.refusal = (500, "etcd is away")
    server.drop_connections()
    await until(
        lambda: followed.answer.problem == "the API server answers 500 to watch endpointslices in namespace inference: etcd is away"
    )
    assert len(followed.states) == 2
    server.delete("endpointslices", "vllm-b")
    server.compact()
    server.refusal = None
    await until(lambda: list(followed.states) == ["10.0.0.1:8000"] and not followed.answer.problem)
    assert server.lists == 2


@pytest.mark.parametrize(
    "line",
    [
        b'{"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired"}}\n',
        b'{"type": "ERROR", "object": {"kind": "Status", "code": 500, "message": "no"}}\n',
        b"no json\n",
        b'{"type": "ADDED"}\n',
        b'{"type": "SURPRISE", "object": {"metadata": {"name": "vllm-a"}}}\n',
        b'{"type": "ADDED", "object": {"metadata": {"name": "x"}, "endpoints": [{"addresses": 7}]}}\n',
        b'{"type": "MODIFIED", "object": {"metadata": null}}\n',
        b"\xff\xfe\n",
    ],
)
async def test_an_event_that_can_not_be_used_leads_to_another_list_and_changes_nothing(server, follow, line):
    put(server, "10.0.0.1")
    followed = follow(**SERVICE)
    await until(lambda: server.watching)
    server.send(line)
    await until(lambda: server.lists == 2 and server.watching)
    assert list(followed.states) == ["10.0.0.1:8000"]
    if b"410" not in line:
        assert any("endpointslices" in problem for problem in followed.problems)
    put(server, "10.0.0.2")
    await until(lambda: list(followed.states) == ["10.0.0.2:8000"] and not followed.answer.problem)


async def test_an_event_may_arrive_in_pieces_and_several_at_once(server, follow):
    put(server, "10.0.0.1")
    followed = follow(**SERVICE)
    await until(lambda: server.watching)
    events = b"".join(
        json.dumps({"type": "ADDED", "object": make_slice(f"vllm-{at}", "vllm", [(f"10.0.1.{at}", UP)], 8000)}).encode() + b"\n"
        for at in range(3)
    )
    for at in range(0, len(events), 97):
        server.send(events[at : at + 97])
    await until(lambda: len(followed.states) == 4)
    assert (server.lists, followed.problems) == (1, [])


@pytest.mark.parametrize(
    ("refusal", "says", "remedy"),
    [
        ((401, "Unauthorized"), "does not accept the credentials (401)", "renew the token"),
        (
            (403, 'endpointslices is forbidden: User "x"'),
            "does not allow to list endpointslices in namespace inference (403)",
            "bind a Role",
        ),
        ((503, ""), "answers 503 to list endpointslices", "check the API server"),
    ],
)
async def test_a_refusal_is_reported_with_object_reason_and_remedy_until_it_ends(server, follow, refusal, says, remedy):
    put(server, "10.0.0.1")
    server.refusal = refusal
    followed = follow(**SERVICE)
    await until(lambda: says in followed.answer.problem)
    assert remedy in followed.answer.remedy
    assert refusal[1] in followed.answer.problem
    server.refusal = None
    await until(lambda: followed.states and not followed.answer.problem)
    assert followed.states == {"10.0.0.1:8000": READY}


async def test_a_server_that_is_away_is_reported_and_the_last_good_answer_kept(server, follow, tmp_path):
    put(server, "10.0.0.1")
    followed = follow(**SERVICE)
    await until(lambda: server.watching)
    there, server.url = server.url, "http://127.0.0.1:9"
    server.write_kubeconfig(tmp_path / "kubeconfig")
    server.drop_connections()
    await until(lambda: "can't be reached" in followed.answer.problem and "127.0.0.1" in followed.answer.problem)
    assert list(followed.states) == ["10.0.0.1:8000"]
    assert "the last good answer stays in use" in followed.answer.remedy
    server.url = there
    server.write_kubeconfig(tmp_path / "kubeconfig")
    await until(lambda: not followed.answer.problem)


async def test_a_pod_is_a_node_while_it_is_ready_and_drains_once_it_is_deleted(server, follow):
    server.put(make_pod("a", "10.0.0.1", 8000), make_pod("b", "10.0.0.2", 8000, ready=False), make_pod("c", "10.0.0.3", 8000))
    ended, unplaced = make_pod("d", "10.0.0.4", 8000), make_pod("e", "", 8000)
    ended["status"]["phase"] = "Succeeded"
    server.put(ended, unplaced)
    followed = follow(**PODS)
    await until(lambda: followed.states == {"10.0.0.1:8000": READY, "10.0.0.2:8000": LOADING, "10.0.0.3:8000": READY})
    going = make_pod("a", "10.0.0.1", 8000)
    going["metadata"]["deletionTimestamp"] = "2026-11-30T10:00:00Z"
    server.put(going, make_pod("b", "10.0.0.2", 8000))
    await until(lambda: followed.states == {"10.0.0.1:8000": DRAINING, "10.0.0.2:8000": READY, "10.0.0.3:8000": READY})
    server.delete("pods", "a")
    await until(lambda: "10.0.0.1:8000" not in followed.states)
    assert followed.states == {"10.0.0.2:8000": READY, "10.0.0.3:8000": READY}


async def test_labels_and_annotations_state_what_a_node_is_and_an_annotation_wins(server, follow):
    pod = make_pod("a", "10.0.0.1", 8000, version="2", tp_world_size="4", max_seq_len="32768", adapters="sql, contracts")
    pod["metadata"]["labels"] |= {"din.dev/version": "1", "din.dev/dtype": "fp8"}
    wrong = make_pod("b", "10.0.0.2", 8000, max_concurrency="many")
    server.put(pod, wrong)
    followed = follow(**PODS)
    await until(lambda: len(followed.states) == 2)
    found = followed.answer.endpoints
    assert found[Endpoint("10.0.0.1", 8000)].stated == {
        "version": "2",
        "dtype": "fp8",
        "tp_world_size": 4,
        "max_seq_len": 32768,
        "adapters": ("sql", "contracts"),
    }
    assert found[Endpoint("10.0.0.2", 8000)].problem == "din.dev/max-concurrency is 'many', and a whole number is expected"


async def test_a_port_is_taken_by_number_or_by_name(server, follow):
    server.put(make_pod("a", "10.0.0.1", 8000))
    named, numbered = follow(**PODS), follow(selector="app=vllm", port=9000)
    await until(lambda: named.states and numbered.states)
    assert [*named.states, *numbered.states] == ["10.0.0.1:8000", "10.0.0.1:9000"]


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ({"service": "none", "port": "http"}, "Service inference/none: there is no pod"),
        ({"selector": "app=none", "port": "http"}, "pods inference/app=none: there is no pod"),
        ({"service": "vllm", "port": "grpc"}, "Service inference/vllm: no port is named 'grpc'"),
        ({"service": "vllm", "port": "http"}, "none of the 1 endpoints of Service inference/vllm is ready"),
    ],
)
async def test_a_source_without_a_ready_node_says_why(server, follow, wanted, says):
    server.put(make_slice("vllm-a", "vllm", [("10.0.0.1", {"ready": False})], 8000))
    followed = follow(**wanted)
    await until(lambda: followed.answer.problem)
    assert followed.answer.problem == says
