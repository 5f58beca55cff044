"""Our minimal messages are Envoy's, gRPC's and Google's own as far as they go."""

import importlib
import importlib.util
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from din_extproc._proto.din.v1 import registry_pb2
from din_extproc._proto.envoy.data.accesslog.v3.accesslog_pb2 import AccessLogCommon
from din_extproc._proto.envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingResponse
from tests.unit.proto import definitions
from tests.unit.proto.definitions import BOOL, BYTES, DOUBLE, ENUM, MESSAGE, STRING

ROOT = Path(__file__).parents[3]
DEEPEST = 4


def filled(message, turn, counter, depth=0):
    """Every field set to a value that no other field has; of a oneof, the member whose turn it is."""
    for field in message.DESCRIPTOR.fields:
        chosen = field.containing_oneof
        if chosen is not None and chosen.fields[turn % len(chosen.fields)] is not field:
            continue
        is_map = field.type == MESSAGE and field.message_type.GetOptions().map_entry
        if field.type == MESSAGE and depth == DEEPEST:
            continue
        if is_map:
            fill_map(message, field, turn, counter, depth)
        elif field.type == MESSAGE:
            inside = getattr(message, field.name)
            filled(inside.add() if field.is_repeated else inside, turn, counter, depth + 1)
            if not field.is_repeated:
                inside.SetInParent()
        elif field.is_repeated:
            getattr(message, field.name).extend([value(field, counter), value(field, counter)])
        else:
            setattr(message, field.name, value(field, counter))
    return message


def fill_map(message, field, turn, counter, depth):
    inside = field.message_type.fields_by_name["value"]
    key = f"key-{next(counter)}"
    if inside.type == MESSAGE:
        filled(getattr(message, field.name)[key], turn, counter, depth + 1)
    else:
        getattr(message, field.name)[key] = value(inside, counter)


def value(field, counter):
    number = next(counter)
    if field.type == ENUM:
        return field.enum_type.values[-1].number
    return {STRING: f"té-{number}", BYTES: bytes([number % 256, 255]), BOOL: True, DOUBLE: number + 0.5}.get(field.type, number)


@pytest.fixture(scope="module")
def ours():
    return definitions.classes(upstream=False)


@pytest.fixture(scope="module")
def samples(ours):
    """Each message, so often that each member of the largest oneof has its turn, with small and large numbers."""
    return [(name, filled(made(), turn, itertools.count(10**turn))) for name, made in ours.items() for turn in range(7)]


@pytest.fixture(scope="module")
def upstream(ours, samples):
    """What a process with the full definitions says about our messages."""
    asked = {"names": list(ours), "messages": [(name, sample.SerializeToString().hex()) for name, sample in samples]}
    run = subprocess.run(
        [sys.executable, definitions.__file__], input=json.dumps(asked), capture_output=True, text=True, check=False, timeout=100
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_every_field_has_upstreams_name_number_type_and_oneof(ours, upstream):
    for name, made in ours.items():
        theirs = upstream["shapes"][name]
        for number, field in definitions.shape(made.DESCRIPTOR).items():
            if (name, number) == ("envoy.type.v3.HttpStatus", "1"):
                assert theirs[number][:2] == ["code", definitions.WHOLE]
            assert field == theirs[number], f"{name}, field {number}"


def test_every_enum_value_has_upstreams_number(ours, upstream):
    for name, made in ours.items():
        for field, values in definitions.enums(made.DESCRIPTOR).items():
            theirs = upstream["enums"][name][field]
            assert {value: theirs.get(value) for value in values} == values, f"{name}.{field}"


def test_every_method_is_upstreams(upstream):
    methods = definitions.methods(upstream=False)
    assert {path: upstream["methods"].get(path) for path in methods} == methods
    assert "/envoy.service.ext_proc.v3.ExternalProcessor/Process" in methods


def test_what_we_write_upstream_reads_with_the_same_values(samples, upstream):
    for (name, sample), theirs in zip(samples, upstream["read"], strict=True):
        assert json.loads(json.dumps(definitions.read(sample))) == theirs, name


def test_what_upstream_writes_we_read_with_the_same_values(ours, samples, upstream):
    for (name, sample), data in zip(samples, upstream["written"], strict=True):
        assert ours[name].FromString(bytes.fromhex(data)) == sample, name


def test_every_field_was_in_a_sample(ours, samples):
    for name, made in ours.items():
        seen = {field.name for of, sample in samples if of == name for field, _ in sample.ListFields()}
        assert seen == {field.name for field in made.DESCRIPTOR.fields}, name


def test_our_messages_live_beside_the_full_ones_in_one_process():
    for module in ("grpc_health.v1.health_pb2", "envoy.service.ext_proc.v3.external_processor_pb2", "google.rpc.status_pb2"):
        importlib.import_module(module)
    for name in ("grpc.health.v1.health_pb2", "google.rpc.status_pb2"):
        ours = importlib.import_module(f"din_extproc._proto.{name}").DESCRIPTOR
        assert ours.package == name.rpartition(".")[0], "another file of the same pool"


def test_well_known_types_know_their_tricks():
    entry = AccessLogCommon()
    entry.duration.FromMilliseconds(1500)
    entry.start_time.FromJsonString("2026-01-01T00:00:00Z")
    assert (entry.duration.ToTimedelta().total_seconds(), entry.start_time.ToSeconds()) == (1.5, 1767225600)
    response = ProcessingResponse()
    response.dynamic_metadata.update({"din": {"tokens": 1, "tenant": "a"}})
    assert dict(response.dynamic_metadata["din"]) == {"tokens": 1.0, "tenant": "a"}


def test_a_registration_reports_all_that_a_node_must_tell():
    named = {field.name for name in ("Node", "Beat") for field in getattr(registry_pb2, name).DESCRIPTOR.fields}
    assert named >= {
        "free_memory_bytes", "max_concurrency", "waiting", "max_seq_len", "dtype", "compute_capability",
        "tp_world_size", "version", "weights_sha256",
    }  # fmt: skip
    assert [method.name for method in registry_pb2.DESCRIPTOR.services_by_name["NodeRegistry"].methods] == [
        "Register", "Heartbeat", "Drain", "Deregister", "Watch",
    ]  # fmt: skip


@pytest.fixture
def generate():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "proto" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_messages_are_those_of_the_definitions(generate, capsys):
    assert generate.main(["--check"]) == 0, capsys.readouterr().err


def test_a_check_names_what_differs_and_changes_nothing(generate, monkeypatch, capsys):
    changed = Path("din/v1/registry_pb2.py")
    there = generate.committed()
    monkeypatch.setattr(generate, "committed", lambda: there | {changed: "", Path("gone_pb2.py"): ""})
    before = (generate.TARGET / changed).read_text()
    assert generate.main(["--check"]) == 1
    output = capsys.readouterr().err
    assert "din_extproc/_proto/din/v1/registry_pb2.py" in output
    assert "gone_pb2.py" in output
    assert (generate.TARGET / changed).read_text() == before


def test_what_is_generated_does_not_depend_on_the_compilers_version(generate):
    text = "".join(content for path, content in generate.committed().items() if path.suffix == ".py")
    assert "runtime_version" not in text
    assert "Protobuf Python Version" not in text
    assert "_descriptor_pool" not in text
