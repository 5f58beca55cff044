"""The link to Redis: one write per turn of the loop, answers in order, and what it does when something is wrong."""

import asyncio
import logging

import pytest

from din_extproc.admit.ledger import LimitsUnavailable
from din_extproc.edge.background import STEPS_PER_ITERATION
from din_extproc.edge.redis import address
from din_extproc.edge.redis.connection import CommandUnanswered, LuaScript, RedisConnection, RedisError, bulks, command_error, pack
from din_extproc.edge.redis.link import Link
from tests.support.ledgers import linked
from tests.support.servers import FLAVOURS, RedisServer, free_port
from tests.support.waiting import turns, until

ECHO = LuaScript(b"return ARGV[1]")


@pytest.fixture
def server(redis_servers) -> RedisServer:
    return redis_servers["valkey8"]


def at(url: str):
    where = address.parse_redis_url(url)

    async def locate() -> address.Address:
        return where

    return locate


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://h", ("h", 6379, "", 0, "", "")),
        ("redis://:p%40w@h:7/3", ("h", 7, "", 3, "", "p@w")),
        ("redis://u:p@h:7", ("h", 7, "", 0, "u", "p")),
        ("unix:///run/r.sock?db=2", ("localhost", 6379, "/run/r.sock", 2, "", "")),
    ],
)
def test_a_url_says_where_and_how(url, expected):
    read = address.parse_redis_url(url)
    assert (read.host, read.port, read.path, read.db, read.username, read.password) == expected
    assert read.tls is None


def test_rediss_means_tls_that_checks_the_certificate():
    context = address.parse_redis_url("rediss://h").tls
    assert context is not None
    assert context.check_hostname
    lax = address.parse_redis_url("rediss://h?ssl_cert_reqs=none").tls
    assert lax is not None
    assert not lax.check_hostname


@pytest.mark.parametrize(
    "url",
    [
        "http://h",
        "redis://u:secret@h?foo=1",
        "redis://u:secret@h/abc",
        "rediss://u:secret@h?ssl_cert_reqs=no",
        "rediss://u:secret@h?ssl_ca_certs=/none",
        "rediss://u:secret@h?ssl_certfile=/none",
    ],
)
def test_a_wrong_url_is_refused_without_showing_its_password(url):
    with pytest.raises(ValueError, match=r"\w") as raised:
        address.parse_redis_url(url)
    assert "secret" not in str(raised.value)


async def test_answers_come_to_those_who_asked(server):
    async with linked(server.unix_url) as link:
        answers = await asyncio.gather(
            *(link.call("ECHO", f"{n}") for n in range(500)), *(link.run(ECHO, *bulks(0, n)) for n in range(500))
        )
        assert answers == [f"{n}".encode() for n in [*range(500), *range(500)]]


class Wire(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self):
        self.writes = []

    def write(self, data):
        self.writes.append(data)

    def abort(self):
        pass


def asked(count, timeout_s=1.0):
    """A connection that waits for so many answers, what it has written, and who waits."""
    loop, wire = asyncio.get_running_loop(), Wire()
    connection = RedisConnection(loop, timeout_s, lambda *_: None, lambda *_: None)
    connection.connection_made(wire)
    answers = [loop.create_future() for _ in range(count)]
    for answer in answers:
        connection.send(pack(("PING",)), answer, loop.time() + timeout_s)
    return connection, wire.writes, answers


async def test_a_burst_of_replies_is_delivered_in_order_over_several_iterations():
    connection, _, answers = asked(3 * STEPS_PER_ITERATION)
    connection.data_received(b"".join(b":%d\r\n" % number for number in range(3 * STEPS_PER_ITERATION)))
    results = []
    while not all(answer.done() for answer in answers):
        results.append([answer.result() for answer in answers if answer.done()])
        await turns()
    assert results == [[*range(STEPS_PER_ITERATION)], [*range(2 * STEPS_PER_ITERATION)]]
    assert [answer.result() for answer in answers] == [*range(3 * STEPS_PER_ITERATION)]
    connection.drop("done")


async def test_received_replies_are_delivered_although_the_connection_breaks_or_they_time_out_meanwhile():
    for end in (lambda connection: connection.connection_lost(None), lambda connection: connection._check()):
        connection, _, answers = asked(3 * STEPS_PER_ITERATION, timeout_s=0)
        connection.data_received(b":1\r\n" * (3 * STEPS_PER_ITERATION - 1))
        end(connection)
        end(connection)
        await turns(10)
        assert [answer.result() for answer in answers[:-1]] == [1] * (3 * STEPS_PER_ITERATION - 1)
        connection.drop("done")
        assert isinstance(answers[-1].exception(), CommandUnanswered)


async def test_what_is_asked_in_one_turn_of_the_loop_leaves_in_one_write():
    connection, writes, answers = asked(3)
    await turns()
    assert writes == [b"*1\r\n$4\r\nPING\r\n" * 3]
    for byte in b"+PONG\r\n:1\r\n$2\r\nab\r\n":
        connection.data_received(bytes((byte,)))
    assert await asyncio.gather(*answers) == [b"PONG", 1, b"ab"]
    connection.drop("done")


