"""The commands `bench ...`: a deployment measured from outside.

Rule: as in `app.py`: parse, call a role, print.
"""

from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import replace

from din_extproc.cli.options import DEFAULT_CONFIG, Config, Json, fail, print_json, settings_of

Url = Annotated[str, typer.Option(help="Envoy, as clients reach it.")]
Key = Annotated[str, typer.Option(envvar="DIN_KEY", help="An API key: its tenant asks.")]
Model = Annotated[str, typer.Option(help="A name that the tenant may use. [default: the first one]")]
History = Annotated[Path, typer.Option(help="Where comparisons are kept, one per line.", envvar="DIN_BENCH_HISTORY")]
_HISTORY = Path("din-bench.jsonl")

bench_app = typer.Typer(no_args_is_help=True, help="Measure a deployment from outside.")


@bench_app.command()
def baseline(
    url: Url,
    key: Key,
    config: Config = DEFAULT_CONFIG,
    model: Model = "",
    node: Annotated[str, typer.Option(help="The node to compare with. [default: the one that would be asked first]")] = "",
    prompts: Annotated[int, typer.Option(help="Different prompts, all in each round.", min=1)] = 24,
    at_once: Annotated[int, typer.Option(help="Requests at once.", min=1)] = 4,
    tokens: Annotated[int, typer.Option(help="Output tokens of an answer, at most.", min=1)] = 32,
    rounds: Annotated[int, typer.Option(help="Rounds, each of both sides.", min=1)] = 3,
    history: History = _HISTORY,
    keep: Annotated[bool, typer.Option(help="Keep the result.")] = True,  # noqa: FBT002 - a flag
    json: Json = False,  # noqa: FBT002 - a flag
) -> None:
    """Ask the same prompts of one node directly and through the network. Exit code 1: the gateway is the bottleneck."""
    from din_extproc.tools.bench import run_baseline as role  # noqa: PLC0415
    from din_extproc.tools.bench.baseline import BaselineFailed, BaselineLoad  # noqa: PLC0415 - the other commands start without it

    load = BaselineLoad(prompts, at_once, tokens, rounds)
    try:
        compared = role.compare(settings_of(config), role.BaselineOptions(url=url, key=key, model=model, node=node, load=load))
        if keep:
            role.keep(history, compared)
    except (BaselineFailed, OSError) as error:
        fail(str(error))
    if json:
        print_json(compared)
    else:
        typer.echo("\n".join(compared.lines()))
    raise typer.Exit(0 if compared.sound else 1)


@bench_app.command()
def split(
    url: Url,
    key: Key,
    config: Config = DEFAULT_CONFIG,
    model: Model = "",
    tokens: Annotated[list[int] | None, typer.Option(help="A length of streams; repeatable. [default: 1, 10, 50, 200, 500]", min=1)] = None,
    repeats: Annotated[int, typer.Option(help="Streams of each length.", min=1)] = 2,
    clock_requests: Annotated[int, typer.Option(help="One-token streams that find out how far clocks are apart.", min=0)] = 24,
    tolerance_ms: Annotated[float, typer.Option(help="How large a gap may be.", min=0.0)] = 50.0,
    svg: Annotated[Path | None, typer.Option(help="Write a picture here.")] = None,
    json: Json = False,  # noqa: FBT002 - a flag
) -> None:
    """Take streams apart by the clocks of client, gateway and nodes. Exit code 1: the parts do not add up, or a clock is off."""
    from din_extproc.roles.operate.nodes import SidecarUnreachable  # noqa: PLC0415
    from din_extproc.tools.bench import run_split as role  # noqa: PLC0415
    from din_extproc.tools.bench.baseline import BaselineFailed  # noqa: PLC0415 - the other commands start without it
    from din_extproc.tools.bench.plot import svg as drawn  # noqa: PLC0415

    asked = role.SplitOptions(url=url, key=key, model=model, repeats=repeats, clock_requests=clock_requests, tolerance_ms=tolerance_ms)
    options = replace(asked, tokens=tuple(tokens)) if tokens else asked
    try:
        apart = role.split(settings_of(config), options)
        if svg is not None:
            svg.write_text(drawn(apart))
    except (BaselineFailed, SidecarUnreachable, OSError) as error:
        fail(str(error))
    if json:
        print_json(apart)
    else:
        typer.echo("\n".join(apart.lines()))
    raise typer.Exit(0 if apart.sound else 1)


@bench_app.command("history")
def show_history(
    history: History = _HISTORY,
    tolerance: Annotated[float, typer.Option(help="By which share throughput may fall.", min=0.0)] = 0.2,
    json: Json = False,  # noqa: FBT002 - a flag
) -> None:
    """What has changed from one kept comparison to the next. Exit code 1: in the newest, throughput fell by more than is tolerated."""
    from din_extproc.tools.bench.history import changes, history_lines  # noqa: PLC0415 - the other commands start without it
    from din_extproc.tools.bench.run_baseline import kept  # noqa: PLC0415

    try:
        found = kept(history)
    except (OSError, ValueError) as error:
        fail(str(error))
    since = changes(found)
    if json:
        print_json([{"compared": compared, "change": change} for compared, change in zip(found, since, strict=True)])
    else:
        typer.echo("\n".join(history_lines(found)))
    newest = since[-1].throughput if since else None
    raise typer.Exit(1 if newest is not None and newest < 1.0 - tolerance else 0)
