"""The admin port's pages: who may see what."""

import httpx
import pytest

from din_extproc.edge.http.admin import AdminPages, is_own_name
from din_extproc.edge.http.budget_orders import BudgetOrders
from din_extproc.edge.http.node_orders import NodeOrders
from tests.support.servers import free_port

REASON = "redis: 10.0.0.7:6379 refuses connections"


@pytest.fixture(params=[False, True], ids=["without keys", "with keys"])
async def site(request):
    async def tenants(_: str) -> dict[str, object]:
        return {"tenants": []}

    def opens(authorization: str) -> bool:
        return not request.param or authorization == "Bearer right"

    async def give(*_: object) -> str:
        return ""

    async def unknown(*_: object) -> None:
        return None

    pages = AdminPages(
        status=dict,
        reasons=lambda: [REASON],
        nodes=dict,
        availability=lambda _: (),
        tenants=tenants,
        budgets=tenants,
        metrics=lambda: iter([b"x 1\n"]),
        times=lambda _: (),
        orders=NodeOrders(lambda authorization: "ops" if authorization == "Bearer ops" else None, give),
        budget_orders=BudgetOrders(lambda authorization: "ops" if authorization == "Bearer ops" else None, unknown),
        opens=opens,
    )
    number = free_port()
    await pages.port.start(f"127.0.0.1:{number}")
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{number}", timeout=20, verify=False) as client:
        yield client, request.param
    await pages.port.stop()


async def test_probes_need_no_key_and_give_an_unknown_caller_no_reason(site):
    client, guarded = site
    assert (await client.get("/healthz")).text == "alive\n"
    unready = await client.get("/readyz")
    assert unready.status_code == 503
    assert unready.text == ("not ready\n" if guarded else f"{REASON}\n")
    assert (await client.get("/readyz", headers={"authorization": "Bearer right"})).text == f"{REASON}\n"


async def test_every_other_page_is_for_holders_of_a_key_where_one_is_wanted(site):
    client, guarded = site
    for page in ("/status", "/nodes", "/availability", "/tenants", "/budgets", "/metrics", "/exchanges?trace=01234567"):
        for headers, status in (({}, 401 if guarded else 200), ({"authorization": "Bearer right"}, 200)):
            assert (await client.get(page, headers=headers)).status_code == status


async def test_an_order_needs_a_key_that_may_operate_also_where_pages_need_none(site):
    client, _ = site
    statuses = [
        (await client.post("/nodes/a/drain", headers={"authorization": f"Bearer {key}"})).status_code for key in ("none", "right", "ops")
    ]
    assert statuses == [401, 401, 200]


async def test_a_page_of_the_web_that_made_its_name_point_here_reads_nothing_where_no_key_is_wanted(site):
    client, guarded = site
    for page in ("/status", "/nodes", "/metrics"):
        for name in ("evil.example:9090", "127.0.0.1.nip.example", "10.0.0.7:9090", ""):
            reply = await client.get(page, headers={"host": name})
            assert reply.status_code == (401 if guarded else 421)
            assert reply.json()["code"] == ("invalid_api_key" if guarded else "misdirected_request")
            keyed = await client.get(page, headers={"host": name, "authorization": "Bearer right"})
            assert keyed.status_code == (200 if guarded else 421)
        for name in ("localhost", "localhost:9090", "127.0.0.1", "127.0.0.9:1", "[::1]:9090"):
            assert (await client.get(page, headers={"host": name})).status_code == (401 if guarded else 200)
    assert (await client.get("/readyz", headers={"host": "evil.example"})).text == "not ready\n"


@pytest.mark.parametrize(
    ("host", "own"), [("din:9090", True), ("10.0.0.7:9090", True), ("evil.example", False), ("", False), ("[::1", False)]
)
def test_a_port_for_a_network_is_asked_by_address_or_by_a_name_without_a_domain(host, own):
    assert is_own_name(host, exposed=True) is own


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ('{"budget": "b", "tokens": 1}', 404),
        ('{"budget": "b"}', 400),
        ('{"budget": "b", "tokens": -1}', 400),
        ('{"budget": "b", "money": 1}', 400),
        ('{"budget": "b", "reset": true, "reason": "\\n"}', 400),
        ("no JSON", 400),
    ],
)
async def test_an_order_for_a_budget_is_checked_and_needs_a_key_that_may_operate(site, body, status):
    client, _ = site
    assert (await client.post("/budgets", content=body)).status_code == 401
    assert (await client.post("/budgets", content=body, headers={"authorization": "Bearer ops"})).status_code == status
