"""What a request asks of budgets: its expected tokens and cost, and nothing where it is charged for nothing."""

import pytest

from din_extproc.admit.keys import Authenticated
from din_extproc.admit.ledger import Claim
from din_extproc.admit.local import LocalLedger
from din_extproc.domain.request import Estimate, Intent, Operation
from din_extproc.edge.background import Background
from din_extproc.edge.telemetry.counters import DecisionCounters
from din_extproc.flow.claims import make_claim
from din_extproc.flow.decision import PendingRequest
from din_extproc.roles.serve.request_plane import RequestPlane
from din_extproc.settings.settings import Settings
from tests.support.configs import read

MORE = """
prices: {currency: EUR, models: {small: {input: 1, output: 2, request: 0.5}}}
budgets: {limits: [{name: own, period: month, money: 10, tenant: t}, {name: large, period: day, tokens: 10, model: large}]}
"""


@pytest.fixture
def claim(tmp_path):
    def made(more: str = MORE, operation: Operation = Operation.CHAT, output: int = 50) -> Claim:
        settings = read(tmp_path, more)
        assert isinstance(settings, Settings), str(settings)
        context = RequestPlane(settings, LocalLedger(lambda: 0), Background(), DecisionCounters()).context
        tenant, (key,) = settings.keys[0]
        request = PendingRequest()
        request.request_id, request.account = "r", tenant.id
        intent = Intent(operation=operation, model="small", estimate=Estimate(100), output_tokens=output, stream=False)
        return make_claim(context, request, Authenticated(tenant, key), intent, "small")

    return made


def test_a_request_asks_for_its_expected_tokens_and_cost(claim):
    asked = claim()
    assert [window.scope for window in asked.spending] == ["budget:own"]
    assert (asked.tokens, asked.cost) == (150, 100 * 1000 + 50 * 2000 + 5 * 10**8)


def test_without_budgets_a_claim_has_neither(claim):
    asked = claim(more="prices: {currency: EUR, models: {small: {input: 1}}}")
    assert (asked.tokens, asked.spending, asked.cost) == (150, (), 0)


def test_what_is_charged_for_nothing_asks_for_no_budget(claim):
    asked = claim(operation=Operation.TOKENIZE, output=0)
    assert (asked.tokens, asked.spending, asked.cost) == (0, (), 0)
