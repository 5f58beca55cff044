"""The commands `render ...`: configuration for proxies and monitoring."""

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from din_extproc.cli.configure import kubernetes
from din_extproc.cli.options import DEFAULT_CONFIG, Config, Output, accepted, fail, fail_on, fail_on_unwritable, load_settings, port, write
from din_extproc.edge.credentials import CredentialFiles
from din_extproc.settings.node import load_node

render_app = typer.Typer(no_args_is_help=True, help="Write configuration for proxies and monitoring.")


@render_app.command("envoy")
def render_envoy(
    config: Config = DEFAULT_CONFIG,
    output: Output = None,
    validate: Annotated[bool, typer.Option(help="Validate with this machine's Envoy, if there is one.")] = True,  # noqa: FBT002
    xds: Annotated[
        bool | None,
        typer.Option("--xds/--static", help="Whether Envoy gets its nodes by xDS while it runs. [default: xDS if gateway.xds is set]"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Discard manual changes in the output file.")] = False,  # noqa: FBT002
    envoy_version: Annotated[str | None, typer.Option(help="Envoy's version, such as 1.38; 1.36 is the oldest supported.")] = None,
    node_id: Annotated[str, typer.Option(help="With --xds: Envoy's node id. [default: the host name]")] = "",
) -> None:
    """Write Envoy's configuration (envoy.yaml) for a din.yaml.

    Manual changes in the output file are kept.
    """
    from din_extproc.roles.configure.render import RenderFailed, write_over  # noqa: PLC0415 - the other commands start without it
    from din_extproc.roles.configure.render import render_envoy as render  # noqa: PLC0415

    settings = load_settings(config)
    problems = CredentialFiles(os.environ).write(settings.pools, settings.credentials_folder)
    if problems:
        fail("; ".join(problems))
    with fail_on(RenderFailed):
        uses_xds = settings.gateway.xds is not None if xds is None else xds
        text = render(settings, validate=validate, xds=uses_xds, node_id=node_id, envoy_version=envoy_version)
        if output is None:
            write(text, None)
        else:
            with fail_on_unwritable(output):
                write_over(output, text, force=force)


@render_app.command("istio")
def render_istio(
    host: Annotated[str, typer.Option(help="The host that clients call, such as llm.example.com.", callback=kubernetes.mesh_host)],
    config: Config = DEFAULT_CONFIG,
    output: Output = None,
    mode: Annotated[
        Literal["gateway", "sidecar"], typer.Option(help="Patch an ingress gateway's Envoys, or those of the clients' sidecars.")
    ] = "gateway",
    namespace: Annotated[
        str, typer.Option(help="Namespace of the resources; in mode sidecar, of the clients.", callback=kubernetes.namespace)
    ] = "default",
    gateway: Annotated[
        str, typer.Option(help="The Gateway that the host is attached to: name, or namespace/name.", callback=kubernetes.resource_reference)
    ] = "istio-ingressgateway",
    selector: Annotated[list[str] | None, typer.Option(help="A label=value of the proxies to patch; repeatable.")] = None,
    port: Annotated[int, port("The port on which these proxies listen.")] = 80,
) -> None:
    """Write Istio resources for a din.yaml.

    EnvoyFilter, DestinationRule, VirtualService and ServiceEntry.
    """
    from din_extproc.roles.configure.render import RenderFailed  # noqa: PLC0415 - the other commands start without it
    from din_extproc.roles.configure.render import render_istio as render  # noqa: PLC0415

    labels = tuple(kubernetes.label(text) for text in selector or (["istio=ingressgateway"] if mode == "gateway" else []))
    with fail_on(RenderFailed):
        text = render(load_settings(config), mode=mode, host=host, namespace=namespace, gateway=gateway, selector=labels, port=port)
    write(text, output)


@render_app.command("envoy-gateway")
def render_envoy_gateway(
    host: Annotated[str, typer.Option(help="The host that clients call, such as llm.example.com.", callback=kubernetes.host)],
    gateway: Annotated[
        str, typer.Option(help="The Gateway that the host is attached to, in the same namespace.", callback=kubernetes.resource)
    ],
    config: Config = DEFAULT_CONFIG,
    output: Output = None,
    namespace: Annotated[str, typer.Option(help="Namespace of the resources.", callback=kubernetes.namespace)] = "default",
    listener: Annotated[str, typer.Option(help="The Gateway's listener.", callback=kubernetes.resource)] = "http",
) -> None:
    """Write Envoy Gateway resources for a din.yaml.

    HTTPRoute, Backend, EnvoyExtensionPolicy, EnvoyPatchPolicy and the objects that they refer to.
    """
    from din_extproc.roles.configure.render import RenderFailed  # noqa: PLC0415 - the other commands start without it
    from din_extproc.roles.configure.render import render_envoy_gateway as render  # noqa: PLC0415

    with fail_on(RenderFailed):
        text = render(load_settings(config), host=host, gateway=gateway, namespace=namespace, listener=listener)
    write(text, output)


@render_app.command("monitoring")
def render_monitoring(folder: Annotated[Path, typer.Argument(help="The folder for grafana/*.json and prometheus/rules/*.yml.")]) -> None:
    """Write Grafana dashboards and Prometheus alert rules."""
    from din_extproc.roles.configure.monitoring import write_monitoring as write_files  # noqa: PLC0415 - the other commands start without it

    try:
        for path in write_files(folder):
            typer.echo(path)
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}")


@render_app.command("ext-authz")
def render_ext_authz(
    node: Annotated[str, typer.Option(help="host:port to which this Envoy sends requests.")] = "127.0.0.1:8000",
    config: Config = DEFAULT_CONFIG,
    output: Output = None,
    validate: Annotated[bool, typer.Option(help="Validate with this machine's Envoy, if there is one.")] = True,  # noqa: FBT002
) -> None:
    """Write an example Envoy that uses the sidecar for ext_authz.

    It starts as it is; `gateway.ext_authz` has to be set.
    """
    from din_extproc.roles.configure.render import RenderFailed  # noqa: PLC0415 - the other commands start without it
    from din_extproc.roles.configure.render_ext_authz import render_ext_authz as render  # noqa: PLC0415

    with fail_on(RenderFailed):
        text = render(load_settings(config), node, validate=validate)
    write(text, output)


@render_app.command("node")
def render_node(
    config: Config = Path("node.yaml"),
    output: Output = None,
    validate: Annotated[bool, typer.Option(help="Validate with this machine's Envoy, if there is one.")] = True,  # noqa: FBT002
) -> None:
    """Write the configuration of a node's Envoy for a node.yaml."""
    from din_extproc.roles.configure.render import RenderFailed  # noqa: PLC0415 - the other commands start without it
    from din_extproc.roles.configure.render import render_node as render  # noqa: PLC0415

    settings = accepted(load_node(config, os.environ))
    with fail_on(RenderFailed):
        text = render(settings, validate=validate)
    write(text, output)
