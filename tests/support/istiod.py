"""istiod's handling of an EnvoyFilter, as far as ours need it: patches applied to the configuration of a gateway.

Rule: only what Istio documents of the operations MERGE, ADD, INSERT_BEFORE and INSERT_FIRST; a patch that finds no place is an error.
"""

from collections.abc import Mapping
from typing import Any

_MANAGER = "envoy.filters.network.http_connection_manager"
_HTTP = "type.googleapis.com/envoy.extensions.filters.http"
_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"


def gateway(host: str, port: int, listen: int, admin: int, services: Mapping[str, int]) -> dict[str, Any]:
    """Return the bootstrap of an ingress gateway with one host whose only route is closed; `services`: clusters and local ports."""
    closed = {"name": "din-closed", "match": {"prefix": "/"}, "direct_response": {"status": 503}}
    virtual_host = {"name": f"{host}:{port}", "domains": ["*"], "routes": [closed]}
    names = ("cors", "fault", "router")
    kinds = {"cors": "cors.v3.Cors", "fault": "fault.v3.HTTPFault", "router": "router.v3.Router"}
    manager = {
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": f"outbound_0.0.0.0_{listen}",
        "route_config": {"name": f"http.{port}", "virtual_hosts": [virtual_host]},
        "http_filters": [{"name": f"envoy.filters.http.{name}", "typed_config": {"@type": f"{_HTTP}.{kinds[name]}"}} for name in names],
        "use_remote_address": True,
        "normalize_path": True,
    }
    listener = {
        "name": f"0.0.0.0_{listen}",
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": listen}},
        "filter_chains": [{"filters": [{"name": _MANAGER, "typed_config": manager}]}],
    }
    internal = {"@type": "type.googleapis.com/envoy.extensions.bootstrap.internal_listener.v3.InternalListener"}
    return {
        "node": {"id": "gateway", "cluster": "gateway"},
        "bootstrap_extensions": [{"name": "envoy.bootstrap.internal_listener", "typed_config": internal}],
        "admin": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": admin}}},
        "static_resources": {"listeners": [listener], "clusters": [_service(*each) for each in services.items()]},
    }


def _service(name: str, port: int) -> dict[str, Any]:
    endpoint = {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": port}}}}
    options = {
        "@type": f"type.googleapis.com/{_OPTIONS}",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": [endpoint]}]},
        "typed_extension_protocol_options": {_OPTIONS: options},
    }


def reach(configuration: dict[str, Any], entry: Mapping[str, Any], rule: Mapping[str, Any]) -> None:
    """Add the clusters that istiod makes of a ServiceEntry resolved by DNS and of its DestinationRule with TLS."""
    [host] = entry["spec"]["hosts"]
    assert (entry["spec"]["resolution"], rule["spec"]["host"]) == ("DNS", host)
    tls = rule["spec"]["trafficPolicy"]["tls"]
    assert tls["mode"] == "SIMPLE"
    names = [{"san_type": "DNS", "matcher": {"exact": name}} for name in tls["subjectAltNames"]]
    validation = {"trusted_ca": {"filename": tls["caCertificates"]}, "match_typed_subject_alt_names": names}
    context = {
        "@type": "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
        "sni": tls["sni"],
        "common_tls_context": {"validation_context": validation},
    }
    for port in entry["spec"]["ports"]:
        name = f"outbound|{port['number']}||{host}"
        endpoint = {"endpoint": {"address": {"socket_address": {"address": host, "port_value": port["number"]}}}}
        configuration["static_resources"]["clusters"].append(
            {
                "name": name,
                "type": "STRICT_DNS",
                "dns_lookup_family": "V4_ONLY",
                "connect_timeout": "5s",
                "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": [endpoint]}]},
                "transport_socket": {"name": "envoy.transport_sockets.tls", "typed_config": context},
            }
        )


def authenticate(configuration: dict[str, Any], authentication: Mapping[str, Any]) -> None:
    """Add the filter that istiod makes of a RequestAuthentication with inline keys: an invalid token is refused, a missing one is not."""
    listener = configuration["static_resources"]["listeners"][0]
    providers, requirements = {}, []
    for index, rule in enumerate(authentication["spec"]["jwtRules"]):
        headers = [{"name": each["name"], "value_prefix": each["prefix"]} for each in rule["fromHeaders"]]
        providers[f"origins-{index}"] = {
            "issuer": rule["issuer"],
            "audiences": rule["audiences"],
            "local_jwks": {"inline_string": rule["jwks"]},
            "payload_in_metadata": "payload",
            "from_headers": headers,
        }
        requirements.append({"provider_name": f"origins-{index}"})
    strict = {"requires_any": {"requirements": [*requirements, {"allow_missing": {}}]}}
    typed = {
        "@type": f"{_HTTP}.jwt_authn.v3.JwtAuthentication",
        "providers": providers,
        "rules": [{"match": {"prefix": "/"}, "requires": strict}],
    }
    filters = listener["filter_chains"][0]["filters"][0]["typed_config"]["http_filters"]
    filters.insert(0, {"name": "envoy.filters.http.jwt_authn", "typed_config": typed})


def apply(configuration: dict[str, Any], envoy_filter: Mapping[str, Any]) -> None:
    """Patch the configuration in place."""
    listener = configuration["static_resources"]["listeners"][0]
    [network] = listener["filter_chains"][0]["filters"]
    manager = network["typed_config"]
    [virtual_host] = manager["route_config"]["virtual_hosts"]
    for patch in envoy_filter["spec"]["configPatches"]:
        what, operation, value = patch["applyTo"], patch["patch"]["operation"], patch["patch"]["value"]
        match what, operation:
            case "CLUSTER", "ADD":
                configuration["static_resources"]["clusters"].append(value)
            case "LISTENER", "ADD":
                configuration["static_resources"]["listeners"].append(value)
            case "LISTENER", "MERGE":
                merge(listener, value)
            case "NETWORK_FILTER", "MERGE":
                merge(network, value)
            case "HTTP_FILTER", ("MERGE" | "INSERT_BEFORE"):
                sought = patch["match"]["listener"]["filterChain"]["filter"]["subFilter"]["name"]
                [place] = [index for index, each in enumerate(manager["http_filters"]) if each["name"] == sought]
                if operation == "MERGE":
                    merge(manager["http_filters"][place], value)
                else:
                    manager["http_filters"].insert(place, value)
            case "VIRTUAL_HOST", "MERGE":
                assert patch["match"]["routeConfiguration"]["vhost"]["name"] == virtual_host["name"]
                merge(virtual_host, value)
            case "HTTP_ROUTE", "INSERT_FIRST":
                assert patch["match"]["routeConfiguration"]["vhost"]["name"] == virtual_host["name"]
                virtual_host["routes"].insert(0, value)
            case other:
                raise AssertionError(other)


def merge(into: dict[str, Any], value: Mapping[str, Any]) -> None:
    """Merge as protobuf does: messages field by field, lists appended, other values replaced."""
    for name, new in value.items():
        old = into.get(name)
        if isinstance(new, Mapping) and isinstance(old, dict):
            merge(old, new)
        else:
            into[name] = [*old, *new] if isinstance(new, list) and isinstance(old, list) else new
