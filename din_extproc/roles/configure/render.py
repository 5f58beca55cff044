"""The role of `render`: proxies' configuration from a `din.yaml` or a node's `node.yaml`.

Rule: a rendered Envoy configuration was validated by this machine's Envoy, if there is one.
"""

import socket
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from msgspec.structs import replace

from din_extproc.control.hand_edits import EditConflict, merge_edits
from din_extproc.control.supported import describe_unsupported, parse_minor
from din_extproc.control.topology import Topology
from din_extproc.domain.identity import SYSTEM_CA, InlineJwks
from din_extproc.edge.process.envoy_binary import find_config_error, find_envoy
from din_extproc.edge.process.envoy_binary import read_envoy_version as envoy_version_of
from din_extproc.settings.node import NodeSettings
from din_extproc.settings.settings import Settings

KEPT = ".rendered"
"""Suffix of the copy that keeps the last rendering, so that manual changes are recognized."""


class RenderFailed(Exception):  # noqa: N818 - it says what the configuration is
    """The configuration can't be rendered, or Envoy rejects it; the message names the field."""


def render_envoy(
    settings: Settings, *, validate: bool = False, xds: bool = False, node_id: str = "", envoy_version: str | None = None
) -> str:
    """Return Envoy's bootstrap as YAML.

    Args:
        settings: A valid configuration.
        validate: Validate with this machine's Envoy, if there is one.
        xds: Whether Envoy gets pools, nodes and routes by xDS.
        node_id: Envoy's node id for xDS; "" is the host name.
        envoy_version: Envoy's version; a local Envoy of another version does not validate.

    Raises:
        RenderFailed: Envoy rejects the result, xDS is asked for and not configured, or a pool's nodes are found and xDS is not asked for.
    """
    from din_extproc.control.bootstrap import render_yaml  # noqa: PLC0415 - three seconds, for those who render only

    refused = None if envoy_version is None else describe_unsupported(envoy_version)
    if refused is not None:
        raise RenderFailed(refused)
    discovery = settings.make_xds_source(node_id or socket.gethostname()) if xds else None
    if xds and discovery is None:
        raise RenderFailed("`gateway.xds` is not configured; set it, or render with --static")
    if discovery is None:
        _refuse_found_nodes(settings)
    text = render_yaml(settings.make_topology(usage_lua(), discovery))
    return accepted(text, validate=validate, envoy_version=envoy_version)


def render_node(settings: NodeSettings, *, validate: bool = False) -> str:
    """Return the bootstrap of a node's Envoy as YAML.

    Args:
        settings: A valid configuration.
        validate: Validate with this machine's Envoy, if there is one.

    Raises:
        RenderFailed: Envoy rejects the result, or the configuration has no `proxy` section.
    """
    from din_extproc.control.bootstrap import render_yaml  # noqa: PLC0415 - three seconds, for those who render only

    if settings.proxy is None:
        raise RenderFailed(f"{settings.file} has no section `proxy`; add it to put an Envoy in front of the engine")
    return accepted(render_yaml(settings.make_topology(), "node"), validate=validate)


def render_istio(settings: Settings, *, mode: Literal["gateway", "sidecar"], **placed: Any) -> str:
    """Return Istio resources as YAML.

    Args:
        settings: A valid configuration.
        mode: Whose Envoys are patched: an ingress gateway's, or the clients' sidecars.
        placed: The other fields of `control.istio.Mesh`.

    Raises:
        RenderFailed: the mesh could not reach the sidecar or the nodes.
    """
    from din_extproc.control.bootstrap import render_documents  # noqa: PLC0415 - three seconds, for those who render only
    from din_extproc.control.istio import Mesh, build_istio  # noqa: PLC0415

    try:
        return render_documents(build_istio(_for_cluster(settings), Mesh(mode=mode, **placed)), "istio")
    except ValueError as error:
        raise RenderFailed(str(error)) from error


