"""The commands `keys ...`: keys of tenants and tokens of nodes.

Rule: as in `app.py`: parse, call a role, print. A key is printed once and kept nowhere.
"""

import secrets
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from din_extproc.admit.keys import ENTROPY_BYTES, NewKey, make_key, make_node_token
from din_extproc.cli.options import DEFAULT_CONFIG, Config, Json, amount, fail, print_json, settings_of

if TYPE_CHECKING:
    from din_extproc.roles.configure.keys import MadeKey

keys_app = typer.Typer(no_args_is_help=True, help="API keys of tenants, and tokens of nodes.")

_LONGEST_DAYS = 36_500
"""What is to be valid for longer needs no end."""

KeyId = Annotated[str, typer.Argument(help="The key's id.")]


@keys_app.command("new")
def new(
    key_id: Annotated[str | None, typer.Argument(help="Names the key in logs: letters, digits, `-` and `.`.")] = None,
    tenant: Annotated[str, typer.Option(help="Whose key: its hash is kept in the configuration's `keys_file`.")] = "",
    expires_days: Annotated[float | None, amount("For how many days it is valid; without it, for ever.", most=_LONGEST_DAYS)] = None,
    config: Config = DEFAULT_CONFIG,
    json: Json = False,  # noqa: FBT002 - a flag
) -> None:
    """Make a key. It is shown once. With --tenant its hash is kept in `keys_file`; without, it goes into din.yaml by hand."""
    from din_extproc.roles.configure import keys  # noqa: PLC0415 - the other commands start without it

    valid_for = None if expires_days is None else timedelta(days=expires_days)
    if tenant:
        try:
            kept = keys.new(settings_of(config), tenant, key_id, valid_for)
        except keys.KeyFileError as error:
            fail(str(error))
        _show(kept, json=json)
        return
    if key_id is None:
        fail("an id for the key is needed, or --tenant")
    made, expires = _made(make_key, key_id), keys.expiry(valid_for)
    if json:
        print_json({"id": key_id, "key": made.text, "hash": made.hash, "expires": expires})
    else:
        until = "" if expires is None else f", expires: {_moment(expires)}"
        entry = f'  - {{ id: {key_id}, hash: "{made.hash}"{until} }}'
        typer.echo(f"for the client, shown once:\n  {made.text}\nfor din.yaml, under the tenant's keys:\n{entry}")


@keys_app.command("rotate")
def rotate(
    key_id: KeyId,
    overlap_hours: Annotated[float, amount("For how long the old key stays valid.", most=_LONGEST_DAYS * 24)] = 24.0,
    config: Config = DEFAULT_CONFIG,
    json: Json = False,  # noqa: FBT002 - a flag
) -> None:
    """Make a successor of a key in `keys_file`; both are valid until the overlap is over."""
    from din_extproc.roles.configure import keys  # noqa: PLC0415 - the other commands start without it

    try:
        made = keys.rotate(settings_of(config), key_id, timedelta(hours=overlap_hours))
    except keys.KeyFileError as error:
        fail(str(error))
    _show(made, json=json)


@keys_app.command("revoke")
def revoke(key_id: KeyId, config: Config = DEFAULT_CONFIG) -> None:
    """Refuse a key in every replica from within a second on."""
    from din_extproc.roles.configure import keys  # noqa: PLC0415 - the other commands start without it

    try:
        removed = keys.revoke(settings_of(config), key_id)
    except keys.KeyFileError as error:
        fail(str(error))
    typer.echo(f"{key_id} is revoked{'' if removed else '; take it out of din.yaml within a month, too'}")


@keys_app.command("list")
def list_keys(
    config: Config = DEFAULT_CONFIG,
    json: Json = False,  # noqa: FBT002 - a flag
) -> None:
    """Every key: whose it is, and whether it is valid. Never the key itself."""
    from din_extproc.roles.configure import keys  # noqa: PLC0415 - the other commands start without it

    found = keys.listed(settings_of(config))
    if json:
        print_json(found)
        return
    for key in found:
        until = "" if key.expires is None else f"  until {_moment(key.expires)}"
        typer.echo(f"{key.id:32}  {key.tenant:24}  {key.state}{until}")


@keys_app.command("node")
def node(
    node_id: Annotated[str, typer.Argument(help="The id that the node registers under.")],
    json: Json = False,  # noqa: FBT002 - a flag
) -> None:
    """Make a node's token. It is shown once; its hash goes into the file that `gateway.registry.node_tokens_file` names."""
    made = _made(make_node_token, node_id)
    if json:
        print_json({"id": node_id, "token": made.text, "hash": made.hash})
    else:
        typer.echo(f'for the node, shown once:\n  {made.text}\nfor the file of node tokens:\n{node_id}: "{made.hash}"')


def _moment(moment: datetime) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def _made(make: Callable[[str, bytes], NewKey], name: str) -> NewKey:
    """A new key or token of this name; a name that can't be one is a wrong call."""
    try:
        return make(name, secrets.token_bytes(ENTROPY_BYTES))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _show(made: "MadeKey", *, json: bool) -> None:
    if json:
        print_json(made)
    else:
        typer.echo(f"{made.id}, for the client of {made.tenant}, shown once:\n  {made.key}")
