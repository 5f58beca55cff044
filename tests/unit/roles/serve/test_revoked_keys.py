"""How soon a worker refuses a revoked key."""

import pytest

from din_extproc.admit.ledger import LimitsUnavailable
from din_extproc.roles.serve.revoked_keys import RevokedKeys

PROMISE_S = 1.0


class Clocked:
    """Redis and the background of one process, by a clock that the test moves; also the context."""

    def __init__(self) -> None:
        self.now = 0.0
        self.revoked_at = 1e9
        self.away = 0
        self.revoked: frozenset[str] = frozenset()

    async def call(self, *_command):
        if self.away:
            self.away -= 1
            raise LimitsUnavailable("gone")
        return [b"stolen"] if self.now >= self.revoked_at else []

    def every(self, seconds, _name, step):
        self.seconds, self.step = seconds, step


@pytest.mark.parametrize("failures", [0, 1, 3])
@pytest.mark.parametrize("moment", [0.0, 0.001, 0.37, 0.9])
async def test_a_revoked_key_is_refused_within_a_second_even_if_three_looks_fail(moment, failures):
    process = Clocked()
    await RevokedKeys(process, "", process).start(process)
    process.revoked_at, process.away = moment + 1e-9, 0
    while "stolen" not in process.revoked:
        process.now += process.seconds
        if process.now >= process.revoked_at and failures:
            process.away, failures = failures, 0
        await process.step()
    assert process.now - process.revoked_at < PROMISE_S


async def test_what_was_revoked_stays_so_while_redis_is_away_or_empty():
    process = Clocked()
    process.revoked_at = 0.0
    await RevokedKeys(process, "", process).start(process)
    assert process.revoked == {"stolen"}
    process.revoked_at, process.away = 1e9, 1
    await process.step()
    await process.step()
    assert process.revoked == {"stolen"}
