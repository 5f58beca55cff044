"""The command line: parse, call a role, print. Its modules are the groups of `--help`: run, configure, plan, operate."""

from din_extproc.cli.app import main

__all__ = ["main"]
