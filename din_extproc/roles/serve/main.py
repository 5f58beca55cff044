"""The command `serve`: load the configuration, run the sidecar until a signal, return the exit code.

Rule: a failed start is reported in one line.
"""

import logging
import os
import sys

import uvloop

from din_extproc.edge.connection_limiter import raise_open_file_limit
from din_extproc.edge.process.workers import WorkerFailed
from din_extproc.edge.registry.catalog_source import CatalogSource
from din_extproc.edge.tls import CertificateUnusable
from din_extproc.roles.serve.gateway_process import GatewayProcess
from din_extproc.roles.serve.options import ServeOptions
from din_extproc.settings.load import load
from din_extproc.settings.problems import ConfigRejected
from din_extproc.settings.settings import Settings

_log = logging.getLogger(__name__)


def run(options: ServeOptions) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code; 1 when the configuration is refused, an address is taken or a worker fails."""
    source = CatalogSource()
    settings = load(options.config, os.environ, source)
    if isinstance(settings, ConfigRejected):
        print(settings, file=sys.stderr)  # noqa: T201 - the log is for running processes
        return 1
    raise_open_file_limit()
    if options.worker is None:
        for warning in settings.warnings:
            _log.warning("%s", warning)
    try:
        uvloop.run(_serve(settings, options, source))
    except OSError as error:
        _log.error("start failed: %s", error)
        return 1
    except (WorkerFailed, CertificateUnusable) as error:
        _log.error("%s", error)
        return 1
    return 0


async def _serve(settings: Settings, options: ServeOptions, source: CatalogSource) -> None:
    """Build the process inside the event loop, to which grpcio's servers are bound."""
    await GatewayProcess(settings, options, source).run()
