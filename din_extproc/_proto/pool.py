"""The descriptor pool of our messages: not protobuf's default one, which belongs to whoever imports first.

Rule: the messages bear Envoy's, gRPC's and Google's own names, so that only a pool of our own lets them live beside a full
definition of the same message in one process (`grpcio-health-checking`, `googleapis-common-protos`, `xds-protos`).
Well-known types come as classes of this pool too: fill them in place (`message.field.update(...)`), don't assign protobuf's own.
"""

from google.protobuf import any_pb2, duration_pb2, struct_pb2, timestamp_pb2, wrappers_pb2
from google.protobuf.descriptor_pool import DescriptorPool

POOL = DescriptorPool()
for _module in (any_pb2, duration_pb2, struct_pb2, timestamp_pb2, wrappers_pb2):
    POOL.AddSerializedFile(_module.DESCRIPTOR.serialized_pb)
