"""Filters of a cluster of two pools: a request that the first pool can't answer is sent once more, to the pool that takes over.

Invariant: a request moves only before the first byte of the response. Where both pools take the same bytes, its body differs in the
model's name alone, at the offset that the sidecar gives. Otherwise the sidecar is asked anew for the attempt and translates it for the
engine there. The response is marked as the other pool's.

Both pools' nodes are hosts of one cluster, so that a request can name its nodes in both; those of the second have the next priority. The
cluster's own chain of filters runs anew for every attempt: with what is known of the node that was chosen this time.
"""

import msgspec
from envoy_data_plane.envoy.config.core.v3 import TypedExtensionConfig
from envoy_data_plane.envoy.extensions.filters.http.header_mutation.v3 import Mutations
from envoy_data_plane.xds.type.matcher.v3 import MatcherMatcherListPredicate, MatcherMatcherListPredicatePredicateList, StringMatcher

from din_extproc.control.attempt_filters import header_matches, make_mutation, make_script, only_when, set_header
from din_extproc.control.filters import sidecar_filter
from din_extproc.control.topology import Topology
from din_extproc.domain.node import ATTEMPT_PLAN, ATTEMPT_POOL, DEGRADED, DROPPED, EVERY_ATTEMPT, Pool

_REASON = "upstream_failed"
_LUA = """\
-- IN   metadata din.move: "<place> <length> <version>", where in the body the model's name stands, and the constraint for other nodes
-- OUT  metadata din.moved_to, din.moved_model: the pool that the request went to instead, and its model
local FALLBACK, MODEL, SERVED, NAME = %s, %s, %s, %s

local function facts(handle)
  return handle:streamInfo():dynamicMetadata():get("din") or {}
end

function envoy_on_request(handle)
  local place, length, version = string.match(facts(handle).move or "", "^(%%d+) (%%d+) (.*)$")
  if not place then
    return
  end
  local body = handle:body()
  local text = body:getBytes(0, body:length())
  local name = string.byte(text, place + 1) == 34 and SERVED or NAME -- a text of JSON, or a part of a form
  local moved = string.sub(text, 1, place) .. name .. string.sub(text, place + length + 1)
  body:setBytes(moved)
  local headers = handle:headers() -- taken anew: an object from before the body is invalid
  headers:replace("content-length", tostring(#moved))
  headers:remove("x-din-model-version")
  if version ~= "" then
    headers:add("x-din-model-version", version)
  end
  local metadata = handle:streamInfo():dynamicMetadata()
  metadata:set("din", "moved_to", FALLBACK)
  metadata:set("din", "moved_model", MODEL)
end

function envoy_on_response(handle)
  if facts(handle).moved_to then
    handle:headers():replace("x-bxagent-degraded", "true")
    handle:headers():replace("x-din-degraded-reason", "upstream_failed")
  end
end
"""


def build_fallback_filters(pool: Pool, fallback: Pool, topology: Topology) -> list[TypedExtensionConfig]:
    """The chain's beginning. What takes headers off answers comes after it: an answer passes the chain backwards.

    Args:
        pool: The pool that is asked first.
        fallback: The pool that takes over, which is asked for its own model.
        topology: How the sidecar is asked.
    """
    carried = Mutations(request_mutations=[set_header(ATTEMPT_POOL, "%UPSTREAM_METADATA(din:pool)%")])
    chain = [make_mutation(carried)]
    moved = header_matches(ATTEMPT_POOL, StringMatcher(exact=fallback.name))
    if pool.takes_same_bytes(fallback):
        quoted = msgspec.json.encode(fallback.served_model).decode()
        script = _LUA % tuple(map(_quote_lua, (fallback.name, fallback.model, quoted, fallback.served_model)))
        chain.append(only_when(moved, make_script(script)))
    else:
        every = header_matches(ATTEMPT_PLAN, StringMatcher(prefix=EVERY_ATTEMPT))
        either = MatcherMatcherListPredicate(or_matcher=MatcherMatcherListPredicatePredicateList(predicate=[moved, every]))
        marks = [set_header(DEGRADED, "true"), set_header("x-din-degraded-reason", _REASON)]
        carried.response_mutations = [set_header(DROPPED, f"%REQ({DROPPED})%")]
        chain = [
            make_mutation(carried),
            only_when(moved, make_mutation(Mutations(response_mutations=marks))),
            only_when(either, sidecar_filter(topology, of_attempts=True)),
        ]
    return chain


def _quote_lua(text: str) -> str:
    """As Lua writes it."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
