"""Headers that a client may not send: removed on arrival, before any filter, on every path.

Invariant: the gateway's own names are removed by family, not one by one, so that a header invented tomorrow is covered today.
"""

from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutation, HeaderMutationRemoveOnMatch
from envoy_data_plane.envoy.config.core.v3 import TypedExtensionConfig
from envoy_data_plane.envoy.extensions.http.early_header_mutation.header_mutation.v3 import HeaderMutation as EarlyHeaderMutation
from envoy_data_plane.envoy.type.matcher.v3 import StringMatcher

from din_extproc.control.packing import overwrite_header, pack_extension

CLIENT_MAY_SEND = (
    "x-din-budget-cost",
    "x-din-budget-tokens",
    "x-din-model-version",
    "x-din-priority",
    "x-din-timeout-ms",
    "x-din-trace-id",
)
"""The intent headers: all that stays of the family."""
_KEPT = "din-kept-"
_FAMILIES = ("x-din-", "x-envoy-")
_NAMES = ("x-bxagent-degraded", "x-gateway-destination-endpoint", "x-request-id", "te", "forwarded", "x-real-ip")
"""Single names: our own mark, the endpoint picker's, the request id, which Envoy then makes anew, what holds for the client's own
connection only, and the client's word on who it is."""


def build_early_header_mutation() -> TypedExtensionConfig:
    """The extension that cleans a request's head as it arrives.

    Envoy can remove what matches, not all but what matches, and its regular expressions know no look-ahead. So the intent headers
    step aside under another name while their family is removed, and step back.
    """
    mutations = [_copy_header(name, _KEPT + name) for name in CLIENT_MAY_SEND]
    mutations += [_remove_family(family) for family in _FAMILIES]
    mutations += [_copy_header(_KEPT + name, name) for name in CLIENT_MAY_SEND]
    mutations += [_remove_family(_KEPT), *(HeaderMutation(remove=name) for name in _NAMES)]
    return pack_extension("envoy.http.early_header_mutation.header_mutation", EarlyHeaderMutation(mutations=mutations))


def _copy_header(source: str, target: str) -> HeaderMutation:
    """Does nothing when the source is not there."""
    return HeaderMutation(append=overwrite_header(target, f"%REQ({source})%"))


def _remove_family(prefix: str) -> HeaderMutation:
    return HeaderMutation(remove_on_match=HeaderMutationRemoveOnMatch(key_matcher=StringMatcher(prefix=prefix)))
