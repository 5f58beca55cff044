"""Updates from the accounting process reach the handler of each part that has changed, and no other."""

import yaml

from din_extproc.admit.local import LocalLedger
from din_extproc.edge.background import Background
from din_extproc.edge.telemetry.counters import DecisionCounters
from din_extproc.roles.serve.worker import Worker
from din_extproc.roles.serve.worker_update import WorkerUpdate
from din_extproc.settings.load import load
from tests.support.stack import tenant


def test_an_update_calls_the_handlers_of_the_parts_that_have_changed():
    called = []
    handlers = {name: lambda value, name=name: called.append((name, value)) for name in WorkerUpdate.__struct_fields__}
    WorkerUpdate(audit_blocked=False, configuration="f1").apply(handlers)
    assert called == [("audit_blocked", False), ("configuration", "f1")]


def test_a_worker_has_a_handler_for_every_part(tmp_path):
    file = tmp_path / "din.yaml"
    node = {"id": "n", "address": "127.0.0.1:1", "version": "1.0", "dtype": "bf16", "max_seq_len": 4096}
    pools = {"p": {"model": "m", "engine": "vllm", "nodes": [node]}}
    file.write_text(yaml.safe_dump({"version": 1, "pools": pools, "tenants": [tenant("acme")]}))
    followed = []
    worker = Worker(
        load(file, {}), object(), LocalLedger(lambda: 0), Background(), counters=DecisionCounters(), follow_config=followed.append
    )
    assert list(worker._handlers) == list(WorkerUpdate.__struct_fields__)
    worker.apply(WorkerUpdate(configuration="f1"))
    assert followed == ["f1"]
