"""The commands under `render`: configuration for the proxies in front, out of one file.

Rule: as in `app.py`: parse, call a role, print.
"""

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from din_extproc.cli import kubernetes
from din_extproc.cli.options import DEFAULT_CONFIG, Config, Output, fail, port, settings_of, write, written
from din_extproc.settings.node import load_node
from din_extproc.settings.problems import ConfigRejected

render_app = typer.Typer(no_args_is_help=True, help="Configuration for the proxy in front.")


@render_app.command("envoy")
def render_envoy(
    config: Config = DEFAULT_CONFIG,
    output: Output = None,
    validate: Annotated[bool, typer.Option(help="Ask the Envoy of this machine, if there is one.")] = True,  # noqa: FBT002
    xds: Annotated[
        bool | None,
        typer.Option(
            "--xds/--static", help="Whether the sidecar tells that Envoy its nodes while it runs. [default: if gateway.xds is set]"
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Forget what was changed by hand in the file.")] = False,  # noqa: FBT002
    envoy_version: Annotated[str | None, typer.Option(help="Of the Envoy that it is for, such as 1.38; 1.36 is the oldest.")] = None,
    node_id: Annotated[str, typer.Option(help="With --xds, the name by which that Envoy asks; this host's by default.")] = "",
) -> None:
    """Envoy's own configuration (envoy.yaml) for this din.yaml. What was changed by hand in the file is kept."""
    from din_extproc.roles.configure.render import RenderFailed, write_over  # noqa: PLC0415 - the other commands start without it
    from din_extproc.roles.configure.render import render_envoy as render  # noqa: PLC0415

    try:
        settings = settings_of(config)
        told = settings.gateway.xds is not None if xds is None else xds
        text = render(settings, validate=validate, xds=told, node_id=node_id, envoy_version=envoy_version)
        if output is None:
            write(text, None)
        else:
            with written(output):
                write_over(output, text, force=force)
    except RenderFailed as error:
        fail(str(error))


@render_app.command("istio")
def render_istio(
    host: Annotated[str, typer.Option(help="What clients call, such as llm.example.com.", callback=kubernetes.mesh_host)],
    config: Config = DEFAULT_CONFIG,
    output: Output = None,
    mode: Annotated[Literal["gateway", "sidecar"], typer.Option(help="An ingress gateway's Envoys, or the clients' own.")] = "gateway",
    namespace: Annotated[
        str, typer.Option(help="Of the resources; in mode sidecar, of the clients.", callback=kubernetes.namespace)
    ] = "default",
    gateway: Annotated[
        str, typer.Option(help="The Gateway that the host joins: a name, or namespace/name.", callback=kubernetes.placed_resource)
    ] = "istio-ingressgateway",
    selector: Annotated[list[str] | None, typer.Option(help="label=value of the proxies that are patched; repeatable.")] = None,
    port: Annotated[int, port("Where those proxies listen for the host.")] = 80,
) -> None:
    """Istio's resources for this din.yaml: EnvoyFilter, DestinationRule, VirtualService, ServiceEntry."""
    from din_extproc.roles.configure.render import RenderFailed  # noqa: PLC0415 - the other commands start without it
    from din_extproc.roles.configure.render import render_istio as render  # noqa: PLC0415

    labels = tuple(kubernetes.label(text) for text in selector or (["istio=ingressgateway"] if mode == "gateway" else []))
    try:
        text = render(settings_of(config), mode=mode, host=host, namespace=namespace, gateway=gateway, selector=labels, port=port)
    except RenderFailed as error:
        fail(str(error))
    write(text, output)


@render_app.command("envoy-gateway")
def render_envoy_gateway(
    host: Annotated[str, typer.Option(help="What clients call, such as llm.example.com.", callback=kubernetes.host)],
    gateway: Annotated[str, typer.Option(help="The Gateway that the host joins, of the same namespace.", callback=kubernetes.resource)],
    config: Config = DEFAULT_CONFIG,
    output: Output = None,
    namespace: Annotated[str, typer.Option(help="Of the resources.", callback=kubernetes.namespace)] = "default",
    listener: Annotated[str, typer.Option(help="The Gateway's listener.", callback=kubernetes.resource)] = "http",
) -> None:
    """Envoy Gateway's resources for this din.yaml: HTTPRoute, Backend, EnvoyExtensionPolicy, EnvoyPatchPolicy and what they need."""
    from din_extproc.roles.configure.render import RenderFailed  # noqa: PLC0415 - the other commands start without it
    from din_extproc.roles.configure.render import render_envoy_gateway as render  # noqa: PLC0415

    try:
        text = render(settings_of(config), host=host, gateway=gateway, namespace=namespace, listener=listener)
    except RenderFailed as error:
        fail(str(error))
    write(text, output)


@render_app.command("monitoring")
def render_monitoring(folder: Annotated[Path, typer.Argument(help="Written here: grafana/*.json, prometheus/rules/*.yml.")]) -> None:
    """Grafana's dashboards and Prometheus' alert rules for the metrics of this version."""
    from din_extproc.roles.configure.monitoring import write as write_files  # noqa: PLC0415 - the other commands start without it

    try:
        for path in write_files(folder):
            typer.echo(path)
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}")


@render_app.command("ext-authz")
def render_ext_authz(
    node: Annotated[str, typer.Option(help="host:port of where that Envoy sends requests.")] = "127.0.0.1:8000",
    config: Config = DEFAULT_CONFIG,
    output: Output = None,
    validate: Annotated[bool, typer.Option(help="Ask the Envoy of this machine, if there is one.")] = True,  # noqa: FBT002
) -> None:
    """An Envoy of your own that only asks whether requests may pass (`gateway.ext_authz`): an example that starts."""
    from din_extproc.roles.configure.render import RenderFailed  # noqa: PLC0415 - the other commands start without it
    from din_extproc.roles.configure.render_ext_authz import render_ext_authz as render  # noqa: PLC0415

    try:
        text = render(settings_of(config), node, validate=validate)
    except RenderFailed as error:
        fail(str(error))
    write(text, output)


@render_app.command("node")
def render_node(
    config: Config = Path("node.yaml"),
    output: Output = None,
    validate: Annotated[bool, typer.Option(help="Ask the Envoy of this machine, if there is one.")] = True,  # noqa: FBT002
) -> None:
    """Configuration of the Envoy in front of a node's engine, for this node.yaml."""
    from din_extproc.roles.configure.render import RenderFailed  # noqa: PLC0415 - the other commands start without it
    from din_extproc.roles.configure.render import render_node as render  # noqa: PLC0415

    settings = load_node(config, os.environ)
    if isinstance(settings, ConfigRejected):
        typer.echo(str(settings), err=True)
        raise typer.Exit(1)
    try:
        text = render(settings, validate=validate)
    except RenderFailed as error:
        fail(str(error))
    write(text, output)
