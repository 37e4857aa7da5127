"""`hearth key`: the home's key, and the keys of people and apps."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from coordinator.cli.options import AsJsonOption, HomeOptions, KeyPathOption, expanded
from coordinator.cli.output import handles_errors, out, print_json, report
from hearth.errors import BadKey, BadSetting
from hearth.platform import security
from hearth.platform.curve import fingerprint, new_keypair
from hearth.wire.messages import AppRole

key_app = typer.Typer(
    no_args_is_help=True,
    help="Create, copy and revoke keys. Anyone who has the home key controls the home until you rotate it.",
)

ForceOption = Annotated[bool, typer.Option("--force", help="Overwrite an existing key; access to its home is lost.")]


def _key_path(key: Path | None) -> Path:
    return key or security.default_key_path(os.environ)


def _load_home_key(path: Path) -> security.HomeKey:
    credential = security.load_credential(path)
    if not isinstance(credential, security.HomeKey):
        raise BadKey(source=str(path), reason="this needs the home key, not an admin or app key")
    return credential


def new(key: KeyPathOption = None, force: ForceOption = False) -> None:
    """Create a new home key on this device."""
    security.save_credential(_key_path(key), security.new_home_key(), force)
    out.print(f"created a new home key in {_key_path(key)}", soft_wrap=True)
    out.print(
        "It stays on coordinators. For every other device: `hearth key add-device NAME` while the coordinator runs."
    )


def show(key: KeyPathOption = None, as_json: AsJsonOption = False) -> None:
    """Show the kind and fingerprints of the key, never the secret."""
    path = _key_path(key)
    credential = security.load_credential(path)
    access = security.coordinator_access(credential)
    facts = {
        "path": str(path),
        "kind": credential.kind,
        "own_fingerprint": fingerprint(access.own.public),
        "home_fingerprint": fingerprint(access.server_public),
    }
    if isinstance(credential, security.AppKey):
        facts["app"] = credential.name
    if as_json:
        print_json(facts)
        return
    for name, value in facts.items():
        out.print(f"{name.replace('_', ' ')}: {value}", soft_wrap=True)


def export(
    role: Annotated[str, typer.Option(help="home: for another coordinator. admin: for a person's computer.")] = "home",
    key: KeyPathOption = None,
) -> None:
    """Print the key as one line, for `hearth key import` on another device."""
    home = _load_home_key(_key_path(key))
    if role not in ("home", "admin"):
        raise BadSetting(setting="--role", reason=f"'{role}' is neither home nor admin")
    if role == "home":
        report("[yellow]Anyone who sees the next line controls this home until `hearth key rotate`.[/]")
    typer.echo(security.format_credential(home if role == "home" else security.admin_key(home)))


def import_(
    source: Annotated[str, typer.Argument(help="File with the exported line; '-' reads standard input.")] = "-",
    key: KeyPathOption = None,
    force: ForceOption = False,
) -> None:
    """Import a key that was exported on another device."""
    if source == "-":
        credential = security.parse_credential(sys.stdin.read(), "standard input")
    else:
        credential = security.load_credential(Path(source))
    security.save_credential(_key_path(key), credential, force)
    out.print(f"imported the {credential.kind} key to {_key_path(key)}", soft_wrap=True)


def rotate(key: KeyPathOption = None) -> None:
    """Replace the home key. Every device, person and app then needs a new key; the old keys stop working."""
    path = _key_path(key)
    old = _load_home_key(path)
    security.save_credential(path.with_name(path.name + ".old"), old, force=True)
    security.save_credential(path, security.new_home_key(), force=True)
    out.print(f"rotated; the old key is kept in {path}.old", soft_wrap=True)
    out.print("Now, in this order:")
    out.print(
        "  1. on every other device with the home key: `hearth key export` here, `hearth key import --force` there"
    )
    out.print("  2. restart hearth-agent on these devices and here, then the coordinators")
    out.print("  3. make new keys for devices (`hearth key revoke-device NAME`, then `add-device NAME`), for apps")
    out.print("     (`hearth key revoke NAME`, then `add-app NAME`), and for people (`hearth key export --role admin`)")


def add_app(
    name: Annotated[str, typer.Argument(help="Name of the app: a-z, 0-9 and -, at most 32 characters.")],
    *,
    where: HomeOptions,
    token: Annotated[
        bool,
        typer.Option("--token", help="Print a bearer token for the HTTP gateway instead of a key for the library."),
    ] = False,
    role: Annotated[
        str,
        typer.Option(
            help="app: ask models. metrics: read the metrics of the home. observer: as app, and read events and metrics."
        ),
    ] = "app",
    as_json: AsJsonOption = False,
) -> None:
    """Create a key for an app, for inference requests only. Needs an admin or home key and the running coordinator."""
    if role not in get_args(AppRole):
        raise BadSetting(setting="--role", reason=f"'{role}' is none of {', '.join(get_args(AppRole))}")
    credential = security.resolve_credential(where.key)
    pair = new_keypair()
    with where.connect() as home:
        warning = home.add_app(name, pair.public, role=cast(AppRole, role))
    home_public = security.coordinator_access(credential).server_public
    app = security.AppKey(name=name, secret=pair.secret, coordinator_public=home_public)
    _warn(warning)
    line = security.format_token(app) if token else security.format_credential(app)
    if as_json:
        print_json({"name": name, "token" if token else "key": line, "fingerprint": fingerprint(pair.public)})
        return
    if token:
        report(f"The token is shown only once. Give it to {name} as its API key; `hearth gateway` answers it:")
        typer.echo(line)
        return
    report(f"The key is shown only once. Give it to {name} in the file that $HEARTH_KEY names, or as connect(key=...):")
    typer.echo(line)


def revoke(name: Annotated[str, typer.Argument(help="Name of the app.")], *, where: HomeOptions) -> None:
    """Revoke an app's key: its running and later requests fail. Needs an admin or home key and the running coordinator."""
    with where.connect() as home:
        warning = home.revoke_app(name)
    out.print(f"revoked {name}")
    _warn(warning)


def add_device(
    name: Annotated[str, typer.Argument(help="Name of the device: a-z, 0-9 and -, at most 32 characters.")],
    *,
    where: HomeOptions,
    as_json: AsJsonOption = False,
) -> None:
    """Create a key for one device's agent, which can be revoked alone. Needs the home key and the running coordinator."""
    home_key = _load_home_key(_key_path(where.key))
    device = security.new_device_key(home_key, name)
    public = security.agent_trust(device).own.public
    with where.connect(key=home_key) as home:
        warning = home.add_device(name, public)
    _warn(warning)
    line = security.format_credential(device)
    if as_json:
        print_json({"name": name, "key": line, "fingerprint": fingerprint(public)})
        return
    report(f"The key is shown only once. On {name}, install.sh asks for it, or `hearth key import --force` takes it:")
    typer.echo(line)


def revoke_device(
    name: Annotated[str, typer.Argument(help="Name of the device, as given to `hearth key add-device`.")],
    *,
    where: HomeOptions,
) -> None:
    """Shut out one device with a key of its own at once, for instance a stolen one. Needs the running coordinator."""
    with where.connect() as home:
        warning = home.revoke_device(name)
    out.print(f"revoked {name}; models are served without it from now on")
    _warn(warning)


def _warn(warning: str) -> None:
    """Say why a change of keys may not last, if it may not."""
    if warning:
        report(f"warning: {warning}; repeat the command later")


for command in (new, show, export, import_, rotate, add_app, revoke, add_device, revoke_device):
    key_app.command(command.__name__.rstrip("_").replace("_", "-"))(handles_errors(expanded(command)))
