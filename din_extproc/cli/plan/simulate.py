"""The command `simulate`: a configuration over modelled nodes and clients, in virtual time."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from din_extproc.cli.options import DEFAULT_CONFIG, Config, Json, accepted, fail_on, finish
from din_extproc.cli.progress import show_progress

if TYPE_CHECKING:
    from din_extproc.tools.simulate.simulate import SimulateOptions


def simulate(
    workload: Annotated[Path | None, typer.Argument(help="A YAML file with requests, node speeds and incidents (see the docs).")] = None,
    config: Config = DEFAULT_CONFIG,
    record: Annotated[
        list[Path] | None, typer.Option(help="Send the requests of the audit log in this folder instead of the workload's; repeatable.")
    ] = None,
    speed: Annotated[float | None, typer.Option(help="With --record: how many times as fast as recorded. [default: 1]", min=0.001)] = None,
    rate: Annotated[float | None, typer.Option(help="Send requests of one kind at this rate per second instead of the workload's.")] = None,
    prompt: Annotated[int | None, typer.Option(help="With --rate: median prompt tokens. [default: 500]")] = None,
    output: Annotated[int | None, typer.Option(help="With --rate: median output tokens. [default: 200]")] = None,
    model: Annotated[str, typer.Option(help="With --rate: the requested model. [default: the tenant's first]")] = "",
    tenant: Annotated[str, typer.Option(help="With --rate: the tenant. [default: the first]")] = "",
    seconds: Annotated[float | None, typer.Option(help="Virtual time to simulate, in seconds.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the random arrivals and lengths.")] = None,
    nodes: Annotated[list[str] | None, typer.Option(help="POOL=N: number of nodes of a pool; repeatable.")] = None,
    slo: Annotated[
        list[str] | None, typer.Option(help="NAME=BOUND: first_token_p99_s, per_token_p99_s, p99_s or errors; repeatable.")
    ] = None,
    tries: Annotated[
        list[str] | None,
        typer.Option(
            "--try",
            help="PATH=VALUE,...: run with each value, such as pools.fast.scheduler=round_robin; repeatable: all combinations.",
        ),
    ] = None,
    size: Annotated[str, typer.Option(help="Find the fewest nodes of this pool that meet the objectives (--slo).")] = "",
    most: Annotated[int | None, typer.Option(help="With --size: maximum number of nodes. [default: 256]", min=1, max=10_000)] = None,
    json: Json = False,  # noqa: FBT002 - a flag
) -> None:
    """Simulate a configuration over modelled nodes and clients.

    Hours of virtual time take seconds. Exit code 1: an objective (--slo) is missed.
    """
    rate_options = {"--prompt": prompt, "--output": output, "--model": model or None, "--tenant": tenant or None}
    if record and rate is not None:
        raise typer.BadParameter("it can't be combined with --record; --speed changes the rate of recorded requests", param_hint="--rate")
    _only_with("--record", record, {"--speed": speed})
    _only_with("--rate", rate, rate_options)
    _only_with("--size", size, {"--most": most})
    given: dict[str, Any] = {f"nodes.{pool}.count": count for pool, count in _pairs("--nodes", nodes)}
    given |= {f"slo.{name}": bound for name, bound in _pairs("--slo", slo)}
    requests = None if rate is None else [_one_kind(rate, prompt, output, {"model": model, "tenant": tenant})]
    given |= {name: value for name, value in (("seconds", seconds), ("seed", seed), ("requests", requests)) if value is not None}
    from din_extproc.tools.simulate.simulate import SimulateOptions  # noqa: PLC0415 - the other commands start without it

    _run(
        SimulateOptions(
            config=config,
            workload=workload,
            given=given,
            record=tuple(record or ()),
            speed=1.0 if speed is None else speed,
            tries=tuple((path, tuple(values)) for path, values in _pairs("--try", tries, several=True)),
            size=size,
            most=256 if most is None else most,
        ),
        json=json,
    )


def _one_kind(rate: float, prompt: int | None, output: int | None, names: dict[str, str]) -> dict[str, Any]:
    """Return a workload's only kind of request, as its YAML would hold it."""
    lengths = {
        name: {"median": usual if median is None else median, "spread": 0.5}
        for name, median, usual in (("prompt_tokens", prompt, 500), ("output_tokens", output, 200))
    }
    return {"rate": rate, **lengths, **{name: value for name, value in names.items() if value}}


def _run(options: "SimulateOptions", *, json: bool) -> None:
    from din_extproc.tools.simulate.report import lines  # noqa: PLC0415
    from din_extproc.tools.simulate.simulate import ReplayRefused, SimulationRefused  # noqa: PLC0415 - the other commands start without it
    from din_extproc.tools.simulate.simulate import simulate as run  # noqa: PLC0415

    began = time.monotonic()
    with fail_on(SimulationRefused, ReplayRefused):
        with show_progress("simulating") as progress:
            found = run(options, os.environ, progress)
        simulated = accepted(found)
    if not json:
        typer.echo(f"({time.monotonic() - began:.1f} s)", err=True)
    finish(simulated, lines(simulated), json=json, ok=simulated.kept)


def _only_with(needed: str, given: object, options: dict[str, Any]) -> None:
    """Reject options that have no effect because the option that they belong to is not given."""
    for option, value in options.items():
        if value is not None and not given and given != 0:
            raise typer.BadParameter(f"it needs {needed}", param_hint=option)


def _pairs(option: str, texts: list[str] | None, *, several: bool = False) -> list[tuple[str, Any]]:
    """Split `NAME=VALUE` and parse the value as YAML; with `several`, a list of values between commas."""
    found = []
    for text in texts or ():
        name, separator, value = text.rpartition("=")
        try:
            read = yaml.safe_load(f"[{value}]")
        except yaml.YAMLError:
            read = None
        if not (separator and name and read) or (len(read) > 1 and not several):
            raise typer.BadParameter(f"{text!r} is not NAME=VALUE" + (",VALUE..." if several else ""), param_hint=option)
        found.append((name, read if several else read[0]))
    return found
