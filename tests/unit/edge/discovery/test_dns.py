"""Nodes of a DNS name, asked of a real server on loopback."""

from collections.abc import Iterator

import dns.rcode
import pytest

from din_extproc.domain.node import DnsName, Endpoint
from din_extproc.edge.discovery import dns as source
from tests.support.dns_server import DnsServer

NAME = "vllm.inference.local"


@pytest.fixture
def server() -> Iterator[DnsServer]:
    with DnsServer() as running:
        yield running


def source_of(server: DnsServer, name: str = NAME, port: int = 8000) -> source.DnsSource:
    return source.DnsSource(DnsName(name, port, every_s=0.5, server=Endpoint.parse(server.address)))


def weights(answer: source.DnsAnswer) -> dict[Endpoint, int]:
    return {endpoint: found.weight for endpoint, found in answer.endpoints.items()}


async def test_each_address_of_both_families_is_an_endpoint_with_the_port_of_the_configuration(server):
    server.records[NAME] = {"A": ["10.0.0.2", "10.0.0.1"], "AAAA": ["fd00::1"]}
    answer = await source_of(server).look()
    assert weights(answer) == {Endpoint("10.0.0.1", 8000): 1, Endpoint("10.0.0.2", 8000): 1, Endpoint("fd00::1", 8000): 1}
    assert answer.problem == ""


async def test_the_next_look_comes_after_the_ttl_and_not_before_the_interval(server):
    server.records[NAME] = {"A": ["10.0.0.1"]}
    assert (await source_of(server).look()).pause_s == 0.5
    server.ttl = 30
    assert (await source_of(server).look()).pause_s == 30


@pytest.mark.parametrize("failure", ["NXDOMAIN", "silence", "SERVFAIL", "no address"])
async def test_a_failed_look_keeps_the_last_good_answer_says_why_and_tries_again_after_the_interval(server, failure, monkeypatch):
    monkeypatch.setattr(source, "_TIMEOUT_S", 0.2)
    server.ttl = 30
    server.records[NAME] = {"A": ["10.0.0.1"]}
    looked = source_of(server)
    await looked.look()
    if failure == "NXDOMAIN":
        server.records.clear()
    elif failure == "no address":
        server.records[NAME] = {}
    elif failure == "silence":
        server.silent = True
    else:
        server.rcode = dns.rcode.SERVFAIL
    answer = await looked.look()
    assert weights(answer) == {Endpoint("10.0.0.1", 8000): 1}
    assert answer.pause_s == 0.5
    assert {"NXDOMAIN": "does not exist", "silence": "no answer for", "SERVFAIL": "SERVFAIL", "no address": "no address"}[
        failure
    ] in answer.problem
    server.records[NAME], server.silent, server.rcode = {"A": ["10.0.0.2"]}, False, dns.rcode.NOERROR
    again = await looked.look()
    assert (weights(again), again.problem) == ({Endpoint("10.0.0.2", 8000): 1}, "")


async def test_service_records_give_port_and_weight_and_only_the_best_priority_that_has_an_address_counts(server):
    service = f"_http._tcp.{NAME}"
    server.records[service] = {"SRV": [f"5 1 9000 gone.{NAME}.", f"10 3 8001 a.{NAME}.", f"10 1 8002 b.{NAME}.", f"20 1 8003 c.{NAME}."]}
    server.records |= {f"{host}.{NAME}": {"A": [f"10.0.0.{at}"]} for at, host in enumerate("abc", 1)}
    looked = source_of(server, service, 0)
    answer = await looked.look()
    assert weights(answer) == {Endpoint("10.0.0.1", 8001): 3, Endpoint("10.0.0.2", 8002): 1}
    assert f"gone.{NAME}. does not exist" in answer.problem
    del server.records[f"a.{NAME}"], server.records[f"b.{NAME}"]
    server.records[service] = {"SRV": [f"20 0 8003 c.{NAME}."]}
    assert weights(await looked.look()) == {Endpoint("10.0.0.3", 8003): 0}
