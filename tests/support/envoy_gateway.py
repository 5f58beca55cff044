"""Envoy Gateway's translation of the rendered resources, kept in `captures/envoy-gateway.json`, with the rendered patches applied.

Rule: the translation is Envoy Gateway's, made of `golden/mesh/envoy-gateway.yaml` without the patches; the patches are those rendered now.
Only what it documents of patches: JSONPath with one descent and equalities, `op: add`; a patch that finds no place is an error.

Where the rendered resources change, translate them again (and see that Envoy Gateway patches as this does):
    go install github.com/envoyproxy/gateway/cmd/egctl@v1.9.1 && python -m tests.support.envoy_gateway $(go env GOPATH)/bin/egctl
"""

import hashlib
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parents[1]
CAPTURE = HERE / "captures" / "envoy-gateway.json"
RENDERED = HERE / "golden" / "mesh" / "envoy-gateway.yaml"
_STANDARD = "gateway.networking.k8s.io"
_CONTROLLER = "gateway.envoyproxy.io/gatewayclass-controller"
_PARAMETERS = {"group": "gateway.envoyproxy.io", "kind": "EnvoyProxy", "name": "din"}
_AROUND: list[dict[str, Any]] = [
    {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "inference"}},
    {"apiVersion": f"{_STANDARD}/v1", "kind": "GatewayClass", "metadata": {"name": "eg"}, "spec": {"controllerName": _CONTROLLER}},
    {
        "apiVersion": f"{_STANDARD}/v1",
        "kind": "Gateway",
        "metadata": {"name": "public", "namespace": "inference"},
        "spec": {
            "gatewayClassName": "eg",
            "infrastructure": {"parametersRef": _PARAMETERS},
            "listeners": [{"name": "http", "protocol": "HTTP", "port": 80}],
        },
    },
]
"""The resources that the cluster already has."""
_LUA = "(usage.lua)"
_PATH = re.compile(r"\.\.(\w+)\[\?\((.*)\)\](?:\.(\w+))?").fullmatch
_EQUAL = re.compile(r"@\.([\w.]+)==('[^']*'|\d+)").fullmatch
_capital = re.compile(r"(?<=[a-z0-9])[A-Z]").sub
Resources = dict[str, list[dict[str, Any]]]


def documents() -> list[dict[str, Any]]:
    """Return the rendered resources."""
    return list(yaml.safe_load_all(RENDERED.read_text()))


def translated(rendered: list[dict[str, Any]]) -> Resources:
    """Return Envoy's resources by type, patched.

    Raises:
        AssertionError: the kept translation was made of other resources, or a patch finds no place.
    """
    kept = json.loads(CAPTURE.read_text())
    assert kept["made_of"] == _sum(rendered), (
        "the rendered resources have changed: see tests/support/envoy_gateway.py how to translate them again"
    )
    patched: Resources = _with_lua(kept["resources"], _lua_of(rendered))
    apply(patched, next(each for each in rendered if each["kind"] == "EnvoyPatchPolicy"))
    return patched


def apply(resources: Resources, policy: Mapping[str, Any]) -> None:
    """Patch the resources in place."""
    for patch in policy["spec"]["jsonPatches"]:
        kind, operation = patch["type"].rpartition(".")[2], patch["operation"]
        assert operation["op"] == "add"
        if not operation["path"]:  # a resource as a whole
            resources[kind].append({"@type": patch["type"], **operation["value"]})
            continue
        (resource,) = [each for each in resources[kind] if each.get("name", each.get("cluster_name")) == patch["name"]]
        places = list(_places(resource, operation["jsonPath"])) if "jsonPath" in operation else [resource]
        assert places, f"no place for {patch}"
        for place in places:
            place[operation["path"].removeprefix("/")] = operation["value"]


def _places(within: Any, path: str) -> Iterator[dict[str, Any]]:
    found = _PATH(path)
    assert found, path
    key, conditions, member = found.groups()
    wanted = [match.groups() for match in map(_EQUAL, conditions.split(" && ")) if match]
    for each in _below(within, key):
        if all(str(_at(each, place)) == value.strip("'") for place, value in wanted):
            yield each[member] if member else each


def _below(within: Any, key: str) -> Iterator[Any]:
    """Yield the items of all lists of this name, at any depth."""
    for name, value in within.items() if isinstance(within, dict) else enumerate(within if isinstance(within, list) else ()):
        if name == key and isinstance(value, list):
            yield from value
        yield from _below(value, key)


def _at(value: Any, place: str) -> Any:
    for name in place.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _with_lua(value: Any, lua: str) -> Any:
    if isinstance(value, dict):
        return {name: _with_lua(each, lua) for name, each in value.items()}
    return [_with_lua(each, lua) for each in value] if isinstance(value, list) else lua if value == _LUA else value


def _lua_of(rendered: list[dict[str, Any]]) -> str:
    (policy,) = [each for each in rendered if each["kind"] == "EnvoyExtensionPolicy"]
    return str(policy["spec"]["lua"][0]["inline"])


