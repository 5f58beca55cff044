from din_extproc._proto.envoy.config.core.v3 import address_pb2 as _address_pb2
from din_extproc._proto.envoy.config.core.v3 import base_pb2 as _base_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Endpoint(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: _address_pb2.Address
    def __init__(self, address: _Optional[_Union[_address_pb2.Address, _Mapping]] = ...) -> None: ...

class LbEndpoint(_message.Message):
    __slots__ = ("endpoint", "metadata")
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    endpoint: Endpoint
    metadata: _base_pb2.Metadata
    def __init__(self, endpoint: _Optional[_Union[Endpoint, _Mapping]] = ..., metadata: _Optional[_Union[_base_pb2.Metadata, _Mapping]] = ...) -> None: ...

class LocalityLbEndpoints(_message.Message):
    __slots__ = ("lb_endpoints",)
    LB_ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    lb_endpoints: _containers.RepeatedCompositeFieldContainer[LbEndpoint]
    def __init__(self, lb_endpoints: _Optional[_Iterable[_Union[LbEndpoint, _Mapping]]] = ...) -> None: ...
