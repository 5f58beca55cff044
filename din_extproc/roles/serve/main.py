"""The command `serve`: the configuration is read, the sidecar runs until a signal, and what goes wrong before that becomes an exit code.

Rule: everything that can be said about a wrong start is said in one line.
"""

import logging
import os
import sys

import uvloop

from din_extproc.edge.connection_limiter import open_as_many_files_as_allowed
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
        print(settings, file=sys.stderr)  # noqa: T201 - for the person who starts it; nothing runs yet
        return 1
    open_as_many_files_as_allowed()
    if options.worker is None:
        for warning in settings.warnings:
            _log.warning("%s", warning)
    try:
        uvloop.run(_serve(settings, options, source))
    except OSError as error:
        _log.error("can't start: %s", error)
        return 1
    except (WorkerFailed, CertificateUnusable) as error:
        _log.error("%s", error)
        return 1
    return 0


async def _serve(settings: Settings, options: ServeOptions, source: CatalogSource) -> None:
    """Made inside the loop: grpcio's servers belong to the one they are made in."""
    await GatewayProcess(settings, options, source).run()
