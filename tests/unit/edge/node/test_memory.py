"""Free memory, by the tool of the accelerators or by the machine's own page."""

import pytest

from din_extproc.edge.node.memory import free_memory_bytes

MIB = 1 << 20


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """Puts a program called nvidia-smi first on the path."""

    def install(script: str):
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return install


@pytest.fixture
def meminfo(tmp_path):
    page = tmp_path / "meminfo"
    page.write_text("MemTotal: 100 kB\nMemAvailable:    64 kB\n")
    return page


async def test_accelerators_add_up(tool, meminfo):
    tool("echo 1000; echo 24")
    assert await free_memory_bytes(meminfo) == 1024 * MIB


@pytest.mark.parametrize("script", ["exit 9", "echo '[N/A]'", "true"])
async def test_a_tool_that_cant_say_leaves_it_to_the_machine(tool, meminfo, script):
    tool(script)
    assert await free_memory_bytes(meminfo) == 64 * 1024


async def test_a_machine_that_cant_say_gives_none(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert await free_memory_bytes(tmp_path / "missing") is None
