"""The file of keys: read with the configuration, and changed by the role behind `din-extproc keys`."""

from datetime import UTC, datetime, timedelta

import pytest

from din_extproc.admit.keys import Authenticated, KeyRing
from din_extproc.edge.keys_file import edit_keys
from din_extproc.roles.configure import keys
from din_extproc.settings.load import load
from din_extproc.settings.problems import ConfigRejected
from din_extproc.settings.settings import Settings

SMALL = """
version: 1
keys_file: keys.yaml
store: { url: "redis://127.0.0.1:1/0" }
pools:
  p:
    model: m
    engine: vllm
    nodes: [{ id: n1, address: "10.0.0.1:8000", version: "1.0", dtype: bf16, max_seq_len: 4096 }]
tenants: [{ id: a, models: ["*"] }, { id: b_b, models: ["*"] }]
"""
HASH = "sha256$db89b6e51ac962053cea9f5ea8094f0d$184c2648ad3532853b13baae921767dbc21737ece04036915ce720696099bdf9"


@pytest.fixture
def file(tmp_path):
    (tmp_path / "din.yaml").write_text(SMALL)
    return tmp_path / "din.yaml"


def settings(file) -> Settings:
    loaded = load(file, {})
    assert isinstance(loaded, Settings), loaded
    return loaded


def ring(file) -> KeyRing:
    return KeyRing(settings(file).keys)


def tenant_of(file, made, now=0.0) -> str | None:
    who = ring(file).authenticate(f"Bearer {made.key}", "", now)
    return who.tenant.id if isinstance(who, Authenticated) else None


def test_before_the_first_key_there_is_no_file_and_tenants_are_warned_of(file):
    assert len(settings(file).warnings) == 2
    keys.make_key_of_tenant(settings(file), "a", None, None)
    assert len(settings(file).warnings) == 1


def test_a_new_key_opens_its_tenant_and_expires_at_its_date(file):
    made = keys.make_key_of_tenant(settings(file), "b_b", None, timedelta(days=1))
    now = datetime.now(UTC).timestamp()
    assert tenant_of(file, made, now) == "b_b"
    assert tenant_of(file, made, now + 90_000) is None


def test_a_rotated_key_lives_through_the_overlap_and_its_successor_after_it(file):
    made = keys.make_key_of_tenant(settings(file), "a", "main", None)
    successor = keys.rotate_key(settings(file), "main", timedelta(hours=2))
    third = keys.rotate_key(settings(file), successor.id, timedelta(hours=2))
    assert (successor.id, third.id) == ("main.r2", "main.r3")
    now = datetime.now(UTC).timestamp()
    assert [tenant_of(file, each, now + 3600) for each in (made, successor, third)] == ["a"] * 3
    assert [tenant_of(file, each, now + 8000) for each in (made, successor, third)] == [None, None, "a"]


def test_a_revocation_that_reaches_no_replica_is_an_error_and_changes_nothing(file):
    made = keys.make_key_of_tenant(settings(file), "a", "main", None)
    with pytest.raises(keys.KeyFileError, match="still valid"):
        keys.revoke_key(settings(file), "main")
    assert tenant_of(file, made) == "a"


@pytest.mark.parametrize(("tenant", "key_id", "why"), [("x", "k", "no tenant"), ("a", "k k", "a key id is"), ("a", "main", "already")])
def test_what_can_not_be_made_is_reported(file, tenant, key_id, why):
    keys.make_key_of_tenant(settings(file), "a", "main", None)
    with pytest.raises(keys.KeyFileError, match=why):
        keys.make_key_of_tenant(settings(file), tenant, key_id, None)


def test_keys_of_nobody_and_second_keys_of_one_name_are_refused(file):
    with edit_keys(file.parent / "keys.yaml") as entries:
        entries += [{"tenant": owner, "id": "k", "hash": HASH} for owner in ("a", "a", "c")]
    refused = load(file, {})
    assert isinstance(refused, ConfigRejected)
    assert "no tenant is called 'c'" in str(refused)
    assert "a second key is called 'k', the first is key 'k' of tenant 'a' on line" in str(refused)


def test_a_tenant_that_is_broken_is_not_one_that_is_missing(file):
    keys.make_key_of_tenant(settings(file), "a", "main", None)
    file.write_text(SMALL.replace("{ id: a,", "{ id: a, limits: { rpm: -1 },"))
    refused = load(file, {})
    assert isinstance(refused, ConfigRejected)
    assert [problem.path for problem in refused.problems if not problem.warning] == ["tenants[0].limits.rpm"]
    with edit_keys(file.parent / "keys.yaml") as entries:
        entries.append({"tenant": "c", "id": "k", "hash": HASH.replace("db89", "db80")})
    assert "no tenant is called 'c'" in str(load(file, {}))


@pytest.mark.parametrize(("one", "other"), [("a", "a"), ("a", "b_b")])
def test_a_hash_that_stands_twice_is_refused_with_both_places(file, one, other):
    with edit_keys(file.parent / "keys.yaml") as entries:
        entries += [{"tenant": owner, "id": key_id, "hash": HASH} for owner, key_id in ((one, "k1"), (other, "k2"))]
    refused = load(file, {})
    assert isinstance(refused, ConfigRejected)
    [problem] = [each for each in refused.problems if not each.warning]
    assert problem.path == "keys[1].hash"
    assert f"it is also the hash of key 'k1' of tenant '{one}' on line " in str(problem)
    (file.parent / "keys.yaml").unlink()
    keys = [f'{{ id: k{at}, hash: "{HASH}" }}' for at in (1, 2)]
    listed = [", ".join(keys), ""] if one == other else keys
    text = SMALL
    for tenant, own in zip(("a", "b_b"), listed, strict=True):
        text = text.replace(f"id: {tenant},", f"id: {tenant}, keys: [{own}],")
    file.write_text(text)
    refused = load(file, {})
    assert isinstance(refused, ConfigRejected)
    [problem] = [each for each in refused.problems if not each.warning]
    assert f"it is also the hash of key 'k1' of tenant '{one}', on line 10" in str(problem)
    file.write_text(SMALL.replace("id: a,", f"id: a, keys: [{keys[0]}],"))
    with edit_keys(file.parent / "keys.yaml") as entries:
        entries += [{"tenant": other, "id": "k2", "hash": HASH}]
    assert "it is also the hash of key 'k1' of tenant 'a'" in str(load(file, {}))


def test_a_failed_change_leaves_the_file_as_it_was(file):
    keys.make_key_of_tenant(settings(file), "a", "main", None)
    before = (file.parent / "keys.yaml").read_text()
    with pytest.raises(keys.KeyFileError, match="has no key"):
        keys.rotate_key(settings(file), "other", timedelta(hours=1))
    assert (file.parent / "keys.yaml").read_text() == before
