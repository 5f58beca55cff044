"""The size of a request in tokens of the model and the engine that it goes to.

Rule: an exact count is never replaced by an estimate.
"""

from msgspec.structs import replace

from din_extproc.domain.request import Estimate, Intent
from din_extproc.flow.decision import DecisionContext, PendingRequest
from din_extproc.flow.node_selector import PlacementTarget, RequestSize
from din_extproc.intent.estimate import estimate_tokens
from din_extproc.route.table import Routed
from din_extproc.southbound.engines import find_engine


def compute_request_size(context: DecisionContext, request: PendingRequest, intent: Intent, routed: Routed, model: str) -> RequestSize:
    """Return the size of the request, with its lower and upper bound."""
    caps = find_engine(routed.pool.engine).caps_output
    size = RequestSize.of(intent, context.calibrators.for_model(model).calibration.band, caps_output=caps)
    if not routed.overflow or intent.timeout_ms is None:
        return size
    expected = [each for each in (context.outputs.expected_tokens(request.account, model), intent.output_each) if each is not None]
    return replace(size, prompt_tokens=intent.prompt_tokens, output_tokens=min(expected, default=1), within_s=intent.timeout_ms / 1000)


def refuse_over_context(context: DecisionContext, request: PendingRequest, intent: Intent, target: PlacementTarget) -> Intent:
    """The intent with no more prompt than an engine that cuts it reads, and no more output than one that caps it gives."""
    caps, most = find_engine(target.pool.engine).caps_output, intent.output_tokens or 0
    if not (intent.truncates or (caps and most)):
        return intent
    longest = context.selector.members.get_longest_context((target.pool.name,))
    if longest is None:
        return intent
    if caps and most > longest * intent.answers:
        intent = replace(intent, output_tokens=longest * intent.answers)
    inputs = 1 if request.parsed is None else request.parsed.prompt.inputs
    if intent.truncates and intent.estimate.tokens > longest * inputs:
        intent = replace(intent, estimate=Estimate(longest * inputs))
    return intent


def estimate_for_model(context: DecisionContext, request: PendingRequest, intent: Intent, model: str) -> Intent:
    """The intent by the calibrator of the model that it goes to, when that is not the one it was read for."""
    gauges, parsed = context.calibrators, request.parsed
    if parsed is None or intent.estimate.exact or gauges.for_model(model) is gauges.for_name(intent.model):
        return intent
    return replace(intent, estimate=estimate_tokens(parsed.prompt, gauges.for_model(model)))