def _for_cluster(settings: Settings) -> Topology:
    """Return the topology with the content of key files: a control plane does not have them.

    Raises:
        RenderFailed: a pool's nodes are found.
        ValueError: a file can't be read.
    """
    _refuse_found_nodes(settings)
    make_topology = settings.make_topology(usage_lua())
    issuers = []
    for each in make_topology.identity.jwt:
        try:
            issuers.append(replace(each, jwks=InlineJwks(Path(each.jwks).read_text())) if isinstance(each.jwks, str) else each)
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"issuer {each.issuer}: {error}") from error
    return replace(make_topology, identity=replace(make_topology.identity, jwt=tuple(issuers)))


def render_envoy_gateway(settings: Settings, **placed: Any) -> str:
    """Return Envoy Gateway resources as YAML. `placed`: the fields of `control.envoy_gateway.Placement`.

    Raises:
        RenderFailed: a part of the configuration can't be used in a cluster.
    """
    from din_extproc.control.bootstrap import render_documents  # noqa: PLC0415 - three seconds, for those who render only
    from din_extproc.control.envoy_gateway import Placement, build_envoy_gateway  # noqa: PLC0415

    try:
        topology = _for_cluster(settings)
        return render_documents(build_envoy_gateway(topology, Placement(**placed), _read_authorities(topology)), "envoy-gateway")
    except ValueError as error:
        raise RenderFailed(str(error)) from error


def _refuse_found_nodes(settings: Settings) -> None:
    """Refuse pools whose nodes are found while Envoy runs.

    Raises:
        RenderFailed: there is one.
    """
    pools = [pool.name for pool in settings.pools if pool.discover is not None]
    if pools:
        raise RenderFailed(
            f"pools.{pools[0]}.discover: a static rendering has the listed nodes alone, and those that are found would get no request; "
            "use `render envoy --xds`, or list the pool's nodes"
        )


def _read_authorities(topology: Topology) -> dict[str, str]:
    """Return the content of hosted APIs' `ca` files by their names; not that of the operating system's bundle.

    Raises:
        ValueError: a file can't be read.
    """
    found = {}
    for node in (node for pool in topology.pools for node in pool.nodes):
        if node.remote is not None and node.remote.tls and node.remote.ca != SYSTEM_CA:
            try:
                found[node.remote.ca] = Path(node.remote.ca).read_text()
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"node {node.id}: its `ca` can't be read: {error}") from error
    return found


def write_over(output: Path, rendered: str, *, force: bool) -> None:
    """Write a rendering over an earlier one, keeping manual changes, and keep a copy of the rendering beside it.

    Args:
        output: The file.
        rendered: The new content.
        force: Discard manual changes.

    Raises:
        RenderFailed: both changed the same lines, or the copy that shows manual changes is missing.
        OSError: a file can't be read or written.
        UnicodeDecodeError: the file is not UTF-8 text.
    """
    kept = output.with_name(output.name + KEPT)
    text: str | tuple[EditConflict, ...] = rendered
    if output.exists() and not force and (found := output.read_text()) != rendered:
        if not kept.exists():
            raise RenderFailed(f"{output} exists without {kept.name}, so manual changes can't be recognized; use --force to overwrite it")
        text = merge_edits(kept.read_text(), found, rendered)
    if not isinstance(text, str):
        raise RenderFailed(
            f"{output} has manual changes in lines that the rendering changes; undo them or use --force: {'; '.join(map(str, text))}"
        )
    output.write_text(text)
    kept.write_text(rendered)  # last: beside an older file, old lines would count as manual changes


def accepted(text: str, *, validate: bool, envoy_version: str | None = None) -> str:
    """Return the configuration if Envoy accepts it, or if there is no Envoy of this version to validate it.

    Raises:
        RenderFailed: Envoy rejects it.
    """
    binary = find_envoy() if validate else None
    if binary is not None and envoy_version is not None and parse_minor(envoy_version_of(binary)) != parse_minor(envoy_version):
        binary = None
    refused = None if binary is None else find_config_error(text, binary)
    if refused is not None:
        raise RenderFailed(f"Envoy rejects the rendered configuration: {refused}")
    return text


def usage_lua() -> str:
    """Return the source of the Lua filter that counts tokens (a link to `envoy/lua/usage.lua`)."""
    return files("din_extproc.control").joinpath("usage.lua").read_text()
