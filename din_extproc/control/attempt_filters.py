"""Parts of a cluster's own chain of filters, which runs anew for every attempt at a node."""

from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutation as RuleMutation
from envoy_data_plane.envoy.config.core.v3 import DataSource, TypedExtensionConfig
from envoy_data_plane.envoy.extensions.common.matching.v3 import ExtensionWithMatcher
from envoy_data_plane.envoy.extensions.filters.common.matcher.action.v3 import SkipFilter
from envoy_data_plane.envoy.extensions.filters.http.header_mutation.v3 import HeaderMutation, Mutations
from envoy_data_plane.envoy.extensions.filters.http.lua.v3 import Lua
from envoy_data_plane.envoy.type.matcher.v3 import HttpRequestHeaderMatchInput
from envoy_data_plane.google.protobuf import Any as PackedAny
from envoy_data_plane.xds.core.v3 import TypedExtensionConfig as XdsExtension
from envoy_data_plane.xds.type.matcher.v3 import (
    Matcher,
    MatcherMatcherList,
    MatcherMatcherListFieldMatcher,
    MatcherMatcherListPredicate,
    MatcherMatcherListPredicateSinglePredicate,
    MatcherOnMatch,
    StringMatcher,
)

from din_extproc.control.packing import overwrite_header, pack_extension


def make_mutation(mutations: Mutations) -> TypedExtensionConfig:
    """Changes of headers."""
    return pack_extension("envoy.filters.http.header_mutation", HeaderMutation(mutations=mutations))


def set_header(name: str, value: str) -> RuleMutation:
    """Does nothing where the value is another header's that is not there."""
    return RuleMutation(append=overwrite_header(name, value))


def make_script(source: str) -> TypedExtensionConfig:
    """A Lua script."""
    return pack_extension("envoy.filters.http.lua", Lua(default_source_code=DataSource(inline_string=source)))


def header_matches(name: str, value: StringMatcher) -> MatcherMatcherListPredicate:
    """The condition that a request header has such a value."""
    header = XdsExtension(name="header", typed_config=PackedAny.pack(HttpRequestHeaderMatchInput(header_name=name)))
    return MatcherMatcherListPredicate(single_predicate=MatcherMatcherListPredicateSinglePredicate(input=header, value_match=value))


def skip_when(condition: MatcherMatcherListPredicate, filter_config: TypedExtensionConfig) -> TypedExtensionConfig:
    """Wrap a filter so that it doesn't run for some attempts. A skipped Lua filter costs no coroutines, a skipped sidecar no call."""
    skip = XdsExtension(name="skip", typed_config=PackedAny.pack(SkipFilter()))
    rule = MatcherMatcherListFieldMatcher(predicate=condition, on_match=MatcherOnMatch(action=skip))
    matcher = Matcher(matcher_list=MatcherMatcherList(matchers=[rule]))
    return pack_extension("envoy.filters.http.match_delegate", ExtensionWithMatcher(extension_config=filter_config, xds_matcher=matcher))


def only_when(condition: MatcherMatcherListPredicate, filter_config: TypedExtensionConfig) -> TypedExtensionConfig:
    """Wrap a filter so that it runs only for some attempts."""
    return skip_when(MatcherMatcherListPredicate(not_matcher=condition), filter_config)
