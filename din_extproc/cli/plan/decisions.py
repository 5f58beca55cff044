"""The commands `explain`, `replay` and `verify`: decisions about single requests, recorded requests and every route."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from din_extproc.cli.options import DEFAULT_CONFIG, Config, Json, fail, fail_on, finish, load_settings
from din_extproc.cli.progress import show_progress


def explain(
    request: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="A JSON body, or {path, headers, claims, peer, body}. `-` reads standard input."),
    ],
    config: Config = DEFAULT_CONFIG,
    tenant: Annotated[str, typer.Option(help="The tenant that sends the request; default: the one that its claims or peer name.")] = "",
    json: Json = False,  # noqa: FBT002 - a flag
    live: Annotated[bool, typer.Option("--live", help="Use nodes and load as the running sidecar knows them.")] = False,  # noqa: FBT002
) -> None:
    """Show where a request would be routed, and why.

    It prints what was read from the request, each rule and each node. Exit code 1: the request would be refused.
    """
    from din_extproc.roles.operate.nodes import SidecarUnreachable, fetch_rows  # noqa: PLC0415 - the other commands start without it
    from din_extproc.tools.explain.explain import ExplainFailed  # noqa: PLC0415
    from din_extproc.tools.explain.explain import explain as explain_request  # noqa: PLC0415

    settings = load_settings(config)
    if str(request) != "-" and not request.exists():
        fail(f"{request} is no file; give a file with the request's JSON, or - for standard input")
    with fail_on(ExplainFailed, SidecarUnreachable, OSError):
        text = sys.stdin.buffer.read() if str(request) == "-" else request.read_bytes()
        explained = explain_request(settings, tenant, text, fetch_rows(settings) if live else None)
    finish(explained, explained.lines(), json=json, ok=explained.sent)


def replay(
    folders: Annotated[list[Path], typer.Argument(help="Folders with audit logs of one or more replicas.")],
    config: Config = DEFAULT_CONFIG,
    before: Annotated[
        Path | None, typer.Option(help="Compare with decisions under this configuration instead of the recorded ones.")
    ] = None,
    json: Json = False,  # noqa: FBT002 - a flag
) -> None:
    """Decide recorded requests again under a new configuration.

    It prints the requests whose outcome changes. Exit code 1: there are some.
    """
    from din_extproc.tools.replay.replay import ReplayRefused  # noqa: PLC0415 - the other commands start without it
    from din_extproc.tools.replay.replay import replay as rerun  # noqa: PLC0415

    after = load_settings(config)
    with fail_on(ReplayRefused):
        then = None if before is None else load_settings(before)
        with show_progress("deciding again") as progress:
            replayed = rerun(tuple(folders), after, then, progress)
    finish(replayed, replayed.lines(), json=json, ok=not replayed.changes)


def verify(
    url: Annotated[str, typer.Option(help="Envoy's URL, as clients reach it.")],
    key: Annotated[str, typer.Option(envvar="DIN_KEY", help="An API key: its tenant's view of the route table is verified.")],
    config: Config = DEFAULT_CONFIG,
    longest: Annotated[int | None, typer.Option(help="Longest prompt to send, in tokens; default: as long as each entry needs.")] = None,
    live: Annotated[bool, typer.Option("--live", help="Include registered nodes, as the running sidecar knows them.")] = False,  # noqa: FBT002
    json: Json = False,  # noqa: FBT002 - a flag
) -> None:
    """Send a request through every route and report the answers.

    Exit code 1: an answer did not come from where the route table says.
    """
    from din_extproc.roles.operate.nodes import SidecarUnreachable, fetch_rows  # noqa: PLC0415 - the other commands start without it
    from din_extproc.tools.verify.verify import VerifyOptions, VerifyRefused  # noqa: PLC0415
    from din_extproc.tools.verify.verify import verify as verify_routes  # noqa: PLC0415

    settings = load_settings(config)
    with fail_on(VerifyRefused, SidecarUnreachable):
        rows = fetch_rows(settings) if live else ()
        with show_progress("verifying") as progress:
            verified = verify_routes(settings, VerifyOptions(url, key, longest), rows, progress)
    finish(verified, verified.lines(), json=json, ok=verified.sound)
