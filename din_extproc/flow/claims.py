"""Stage 8 of the pipeline: what a request asks of the ledger."""

from msgspec.structs import replace

from din_extproc.admit.keys import Authenticated
from din_extproc.admit.ledger import Claim
from din_extproc.domain.request import Intent
from din_extproc.domain.usage import Usage
from din_extproc.flow.decision import DecisionContext, PendingRequest
from din_extproc.flow.view import build_claim


def make_claim(context: DecisionContext, request: PendingRequest, who: Authenticated, intent: Intent, model: str) -> Claim:
    """Return what is asked of the limits of key, tenant, model and network, and of the budgets of periods."""
    expected = context.outputs.expected_tokens(request.account, model)
    claim = build_claim(
        view=context.view,
        request_id=request.request_id,
        intent=intent,
        who=who,
        model=model,
        expected=expected,
        lease_ms=context.lease_ms,
    )
    if request.account != claim.tenant:
        claim = replace(claim, tenant=request.account)
    budgets = context.view.budgets
    if budgets is None or not claim.tokens:
        return claim
    wall = context.clock.wall()
    spending = budgets.windows(claim.tenant, who.key.id, model, wall)
    if not spending:
        return claim
    output = max(0, claim.tokens - intent.prompt_tokens)
    likely = Usage(intent.prompt_tokens, output, images=intent.images, audio_seconds=intent.audio_seconds)
    media = 0 if request.parsed is None else request.parsed.prompt.media
    return replace(claim, spending=spending, cost=context.view.prices.cost(model, wall, likely, media))
