"""Filters of a cluster that send a request which broke two connections to no third node.

Invariant: an attempt counts as a break only if the node got the whole request, sent no byte, and ended sooner than any time limit would
have. An attempt that follows another and got an idle connection waits for one round trip to the sidecar. Meanwhile Envoy closes that
connection if it died along with the node before, and a request that has not left breaks nothing.
"""

from envoy_data_plane.envoy.config.core.v3 import TypedExtensionConfig
from envoy_data_plane.envoy.extensions.filters.http.header_mutation.v3 import Mutations
from envoy_data_plane.xds.type.matcher.v3 import StringMatcher

from din_extproc.control.attempt_filters import header_matches, make_mutation, make_script, set_header, skip_when
from din_extproc.control.topology import EXT_PROC_CLUSTER, Topology
from din_extproc.domain.node import Pool
from din_extproc.domain.request import OPERATIONS

TRIED = "x-din-tried"
"""Carries to the script what the attempts before came to."""
_VALUE = (
    "%UPSTREAM_REQUEST_ATTEMPT_COUNT% %UPSTREAM_WIRE_BYTES_SENT% %UPSTREAM_WIRE_BYTES_RECEIVED% "
    "%START_TIME(%s%3f)% %UPSTREAM_CONNECTION_ID%"
)
_BREAKS = 2
_LUA = """\
-- IN   header x-din-tried: number of the attempt, bytes that those before have sent and received, start of the exchange (ms),
--      id of the idle connection that it got, 0 for a new one
-- IN   metadata din.labels: what the sidecar says of the request
-- OUT  metadata din.tried: breaks so far; start of this attempt (ms), bytes sent and received before it
-- A request that two nodes got whole and left without a byte, sooner than any time limit, has broken both: no third one gets it.
local BREAKS, LIMIT_MS, MESSAGE_MS = %d, %d, %d
local WHOLE = { %s }

function envoy_on_request(handle)
  local headers, metadata = handle:headers(), handle:streamInfo():dynamicMetadata()
  local facts = metadata:get("din") or {}
  local sent, received, start, idle = string.match(headers:get("x-din-tried") or "", "^%%d+ (%%d+) (%%d+) (%%d+) (%%d+)$")
  if not sent then
    return
  end
  local now, labels = handle:timestamp(), facts.labels or ""
  local breaks, began, sent_before, received_before = string.match(facts.tried or "", "^(%%d+) (%%d+) (%%d+) (%%d+)$")
  if not breaks then
    local decided_us = string.match(labels, '"decided_us":(%%d+)') or 0
    breaks, began, sent_before, received_before = 0, start + decided_us / 1000, 0, "0"
  end
  local unlimited = WHOLE[string.match(labels, '"operation":"([^"]*)"')] and not string.find(labels, '"stream":true', 1, true)
  local got_all = sent - sent_before >= (tonumber(headers:get("content-length")) or 1)
  if got_all and received == received_before and (unlimited or now - began < LIMIT_MS) then
    breaks = breaks + 1
  end
  if breaks >= BREAKS then
    handle:respond({ [":status"] = "424" }, "")
    return
  end
  metadata:set("din", "tried", string.format("%%d %%.0f %%s %%s", breaks, now, sent, received))
  if idle ~= "0" then
    handle:httpCall("%s", { [":method"] = "GET", [":path"] = "/", [":authority"] = "din" }, "", MESSAGE_MS)
  end
end
"""


def limits_breaks(topology: Topology, *, moves: bool) -> bool:
    """Whether a request may be tried at more than two nodes. `moves`: its cluster has the nodes of a fallback pool, too."""
    return topology.retry.attempts + moves >= _BREAKS


def build_break_limit(pool: Pool, topology: Topology) -> list[TypedExtensionConfig]:
    """The filters, for the end of a chain that takes `TRIED` off. `pool` is asked first: its limits hold for every attempt."""
    whole = ", ".join(f'["{each.value}"] = true' for each in OPERATIONS if not each.spec.begins_soon)
    limit_ms = min(topology.timeouts.node_idle_ms, pool.timeouts.first_byte_ms or topology.timeouts.node_idle_ms)
    script = _LUA % (_BREAKS, limit_ms, topology.timeouts.message_ms, whole, EXT_PROC_CLUSTER)
    first = header_matches(TRIED, StringMatcher(prefix="1 "))
    return [make_mutation(Mutations(request_mutations=[set_header(TRIED, _VALUE)])), skip_when(first, make_script(script))]
