"""Messages by name, from our definitions or from the full upstream ones; run as a program it answers for the upstream ones.

Rule: one process holds one set of definitions. The program reads one JSON request on stdin and writes one JSON answer:
the shape of each message, its sample written by upstream, and what upstream reads in the bytes it was given.
"""

import importlib
import json
import struct
import sys

FILES = (
    "envoy.config.core.v3.address",
    "envoy.config.core.v3.base",
    "envoy.config.endpoint.v3.endpoint",
    "envoy.config.endpoint.v3.endpoint_components",
    "envoy.data.accesslog.v3.accesslog",
    "envoy.extensions.filters.http.ext_proc.v3.processing_mode",
    "envoy.service.accesslog.v3.als",
    "envoy.service.auth.v3.attribute_context",
    "envoy.service.auth.v3.external_auth",
    "envoy.service.discovery.v3.ads",
    "envoy.service.discovery.v3.discovery",
    "envoy.service.ext_proc.v3.external_processor",
    "envoy.type.v3.http_status",
    "google.rpc.status",
    "grpc.health.v1.health",
)
OURS = "din_extproc._proto."
RENAMED = {"grpc.health.v1.health": "grpc_health.v1.health"}
STRING, BYTES, MESSAGE, ENUM, BOOL, DOUBLE, FLOAT = 9, 12, 11, 14, 8, 1, 2
WHOLE = "whole number"


def modules(upstream):
    """The modules that hold the messages."""
    for name in FILES:
        yield importlib.import_module((RENAMED.get(name, name) if upstream else OURS + name) + "_pb2")


def descriptors(upstream):
    """Every message of every file by its full name, nested ones too, map entries not."""
    found = {}

    def collect(descriptor):
        if not descriptor.GetOptions().map_entry:
            found[descriptor.full_name] = descriptor
            for nested in descriptor.nested_types:
                collect(nested)

    for module in modules(upstream):
        for descriptor in module.DESCRIPTOR.message_types_by_name.values():
            collect(descriptor)
    return found


def classes(upstream):
    """The classes of those messages."""
    from google.protobuf.message_factory import GetMessageClass  # noqa: PLC0415 - the program must start without our package

    return {name: GetMessageClass(descriptor) for name, descriptor in descriptors(upstream).items()}


def methods(upstream):
    """Every service method: its path, its types, and which sides stream."""
    return {
        f"/{service.full_name}/{method.name}": [
            method.input_type.full_name, method.output_type.full_name, method.client_streaming, method.server_streaming,
        ]
        for module in modules(upstream)
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }  # fmt: skip


def kind(field):
    """What the field holds, as far as the wire can tell: an enum is a number."""
    if field.type == MESSAGE:
        return field.message_type.full_name
    return {STRING: "text", BYTES: "bytes", BOOL: "truth", DOUBLE: "double", FLOAT: "float"}.get(field.type, WHOLE)


def shape(descriptor):
    """Each field by its number."""
    return {
        str(field.number): [field.name, kind(field), field.is_repeated, field.containing_oneof.name if field.containing_oneof else ""]
        for field in descriptor.fields
    }


def enums(descriptor):
    """Names and numbers of each enum field's values."""
    return {field.name: {v.name: v.number for v in field.enum_type.values} for field in descriptor.fields if field.type == ENUM}


def read(message):
    """A message as plain values by field number: the same from either definition."""
    out = {}
    for field, value in message.ListFields():
        if field.is_repeated and field.type == MESSAGE and field.message_type.GetOptions().map_entry:
            of_message = field.message_type.fields_by_name["value"].type == MESSAGE
            plain = {str(key): read(value[key]) if of_message else value[key] for key in sorted(value)}
        elif field.is_repeated:
            plain = [one(field, item) for item in value]
        else:
            plain = one(field, value)
        out[str(field.number)] = plain
    return out


def one(field, value):
    """One value of a field."""
    if field.type == MESSAGE:
        return read(value)
    if field.type == BYTES:
        return value.hex()
    return struct.pack("<d", value).hex() if field.type == DOUBLE else value


def answer(asked):
    """What the upstream definitions say."""
    known, made = descriptors(upstream=True), classes(upstream=True)
    return {
        "shapes": {name: shape(known[name]) for name in asked["names"]},
        "enums": {name: enums(known[name]) for name in asked["names"]},
        "methods": methods(upstream=True),
        "read": [read(made[name].FromString(bytes.fromhex(data))) for name, data in asked["messages"]],
        "written": [made[name].FromString(bytes.fromhex(data)).SerializeToString().hex() for name, data in asked["messages"]],
    }


if __name__ == "__main__":
    json.dump(answer(json.load(sys.stdin)), sys.stdout)
