"""What a cluster of two pools does besides: a request that its own pool can't answer is sent on, once more, to the pool that takes over.

Invariant: a request moves only before the first byte of the response. Where both pools take the same bytes, its body differs in the
model's name alone, at the offset that the sidecar gives. Otherwise the sidecar is asked anew for the attempt and translates it for the
engine there. The response is marked as the other pool's.

Both pools' nodes are hosts of one cluster, so that a request can name its nodes in both; those of the second have the next priority. The
cluster's own chain of filters runs anew for every attempt: with what is known of the node that was chosen this time.
"""

import msgspec
from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutation as RuleMutation
from envoy_data_plane.envoy.config.core.v3 import DataSource, TypedExtensionConfig
from envoy_data_plane.envoy.extensions.common.matching.v3 import ExtensionWithMatcher
from envoy_data_plane.envoy.extensions.filters.common.matcher.action.v3 import SkipFilter
from envoy_data_plane.envoy.extensions.filters.http.header_mutation.v3 import HeaderMutation, Mutations
from envoy_data_plane.envoy.extensions.filters.http.lua.v3 import Lua
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter
from envoy_data_plane.envoy.type.matcher.v3 import HttpRequestHeaderMatchInput
from envoy_data_plane.google.protobuf import Any as PackedAny
from envoy_data_plane.xds.core.v3 import TypedExtensionConfig as XdsExtension
from envoy_data_plane.xds.type.matcher.v3 import (
    Matcher,
    MatcherMatcherList,
    MatcherMatcherListFieldMatcher,
    MatcherMatcherListPredicate,
    MatcherMatcherListPredicatePredicateList,
    MatcherMatcherListPredicateSinglePredicate,
    MatcherOnMatch,
    StringMatcher,
)

from din_extproc.control.filters import sidecar_filter
from din_extproc.control.packing import overwrite_header, pack_extension
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


def build_fallback_filters(pool: Pool, fallback: Pool, topology: Topology) -> list[HttpFilter]:
    """The chain's beginning. What takes headers off answers comes after it: an answer passes the chain backwards.

    Args:
        pool: The pool that is asked first.
        fallback: The pool that takes over, which is asked for its own model.
        topology: How the sidecar is asked.
    """
    carried = Mutations(request_mutations=[_set(ATTEMPT_POOL, "%UPSTREAM_METADATA(din:pool)%")])
    chain = [_mutation(carried)]
    moved = _header(ATTEMPT_POOL, StringMatcher(exact=fallback.name))
    if pool.takes_same_bytes(fallback):
        quoted = msgspec.json.encode(fallback.served_model).decode()
        script = _LUA % tuple(map(_quote_lua, (fallback.name, fallback.model, quoted, fallback.served_model)))
        chain.append(_only_when(moved, pack_extension("envoy.filters.http.lua", Lua(default_source_code=DataSource(inline_string=script)))))
    else:
        translated = MatcherMatcherListPredicatePredicateList(predicate=[moved, _header(ATTEMPT_PLAN, StringMatcher(prefix=EVERY_ATTEMPT))])
        either = MatcherMatcherListPredicate(or_matcher=translated)
        carried.response_mutations = [_set(DROPPED, f"%REQ({DROPPED})%")]
        chain = [
            _mutation(carried),
            _only_when(moved, _mutation(Mutations(response_mutations=[_set(DEGRADED, "true"), _set("x-din-degraded-reason", _REASON)]))),
            _only_when(either, sidecar_filter(topology, of_attempts=True)),
        ]
    return [HttpFilter(name=each.name, typed_config=each.typed_config) for each in chain]


def _mutation(mutations: Mutations) -> TypedExtensionConfig:
    return pack_extension("envoy.filters.http.header_mutation", HeaderMutation(mutations=mutations))


def _set(name: str, value: str) -> RuleMutation:
    """Does nothing where the value is another header's that is not there."""
    return RuleMutation(append=overwrite_header(name, value))


def _header(name: str, value: StringMatcher) -> MatcherMatcherListPredicate:
    header = XdsExtension(name="pool", typed_config=PackedAny.pack(HttpRequestHeaderMatchInput(header_name=name)))
    return MatcherMatcherListPredicate(single_predicate=MatcherMatcherListPredicateSinglePredicate(input=header, value_match=value))


def _only_when(condition: MatcherMatcherListPredicate, filter_config: TypedExtensionConfig) -> TypedExtensionConfig:
    """Wrap a filter so that it runs only for some attempts. A skipped Lua filter costs no coroutines, a skipped sidecar no call."""
    skip = XdsExtension(name="skip", typed_config=PackedAny.pack(SkipFilter()))
    rule = MatcherMatcherListFieldMatcher(
        predicate=MatcherMatcherListPredicate(not_matcher=condition), on_match=MatcherOnMatch(action=skip)
    )
    matcher = Matcher(matcher_list=MatcherMatcherList(matchers=[rule]))
    return pack_extension("envoy.filters.http.match_delegate", ExtensionWithMatcher(extension_config=filter_config, xds_matcher=matcher))


def _quote_lua(text: str) -> str:
    """As Lua writes it."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
