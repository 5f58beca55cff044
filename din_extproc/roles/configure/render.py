"""The role `render`: Envoy's configuration out of `din.yaml`, or out of a node's `node.yaml`.

Rule: what is printed was accepted by an Envoy of this machine, where there is one.
"""

import socket
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from din_extproc.control.hand_edits import EditConflict, merged
from din_extproc.control.supported import minor, unsupported
from din_extproc.edge.process.envoy_binary import complaint, find_envoy
from din_extproc.edge.process.envoy_binary import envoy_version as envoy_version_of
from din_extproc.settings.node import NodeSettings
from din_extproc.settings.settings import Settings

KEPT = ".rendered"
"""Stands behind the name of a rendered file: the rendering as it was, so that hand edits are known."""


class RenderFailed(Exception):  # noqa: N818 - it says what the configuration is
    """Envoy refuses what the configuration asks for, or it can't be asked for; the message names the field."""


def render_envoy(
    settings: Settings, *, validate: bool = False, xds: bool = False, node_id: str = "", envoy_version: str | None = None
) -> str:
    """Envoy's bootstrap as YAML.

    Args:
        settings: A sound configuration.
        validate: Ask the Envoy of this machine, when there is one, whether it would start with it.
        xds: For an Envoy that is told its pools, nodes and routes while it runs.
        node_id: By which name it asks then; "" is this host's.
        envoy_version: Of the Envoy that it is for; an Envoy of this machine of another version is then not asked.

    Raises:
        Unrenderable: Envoy would not start, or nothing tells it anything while it runs.
    """
    from din_extproc.control.bootstrap import as_yaml  # noqa: PLC0415 - three seconds, for those who render only

    refused = None if envoy_version is None else unsupported(envoy_version)
    if refused is not None:
        raise RenderFailed(refused)
    discovery = settings.discovery(node_id or socket.gethostname()) if xds else None
    if xds and discovery is None:
        raise RenderFailed("`gateway.xds` is not configured: nothing would tell that Envoy its nodes")
    text = as_yaml(settings.topology(usage_lua(), discovery))
    return accepted(text, validate=validate, envoy_version=envoy_version)


def render_node(settings: NodeSettings, *, validate: bool = False) -> str:
    """The bootstrap of the Envoy in front of a node's engine, as YAML.

    Args:
        settings: A sound configuration.
        validate: Ask the Envoy of this machine, when there is one, whether it would start with it.

    Raises:
        Unrenderable: it would not, or the configuration asks for no such Envoy.
    """
    from din_extproc.control.bootstrap import as_yaml  # noqa: PLC0415 - three seconds, for those who render only

    if settings.proxy is None:
        raise RenderFailed(f"{settings.file} has no section `proxy`: no Envoy stands in front of the engine")
    return accepted(as_yaml(settings.topology(), "node"), validate=validate)


def render_istio(settings: Settings, *, mode: Literal["gateway", "sidecar"], **placed: Any) -> str:
    """Istio's resources as YAML.

    Args:
        settings: A sound configuration.
        mode: Whose Envoys are patched: an ingress gateway's, or the clients' own.
        placed: The other fields of `control.istio.Mesh`.

    Raises:
        Unrenderable: the mesh could not reach the sidecar or the nodes.
    """
    from din_extproc.control.bootstrap import documents  # noqa: PLC0415 - three seconds, for those who render only
    from din_extproc.control.istio import Mesh, istio  # noqa: PLC0415

    try:
        return documents(istio(settings.topology(usage_lua()), Mesh(mode=mode, **placed)), "istio")
    except ValueError as error:
        raise RenderFailed(str(error)) from error


def render_envoy_gateway(settings: Settings, **placed: Any) -> str:
    """Envoy Gateway's resources as YAML. `placed`: the fields of `control.envoy_gateway.Placement`.

    Raises:
        Unrenderable: a part of the configuration has no place in a cluster.
    """
    from din_extproc.control.bootstrap import documents  # noqa: PLC0415 - three seconds, for those who render only
    from din_extproc.control.envoy_gateway import Placement, envoy_gateway  # noqa: PLC0415

    try:
        return documents(envoy_gateway(settings.topology(usage_lua()), Placement(**placed)), "envoy-gateway")
    except ValueError as error:
        raise RenderFailed(str(error)) from error


def write_over(output: Path, rendered: str, *, force: bool) -> None:
    """Write it where an earlier rendering may lie, which somebody may have changed by hand; the rendering as it is stays beside it.

    Args:
        output: The file.
        rendered: What it is to say.
        force: Forget what was changed by hand.

    Raises:
        Unrenderable: both changed the same lines, or it is not known what was changed by hand.
        OSError: a file can't be read or written.
        UnicodeDecodeError: what lies there is no text.
    """
    kept = output.with_name(output.name + KEPT)
    text: str | tuple[EditConflict, ...] = rendered
    if output.exists() and not force and (found := output.read_text()) != rendered:
        if not kept.exists():
            raise RenderFailed(f"{output} is there, and {kept.name} is not: nobody knows what was changed by hand; --force overwrites it")
        text = merged(kept.read_text(), found, rendered)
    if not isinstance(text, str):
        raise RenderFailed(f"{output} was changed by hand where it changes: {'; '.join(map(str, text))}")
    output.write_text(text)
    kept.write_text(rendered)  # last: beside an older file it would call what is old there changed by hand


def accepted(text: str, *, validate: bool, envoy_version: str | None = None) -> str:
    """The configuration, if Envoy takes it, or need not be asked: there is none here, or one of another version.

    Raises:
        Unrenderable: it does not.
    """
    binary = find_envoy() if validate else None
    if binary is not None and envoy_version is not None and minor(envoy_version_of(binary)) != minor(envoy_version):
        binary = None
    refused = None if binary is None else complaint(text, binary)
    if refused is not None:
        raise RenderFailed(f"Envoy refuses the rendered configuration: {refused}")
    return text


def usage_lua() -> str:
    """The source of the filter that counts what nodes answer (a link to `envoy/lua/usage.lua`)."""
    return files("din_extproc.control").joinpath("usage.lua").read_text()
