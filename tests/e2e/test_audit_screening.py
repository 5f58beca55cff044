"""What the audit log says of the filter for sensitive data: found, clean, or not asked."""

import json

import pytest

from tests.support.servers import EngineSim
from tests.support.stack import Stack, node, tenant

pytestmark = pytest.mark.e2e


def test_a_record_says_what_was_found_that_nothing_was_or_that_nobody_looked(tmp_path):
    (tmp_path / "audit.key").write_text("0" * 64)
    log = tmp_path / "log"
    with EngineSim(model="m") as engine:
        config = {
            "pools": {"p": {"model": "m", "engine": "vllm", "nodes": [node("a", engine.address)]}},
            "tenants": [{**tenant("acme"), "sensitive_data": "flag"}, tenant("other")],
            "audit": {"folder": str(log), "keys": {"k": {"file": str(tmp_path / "audit.key")}}},
        }
        with Stack(config) as stack:
            trace_ids = {"found": "screened-found", "clean": "screened-clean", "nobody": "screened-nobody"}
            expected = [
                ("acme", "mail to a@b.co", trace_ids["found"]),
                ("acme", "hello", trace_ids["clean"]),
                ("other", "mail to a@b.co", trace_ids["nobody"]),
            ]
            for name, text, trace_id in expected:
                messages = [{"role": "user", "content": text}]
                assert stack.chat(messages=messages, tenant_name=name, headers={"x-din-trace-id": trace_id}).status_code == 200

            def recorded() -> dict[str, str]:
                lines = [json.loads(line) for file in log.iterdir() for line in file.read_text().splitlines()]
                return {line["trace_id"]: line["screening"] for line in lines if line.get("kind") == "settled"}

            stack.eventually(lambda: len(recorded()) == 3, "all are recorded")
            assert recorded() == {
                trace_ids["found"]: "flag email=1",
                trace_ids["clean"]: "inspected, clean",
                trace_ids["nobody"]: "not inspected",
            }
