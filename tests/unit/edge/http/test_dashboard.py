"""The dashboard's pages: who gets data, what a stream of events is made of, and that the page needs nobody else."""

import asyncio
import json
import re
from importlib.resources import files

import httpx
import pytest

from din_extproc.edge.http.dashboard import DashboardPages
from din_extproc.edge.http.port import HttpPort
from din_extproc.observe.dashboard_data import DashboardData, NodeRow
from tests.support.servers import free_port

FOLDER = files("din_extproc.edge.http").joinpath("pages")
KEY = {"authorization": "Bearer right"}


@pytest.fixture
async def site():
    made = []

    async def read_data() -> DashboardData:
        made.append(len(made))
        nodes = (
            NodeRow("still", ("p",), "ready", 1.0, "m", "1", "bf16", "vllm", 8),
            NodeRow(f"n{len(made)}", ("p",), "ready", 1.0, "m", "1", "bf16", "vllm", 8),
        )
        return DashboardData(float(len(made)), 10, 60, "", "f", (), 0, {}, (), nodes, {}, {}, (), (), None)

    pages = DashboardPages(lambda authorization: "ops" if authorization == KEY["authorization"] else None, read_data)
    port = HttpPort(pages.routes)
    number = free_port()
    await port.start(f"127.0.0.1:{number}")
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{number}", timeout=20, verify=False) as client:
        yield client, pages, made
    pages.close()
    await port.stop()


async def test_the_page_is_for_everybody_and_holds_nothing_its_data_is_for_holders_of_a_key(site):
    client, _, made = site
    page = await client.get("/dashboard")
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for path in ("/dashboard/data", "/dashboard/events"):
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "right"}):
            refused = await client.get(path, headers=headers)
            assert (refused.status_code, refused.json()["code"]) == (401, "invalid_api_key")
    assert made == []
    assert (await client.get("/dashboard/data", headers=KEY)).json()["nodes"][0]["id"] == "still"
    assert (await client.post("/dashboard/data", headers=KEY)).status_code == 405


async def test_events_are_a_whole_board_and_then_what_changes(site):
    client, pages, _ = site
    found = []
    async with client.stream("GET", "/dashboard/events", headers=KEY) as reply:
        assert reply.headers["content-type"] == "text/event-stream"
        async for line in reply.aiter_lines():
            if line.startswith("event: "):
                kind = line[7:]
            elif line.startswith("data: "):
                found.append((kind, json.loads(line[6:])))
            if len(found) == 2:
                pages.close()
    (first, board), (second, change) = found[:2]
    assert (first, second) == ("board", "change")
    assert {row["id"] for row in board["nodes"]} == {"still", "n1"}
    assert [row["id"] for row in change["nodes"]] == ["n2"]
    assert change["gone"] == ["n1"]
    assert change["board"]["nodes"] == []


async def test_the_data_is_built_once_for_all_viewers_and_too_many_viewers_are_refused(site):
    client, _, made = site
    await asyncio.gather(*(client.get("/dashboard/data", headers=KEY) for _ in range(20)))
    assert len(made) == 1
    async with asyncio.TaskGroup() as group:
        streams = [client.build_request("GET", "/dashboard/events", headers=KEY) for _ in range(17)]
        sent = [group.create_task(client.send(request, stream=True)) for request in streams]
    replies = [task.result() for task in sent]
    assert sorted(reply.status_code for reply in replies) == [200] * 16 + [503]
    for reply in replies:
        await reply.aclose()


def test_the_page_asks_nobody_else_and_its_script_finds_what_it_looks_for():
    html, script, style = (FOLDER.joinpath(name).read_text() for name in ("index.html", "dashboard.js", "dashboard.css"))
    outside = re.findall(
        r"(?:https?:)?//[\w.]+",
        re.sub(r"^ *//.*|// .*", "", script, flags=re.MULTILINE).replace("http://www.w3.org/2000/svg", "") + html + style,
    )
    assert outside == []
    assert "innerHTML" not in script
    assert not re.search(r"\son\w+=|style=", html)
    ids = set(re.findall(r'id="([\w-]+)"', html))
    asked = set(re.findall(r'\$\("([\w-]+)"\)', script))
    assert asked <= ids, asked - ids
    for tag in ("header", "main", "table", "caption", "dialog"):
        assert f"<{tag}" in html


def test_both_colour_schemes_have_every_colour_and_enough_contrast():
    style = FOLDER.joinpath("dashboard.css").read_text()
    blocks = re.findall(r"\{([^{}]*--page:[^{}]*)\}", style)
    themes = [dict(re.findall(r"--([\w-]+): (#[0-9a-f]+)", block)) for block in blocks]
    assert len(themes) == 3
    assert themes[0].keys() == themes[1].keys()
    assert themes[1] == themes[2]
    for theme in themes[:2]:
        for ink in ("ink", "soft", "good", "warn", "bad"):
            assert contrast(theme[ink], theme["panel"]) >= 4.5, (ink, theme)


def contrast(one: str, other: str) -> float:
    """WCAG 2's."""

    def luminance(colour: str) -> float:
        digits = colour[1:] if len(colour) == 7 else "".join(digit * 2 for digit in colour[1:])
        parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)
