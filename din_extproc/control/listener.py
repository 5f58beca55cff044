"""The downstream listener: HTTP/1.1 and HTTP/2, and the requests that it rejects before any filter runs.

Invariant: a path reaches the sidecar as the client sent it. Normalising it here would give every route a second spelling.
"""

from envoy_data_plane.envoy.config.core.v3 import (
    DataSource,
    Http1ProtocolOptions,
    Http2ProtocolOptions,
    HttpProtocolOptions,
    HttpProtocolOptionsHeadersWithUnderscoresAction,
    TransportSocket,
)
from envoy_data_plane.envoy.config.listener.v3 import Filter, FilterChain, Listener
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import (
    HttpConnectionManager,
    HttpConnectionManagerCodecType,
    HttpConnectionManagerPathWithEscapedSlashesAction,
    HttpConnectionManagerServerHeaderTransformation,
    Rds,
)
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import (
    HttpConnectionManagerForwardClientCertDetails as ForwardClientCertDetails,
)
from envoy_data_plane.envoy.extensions.transport_sockets.tls.v3 import (
    CertificateValidationContext,
    CommonTlsContext,
    DownstreamTlsContext,
    TlsCertificate,
)
from envoy_data_plane.envoy.type.matcher.v3 import StringMatcher
from envoy_data_plane.google.protobuf import Any as PackedAny

from din_extproc.control.access_log import build_access_log
from din_extproc.control.early_headers import build_early_header_mutation
from din_extproc.control.filters import build_http_filters
from din_extproc.control.local_replies import build_local_reply_config
from din_extproc.control.packing import make_address, make_ads_source, pack_extension, to_duration
from din_extproc.control.routes import ROUTE_CONFIGURATION, build_route_configuration
from din_extproc.control.topology import ListenerTls, Topology
from din_extproc.domain.identity import TrustedGateway

EDIT_ROOM_BYTES = 64 << 10
"""Bytes that Envoy holds above the limit of a body, for the sidecar makes it a little longer: a body as large as allowed passes with its
model renamed. What a client sends in between is refused by the sidecar."""
_CLIENT_KEEPALIVE_MS = 3_600_000
_HEADERS_TIMEOUT_MS = 10_000
_HTTP2_STREAMS = 256
_HEADERS = 128
"""Of a request, the gateway's own included. Envoy's default of 100 would leave a client that sends 90 no room for those."""


def build_listener(topology: Topology) -> Listener:
    """The gateway's listener."""
    manager = pack_extension("envoy.filters.network.http_connection_manager", build_connection_manager(topology))
    return Listener(
        name="din",
        address=make_address(topology.listener),
        per_connection_buffer_limit_bytes=compute_held_bytes(topology),
        filter_chains=[
            FilterChain(
                filters=[Filter(name=manager.name, typed_config=manager.typed_config)],
                transport_socket=None if topology.tls is None else _tls(topology.tls),
            )
        ],
    )


def _tls(tls: ListenerTls) -> TransportSocket:
    """A certificate that a client shows is verified, also where it need not show one."""
    trusted = None if tls.client_ca is None else CertificateValidationContext(trusted_ca=DataSource(filename=tls.client_ca))
    pair = TlsCertificate(certificate_chain=DataSource(filename=tls.cert), private_key=DataSource(filename=tls.key))
    common = CommonTlsContext(tls_certificates=[pair], validation_context=trusted, alpn_protocols=["h2", "http/1.1"])
    context = DownstreamTlsContext(common_tls_context=common, require_client_certificate=tls.requires_certificate)
    return TransportSocket(name="envoy.transport_sockets.tls", typed_config=PackedAny.pack(context))


def _forwarded_certificates(gateway: TrustedGateway | None) -> ForwardClientCertDetails:
    """`x-forwarded-client-cert` is removed from what clients send unless a gateway in front may say it; the sidecar checks that it did."""
    if gateway is None or not gateway.client_certificate:
        return ForwardClientCertDetails.SANITIZE
    return ForwardClientCertDetails.ALWAYS_FORWARD_ONLY if gateway.networks else ForwardClientCertDetails.FORWARD_ONLY


def compute_held_bytes(topology: Topology) -> int:
    """Return the bytes that Envoy may hold of one request. Over HTTP/2 it holds the stream's window, and refuses longer bodies."""
    return topology.body_limit_bytes + EDIT_ROOM_BYTES


def build_connection_manager(topology: Topology) -> HttpConnectionManager:
    """Return the HTTP connection manager: the filters, and the settings around them."""
    return HttpConnectionManager(
        stat_prefix="din",
        codec_type=HttpConnectionManagerCodecType.AUTO,
        route_config=build_route_configuration(topology) if topology.discovery is None else None,
        rds=None if topology.discovery is None else Rds(config_source=make_ads_source(), route_config_name=ROUTE_CONFIGURATION),
        http_filters=build_http_filters(topology),
        access_log=[build_access_log(topology)],
        local_reply_config=build_local_reply_config(),
        early_header_mutation_extensions=[build_early_header_mutation()],
        use_remote_address=True,
        forward_client_cert_details=_forwarded_certificates(topology.identity.gateway),
        generate_request_id=True,
        preserve_external_request_id=False,
        server_name="din",
        server_header_transformation=HttpConnectionManagerServerHeaderTransformation.OVERWRITE,
        normalize_path=False,
        merge_slashes=False,
        path_with_escaped_slashes_action=HttpConnectionManagerPathWithEscapedSlashesAction.KEEP_UNCHANGED,
        request_timeout=to_duration(topology.timeouts.request_ms),
        request_headers_timeout=to_duration(_HEADERS_TIMEOUT_MS),
        stream_idle_timeout=to_duration(topology.timeouts.stream_idle_ms),
        common_http_protocol_options=HttpProtocolOptions(
            idle_timeout=to_duration(_CLIENT_KEEPALIVE_MS),
            max_headers_count=_HEADERS,
            headers_with_underscores_action=HttpProtocolOptionsHeadersWithUnderscoresAction.DROP_HEADER,
        ),
        http_protocol_options=Http1ProtocolOptions(
            override_stream_error_on_invalid_http_message=True,
            ignore_http_11_upgrade=[StringMatcher(exact="websocket", ignore_case=True)],
        ),
        http2_protocol_options=Http2ProtocolOptions(
            max_concurrent_streams=_HTTP2_STREAMS,
            initial_stream_window_size=compute_held_bytes(topology),
            initial_connection_window_size=compute_held_bytes(topology),
            override_stream_error_on_invalid_http_message=True,
        ),
    )
