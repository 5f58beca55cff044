import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Health(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HEALTH_UNSPECIFIED: _ClassVar[Health]
    HEALTH_SERVING: _ClassVar[Health]
    HEALTH_DEGRADED: _ClassVar[Health]
    HEALTH_FAILING: _ClassVar[Health]

class NodeState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NODE_STATE_UNSPECIFIED: _ClassVar[NodeState]
    NODE_STATE_READY: _ClassVar[NodeState]
    NODE_STATE_RAMPING: _ClassVar[NodeState]
    NODE_STATE_DRAINING: _ClassVar[NodeState]
    NODE_STATE_EJECTED: _ClassVar[NodeState]
    NODE_STATE_DEAD: _ClassVar[NodeState]
HEALTH_UNSPECIFIED: Health
HEALTH_SERVING: Health
HEALTH_DEGRADED: Health
HEALTH_FAILING: Health
NODE_STATE_UNSPECIFIED: NodeState
NODE_STATE_READY: NodeState
NODE_STATE_RAMPING: NodeState
NODE_STATE_DRAINING: NodeState
NODE_STATE_EJECTED: NodeState
NODE_STATE_DEAD: NodeState

class Node(_message.Message):
    __slots__ = ("id", "address", "port", "engine", "compute_capability", "total_memory_bytes", "network", "site", "models")
    ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    NETWORK_FIELD_NUMBER: _ClassVar[int]
    SITE_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    id: str
    address: str
    port: int
    engine: str
    compute_capability: str
    total_memory_bytes: int
    network: str
    site: str
    models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, id: _Optional[str] = ..., address: _Optional[str] = ..., port: _Optional[int] = ..., engine: _Optional[str] = ..., compute_capability: _Optional[str] = ..., total_memory_bytes: _Optional[int] = ..., network: _Optional[str] = ..., site: _Optional[str] = ..., models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "version", "dtype", "weights_sha256", "tp_world_size", "max_seq_len", "instances", "max_concurrency")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_SHA256_FIELD_NUMBER: _ClassVar[int]
    TP_WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQ_LEN_FIELD_NUMBER: _ClassVar[int]
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    MAX_CONCURRENCY_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    dtype: str
    weights_sha256: str
    tp_world_size: int
    max_seq_len: int
    instances: int
    max_concurrency: int
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., dtype: _Optional[str] = ..., weights_sha256: _Optional[str] = ..., tp_world_size: _Optional[int] = ..., max_seq_len: _Optional[int] = ..., instances: _Optional[int] = ..., max_concurrency: _Optional[int] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("free_memory_bytes", "models")
    FREE_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    free_memory_bytes: int
    models: _containers.RepeatedCompositeFieldContainer[ModelLoad]
    def __init__(self, free_memory_bytes: _Optional[int] = ..., models: _Optional[_Iterable[_Union[ModelLoad, _Mapping]]] = ...) -> None: ...

class ModelLoad(_message.Message):
    __slots__ = ("model", "running", "queue_depth", "tokens_in_use", "kv_cache_usage")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    QUEUE_DEPTH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_IN_USE_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_USAGE_FIELD_NUMBER: _ClassVar[int]
    model: str
    running: int
    queue_depth: int
    tokens_in_use: int
    kv_cache_usage: float
    def __init__(self, model: _Optional[str] = ..., running: _Optional[int] = ..., queue_depth: _Optional[int] = ..., tokens_in_use: _Optional[int] = ..., kv_cache_usage: _Optional[float] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("node", "load")
    NODE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    node: Node
    load: Load
    def __init__(self, node: _Optional[_Union[Node, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("lease", "heartbeat_interval", "dead_after", "warnings")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    DEAD_AFTER_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    lease: str
    heartbeat_interval: _duration_pb2.Duration
    dead_after: _duration_pb2.Duration
    warnings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, lease: _Optional[str] = ..., heartbeat_interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., dead_after: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., warnings: _Optional[_Iterable[str]] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("node_id", "lease", "sequence", "health", "load", "sent_at")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    SENT_AT_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    lease: str
    sequence: int
    health: Health
    load: Load
    sent_at: _timestamp_pb2.Timestamp
    def __init__(self, node_id: _Optional[str] = ..., lease: _Optional[str] = ..., sequence: _Optional[int] = ..., health: _Optional[_Union[Health, str]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., sent_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("heartbeat_interval", "drain")
    HEARTBEAT_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    heartbeat_interval: _duration_pb2.Duration
    drain: bool
    def __init__(self, heartbeat_interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., drain: _Optional[bool] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("node_id", "lease", "deadline", "reason")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    lease: str
    deadline: _duration_pb2.Duration
    reason: str
    def __init__(self, node_id: _Optional[str] = ..., lease: _Optional[str] = ..., deadline: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("in_flight",)
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    in_flight: int
    def __init__(self, in_flight: _Optional[int] = ...) -> None: ...

class DeregisterRequest(_message.Message):
    __slots__ = ("node_id", "lease", "reason")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    lease: str
    reason: str
    def __init__(self, node_id: _Optional[str] = ..., lease: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class DeregisterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NodeStatus(_message.Message):
    __slots__ = ("node", "state", "load", "trust", "last_heartbeat")
    NODE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    TRUST_FIELD_NUMBER: _ClassVar[int]
    LAST_HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    node: Node
    state: NodeState
    load: Load
    trust: float
    last_heartbeat: _timestamp_pb2.Timestamp
    def __init__(self, node: _Optional[_Union[Node, _Mapping]] = ..., state: _Optional[_Union[NodeState, str]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., trust: _Optional[float] = ..., last_heartbeat: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("revision", "complete", "nodes", "removed")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    revision: int
    complete: bool
    nodes: _containers.RepeatedCompositeFieldContainer[NodeStatus]
    removed: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, revision: _Optional[int] = ..., complete: _Optional[bool] = ..., nodes: _Optional[_Iterable[_Union[NodeStatus, _Mapping]]] = ..., removed: _Optional[_Iterable[str]] = ...) -> None: ...
