"""The commands `bench ...`: measurements of a running deployment from outside."""

from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import replace

from din_extproc.cli.options import DEFAULT_CONFIG, Config, Json, fail_on, finish, load_settings
from din_extproc.cli.progress import show_progress

Url = Annotated[str, typer.Option(help="Envoy's URL, as clients reach it.")]
Key = Annotated[str, typer.Option(envvar="DIN_KEY", help="An API key: requests are sent as its tenant.")]
Model = Annotated[str, typer.Option(help="A model that the tenant may use. [default: the first one]")]
History = Annotated[Path, typer.Option(help="The file of results, one per line.", envvar="DIN_BENCH_HISTORY")]
_HISTORY = Path("din-bench.jsonl")

bench_app = typer.Typer(no_args_is_help=True, help="Measure a running deployment from outside.")


@bench_app.command()
def baseline(
    url: Url,
    key: Key,
    config: Config = DEFAULT_CONFIG,
    model: Model = "",
    node: Annotated[str, typer.Option(help="The node to compare with. [default: the one that the scheduler picks first]")] = "",
    prompts: Annotated[int, typer.Option(help="Number of different prompts; each round sends all.", min=1)] = 24,
    at_once: Annotated[int, typer.Option(help="Concurrent requests.", min=1)] = 4,
    tokens: Annotated[int, typer.Option(help="Maximum output tokens of an answer.", min=1)] = 32,
    rounds: Annotated[int, typer.Option(help="Rounds; each measures both sides.", min=1)] = 3,
    history: History = _HISTORY,
    keep: Annotated[bool, typer.Option(help="Append the result to the history.")] = True,  # noqa: FBT002 - a flag
    json: Json = False,  # noqa: FBT002 - a flag
) -> None:
    """Compare one node directly with the same node through the gateway.

    Both get the same prompts. Exit code 1: the gateway is the bottleneck.
    """
    from din_extproc.tools.bench import baseline as role  # noqa: PLC0415
    from din_extproc.tools.bench.baseline_figures import BaselineFailed, BaselineLoad  # noqa: PLC0415 - the other commands start without it

    load = BaselineLoad(prompts, at_once, tokens, rounds)
    with fail_on(BaselineFailed, OSError):
        options = role.BaselineOptions(url=url, key=key, model=model, node=node, load=load)
        with show_progress("measuring") as progress:
            compared = role.compare(load_settings(config), options, progress)
        if keep:
            role.append_result(history, compared)
    finish(compared, compared.lines(), json=json, ok=compared.sound)


def _parse_counts(texts: list[str]) -> tuple[int, ...]:
    """Return the numbers of a repeatable option with commas (`BadParameter`: one is no positive number)."""
    parts = [part.strip() for text in texts for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"{','.join(parts)} is not a list of positive numbers such as 1,20", param_hint="--tokens")
    return tuple(int(part) for part in parts)


@bench_app.command()
def split(
    url: Url,
    key: Key,
    config: Config = DEFAULT_CONFIG,
    model: Model = "",
    tokens: Annotated[
        list[str] | None, typer.Option(help="Output tokens of streams, such as 1,20; repeatable. [default: 1,10,50,200,500]")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Streams of each length.", min=1)] = 2,
    clock_requests: Annotated[int, typer.Option(help="One-token streams that measure clock offsets.", min=0)] = 24,
    tolerance_ms: Annotated[float, typer.Option(help="Largest accepted difference between the parts and the whole.", min=0.0)] = 50.0,
    svg: Annotated[Path | None, typer.Option(help="Write a chart to this file.")] = None,
    json: Json = False,  # noqa: FBT002 - a flag
) -> None:
    """Split the time of streams into client, gateway and node.

    Exit code 1: the parts do not add up, or a clock is off.
    """
    from din_extproc.roles.operate.nodes import SidecarUnreachable  # noqa: PLC0415
    from din_extproc.tools.bench import split as role  # noqa: PLC0415
    from din_extproc.tools.bench.baseline_figures import BaselineFailed  # noqa: PLC0415 - the other commands start without it
    from din_extproc.tools.bench.plot import draw_svg  # noqa: PLC0415

    options = role.SplitOptions(url=url, key=key, model=model, repeats=repeats, clock_requests=clock_requests, tolerance_ms=tolerance_ms)
    if tokens:
        options = replace(options, tokens=_parse_counts(tokens))
    with fail_on(BaselineFailed, SidecarUnreachable, OSError):
        with show_progress("measuring") as progress:
            report = role.split(load_settings(config), options, progress)
        if svg is not None:
            svg.write_text(draw_svg(report))
    finish(report, report.lines(), json=json, ok=report.sound)


@bench_app.command("history")
def show_history(
    history: History = _HISTORY,
    tolerance: Annotated[float, typer.Option(help="Share by which throughput may fall.", min=0.0)] = 0.2,
    json: Json = False,  # noqa: FBT002 - a flag
) -> None:
    """Show how the kept results changed.

    Exit code 1: in the newest, throughput fell by more than the tolerance.
    """
    from din_extproc.tools.bench.baseline import read_history  # noqa: PLC0415
    from din_extproc.tools.bench.history import find_changes, history_lines  # noqa: PLC0415 - the other commands start without it

    with fail_on(OSError, ValueError):
        results = read_history(history)
    found = find_changes(results)
    newest = found[-1].throughput if found else None
    pairs = [{"compared": compared, "change": change} for compared, change in zip(results, found, strict=True)]
    finish(pairs, history_lines(results), json=json, ok=newest is None or newest >= 1.0 - tolerance)
