"""`hearth gateway`: the HTTP gateway, for software that speaks OpenAI's or Ollama's API."""

from __future__ import annotations

import os
import re
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli.options import HomeOptions
from coordinator.cli.output import report
from coordinator.http.settings import HTTP_PORT, HttpSettings, check_installed
from coordinator.serve.config import default_state_dir
from hearth.errors import BadRequest, BadSetting, KeyMissing
from hearth.platform import security
from hearth.platform.curve import new_keypair


def gateway(
    listen: Annotated[str, typer.Option(help="Local address to listen on; 0.0.0.0 or :: for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="TCP port (0: any free port).", min=0, max=65535)] = HTTP_PORT,
    allow_host: Annotated[
        list[str],
        typer.Option(help="A name under which clients ask for this gateway, if it is not a local one.", metavar="NAME"),
    ] = [],  # noqa: B006 (typer's form of an empty default)
    certificate: Annotated[Path | None, typer.Option(help="PEM file: speak TLS. Needs --private-key.")] = None,
    private_key: Annotated[Path | None, typer.Option(help="PEM file of the certificate's key.")] = None,
    tls: Annotated[
        bool,
        typer.Option("--tls", help="Speak TLS with a self-made certificate, whose authority clients have to trust."),
    ] = False,
    state_dir: Annotated[Path | None, typer.Option(help="Directory of the self-made certificate.")] = None,
    no_advertise: Annotated[
        bool, typer.Option("--no-advertise", help="Do not advertise over mDNS. On loopback, it never does.")
    ] = False,
    *,
    where: HomeOptions,
) -> None:
    """Answer OpenAI's and Ollama's APIs over HTTP until stopped. Clients need a token: `hearth key add-app NAME --token`."""
    check_installed(tls)
    if tls and certificate is not None:
        raise BadSetting(setting="--tls", reason="--tls makes a certificate, and --certificate names one")
    if (certificate is None) != (private_key is None):
        raise BadSetting(setting="--certificate", reason="--certificate and --private-key belong together")
    for option, path in (("--certificate", certificate), ("--private-key", private_key)):
        if path is not None and not os.access(path, os.R_OK):
            raise BadSetting(setting=option, reason=f"{path} cannot be read")
    interfaces = where.interfaces
    app = _app_key(where)
    settings = HttpSettings(
        host=listen, port=port, key=security.format_credential(app), address=where.address,
        interfaces=tuple(interfaces) if interfaces else None, advertise=not no_advertise,
        allowed_hosts=tuple(name.lower() for name in allow_host),
        certificate=str(certificate) if certificate else None, private_key=str(private_key) if private_key else None,
        tls_folder=(state_dir or default_state_dir(os.environ, "hearth-gateway")) / "tls" if tls else None,
    )  # fmt: skip
    _become_gateway(settings)


def _app_key(where: HomeOptions) -> security.AppKey:
    """The app key in the key file. Next to an admin or home key, a key for the gateway is kept, and made the first time."""
    path = where.key or security.default_key_path(os.environ)
    credential = security.resolve_credential(path)
    if isinstance(credential, security.AppKey):
        return credential
    own = path.with_name(f"{path.name}.gateway")
    coordinator_public = security.coordinator_access(credential).server_public
    try:
        kept = security.load_credential(own)
        if isinstance(kept, security.AppKey) and kept.coordinator_public == coordinator_public:
            return kept
    except KeyMissing:
        pass
    pair = new_keypair()
    name = "http-" + (re.sub("[^a-z0-9-]", "-", socket.gethostname().lower())[:27] or "gateway")
    with where.connect(key=credential) as home:
        try:
            home.add_app(name, pair.public)
        except BadRequest:  # an earlier key, whose file is gone
            home.revoke_app(name)
            home.add_app(name, pair.public)
    made = security.AppKey(name=name, secret=pair.secret, coordinator_public=coordinator_public)
    security.save_credential(own, made, force=True)
    report(f"made the key of the app {name} for this gateway, in {own}")
    return made


def _become_gateway(settings: HttpSettings) -> None:
    """Replace this process, which may have read the home key, by the gateway."""
    reading, writing = os.pipe()
    os.write(writing, settings.model_dump_json().encode())
    os.close(writing)
    os.dup2(reading, 0)
    os.close(reading)
    os.execv(sys.executable, [sys.executable, "-m", "coordinator.http"])
