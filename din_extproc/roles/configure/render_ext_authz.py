"""The role of `render ext-authz`: an example Envoy that uses the sidecar for ext_authz.

Rule: the configuration starts as it is; marked parts are meant to be copied.
"""

import json
from importlib.resources import files
from string import Template

from din_extproc.control.topology import Address, SocketAddress, UnixSocket
from din_extproc.roles.configure.render import RenderFailed, accepted, usage_lua
from din_extproc.settings.gateway import as_reached, is_host
from din_extproc.settings.settings import Settings

_MARGIN_MS = 500


def render_ext_authz(settings: Settings, node: str, *, validate: bool = False) -> str:
    """Return the configuration as YAML.

    Args:
        settings: A valid configuration.
        node: `host:port` to which requests go.
        validate: Validate with this machine's Envoy, if there is one.

    Raises:
        RenderFailed: ext_authz is not configured, the node's address is malformed, or Envoy rejects the result.
    """
    gateway, envoy = settings.gateway, settings.envoy
    if gateway.ext_authz is None:
        raise RenderFailed("`gateway.ext_authz` is not configured; add it")
    reached = _make_address(node)
    logs = as_reached(gateway.access_log.address)
    waits_ms = settings.longest_wait_ms
    template = Template(files("din_extproc.control").joinpath("ext_authz.yaml").read_text())
    text = template.substitute(
        admin_port=envoy.admin.port,
        listen_host=envoy.listener.host,
        listen_port=envoy.listener.port,
        usage_lua=json.dumps(usage_lua()),
        body_bytes=settings.body_limit,
        timeout=f"{(waits_ms + _MARGIN_MS) / 1000:.3f}s",
        flush=f"{envoy.access_log_flush_ms / 1000:.3f}s",
        node_host=json.dumps(reached.host),
        node_port=reached.port,
        authz=", ".join(_make_endpoint(address) for address in gateway.worker_addresses),
        logs_host=logs.host,
        logs_port=logs.port,
    )
    return accepted(text, validate=validate)


def _make_address(node: str) -> SocketAddress:
    host, _, port = node.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    if is_host(host) is None or bracketed != (":" in host) or not port.isdecimal():
        raise RenderFailed(f"the node's address {node!r} is not host:port")
    try:
        return SocketAddress(host, int(port))
    except ValueError as error:
        raise RenderFailed(str(error)) from error


def _make_endpoint(address: Address) -> str:
    if isinstance(address, UnixSocket):
        return f"{{ endpoint: {{ address: {{ pipe: {{ path: {address.path} }} }} }} }}"
    return f"{{ endpoint: {{ address: {{ socket_address: {{ address: {address.host}, port_value: {address.port} }} }} }} }}"
