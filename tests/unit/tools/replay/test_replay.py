"""Recorded requests under another configuration: nothing changes under the same one, and exactly what was meant to under another."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from din_extproc.audit.chain import sign_entry
from din_extproc.audit.records import RefusalRecord, SettlementRecord
from din_extproc.audit.report import make_segment_name
from din_extproc.settings.load import load
from din_extproc.settings.settings import Settings
from din_extproc.tools.replay.replay import ReplayRefused, replay
from tests.support.stack import node, tenant

START = 1_800_000_000.0
CONFIG: dict[str, Any] = {
    "version": 1,
    "gateway": {"ext_proc": {"socket": "/tmp/x.sock"}, "access_log": {"address": "127.0.0.1:1"}},
    "store": {"url": "redis://127.0.0.1:1"},
    "aliases": {"m": {"model": "small"}},
    "pools": {
        "fast": {"model": "small", "engine": "vllm", "nodes": [node("a", "10.0.0.1:8000")]},
        "long": {"model": "small", "engine": "vllm", "nodes": [node("b", "10.0.0.2:8000", max_seq_len=65536)]},
    },
    "rules": [
        {"id": "long", "when": {"estimated_tokens": {"gt": 4000}}, "pool": "long"},
        {"id": "light", "when": {"header": {"x-kind": ["light"]}}, "pool": "fast"},
    ],
    "tenants": [tenant("acme", rpm=100, tpm=1_000_000), tenant("other", rpm=100, tpm=1_000_000, max_streams=2)],
}


def settings(tmp_path: Path, name: str, change=lambda content: None) -> Settings:
    content = copy.deepcopy(CONFIG)
    change(content)
    file = tmp_path / f"{name}.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    loaded = load(file, {})
    assert isinstance(loaded, Settings), str(loaded)
    return loaded


def sent(
    second: float, tenant_id: str = "acme", *, tokens: int = 100, rule: str = "", pool: str = "fast", **fields: Any
) -> SettlementRecord:
    known = {"model": "small", "alias": "m", "outcome": "completed", "status": 200, "prompt_tokens": tokens, "completion_tokens": 20}
    tags = {"asked_for": "m", "operation": "/v1/chat/completions", "prompt_estimate": tokens, "output_asked": 50, "duration_ms": 500.0}
    ids = {"request_id": f"r{second}", "trace_id": f"t{second}", "tenant": tenant_id, "key_id": tenant_id}
    return SettlementRecord(
        at=START + second + 0.5, **{**ids, **known, **tags, "pool": pool, "rule": rule, "reserved_tokens": tokens + 50, **fields}
    )


def refused(second: float, code: str, status: int, **fields: Any) -> RefusalRecord:
    tags = {"asked_for": "m", "operation": "/v1/chat/completions", "prompt_estimate": 100, "output_asked": 50, "duration_ms": 1.0}
    return RefusalRecord(
        at=START + second, trace_id=f"t{second}", code=code, status=status, tenant="acme", key_id="acme", **{**tags, **fields}
    )


def recorded(tmp_path: Path, *events: object) -> Path:
    folder = tmp_path / "audit"
    folder.mkdir()
    mac, lines = b"\0" * 32, []
    for seq, event in enumerate(events, 1):
        line, mac = sign_entry(b"s" * 32, mac, seq, event)
        lines.append(line)
    (folder / make_segment_name("gateway", 1)).write_bytes(b"".join(lines))
    return folder


def hour() -> list[object]:
    """Sixty requests, some long, some by a header that is not recorded, one refused for its version."""
    events: list[object] = [sent(second) for second in range(40)]
    events += [sent(40 + second, tokens=9000, rule="long", pool="long") for second in range(10)]
    events += [sent(50 + second, rule="light") for second in range(9)]
    return [*events, refused(59.5, "version_mismatch", 409, version_asked=">=2030")]


def test_the_same_configuration_changes_nothing_with_and_without_its_predecessor(tmp_path: Path) -> None:
    folder, same = recorded(tmp_path, *hour()), settings(tmp_path, "same")
    for before in (None, same):
        replayed = replay((folder,), same, before)
        assert replayed.changes == ()
        assert (replayed.requests, replayed.skipped) == (60, 0)
        assert replayed.lines() == ["60 requests decided again, 0 fare otherwise"]


def test_identities_are_those_of_the_new_configuration(tmp_path: Path) -> None:
    identities = {"gateway": {"networks": ["10.0.0.0/8"], "tenant_header": "x-tenant"}}

    def listed(content: dict[str, Any], **fields: Any) -> None:
        content["identity"] = {**identities, **fields}

    names = {"acme": "gateway:acme", "team-7": "gateway:team-7"}
    folder = recorded(tmp_path, *(sent(at, name, key_id=key) for at, (name, key) in enumerate(names.items())))
    defaults = {"tenant_defaults": {"models": ["*"]}}
    assert replay((folder,), settings(tmp_path, "all", lambda content: listed(content, **defaults)), None).changes == ()
    [change] = replay((folder,), settings(tmp_path, "listed", listed), None).changes
    assert (change.tenant, change.after) == ("team-7", "refused: invalid_api_key")
    assert {change.tenant for change in replay((folder,), settings(tmp_path, "none"), None).changes} == set(names)


def test_a_rule_that_moves_its_threshold_moves_exactly_the_requests_beyond_it(tmp_path: Path) -> None:
    folder = recorded(tmp_path, *hour())
    after = settings(tmp_path, "after", lambda content: content["rules"][0]["when"]["estimated_tokens"].update(gt=9500))
    replayed = replay((folder,), after, settings(tmp_path, "before"))
    [change] = replayed.changes
    assert (change.tenant, change.requests) == ("acme", 10)
    assert change.before == "long -> long (small)"
    assert change.after == "(no rule) -> fast (small)"
    assert change.examples == ("t40", "t41", "t42")
    assert "| acme | long -> long (small) |" in "\n".join(replayed.lines())


def test_a_header_that_is_not_recorded_is_known_by_the_rule_that_asked_for_it(tmp_path: Path) -> None:
    folder = recorded(tmp_path, *hour())
    after = settings(tmp_path, "after", lambda content: content["rules"][1].update(pool="long"))
    [change] = replay((folder,), after, None).changes
    assert (change.requests, change.before, change.after) == (9, "light -> fast (small)", "light -> long (small)")


def test_lower_limits_refuse_those_beyond_them_and_no_others(tmp_path: Path) -> None:
    folder = recorded(tmp_path, *[sent(second / 100) for second in range(50)])
    after = settings(tmp_path, "after", lambda content: content["tenants"][0]["limits"].update(rpm=30))
    [change] = replay((folder,), after, None).changes
    assert (change.requests, change.after) == (20, "refused: rate_limit_exceeded")


def test_slots_are_free_again_when_the_recorded_answers_end(tmp_path: Path) -> None:
    many = [sent(0.1 * at, "other", duration_ms=150.0) for at in range(12)]  # at most two at once
    folder = recorded(tmp_path, *many)
    same = settings(tmp_path, "same")
    assert replay((folder,), same, None).changes == ()
    narrower = settings(tmp_path, "after", lambda content: content["tenants"][1]["limits"].update(max_streams=1))
    [change] = replay((folder,), narrower, None).changes
    assert change.after == "refused: concurrency_limit_exceeded"
    assert change.requests == 6


def test_higher_limits_let_in_what_was_refused(tmp_path: Path) -> None:
    events = [sent(second / 100) for second in range(30)] + [refused(0.5 + at / 100, "rate_limit_exceeded", 429) for at in range(5)]
    folder = recorded(tmp_path, *events)
    [change] = replay((folder,), settings(tmp_path, "after"), None).changes
    assert (change.requests, change.before, change.after) == (5, "refused: rate_limit_exceeded", "(no rule) -> fast (small)")


def test_a_queue_makes_those_wait_that_were_refused(tmp_path: Path) -> None:
    folder = recorded(tmp_path, *[sent(0.01 * at, "other", duration_ms=200.0) for at in range(6)])
    patient = settings(tmp_path, "after", lambda content: content["tenants"][1].update(queue={"max_wait_ms": 300}))
    changes = {
        change.after: (change.before, change.requests) for change in replay((folder,), patient, settings(tmp_path, "before")).changes
    }
    assert changes == {"(no rule) -> fast (small), after a wait": ("refused: concurrency_limit_exceeded", 2)}


def test_a_request_that_another_proxy_asked_about_is_replayed_as_such(tmp_path: Path) -> None:
    asked = [sent(second, tokens=9000, pool="", entry="ext_authz") for second in range(3)]
    unknown = sent(5, pool="", entry="ext_authz", model="elsewhere", alias="elsewhere", asked_for="elsewhere")
    folder, same = recorded(tmp_path, *asked, unknown), settings(tmp_path, "same")
    assert replay((folder,), same, None).lines() == ["4 requests decided again, 0 fare otherwise"]
    closed = settings(tmp_path, "after", lambda content: content["tenants"][0].update(models=["small"]))
    [change] = replay((folder,), closed, None).changes
    assert (change.requests, change.before, change.after) == (1, "passed (elsewhere)", "refused: model_not_allowed")


def test_a_tenant_that_is_gone_and_a_key_that_is_gone_are_refused(tmp_path: Path) -> None:
    folder = recorded(tmp_path, sent(1), sent(2, "other"))
    after = settings(tmp_path, "after", lambda content: content["tenants"].pop())
    [change] = replay((folder,), after, None).changes
    assert (change.tenant, change.after) == ("other", "refused: invalid_api_key")


def test_what_no_configuration_decides_is_skipped(tmp_path: Path) -> None:
    unread = RefusalRecord(at=START, trace_id="t", code="invalid_api_key", status=401)
    folder = recorded(tmp_path, refused(1, "no_healthy_node", 503), unread, sent(2, degraded=True))
    replayed = replay((folder,), settings(tmp_path, "same"), None)
    assert (replayed.requests, replayed.skipped, replayed.changes) == (0, 3, ())


def test_a_line_that_is_none_is_passed_over(tmp_path: Path) -> None:
    folder = recorded(tmp_path, sent(1))
    with (folder / make_segment_name("gateway", 1)).open("ab") as file:
        file.write(b"garbage\n" + b'{"seq":9,"kind":"settled"')
    assert replay((folder,), settings(tmp_path, "same"), None).requests == 1


@pytest.mark.parametrize("there", [True, False])
def test_a_folder_without_a_record_is_a_clear_no(tmp_path: Path, *, there: bool) -> None:
    folder = tmp_path / "empty"
    if there:
        folder.mkdir()
    with pytest.raises(ReplayRefused, match=r"no audit log|No such file"):
        replay((folder,), settings(tmp_path, "same"), None)


def test_a_recorded_list_fits_by_its_longest_input_and_answer(tmp_path):
    lists = {"operation": "/v1/completions", "tokens": 12_000, "output_asked": 40_000, "answers_asked": 40}
    folder = recorded(
        tmp_path,
        sent(0, **lists, longest_estimate=300, rule="long", pool="long"),
        sent(1, operation="/v1/chat/completions", tokens=300, output_asked=10_000, answers_asked=2),
    )
    assert replay((folder,), settings(tmp_path, "now"), None).changes == ()
    small = settings(tmp_path, "small", lambda content: content["pools"]["long"]["nodes"][0].update(max_seq_len=8192))
    assert replay((folder,), small, None).changes == ()


def priced(content: dict[str, Any]) -> None:
    content["prices"] = {"currency": "EUR", "models": {"small": {"input": 1, "cached_input": 0.5, "output": 2}}}


def test_what_the_record_would_have_cost_under_these_prices(tmp_path: Path) -> None:
    events = [sent(0, tokens=2000, cached_tokens=1000), sent(1, "other"), sent(2, cost=5 * 10**9)]
    folder = recorded(tmp_path, *events, refused(3, "version_mismatch", 409, version_asked=">=2030"))
    costs = replay((folder,), settings(tmp_path, "priced", priced), None).costs
    assert [(each.tenant, each.before, each.after) for each in costs] == [
        ("(all)", "5.00", "0.00182"),
        ("acme", "5.00", "0.00168"),
        ("other", "0.00", "0.00014"),
    ]
    dearer = settings(tmp_path, "dearer", lambda content: (priced(content), content["prices"]["models"]["small"].update(output=4)))
    replayed = replay((folder,), dearer, settings(tmp_path, "before", priced))
    assert (replayed.costs[0].before, replayed.costs[0].after) == ("0.00182", "0.00194")
    assert "| tenant | cost before, EUR | cost after |" in replayed.lines()
    assert replay((folder,), settings(tmp_path, "free"), None).costs == ()


def test_a_budget_refuses_what_it_would_have_refused(tmp_path: Path) -> None:
    def budgeted(content: dict[str, Any]) -> None:
        priced(content)
        content["budgets"] = {"limits": [{"name": "day", "period": "day", "tenant": "acme", "money": 0.0005}]}

    folder = recorded(tmp_path, *(sent(second) for second in range(10)))
    [change] = replay((folder,), settings(tmp_path, "budgeted", budgeted), None).changes
    assert (change.after, change.requests) == ("refused: budget_exceeded", 7), "three of 0.00014 EUR fit, with 0.0002 reserved for the next"
