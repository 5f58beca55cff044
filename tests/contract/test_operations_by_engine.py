"""Each cell of the documented table of operations and engines: the request that a node gets, or that no node gets one."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from din_extproc.admit.keys import KeyRing
from din_extproc.domain.node import Endpoint, Node, Pool
from din_extproc.domain.request import BUILT_IN, Operation, Priority, RequestHead
from din_extproc.domain.tenant import RateLimits, Tenant
from din_extproc.domain.verdict import Refusal
from din_extproc.flow.node_request import NodeRequest, build_node_request
from din_extproc.flow.pool_membership import PoolMembership
from din_extproc.flow.view import DecisionView
from din_extproc.intent.estimate import TokenCalibrator
from din_extproc.intent.read import ParsedRequest, parse_request
from din_extproc.route.compile import compile_routes
from din_extproc.route.table import Routed, RouteTable
from din_extproc.southbound.engines import ENGINES, native_operations, openai_operations
from din_extproc.tools.verify.route_coverage import RouteCoverage
from din_extproc.tools.verify.sample_body import build_body, content_type

PAGE = Path(__file__).parents[2] / "deploy" / "docs" / "pages" / "reference" / "operations.md"
TENANT = Tenant("t", ("*",), Priority.STANDARD, RateLimits(), {})
NODE = Node(
    id="a",
    endpoint=Endpoint("10.0.0.1", 8000),
    model="m",
    version="1.0",
    dtype="bf16",
    max_seq_len=1 << 20,
    tp_world_size=1,
    compute_capability="",
    max_concurrency=4,
)


def cells() -> Iterator[tuple[str, str, bool]]:
    """Yield path, column and what the page says of it."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    head = next(row for row in rows if row[0] == "operation")
    for row in rows:
        path = row[0].strip("`")
        if path in BUILT_IN and len(row) == len(head):
            yield from ((path, column, cell == "yes") for column, cell in zip(head[4:], row[4:], strict=True))


CELLS = list(cells())
TRANSLATED = {
    ("*anthropic*", "/v1/chat/completions"): "/v1/messages",
    ("*ollama*", "/v1/chat/completions"): "/api/chat",
    ("*ollama*", "/v1/completions"): "/api/generate",
    ("*ollama*", "/v1/embeddings"): "/api/embed",
    ("*tgi*", "/v1/completions"): "/generate",
    ("*triton*", "/v1/completions"): "/v2/models/served/generate",
    ("*triton*", "/v1/embeddings"): "/v2/models/served/infer",
    ("*triton*", "/v1/rerank"): "/v2/models/served/infer",
}
"""The paths of engines' own interfaces. Messages are chats where an engine has none."""


@cache
def pool_of(column: str) -> tuple[Pool, RouteTable]:
    engine, native = column.strip("*"), column.startswith("*")
    operations = native_operations(engine) if native else openai_operations(engine)
    api = "native" if native else "openai"
    pool = Pool("p", "m", "served", engine=engine, scheduler="round_robin", nodes=(NODE,), api=api, operations=operations)
    compiled = compile_routes([pool], [], [], [TENANT])
    assert compiled.table is not None
    return pool, compiled.table


def test_the_page_has_every_operation_and_every_interface():
    assert {path for path, _, _ in CELLS} == {operation.value for operation in Operation} - {Operation.MODELS.value}
    own = {name for name, engine in ENGINES.items() if engine.operations}
    assert {column for _, column, _ in CELLS} == own | {f"*{name}*" for name, engine in ENGINES.items() if engine.native is not None}


@pytest.mark.parametrize(("path", "column", "served"), CELLS, ids=[f"{column} {path}" for path, column, _ in CELLS])
def test_a_node_gets_what_the_page_says_and_nothing_else(path, column, served):
    pool, table = pool_of(column)
    operation = BUILT_IN[path]
    head = RequestHead(operation.spec.method, path, {"content-type": content_type(operation)})
    parsed = parse_request(head, build_body(operation, "m", 9), lambda _name: TokenCalibrator(), 1 << 20)
    assert isinstance(parsed, ParsedRequest), parsed
    routed = table.route(parsed.intent, TENANT, head, 12, lambda _pool: frozenset())
    if not served:
        assert isinstance(routed, Refusal)
        assert routed.message == f"The model `m` does not serve {path}."
        return
    assert isinstance(routed, Routed), routed
    asked = build_node_request(parsed, parsed.intent, pool)
    assert isinstance(asked, NodeRequest), asked
    native = TRANSLATED.get((column, path), Operation.CHAT.value if path == Operation.MESSAGES else "")
    if asked.dialect is None:
        assert (asked.path, asked.body) == (path, build_body(operation, "served", 9))
    else:
        assert asked.path == native
        assert b"echo echo echo" in asked.body


@pytest.mark.parametrize("column", sorted({column for _, column, _ in CELLS}))
def test_verify_asks_for_every_operation_of_a_pool(column):
    pool, table = pool_of(column)
    view = DecisionView(table=table, keys=KeyRing(()), models={}, body_limit=1 << 20)
    entries = list(RouteCoverage(view, PoolMembership.from_pools((pool,)), TENANT, 12).entries())
    assert [entry.why for entry in entries] == [""] * len(entries)
    assert {entry.operation.value for entry in entries} == {path for path, each, served in CELLS if served and each == column}
