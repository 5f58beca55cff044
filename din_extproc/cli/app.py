"""The command `din-extproc` and its table of commands, in the order and the groups in which `--help` shows them.

Rule: modules of this package hold no logic. Exit codes: 0, 1 when the answer is no, 2 for a wrong call; every error is one line.
"""

from collections.abc import Callable
from typing import Annotated, Any

import typer

from din_extproc import __version__
from din_extproc.cli.budgets import budgets_app
from din_extproc.cli.configure.check import check
from din_extproc.cli.configure.keys import keys_app
from din_extproc.cli.configure.render import render_app
from din_extproc.cli.operate import audit_app, doctor, drain, nodes_app, tenants, usage
from din_extproc.cli.plan.bench import bench_app
from din_extproc.cli.plan.decisions import explain, replay, verify
from din_extproc.cli.plan.simulate import simulate
from din_extproc.cli.run import demo, engine_sim, envoy, node, serve

_GROUPS: dict[str, dict[str, Callable[..., Any] | typer.Typer]] = {
    "Run": {"serve": serve, "node": node, "envoy": envoy, "demo": demo, "engine-sim": engine_sim},
    "Configure": {"check": check, "render": render_app, "keys": keys_app},
    "Plan": {"explain": explain, "replay": replay, "simulate": simulate, "verify": verify, "bench": bench_app},
    "Operate": {
        "tenants": tenants,
        "usage": usage,
        "budgets": budgets_app,
        "drain": drain,
        "doctor": doctor,
        "nodes": nodes_app,
        "audit": audit_app,
    },
}

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    help="An Envoy sidecar that routes LLM requests to GPU nodes.",
)
for _panel, _commands in _GROUPS.items():
    for _name, _command in _commands.items():
        if isinstance(_command, typer.Typer):
            app.add_typer(_command, name=_name, rich_help_panel=_panel)
        else:
            app.command(_name, rich_help_panel=_panel)(_command)


def main() -> None:
    """Run the console script."""
    app()


def _show_version(wanted: bool) -> None:  # noqa: FBT001 - typer's callback
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")] = False,  # noqa: FBT002
) -> None:
    pass
