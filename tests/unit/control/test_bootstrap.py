import subprocess
import sys

import msgspec
import pytest

from din_extproc.control import bootstrap
from din_extproc.control.topology import HealthCheck, SocketAddress, Topology, UnixSocket
from din_extproc.domain.node import Pool
from din_extproc.domain.verdict import RefusalCode, error_body


def rendered(**changes):
    base = {"ext_proc": (UnixSocket("/run/a.sock"),), "access_log": SocketAddress("127.0.0.1", 50052)}
    return bootstrap.render_dict(Topology(**{**base, **changes}))


def connection_manager(config):
    return config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]


def cluster(config, name):
    return next(each for each in config["static_resources"]["clusters"] if each["name"] == name)


def test_filters_that_nobody_asked_for_are_left_out():
    names = [each["name"].rpartition(".")[2] for each in connection_manager(rendered())["http_filters"]]
    assert names == ["ext_proc", "router"]
    full = rendered(usage_lua="-- lua", cors_origins=("https://a.example",))
    assert [each["name"].rpartition(".")[2] for each in connection_manager(full)["http_filters"]] == ["cors", "lua", "ext_proc", "router"]


def test_envoys_own_answers_to_a_head_that_it_refuses_are_not_sent_to_the_sidecar():
    ext_proc = next(each for each in connection_manager(rendered())["http_filters"] if each["name"].endswith("ext_proc"))["typed_config"]
    assert ext_proc["processing_mode"] == {
        "request_header_mode": "SEND",
        "request_body_mode": "BUFFERED",
        "request_trailer_mode": "SKIP",
        "response_header_mode": "SKIP",
        "response_trailer_mode": "SKIP",
    }


def test_every_own_answer_of_envoy_has_exactly_the_keys_of_the_error_body():
    mappers = connection_manager(rendered())["local_reply_config"]["mappers"]
    expected = msgspec.json.decode(error_body(RefusalCode.INTERNAL_ERROR, "m", trace_id="t"))
    bodies = [mapper["body_format_override"]["json_format"] for mapper in mappers]
    of_anthropic = [body for body in bodies if body["type"] == "error"]
    assert {(*sorted(body), *sorted(body["error"])) for body in of_anthropic} == {("error", "request_id", "type", "message", "type")}
    for body in (each for each in bodies if each not in of_anthropic):
        assert (set(body), set(body["error"])) == (set(expected), set(expected["error"]))
        assert body["detail"] == body["error"]["message"]
        assert body["code"] == body["error"]["code"]


@pytest.mark.parametrize(("engine", "path"), [("vllm", "/live"), ("triton", "/v2/health/ready"), ("ollama", "/api/version")])
def test_an_engine_is_asked_for_its_health_where_it_answers(engine, path):
    config = rendered(pools=(Pool("p", "m", "m", engine, "round_robin", ()),), health_check=HealthCheck(path="/live"))
    assert cluster(config, "p")["health_checks"][0]["http_health_check"]["path"] == path


def test_a_sidecar_with_a_name_is_looked_up_and_one_with_an_address_is_not():
    config = rendered(ext_proc=(SocketAddress("sidecar.internal", 50051),))
    assert (cluster(config, "din_ext_proc")["type"], cluster(config, "din_access_log")["type"]) == ("STRICT_DNS", "STATIC")


def test_a_topology_costs_nobody_the_import_of_envoys_vocabulary():
    code = "import sys, din_extproc.control.topology; sys.exit('envoy_data_plane' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", ["y", "n", "Y", "N"])
def test_a_pool_whose_name_envoy_would_take_for_yes_or_no_is_quoted(name):
    text = bootstrap.render_documents([{"name": name, "lua": "a\nb\n"}], "envoy")
    assert text.endswith(f'name: "{name}"\nlua: |\n  a\n  b\n')
