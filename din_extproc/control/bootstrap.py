"""From a topology to the file that Envoy is started with.

Invariant: the same topology gives the same bytes, so that the rendered file can be committed and compared.
Importing this module takes about three seconds (Envoy's whole vocabulary): only a command that renders imports it.
"""

from collections.abc import Sequence
from typing import Any

import yaml
from envoy_data_plane.envoy.config.bootstrap.v3 import Admin, Bootstrap, BootstrapDynamicResources, BootstrapStaticResources
from envoy_data_plane.envoy.config.core.v3 import (
    ApiConfigSource,
    ApiConfigSourceApiType,
    ApiVersion,
    BackoffStrategy,
    GrpcService,
    GrpcServiceEnvoyGrpc,
    RetryPolicy,
)
from envoy_data_plane.envoy.config.core.v3 import Node as EnvoyNode
from envoy_data_plane.envoy.config.overload.v3 import OverloadManager, ResourceMonitor
from envoy_data_plane.envoy.extensions.resource_monitors.downstream_connections.v3 import DownstreamConnectionsConfig

from din_extproc.control.clusters import build_clusters
from din_extproc.control.egress import add_egress
from din_extproc.control.jwt import jwks_clusters
from din_extproc.control.listener import build_listener
from din_extproc.control.packing import make_address, make_ads_source, pack_extension, to_duration, to_plain
from din_extproc.control.topology import XDS_CLUSTER, Topology, XdsSource

_SERVICE_CLUSTER = "din"
_FIRST_RETRY_MS = 100
_LAST_RETRY_MS = 1_000
_NOTE = "# Rendered by `din-extproc render {}`: change the {}'s configuration, not this file.\n"
_WHOSE = {"node": "node"}


def build_bootstrap(topology: Topology) -> Bootstrap:
    """Envoy's bootstrap message."""
    discovery = topology.discovery
    found = Bootstrap(
        node=None if discovery is None else EnvoyNode(id=discovery.node_id, cluster=_SERVICE_CLUSTER),
        admin=Admin(address=make_address(topology.admin)),
        static_resources=BootstrapStaticResources(
            listeners=[build_listener(topology)], clusters=[*build_clusters(topology), *jwks_clusters(topology)]
        ),
        dynamic_resources=None if discovery is None else _build_dynamic_resources(discovery),
        overload_manager=_build_connection_limit(topology.max_connections),
    )
    add_egress(found, topology)
    return found


def _build_dynamic_resources(discovery: XdsSource) -> BootstrapDynamicResources:
    """One stream for everything. While it is down, Envoy goes on with what it was told last, and tries again with short pauses."""
    pause = BackoffStrategy(base_interval=to_duration(_FIRST_RETRY_MS), max_interval=to_duration(_LAST_RETRY_MS))
    service = GrpcServiceEnvoyGrpc(cluster_name=XDS_CLUSTER, retry_policy=RetryPolicy(retry_back_off=pause))
    source = ApiConfigSource(
        api_type=ApiConfigSourceApiType.DELTA_GRPC if discovery.delta else ApiConfigSourceApiType.GRPC,
        transport_api_version=ApiVersion.V3,
        grpc_services=[GrpcService(envoy_grpc=service)],
        set_node_on_first_message_only=True,
    )
    return BootstrapDynamicResources(ads_config=source, cds_config=make_ads_source())


def _build_connection_limit(connections: int) -> OverloadManager:
    config = DownstreamConnectionsConfig(max_active_downstream_connections=connections)
    monitor = pack_extension("envoy.resource_monitors.global_downstream_max_connections", config)
    return OverloadManager(resource_monitors=[ResourceMonitor(name=monitor.name, typed_config=monitor.typed_config)])


def render_dict(topology: Topology) -> dict[str, Any]:
    """The bootstrap as plain values, with the field names of Envoy's documentation."""
    return to_plain(build_bootstrap(topology))


def render_yaml(topology: Topology, command: str = "envoy") -> str:
    """The bootstrap as YAML text; texts of several lines stand as blocks. `command`: of `din-extproc render`."""
    return render_documents([render_dict(topology)], command)


def render_documents(values: Sequence[dict[str, Any]], command: str) -> str:
    """Plain values as YAML documents, with a note that says where to change them."""
    texts = (yaml.dump(value, Dumper=_BlockDumper, sort_keys=False, width=140, allow_unicode=True) for value in values)
    return _NOTE.format(command, _WHOSE.get(command, "gateway")) + "---\n".join(texts)


_READ_AS_BOOL = frozenset("ynYN")
"""A pool may be called so. PyYAML writes these as they are, Envoy takes them for yes and no."""


class _BlockDumper(yaml.SafeDumper):
    """Writes texts of several lines the way people read them, and what stands twice in full."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 - PyYAML's own signature
        """No anchors."""
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else '"' if text in _READ_AS_BOOL else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_BlockDumper.add_representer(str, _represent_text)