async def test_a_cancelled_waiter_does_not_shift_the_answers(server):
    async with linked(server.url) as link:
        answers = [link.call("ECHO", f"{n}") for n in range(10)]
        answers[3].cancel()
        del answers[3]
        assert await asyncio.gather(*answers) == [f"{n}".encode() for n in (0, 1, 2, 4, 5, 6, 7, 8, 9)]


async def test_an_error_reply_goes_to_the_one_who_caused_it(server):
    async with linked(server.url) as link:
        before, wrong, after = link.call("ECHO", "a"), link.call("NONSENSE"), link.call("ECHO", "b")
        with pytest.raises(RedisError, match="NONSENSE"):
            await wrong
        assert (await before, await after) == (b"a", b"b")


async def test_it_greets_with_password_user_and_database():
    with RedisServer("--requirepass", "secret") as server:
        admin = f"redis://:secret@127.0.0.1:{server.port}"
        async with linked(f"{admin}/5") as link:
            await link.call("SET", "here", 1)
            await link.call("ACL", "SETUSER", "din", "on", ">other", "~*", "+@all")
        async with linked(f"redis://din:other@127.0.0.1:{server.port}/5") as link:
            assert await link.call("GET", "here") == b"1"
            assert await link.call("ACL", "WHOAMI") == b"din"
        async with linked(admin) as link:
            assert await link.call("GET", "here") is None


async def test_a_wrong_password_is_reported_and_nothing_is_sent():
    with RedisServer("--requirepass", "secret") as server:
        link = Link(at(f"redis://:guess@127.0.0.1:{server.port}"), ())
        assert not await link.start(wait_s=0.1)
        assert "WRONGPASS" in link.state.reason
        with pytest.raises(LimitsUnavailable, match="WRONGPASS"):
            link.call("PING")
        await link.close()


async def test_without_a_server_every_call_fails_at_once_and_the_link_comes_up_later():
    server = RedisServer()
    link = Link(at(server.url), (ECHO,))
    try:
        assert not await link.start(wait_s=0.05)
        with pytest.raises(LimitsUnavailable):
            link.call("PING")
        server.start()
        await asyncio.wait_for(link._up.wait(), 10)
        assert await link.run(ECHO, *bulks(0, "x")) == b"x"
    finally:
        await link.close()
        server.stop()


async def test_a_forgotten_script_is_loaded_once_for_all_that_wait(server):
    async with linked(server.url) as link:
        script = LuaScript(b"return {ARGV[1], 'told again'}")
        await link.call("CONFIG", "RESETSTAT")
        answers = await asyncio.gather(*(link.run(script, *bulks(0, n)) for n in range(200)))
        assert [int(answer[0]) for answer in answers] == list(range(200))
        stats = (await link.call("INFO", "commandstats")).decode()
        assert "cmdstat_script|load:calls=1," in stats
        assert "cmdstat_eval:" not in stats


async def test_flushing_scripts_under_load_is_seen_by_nobody(server):
    async with linked(server.url) as link, linked(server.unix_url) as other:
        script = LuaScript(b"return redis.call('INCR', KEYS[1])")
        await link.call("DEL", "n")

        async def ask(count):
            return [await link.run(script, *bulks(1, "n")) for _ in range(count)]

        async def flush():
            for _ in range(100):
                await other.call("SCRIPT", "FLUSH")

        lists = await asyncio.gather(*(ask(50) for _ in range(20)), flush())
        assert sorted(number for numbers in lists[:-1] for number in numbers) == list(range(1, 1001))


async def test_too_many_unanswered_commands_are_refused_before_they_are_sent(server):
    async with linked(server.url, max_in_flight=5) as link:
        asked = [link.call("ECHO", n) for n in range(5)]
        with pytest.raises(LimitsUnavailable, match="5 commands"):
            link.call("PING")
        assert len(await asyncio.gather(*asked)) == 5
        assert await link.call("PING") == b"PONG"


async def test_closing_waits_for_what_was_asked():
    with RedisServer() as server:
        async with linked(server.url) as link:
            asked = [link.call("ECHO", n) for n in range(100)]
        assert len(await asyncio.gather(*asked)) == 100
        with pytest.raises(LimitsUnavailable):
            link.call("PING")


