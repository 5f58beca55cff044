"""API keys: made, found by id, proven by hash, refused without a word too many."""

from datetime import UTC, datetime

import pytest

from din_extproc.admit.keys import ENTROPY_BYTES, Authenticated, KeyRing, is_key_id, make_key, parse_hash
from din_extproc.domain.request import Priority
from din_extproc.domain.tenant import ApiKey, RateLimits, Tenant
from din_extproc.domain.verdict import Refusal, RefusalCode

TENANT = Tenant(id="finance", models=("*",), priority=Priority.STANDARD, limits=RateLimits(), per_model={})
NEW = make_key("fin-2026.11", bytes(range(ENTROPY_BYTES)))
NOON = datetime(2026, 11, 29, 12, tzinfo=UTC).timestamp()


def stored(new=NEW, key_id="fin-2026.11", expires=None):
    salt, digest = parse_hash(new.hash)
    return ApiKey(id=key_id, salt=salt, digest=digest, expires=expires)


RING = KeyRing([(TENANT, [stored()])])


@pytest.mark.parametrize(
    ("authorization", "x_api_key"),
    [
        (f"Bearer {NEW.text}", ""),
        (f"bearer {NEW.text}", ""),
        (f"BEARER   {NEW.text}  ", ""),
        (f"  Bearer {NEW.text}", ""),
        ("", NEW.text),
        ("", f" {NEW.text} "),
        ("Basic dXNlcjpwYXNz", NEW.text),
    ],
)
def test_a_key_opens_in_every_usual_spelling(authorization, x_api_key):
    found = RING.authenticate(authorization, x_api_key, NOON)
    assert isinstance(found, Authenticated)
    assert (found.tenant.id, found.key.id) == ("finance", "fin-2026.11")


@pytest.mark.parametrize("authorization", ["", "Bearer", "Bearer   ", "Basic dXNlcjpwYXNz", NEW.text])
def test_a_request_without_a_key_gets_the_way_to_send_one(authorization):
    refusal = RING.authenticate(authorization, "", NOON)
    assert refusal.code is RefusalCode.INVALID_API_KEY
    assert "x-api-key" in refusal.message


@pytest.mark.parametrize(
    "key",
    [
        NEW.text[:-1] + "!",
        NEW.text[:-1],
        NEW.text + "0",
        NEW.text.replace("fin-2026.11", "fin-2026.12"),
        NEW.text.replace("din_", "sk-"),
        "din_",
        "din__",
        "din_fin-2026.11_",
        "din_\u00e9\ud83d_\udc00",
        "din_" + "x" * 100_000,
        "x",
    ],
)
def test_a_wrong_key_is_refused_in_the_same_words_and_never_quoted(key):
    refusal = RING.authenticate(f"Bearer {key}", "", NOON)
    assert refusal == Refusal(RefusalCode.INVALID_API_KEY, "The API key is not valid.")


def test_a_bearer_key_is_not_replaced_by_another_one():
    refusal = RING.authenticate("Bearer din_wrong_one", NEW.text, NOON)
    assert refusal.code is RefusalCode.INVALID_API_KEY


def test_an_expired_key_says_so_only_to_whoever_holds_it():
    ring = KeyRing([(TENANT, [stored(expires=datetime(2026, 11, 29, 12, tzinfo=UTC))])])
    assert isinstance(ring.authenticate(f"Bearer {NEW.text}", "", NOON - 1), Authenticated)
    assert "expired" in ring.authenticate(f"Bearer {NEW.text}", "", NOON).message
    assert "expired" not in ring.authenticate(f"Bearer {NEW.text}0", "", NOON).message


def test_a_time_without_zone_is_utc():
    ring = KeyRing([(TENANT, [stored(expires=datetime(2026, 11, 29, 12))])])  # noqa: DTZ001 - the point
    assert isinstance(ring.authenticate("", NEW.text, NOON - 1), Authenticated)
    assert isinstance(ring.authenticate("", NEW.text, NOON), Refusal)


def test_two_keys_of_one_tenant_work_while_one_replaces_the_other():
    other = make_key("next", bytes(ENTROPY_BYTES))
    ring = KeyRing([(TENANT, [stored(), stored(other, "next")])])
    assert ring.authenticate("", NEW.text, NOON).key.id == "fin-2026.11"
    assert ring.authenticate("", other.text, NOON).key.id == "next"


def test_a_new_key_holds_all_its_entropy_and_hides_from_repr():
    other = make_key("fin-2026.11", bytes(range(1, ENTROPY_BYTES + 1)))
    secret = NEW.text.rpartition("_")[2]
    assert len(secret) == 43
    assert secret.isalnum()
    assert other.text != NEW.text
    assert secret not in NEW.hash
    assert secret not in repr(NEW)


@pytest.mark.parametrize("key_id", ["", "-a", "a_b", "a b", "a" * 65, "\u00e4"])
def test_a_key_id_keeps_to_its_letters(key_id):
    assert not is_key_id(key_id)
    with pytest.raises(ValueError, match="a key id is"):
        make_key(key_id, bytes(ENTROPY_BYTES))


def test_a_key_needs_its_whole_entropy():
    with pytest.raises(ValueError, match="48 random bytes"):
        make_key("a", bytes(8))


@pytest.mark.parametrize(
    "text", ["", "sha256$$", "sha256$00$" + "0" * 64, "md5$0011223344556677$" + "0" * 64, NEW.hash.upper(), NEW.hash + "0"]
)
def test_a_hash_in_another_shape_is_none(text):
    assert parse_hash(text) is None


@pytest.mark.parametrize(
    ("authorization", "x_api_key"),
    [
        (f"Bearer {NEW.text}", "sk-ant-stale"),
        ("Bearer sk-ant-oat01-foreign", NEW.text),
        (f"Bearer {NEW.text}", "din_fin-2026.11_wrong"),
    ],
)
def test_of_two_credentials_the_one_with_our_prefix_counts_and_of_two_of_ours_the_bearer(authorization: str, x_api_key: str) -> None:
    assert isinstance(RING.authenticate(authorization, x_api_key, NOON), Authenticated)


def test_a_wrong_bearer_of_ours_is_not_saved_by_a_good_x_api_key() -> None:
    assert isinstance(RING.authenticate("Bearer din_fin-2026.11_wrong", NEW.text, NOON), Refusal)
