"""Leases of requests that ext_authz permitted: renewed until settlement, or until the time limit."""

import json

import pytest
import yaml

from din_extproc.admit.local import LocalLedger
from din_extproc.domain.request import RequestHead
from din_extproc.domain.verdict import ImmediateResponse, Send
from din_extproc.edge.background import Background
from din_extproc.edge.telemetry.counters import DecisionCounters
from din_extproc.roles.serve.ext_authz_leases import ExtAuthzLeases
from din_extproc.roles.serve.request_plane import RequestPlane
from din_extproc.settings.load import load
from tests.support.stack import key_of, tenant

CONFIG = {"version": 1, "gateway": {"ext_authz": {}}, "tenants": [tenant("acme", max_streams=1)]}
HEAD = RequestHead("POST", "/v1/chat/completions", {"authorization": f"Bearer {key_of('acme')}"})
BODY = json.dumps({"model": "anything", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}).encode()


class Clocked(LocalLedger):
    """Counters by a clock that the test moves."""

    def __init__(self) -> None:
        super().__init__(lambda: self.now_ms)
        self.now_ms = 0


@pytest.fixture
def plane(tmp_path):
    (tmp_path / "din.yaml").write_text(yaml.safe_dump(CONFIG))
    return RequestPlane(load(tmp_path / "din.yaml", {}), Clocked(), Background(), DecisionCounters())


async def check(permits: ExtAuthzLeases):
    return await permits.factory.create_handler().decide(HEAD, BODY)


async def test_a_permitted_request_keeps_its_slot_until_it_is_settled(plane):
    permits, ledger = ExtAuthzLeases(plane.context, 1e6), plane.context.ledger
    verdict = await check(permits)
    assert isinstance(verdict, Send)
    for _ in range(5):
        ledger.now_ms += plane.context.lease_ms - 1
        await permits.renew()
        assert isinstance(await check(permits), ImmediateResponse)
    assert await ledger.settle("acme", verdict.metadata["request_id"], 10)
    await permits.renew()
    assert permits.factory.permits == {}
    assert isinstance(await check(permits), Send)


async def test_a_request_without_an_end_is_not_renewed_forever(plane):
    permits = ExtAuthzLeases(plane.context, 0.0)
    await check(permits)
    await permits.renew()
    assert permits.factory.permits == {}
    plane.context.ledger.now_ms += plane.context.lease_ms
    assert isinstance(await check(permits), Send)


@pytest.mark.parametrize(("policy", "passes"), [("off", True), ("flag", True), ("mask", False), ("block", False)])
async def test_sensitive_data_is_flagged_or_blocked_and_what_would_be_masked_is_blocked(tmp_path, policy, passes):
    config = CONFIG | {"tenants": [tenant("acme") | {"sensitive_data": policy}]}
    (tmp_path / "din.yaml").write_text(yaml.safe_dump(config))
    context = RequestPlane(load(tmp_path / "din.yaml", {}), Clocked(), Background(), DecisionCounters()).context
    asked = {"model": "anything", "messages": [{"role": "user", "content": "to alice@example.com"}]}
    verdict = await ExtAuthzLeases(context, 1e6).factory.create_handler().decide(HEAD, json.dumps(asked).encode())
    assert isinstance(verdict, Send) == passes
    if passes:
        found = json.loads(verdict.metadata["labels"]).get("sensitive")
        assert found == (None if policy == "off" else {"policy": "flag", "kinds": {"email": 1}, "whole": True})
    else:
        assert (verdict.status, json.loads(verdict.body)["code"]) == (400, "sensitive_data_blocked")
        assert b"alice" not in verdict.body