async def test_closing_a_link_that_never_came_up_is_quick_and_silent():
    link = Link(at(f"redis://127.0.0.1:{free_port()}"), ())
    await link.start(wait_s=0.01)
    await link.close()
    assert not link.state.up


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_a_server_that_became_a_replica_is_left_at_the_first_script_that_writes(flavour):
    write = LuaScript(b"return redis.call('SET', KEYS[1], ARGV[1])")
    with RedisServer(flavour=flavour) as server:
        async with linked(server.url) as link, linked(server.unix_url) as admin:
            await admin.call("REPLICAOF", "127.0.0.1", free_port())
            with pytest.raises(RedisError, match=r"^READONLY "):
                await link.run(write, *bulks(1, "a", 1))
            assert not link.state.up


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("forbidden", [("-script",), ("-evalsha",), ("-script", "-evalsha")])
async def test_scripts_that_can_not_be_loaded_or_called_by_digest_are_sent_whole_and_it_is_reported(flavour, forbidden, caplog):
    script = LuaScript(b"return {ARGV[1], redis.call('INCR', KEYS[1])}")
    with RedisServer(flavour=flavour) as server:
        async with linked(server.url) as admin:
            await admin.call("ACL", "SETUSER", "din", "on", ">secret", "~*", "&*", "+@all", *forbidden)
        async with linked(f"redis://din:secret@127.0.0.1:{server.port}") as link:
            answers = await asyncio.gather(*(link.run(script, *bulks(1, "n", n)) for n in range(20)))
            assert answers == [[b"%d" % n, n + 1] for n in range(20)]
            assert link.state.up
            assert "EVAL" in link.state.warning
            assert "NOPERM" in link.state.warning
    assert len([record for record in caplog.records if "sent whole" in record.message]) == 1


async def test_a_user_that_may_run_no_script_at_all_does_not_connect(server):
    async with linked(server.url) as admin:
        await admin.call("ACL", "SETUSER", "din", "on", ">secret", "~*", "+@all", "-@scripting")
        link = Link(at(f"redis://din:secret@127.0.0.1:{server.port}"), (ECHO,))
        assert not await link.start(wait_s=0.2)
        assert "NOPERM" in link.state.reason
        await link.close()
        await admin.call("ACL", "DELUSER", "din")


@pytest.mark.parametrize(
    ("reply", "meant"),
    [
        ("ERR Error running script (call to f_0a): @user_script:7: -READONLY You can't write.", "READONLY You can't write."),
        ("ERR Error running script (call to f_0a): @user_script:7: @user_script: 7: -OOM command not allowed", "OOM command not allowed"),
        ("ERR Error running script (call to f_0a): @user_script:1: attempt to index a nil value", None),
        ("READONLY You can't write against a read only replica.", None),
        ("WRONGTYPE Operation against a key, Error running script x: -READONLY y", None),
    ],
)
def test_the_error_inside_a_scripts_error_is_the_one_that_counts(reply, meant):
    assert command_error(reply) == (meant or reply)


async def test_between_two_looks_for_a_server_there_are_never_two_seconds(monkeypatch):
    pauses, looked, loop = [], asyncio.Event(), asyncio.get_running_loop()

    async def locate():
        if len(pauses) == 20:
            looked.set()
        raise OSError("away")

    async def record(seconds):
        pauses.append(seconds)
        turn = loop.create_future()
        loop.call_soon(turn.set_result, None)
        await turn

    monkeypatch.setattr(asyncio, "sleep", record)
    link = Link(locate, ())
    await link.start(wait_s=0)
    await looked.wait()
    await link.close()
    assert pauses[0] < 0.1, "the first one is short: a failover by address is over when the link is lost"
    assert max(pauses) < 2


async def test_a_server_that_became_a_replica_is_left():
    with RedisServer() as server:
        states = []
        async with linked(server.url, on_change=states.append) as link, linked(server.unix_url) as admin:
            await admin.call("REPLICAOF", "127.0.0.1", free_port())
            with pytest.raises(RedisError, match="READONLY"):
                await link.call("SET", "a", 1)
            assert not link.state.up
            await admin.call("REPLICAOF", "NO", "ONE")
            await asyncio.wait_for(link._up.wait(), 10)
            await link.call("SET", "a", 1)
        assert [state.up for state in states][:3] == [True, False, True]


async def test_nonsense_on_the_wire_breaks_the_link_and_not_the_process(caplog):
    async def speak_http(reader, writer):
        await reader.read(10)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    strange = await asyncio.start_server(speak_http, "127.0.0.1", 0)
    port = strange.sockets[0].getsockname()[1]
    with caplog.at_level(logging.INFO):
        link = Link(at(f"redis://127.0.0.1:{port}"), ())
        assert not await link.start(wait_s=0.3)
        assert "out of turn" in link.state.reason or "Protocol error" in link.state.reason
        await link.close()
    strange.close()
    assert len([r for r in caplog.records if "redis" in r.name]) == 1


async def test_a_broken_connection_fails_those_who_wait_as_unanswered():
    with RedisServer() as server:
        async with linked(server.url) as link, linked(server.unix_url) as admin:
            blocked = link.call("BLPOP", "never", 0)
            await until(lambda: _waits(admin))
            await admin.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            with pytest.raises(CommandUnanswered):
                await blocked


async def _waits(admin):
    return b"blocked_clients:1\r\n" in await admin.call("INFO", "clients")
