"""The cluster of a pool and the pool that takes over in flight: a request that its pool can't answer is sent on, once more and elsewhere.

Rule: until the first byte of an answer has left, and not later. The body that moves differs from the one that was sent in the model's name
alone, at the place that the sidecar names; the answer says that it is another pool's.

An aggregate cluster runs its own chain of filters, not that of the pools inside, and runs it anew for every attempt: with what is known of
the node that was chosen this time.
"""

import msgspec
from envoy_data_plane.envoy.config.cluster.v3 import Cluster, ClusterCustomClusterType, ClusterLbPolicy
from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutation as RuleMutation
from envoy_data_plane.envoy.config.core.v3 import DataSource, Http1ProtocolOptions, HttpProtocolOptions
from envoy_data_plane.envoy.extensions.clusters.aggregate.v3 import ClusterConfig
from envoy_data_plane.envoy.extensions.filters.http.header_mutation.v3 import HeaderMutation, Mutations
from envoy_data_plane.envoy.extensions.filters.http.lua.v3 import Lua
from envoy_data_plane.envoy.extensions.filters.http.upstream_codec.v3 import UpstreamCodec
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter
from envoy_data_plane.envoy.extensions.upstreams.http.v3 import HttpProtocolOptions as UpstreamProtocolOptions
from envoy_data_plane.envoy.extensions.upstreams.http.v3 import HttpProtocolOptionsExplicitHttpConfig
from envoy_data_plane.google.protobuf import Any as PackedAny

from din_extproc.control.packing import extension, milliseconds, overwrite
from din_extproc.domain.node import Pool, moving_cluster

_PROTOCOL_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
_ATTEMPT_POOL = "x-din-attempt-pool"
"""Carries the pool of the node that was chosen to the script."""
_LUA = """\
-- IN   metadata din.move: "<place> <length> <version>", where in the body the model's name stands, and the constraint for other nodes
--      x-din-attempt-pool: of the node that was chosen for this attempt
-- OUT  metadata din.moved_to, din.moved_model: the pool that the request went to instead, and its model
local FALLBACK, MODEL, SERVED = %s, %s, %s

local function facts(handle)
  return handle:streamInfo():dynamicMetadata():get("din") or {}
end

function envoy_on_request(handle)
  local headers = handle:headers()
  local pool = headers:get("x-din-attempt-pool")
  headers:remove("x-din-attempt-pool")
  local place, length, version = string.match(facts(handle).move or "", "^(%%d+) (%%d+) (.*)$")
  if not place or pool ~= FALLBACK then
    return
  end
  local body = handle:body()
  local text = body:getBytes(0, body:length())
  local moved = string.sub(text, 1, place) .. SERVED .. string.sub(text, place + length + 1)
  body:setBytes(moved)
  headers = handle:headers() -- an object that is kept while the body is waited for is dead
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


def moving(pool: str, fallback: Pool, *, connect_ms: int, idle_ms: int, endpoint_header: str) -> Cluster:
    """The cluster whose name `moving_cluster` makes.

    Args:
        pool: Its nodes are tried first.
        fallback: Then those of this one, which is asked for its own model.
        connect_ms: As of a pool's cluster.
        idle_ms: After which a connection to a node is closed, likewise.
        endpoint_header: Names the nodes; read when a host is picked, so it is taken off here.
    """
    carried = RuleMutation(append=overwrite(_ATTEMPT_POOL, "%UPSTREAM_METADATA(din:pool)%"))
    mutation = HeaderMutation(mutations=Mutations(request_mutations=[RuleMutation(remove=endpoint_header), carried]))
    script = _LUA % tuple(map(_literal, (fallback.name, fallback.model, msgspec.json.encode(fallback.served_model).decode())))
    chain = [
        extension("envoy.filters.http.header_mutation", mutation),
        extension("envoy.filters.http.lua", Lua(default_source_code=DataSource(inline_string=script))),
        extension("envoy.filters.http.upstream_codec", UpstreamCodec()),
    ]
    protocol = UpstreamProtocolOptions(
        common_http_protocol_options=HttpProtocolOptions(idle_timeout=milliseconds(idle_ms)),
        explicit_http_config=HttpProtocolOptionsExplicitHttpConfig(http_protocol_options=Http1ProtocolOptions()),
        http_filters=[HttpFilter(name=each.name, typed_config=each.typed_config) for each in chain],
    )
    inside = extension("envoy.clusters.aggregate", ClusterConfig(clusters=[pool, fallback.name]))
    return Cluster(
        name=moving_cluster(pool, fallback.name),
        connect_timeout=milliseconds(connect_ms),
        lb_policy=ClusterLbPolicy.CLUSTER_PROVIDED,
        cluster_type=ClusterCustomClusterType(name=inside.name, typed_config=inside.typed_config),
        typed_extension_protocol_options={_PROTOCOL_OPTIONS: PackedAny.pack(protocol)},
    )


def _literal(text: str) -> str:
    """As Lua writes it."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
