"""`hearth key`: the home's key, and the keys of people and apps."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli.options import Address, AsJson, Interfaces, KeyPath, interface_list
from coordinator.cli.output import handles_errors, out, print_json, report
from hearth.client.sync import connect
from hearth.errors import BadKey, BadSetting
from hearth.platform.security import (
    AppKey,
    HomeKey,
    admin_key,
    coordinator_access,
    default_key_path,
    fingerprint,
    format_credential,
    load_credential,
    new_home_key,
    new_keypair,
    parse_credential,
    resolve_credential,
    save_credential,
)

key_app = typer.Typer(
    no_args_is_help=True,
    help="Make, move and revoke keys. The home key is everything: whoever has it owns the home until you rotate it.",
)

Force = Annotated[bool, typer.Option("--force", help="Overwrite a key that is there; access to its home is lost.")]


def _path(key: Path | None) -> Path:
    return key or default_key_path(os.environ)


def _home(path: Path) -> HomeKey:
    credential = load_credential(path)
    if not isinstance(credential, HomeKey):
        raise BadKey(source=str(path), reason="this needs the home key, not an admin's or an app's")
    return credential


def new(key: KeyPath = None, force: Force = False) -> None:
    """Make a new home key on this device."""
    save_credential(_path(key), new_home_key(), force)
    out.print(f"made a new home key in {_path(key)}", soft_wrap=True)
    out.print("On every other device: `hearth key export` here, `hearth key import` there.")


def show(key: KeyPath = None, as_json: AsJson = False) -> None:
    """Show what key this is: its kind and fingerprints, never the secret."""
    path = _path(key)
    credential = load_credential(path)
    access = coordinator_access(credential)
    facts = {
        "path": str(path),
        "kind": credential.kind,
        "own_fingerprint": fingerprint(access.own.public),
        "home_fingerprint": fingerprint(access.server_public),
    }
    if isinstance(credential, AppKey):
        facts["app"] = credential.name
    if as_json:
        print_json(facts)
        return
    for name, value in facts.items():
        out.print(f"{name.replace('_', ' ')}: {value}", soft_wrap=True)


def export(
    role: Annotated[
        str, typer.Option(help="home: for agents and coordinators. admin: for a person's own computer.")
    ] = "home",
    key: KeyPath = None,
) -> None:
    """Print the key as one line, to import elsewhere."""
    home = _home(_path(key))
    if role not in ("home", "admin"):
        raise BadSetting(setting="--role", reason=f"'{role}' is neither home nor admin")
    if role == "home":
        report("[yellow]Whoever sees the next line owns this home until `hearth key rotate`.[/]")
    typer.echo(format_credential(home if role == "home" else admin_key(home)))


def import_(
    source: Annotated[str, typer.Argument(help="File with the exported line; '-' reads standard input.")] = "-",
    key: KeyPath = None,
    force: Force = False,
) -> None:
    """Take over a key that was exported elsewhere."""
    credential = (
        parse_credential(sys.stdin.read(), "standard input") if source == "-" else load_credential(Path(source))
    )
    save_credential(_path(key), credential, force)
    out.print(f"imported the {credential.kind} key to {_path(key)}", soft_wrap=True)


def rotate(key: KeyPath = None) -> None:
    """Replace the home key. Every device, person and app needs the new one; the old one opens nothing any more."""
    path = _path(key)
    old = _home(path)
    save_credential(path.with_name(path.name + ".old"), old, force=True)
    save_credential(path, new_home_key(), force=True)
    out.print(f"rotated; the old key is kept in {path}.old", soft_wrap=True)
    out.print("Now, in this order:")
    out.print("  1. on every device: `hearth key export` here, `hearth key import --force` there, restart hearth-agent")
    out.print("  2. restart the coordinator")
    out.print("  3. make new keys for people (`hearth key export --role admin`) and apps (`hearth key add-app NAME`)")


def add_app(
    name: Annotated[str, typer.Argument(help="a-z, 0-9 and -, at most 32 characters.")],
    address: Address = None,
    mdns_interfaces: Interfaces = None,
    key: KeyPath = None,
    as_json: AsJson = False,
) -> None:
    """Make a key for an app: it may ask for inference, nothing else. Needs the running coordinator."""
    credential = resolve_credential(key)
    pair = new_keypair()
    with connect(address, credential, interfaces=interface_list(mdns_interfaces)) as home:
        home.add_app(name, pair.public)
    app = AppKey(name=name, secret=pair.secret, coordinator_public=coordinator_access(credential).server_public)
    line = format_credential(app)
    if as_json:
        print_json({"name": name, "key": line, "fingerprint": fingerprint(pair.public)})
        return
    report(f"The app's key, shown this once; give it to {name} as $HEARTH_KEY file or connect(key=...):")
    typer.echo(line)


def revoke(
    name: Annotated[str, typer.Argument(help="The app to shut out.")],
    address: Address = None,
    mdns_interfaces: Interfaces = None,
    key: KeyPath = None,
) -> None:
    """Shut an app out, from its next request on. Needs the running coordinator."""
    with connect(address, key, interfaces=interface_list(mdns_interfaces)) as home:
        home.revoke_app(name)
    out.print(f"revoked {name}")


for command in (new, show, export, import_, rotate, add_app, revoke):
    key_app.command(command.__name__.rstrip("_").replace("_", "-"))(handles_errors(command))
