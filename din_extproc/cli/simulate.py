"""The command `simulate`: a configuration over modelled nodes and clients, in virtual time.

Rule: as in `cli.py`: parse, call a role, print.
"""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from din_extproc.cli.options import DEFAULT_CONFIG, Config, Json, fail, print_json

if TYPE_CHECKING:
    from din_extproc.tools.simulate.simulate import SimulateOptions


def simulate(
    workload: Annotated[
        Path | None, typer.Argument(help="What clients send, how quick nodes are, what befalls them: a YAML file (see README).")
    ] = None,
    config: Config = DEFAULT_CONFIG,
    record: Annotated[
        list[Path] | None, typer.Option(help="A folder with an audit log whose requests are sent again, instead of the workload's.")
    ] = None,
    speed: Annotated[
        float | None, typer.Option(help="With --record: so many times as fast as they were recorded. [default: 1]", min=0.001)
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Requests per second, of one sort, instead of the workload's.")] = None,
    prompt: Annotated[int | None, typer.Option(help="With --rate: the usual prompt, in tokens. [default: 500]")] = None,
    output: Annotated[int | None, typer.Option(help="With --rate: the usual answer, in tokens. [default: 200]")] = None,
    model: Annotated[str, typer.Option(help="With --rate: the name that clients ask for. [default: the tenant's first]")] = "",
    tenant: Annotated[str, typer.Option(help="With --rate: who asks. [default: the first]")] = "",
    seconds: Annotated[float | None, typer.Option(help="Of virtual time.")] = None,
    seed: Annotated[int | None, typer.Option(help="Another one draws other arrivals.")] = None,
    nodes: Annotated[list[str] | None, typer.Option(help="POOL=N: so many nodes; repeatable.")] = None,
    slo: Annotated[
        list[str] | None, typer.Option(help="NAME=BOUND: first_token_p99_s, per_token_p99_s, p99_s or errors; repeatable.")
    ] = None,
    tries: Annotated[
        list[str] | None,
        typer.Option(
            "--try",
            help="PATH=VALUE,VALUE...: run with each of these in place of what din.yaml says there, such as "
            "pools.fast.scheduler=round_robin,token_available; `workload.` before a path of the workload; repeatable: all combinations.",
        ),
    ] = None,
    size: Annotated[str, typer.Option(help="Look for the fewest nodes of this pool that keep what is promised (--slo).")] = "",
    most: Annotated[int | None, typer.Option(help="With --size: no more than these. [default: 256]", min=1, max=10_000)] = None,
    json: Json = False,  # noqa: FBT002 - a flag
) -> None:
    """Try a configuration over modelled nodes and clients: hours in seconds. Exit code 1: what is promised is not kept."""
    sort = {"--prompt": prompt, "--output": output, "--model": model or None, "--tenant": tenant or None}
    if record and rate is not None:
        raise typer.BadParameter("requests are those of the record (--speed sends them quicker)", param_hint="--rate")
    _only_with("--record", record, {"--speed": speed})
    _only_with("--rate", rate, sort)
    _only_with("--size", size, {"--most": most})
    given: dict[str, Any] = {f"nodes.{pool}.count": count for pool, count in _pairs("--nodes", nodes)}
    given |= {f"slo.{name}": bound for name, bound in _pairs("--slo", slo)}
    sorts = None if rate is None else [_one_sort(rate, prompt, output, {"model": model, "tenant": tenant})]
    given |= {name: value for name, value in (("seconds", seconds), ("seed", seed), ("requests", sorts)) if value is not None}
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


def _one_sort(rate: float, prompt: int | None, output: int | None, names: dict[str, str]) -> dict[str, Any]:
    """The only requests of a workload."""
    lengths = {
        name: {"median": usual if median is None else median, "spread": 0.5}
        for name, median, usual in (("prompt_tokens", prompt, 500), ("output_tokens", output, 200))
    }
    return {"rate": rate, **lengths, **{name: value for name, value in names.items() if value}}


def _run(options: "SimulateOptions", *, json: bool) -> None:
    from din_extproc.settings.problems import ConfigRejected  # noqa: PLC0415
    from din_extproc.tools.simulate.report import lines  # noqa: PLC0415
    from din_extproc.tools.simulate.simulate import ReplayRefused, SimulationRefused  # noqa: PLC0415 - the other commands start without it
    from din_extproc.tools.simulate.simulate import simulate as run  # noqa: PLC0415

    began = time.monotonic()
    try:
        simulated = run(options, os.environ)
    except (SimulationRefused, ReplayRefused) as error:
        fail(str(error))
    if isinstance(simulated, ConfigRejected):
        typer.echo(str(simulated), err=True)
        raise typer.Exit(1)
    if json:
        print_json(simulated)
    else:
        typer.echo("\n".join(lines(simulated)))
        typer.echo(f"({time.monotonic() - began:.1f} s)", err=True)
    raise typer.Exit(0 if simulated.kept else 1)


def _only_with(needed: str, given: object, options: dict[str, Any]) -> None:
    """Refuse what would say nothing: options that another one needs which is not there."""
    for option, value in options.items():
        if value is not None and not given and given != 0:
            raise typer.BadParameter(f"it needs {needed}", param_hint=option)


def _pairs(option: str, texts: list[str] | None, *, several: bool = False) -> list[tuple[str, Any]]:
    """`NAME=VALUE` as YAML reads the value; `several`: values with commas between."""
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
