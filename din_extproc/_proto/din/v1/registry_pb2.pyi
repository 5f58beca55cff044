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

class NodeState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NODE_STATE_UNSPECIFIED: _ClassVar[NodeState]
    NODE_STATE_LOADING: _ClassVar[NodeState]
    NODE_STATE_READY: _ClassVar[NodeState]
    NODE_STATE_DRAINING: _ClassVar[NodeState]
    NODE_STATE_QUARANTINED: _ClassVar[NodeState]
    NODE_STATE_DEAD: _ClassVar[NodeState]
NODE_STATE_UNSPECIFIED: NodeState
NODE_STATE_LOADING: NodeState
NODE_STATE_READY: NodeState
NODE_STATE_DRAINING: NodeState
NODE_STATE_QUARANTINED: NodeState
NODE_STATE_DEAD: NodeState

class ModelInstance(_message.Message):
    __slots__ = ("model", "version", "max_concurrency")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_CONCURRENCY_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: str
    max_concurrency: int
    def __init__(self, model: _Optional[str] = ..., version: _Optional[str] = ..., max_concurrency: _Optional[int] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("id", "address", "model", "version", "dtype", "engine", "compute_capability", "tp_world_size", "max_seq_len", "max_concurrency", "pool", "network", "weights_sha256", "free_memory_bytes", "epoch", "instances")
    ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    TP_WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQ_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_CONCURRENCY_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    NETWORK_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_SHA256_FIELD_NUMBER: _ClassVar[int]
    FREE_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    id: str
    address: str
    model: str
    version: str
    dtype: str
    engine: str
    compute_capability: str
    tp_world_size: int
    max_seq_len: int
    max_concurrency: int
    pool: str
    network: str
    weights_sha256: str
    free_memory_bytes: int
    epoch: int
    instances: _containers.RepeatedCompositeFieldContainer[ModelInstance]
    def __init__(self, id: _Optional[str] = ..., address: _Optional[str] = ..., model: _Optional[str] = ..., version: _Optional[str] = ..., dtype: _Optional[str] = ..., engine: _Optional[str] = ..., compute_capability: _Optional[str] = ..., tp_world_size: _Optional[int] = ..., max_seq_len: _Optional[int] = ..., max_concurrency: _Optional[int] = ..., pool: _Optional[str] = ..., network: _Optional[str] = ..., weights_sha256: _Optional[str] = ..., free_memory_bytes: _Optional[int] = ..., epoch: _Optional[int] = ..., instances: _Optional[_Iterable[_Union[ModelInstance, _Mapping]]] = ...) -> None: ...

class InstanceLoad(_message.Message):
    __slots__ = ("model", "waiting", "running")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    model: str
    waiting: int
    running: int
    def __init__(self, model: _Optional[str] = ..., waiting: _Optional[int] = ..., running: _Optional[int] = ...) -> None: ...

class Adapters(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ...) -> None: ...

class Beat(_message.Message):
    __slots__ = ("state", "sequence", "waiting", "running", "kv_cache_usage", "tokens_in_use", "prefill_rate", "decode_rate", "free_memory_bytes", "reason", "instances", "adapters", "active_adapters", "adapter_slots", "cached_share")
    STATE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_USAGE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_IN_USE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_RATE_FIELD_NUMBER: _ClassVar[int]
    DECODE_RATE_FIELD_NUMBER: _ClassVar[int]
    FREE_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_SLOTS_FIELD_NUMBER: _ClassVar[int]
    CACHED_SHARE_FIELD_NUMBER: _ClassVar[int]
    state: NodeState
    sequence: int
    waiting: int
    running: int
    kv_cache_usage: float
    tokens_in_use: int
    prefill_rate: float
    decode_rate: float
    free_memory_bytes: int
    reason: str
    instances: _containers.RepeatedCompositeFieldContainer[InstanceLoad]
    adapters: Adapters
    active_adapters: _containers.RepeatedScalarFieldContainer[str]
    adapter_slots: int
    cached_share: float
    def __init__(self, state: _Optional[_Union[NodeState, str]] = ..., sequence: _Optional[int] = ..., waiting: _Optional[int] = ..., running: _Optional[int] = ..., kv_cache_usage: _Optional[float] = ..., tokens_in_use: _Optional[int] = ..., prefill_rate: _Optional[float] = ..., decode_rate: _Optional[float] = ..., free_memory_bytes: _Optional[int] = ..., reason: _Optional[str] = ..., instances: _Optional[_Iterable[_Union[InstanceLoad, _Mapping]]] = ..., adapters: _Optional[_Union[Adapters, _Mapping]] = ..., active_adapters: _Optional[_Iterable[str]] = ..., adapter_slots: _Optional[int] = ..., cached_share: _Optional[float] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: Node
    def __init__(self, node: _Optional[_Union[Node, _Mapping]] = ...) -> None: ...

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
    __slots__ = ("node_id", "lease", "beat")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    lease: str
    beat: Beat
    def __init__(self, node_id: _Optional[str] = ..., lease: _Optional[str] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("drain",)
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    drain: bool
    def __init__(self, drain: _Optional[bool] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("node_id", "lease", "reason")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    lease: str
    reason: str
    def __init__(self, node_id: _Optional[str] = ..., lease: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

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
    __slots__ = ("node", "state", "beat", "trust", "reasons", "last_heartbeat", "stale")
    NODE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    TRUST_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    LAST_HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    node: Node
    state: NodeState
    beat: Beat
    trust: float
    reasons: _containers.RepeatedScalarFieldContainer[str]
    last_heartbeat: _timestamp_pb2.Timestamp
    stale: bool
    def __init__(self, node: _Optional[_Union[Node, _Mapping]] = ..., state: _Optional[_Union[NodeState, str]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ..., trust: _Optional[float] = ..., reasons: _Optional[_Iterable[str]] = ..., last_heartbeat: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., stale: _Optional[bool] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("complete", "nodes")
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    complete: bool
    nodes: _containers.RepeatedCompositeFieldContainer[NodeStatus]
    def __init__(self, complete: _Optional[bool] = ..., nodes: _Optional[_Iterable[_Union[NodeStatus, _Mapping]]] = ...) -> None: ...
