"""The command line: parse, call a role, print."""

from din_extproc.cli.app import main

__all__ = ["main"]
