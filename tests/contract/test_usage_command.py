"""`usage` over a Redis: a table even when it is empty, and tenants that are gone."""

import asyncio
import csv
import io
from datetime import UTC, datetime

import pytest
from typer.testing import CliRunner

from din_extproc.cli.app import app
from din_extproc.edge.redis.usage import UsageStore, split_by_day
from din_extproc.observe.usage_book import UsageKey, UsageTotals
from tests.support.ledgers import linked

DIN = """
version: 1
network: usage-command
store: {{ url: "{url}" }}
prices: {{ currency: EUR, models: {{ m: {{ input: 0.15 }} }} }}
pools:
  p:
    model: m
    engine: vllm
    nodes: [{{ id: n1, address: "10.0.0.1:8000", version: "1.0", dtype: bf16, max_seq_len: 4096 }}]
tenants: [{{ id: acme, models: ["*"] }}]
"""


@pytest.fixture
def usage(redis_servers, tmp_path):
    file = tmp_path / "din.yaml"
    file.write_text(DIN.format(url=redis_servers["valkey8"].url))
    return lambda *arguments: CliRunner().invoke(app, ["usage", *arguments, "-c", str(file)])


def test_a_table_without_rows_has_its_header(usage):
    result = usage("--from", "0001-01-01", "--to", "9999-12-31", "--tenant", "acme")
    assert (result.exit_code, result.output.count("\n")) == (0, 1), result.output
    assert result.output.startswith("day,tenant,model,requests,failed,refused")


async def _count(url: str, tenant: str) -> None:
    async with linked(url) as link:
        today = datetime.now(UTC).date().isoformat()
        for portion in split_by_day(
            {UsageKey(today, tenant, "m"): UsageTotals(3), UsageKey(today, tenant, "m", "k"): UsageTotals(2, cost=150_000)}, 1
        ):
            await UsageStore(link, "usage-command").add("r", portion)


def test_a_tenant_that_is_gone_still_has_its_usage_and_one_that_never_was_is_reported(usage, redis_servers):
    asyncio.run(_count(redis_servers["valkey8"].url, "former"))
    [row] = csv.DictReader(io.StringIO(usage("--tenant", "former").output))
    assert (row["tenant"], row["requests"]) == ("former", "5")
    rows = list(csv.DictReader(io.StringIO(usage("--tenant", "former", "--by", "key,model").output)))
    assert [(row["key"], row["model"], row["requests"], row["cost"], row["currency"]) for row in rows] == [
        ("", "m", "3", "0.00", "EUR"),
        ("k", "m", "2", "0.00015", "EUR"),
    ]
    result = usage("--tenant", "acmee")
    assert (result.exit_code, result.stderr) == (1, "error: no tenant is called 'acmee'; did you mean 'acme'?\n"), result.output


@pytest.mark.parametrize("by", ["", "day,day", "colour"])
def test_what_usage_can_not_be_grouped_by_is_reported(usage, by):
    result = usage("--by", by)
    assert (result.exit_code, "day, tenant, key, identity, model, rule" in " ".join(result.output.split()).replace("│ ", "")) == (2, True)