def _sum(rendered: list[dict[str, Any]]) -> str:
    """Return a digest of all but the script and the patches, which are taken as they are now."""
    own = [each for each in rendered if each["kind"] != "EnvoyPatchPolicy"]
    text = json.dumps(own, sort_keys=True).replace(json.dumps(_lua_of(rendered)), "")
    return hashlib.sha256(text.encode()).hexdigest()


def bootstrap(resources: Resources, ports: Mapping[tuple[str, int], int], listen: int, admin: int, authority: str) -> dict[str, Any]:
    """Return a static bootstrap of the resources: all listeners, and all clusters on loopback ports.

    Args:
        resources: The translation.
        ports: The port of each address.
        listen: The port of the listener.
        admin: The port of the admin interface.
        authority: Certificates of the authority to trust, PEM, instead of the rendered ones.
    """
    for resource in itertools.chain.from_iterable(resources.values()):
        resource.pop("@type", None)
    (listener,) = [each for each in resources["Listener"] if each["name"] == "inference/public/http"]
    (routes,) = resources["RouteConfiguration"]
    manager = listener["default_filter_chain"]["filters"][-1]["typed_config"]
    del manager["rds"]
    manager["route_config"] = routes
    listener["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": listen}
    internal = [each for each in resources["Listener"] if "internal_listener" in each]
    assignments = {each["cluster_name"]: each for each in resources["ClusterLoadAssignment"]}
    for cluster in resources["Cluster"]:
        if cluster.pop("eds_cluster_config", None):
            cluster["load_assignment"] = assignments[cluster["name"]]
        cluster.pop("cluster_type", None)
        cluster["type"] = "STATIC"
        for endpoint in _below(cluster, "lb_endpoints"):
            place = endpoint["endpoint"]["address"].get("socket_address")
            if place is not None:
                place |= {"address": "127.0.0.1", "port_value": ports[place["address"], place["port_value"]]}
    trusted = {"trusted_ca": {"inline_string": authority}}
    secrets = [{"name": name, "validation_context": trusted} for name in sorted(_secret_names(resources["Cluster"]))]
    (proxy,) = [each for each in documents() if each["kind"] == "EnvoyProxy"]
    return {
        **json.loads(proxy["spec"]["bootstrap"]["value"]),
        "node": {"id": "proxy", "cluster": "gateway"},
        "admin": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": admin}}},
        "static_resources": {"listeners": [listener, *internal], "clusters": resources["Cluster"], "secrets": secrets},
    }


def _secret_names(value: Any) -> set[str]:
    """Return the names of the secrets that a resource asks Envoy Gateway for, and let it use static ones."""
    if isinstance(value, dict) and value.get("sds_config", {}).get("ads") is not None:
        del value["sds_config"]
        return {value["name"]}
    within = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return {name for each in within for name in _secret_names(each)}


def _asked(egctl: str, rendered: list[dict[str, Any]]) -> Resources:
    """Run the program. It drops labels when it reads a file, so selectors by label are written out."""
    documents = json.loads(json.dumps(_AROUND + rendered))
    routes = [each["metadata"]["name"] for each in rendered if each["kind"] == "HTTPRoute"]
    for document in documents:
        if document.get("spec", {}).pop("targetSelectors", None):
            document["spec"]["targetRefs"] = [{"group": _STANDARD, "kind": "HTTPRoute", "name": name} for name in routes]
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump_all(documents, file)
        command = [egctl, "experimental", "translate", "--to", "xds", "--type", "all", "--output", "json", "--file", file.name]
        output = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    configs = {each["@type"].rpartition(".")[2]: each for each in _snake(output["xds"]["inference/public"]["configs"])}
    return {
        "Listener": [each["active_state"]["listener"] for each in configs["ListenersConfigDump"]["dynamic_listeners"]],
        "RouteConfiguration": [each["route_config"] for each in configs["RoutesConfigDump"]["dynamic_route_configs"]],
        "Cluster": [each["cluster"] for each in configs["ClustersConfigDump"]["dynamic_active_clusters"]],
        "ClusterLoadAssignment": [each["endpoint_config"] for each in configs["EndpointsConfigDump"]["dynamic_endpoint_configs"]],
    }


def _snake(value: Any) -> Any:
    """Convert field names to those of patches; a name with a dot is that of an extension."""
    if isinstance(value, dict):
        return {_field(name): _snake(each) for name, each in value.items()}
    return [_snake(each) for each in value] if isinstance(value, list) else value


def _field(name: str) -> str:
    """Convert one field name; digits begin no word."""
    return (
        "ignore_http_11_upgrade"
        if name == "ignoreHttp11Upgrade"
        else name
        if "." in name
        else _capital(lambda at: f"_{at[0].lower()}", name)
    )


def main(egctl: str) -> None:
    """Rewrite the capture."""
    rendered = documents()
    own = [each for each in rendered if each["kind"] != "EnvoyPatchPolicy"]
    resources = json.loads(json.dumps(_asked(egctl, own)).replace(json.dumps(_lua_of(rendered)), json.dumps(_LUA)))
    CAPTURE.write_text(json.dumps({"made_of": _sum(rendered), "resources": resources}, indent=1, sort_keys=True) + "\n")
    assert translated(rendered) == _asked(egctl, rendered), "Envoy Gateway patches otherwise than this does"


if __name__ == "__main__":
    main(sys.argv[1])
