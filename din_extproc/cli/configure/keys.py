"""The commands `keys ...`: API keys of tenants and tokens of nodes.

Rule: a key is printed once; only its hash is stored.
"""

import secrets
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from din_extproc.admit.keys import ENTROPY_BYTES, NewKey, make_key, make_node_token
from din_extproc.cli.options import DEFAULT_CONFIG, Config, Json, fail, fail_on, load_settings, number, print_json

if TYPE_CHECKING:
    from din_extproc.roles.configure.keys import MadeKey

keys_app = typer.Typer(no_args_is_help=True, help="Manage API keys of tenants and tokens of nodes.")

_LONGEST_DAYS = 36_500
"""Bound of `--expires-days`: dates beyond it may not exist in the calendar."""

KeyId = Annotated[str, typer.Argument(help="The key's id.")]


@keys_app.command("new")
def new(
    key_id: Annotated[str | None, typer.Argument(help="Names the key in logs: letters, digits, `-` and `.`.")] = None,
    tenant: Annotated[str, typer.Option(help="The key's tenant: the hash is stored in the configuration's `keys_file`.")] = "",
    expires_days: Annotated[float | None, number("Days for which the key is valid. [default: no expiry]", most=_LONGEST_DAYS)] = None,
    config: Config = DEFAULT_CONFIG,
    json: Json = False,  # noqa: FBT002 - a flag
) -> None:
    """Make an API key and print it once.

    With --tenant its hash is stored in `keys_file`; otherwise the line for din.yaml is printed.
    """
    from din_extproc.roles.configure import keys  # noqa: PLC0415 - the other commands start without it

    valid_for = None if expires_days is None else timedelta(days=expires_days)
    if tenant:
        with fail_on(keys.KeyFileError):
            stored = keys.make_key_of_tenant(load_settings(config), tenant, key_id, valid_for)
        _print_key(stored, json=json)
        return
    if key_id is None:
        fail("the key has no id; give an id, or --tenant to have one made")
    made, expires = _make(make_key, key_id), keys.expiry(valid_for)
    if json:
        print_json({"id": key_id, "key": made.text, "hash": made.hash, "expires": expires})
    else:
        until = "" if expires is None else f", expires: {_format_utc(expires)}"
        entry = f'  - {{ id: {key_id}, hash: "{made.hash}"{until} }}'
        typer.echo(f"for the client, shown once:\n  {made.text}\nfor din.yaml, under the tenant's keys:\n{entry}")


@keys_app.command("rotate")
def rotate(
    key_id: KeyId,
    overlap_hours: Annotated[float, number("Hours for which the old key stays valid.", most=_LONGEST_DAYS * 24)] = 24.0,
    config: Config = DEFAULT_CONFIG,
    json: Json = False,  # noqa: FBT002 - a flag
) -> None:
    """Replace a key in `keys_file`.

    The old key stays valid for the overlap.
    """
    from din_extproc.roles.configure import keys  # noqa: PLC0415 - the other commands start without it

    with fail_on(keys.KeyFileError):
        made = keys.rotate_key(load_settings(config), key_id, timedelta(hours=overlap_hours))
    _print_key(made, json=json)


@keys_app.command("revoke")
def revoke(key_id: KeyId, config: Config = DEFAULT_CONFIG) -> None:
    """Revoke a key in every replica, within a second."""
    from din_extproc.roles.configure import keys  # noqa: PLC0415 - the other commands start without it

    with fail_on(keys.KeyFileError):
        removed = keys.revoke_key(load_settings(config), key_id)
    typer.echo(f"{key_id} is revoked{'' if removed else '; also remove it from din.yaml within a month'}")


@keys_app.command("list")
def list_keys(
    config: Config = DEFAULT_CONFIG,
    json: Json = False,  # noqa: FBT002 - a flag
) -> None:
    """List key ids with tenant, state and expiry."""
    from din_extproc.roles.configure import keys  # noqa: PLC0415 - the other commands start without it

    found = keys.list_keys(load_settings(config))
    if json:
        print_json(found)
        return
    for key in found:
        until = "" if key.expires is None else f"  until {_format_utc(key.expires)}"
        typer.echo(f"{key.id:32}  {key.tenant:24}  {key.state}{until}")


@keys_app.command("node")
def node(
    node_id: Annotated[str, typer.Argument(help="The id that the node registers under.")],
    json: Json = False,  # noqa: FBT002 - a flag
) -> None:
    """Make a node's token and print it once.

    Its hash goes into the file that `gateway.registry.node_tokens_file` names.
    """
    made = _make(make_node_token, node_id)
    if json:
        print_json({"id": node_id, "token": made.text, "hash": made.hash})
    else:
        typer.echo(f'for the node, shown once:\n  {made.text}\nfor the file of node tokens:\n{node_id}: "{made.hash}"')


def _format_utc(moment: datetime) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def _make(make: Callable[[str, bytes], NewKey], name: str) -> NewKey:
    """Make a key or token with this id; a malformed id is a wrong call."""
    try:
        return make(name, secrets.token_bytes(ENTROPY_BYTES))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _print_key(made: "MadeKey", *, json: bool) -> None:
    if json:
        print_json(made)
    else:
        typer.echo(f"{made.id}, for the client of {made.tenant}, shown once:\n  {made.key}")
