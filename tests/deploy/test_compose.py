"""The compose network, as far as it can be checked without a container engine: its schema, its configuration, its commands, its files."""

import re

import pytest
import typer
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema
from jsonschema import Draft7Validator
from typer.core import TyperGroup

from din_extproc.cli.app import app
from din_extproc.edge.process.envoy_binary import find_config_error, find_envoy
from din_extproc.roles.configure.render import render_envoy
from din_extproc.settings.load import load
from din_extproc.settings.settings import Settings
from tests.deploy.shipped import DEPLOY, published_key_opens

HERE = DEPLOY / "compose"
COMPOSE = yaml.safe_load((HERE / "compose.yaml").read_text())
OURS = {name: service for name, service in COMPOSE["services"].items() if "build" in service}


@pytest.fixture(scope="module")
def settings() -> Settings:
    loaded = load(HERE / "din.yaml", {})
    assert isinstance(loaded, Settings), str(loaded)
    return loaded


def test_the_file_holds_to_the_compose_specification():
    errors = [
        f"{error.json_path}: {error.message}" for error in Draft7Validator(get_builtin_schema("vendor.compose-spec")).iter_errors(COMPOSE)
    ]
    assert errors == []


def test_its_configuration_is_sound_and_envoy_would_start_with_it(settings):
    assert settings.warnings == ()
    assert find_config_error(render_envoy(settings), find_envoy()) is None


def test_the_published_key_opens_it():
    assert published_key_opens(HERE / "din.yaml", (HERE / "compose.yaml").read_text())


@pytest.mark.parametrize("service", OURS)
def test_each_of_our_commands_is_one_that_the_program_takes(service):
    arguments = list(OURS[service]["command"])
    command = typer.main.get_command(app)
    while isinstance(command, TyperGroup):
        command = command.commands[arguments.pop(0)]
    assert command.make_context(service, arguments).command is command


def test_every_node_has_the_address_that_the_configuration_gives_it(settings):
    configured = {node.id: (node.endpoint.host, str(node.endpoint.port)) for pool in settings.pools for node in pool.nodes}
    engines = {name: service for name, service in OURS.items() if service["command"][0] == "engine-sim"}
    listening = {name: service["command"][service["command"].index("--port") + 1] for name, service in engines.items()}
    assert configured == {name: (engines[name]["networks"]["din"]["ipv4_address"], listening[name]) for name in engines}
    redis = COMPOSE["services"]["redis"]["networks"]["din"]["ipv4_address"]
    assert redis in settings.store.url.get_secret_value()


def test_the_engines_serve_the_models_that_their_pools_name(settings):
    served = {
        name: service["command"][service["command"].index("--model") + 1]
        for name, service in OURS.items()
        if "--model" in service["command"]
    }
    assert served == {node.id: pool.model for pool in settings.pools for node in pool.nodes}


def test_what_is_mounted_from_the_repository_is_there():
    sources = {
        volume.split(":")[0] for service in COMPOSE["services"].values() for volume in service.get("volumes", ()) if volume.startswith(".")
    }
    assert [source for source in sources if not (HERE / source).exists()] == []


def test_nothing_runs_as_root_or_is_reached_from_outside_the_host():
    for name, service in COMPOSE["services"].items():
        assert int(service["user"].partition(":")[0]) > 0, name
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"]), name
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), name


def test_every_image_names_its_version():
    images = {name: re.sub(r"^\$\{\w+:-(.*)\}$", r"\1", service["image"]) for name, service in COMPOSE["services"].items()}
    assert {name: image for name, image in images.items() if not re.search(r":[\w.-]*\d", image)} == dict.fromkeys(
        OURS, "din-extproc:latest"
    )


def test_prometheus_asks_ports_that_are_there(settings):
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    for job in config["scrape_configs"]:
        for target in job["static_configs"][0]["targets"]:
            host, _, port = target.partition(":")
            assert host in COMPOSE["services"], target
            assert port == ("8000" if job["job_name"] == "engines" else str(settings.gateway.admin.address.port))
