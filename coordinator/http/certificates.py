"""A self-made certificate of the gateway, of an authority that is made once and that clients have to trust.

The authority's key could vouch for any site to those who trust it, so that its certificate limits it to the names of a home
(name constraints, RFC 5280, section 4.2.1.10). Only a gateway that makes its certificate imports this module: `cryptography`
takes 9 MB.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import socket
import ssl
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from coordinator.http.settings import LOCAL_SUFFIXES
from hearth.errors import BadSetting, DiskHung
from hearth.files import write_atomically
from hearth.platform.disk import FILE_SECONDS, on_disk
from hearth.platform.network import all_addresses

log = logging.getLogger(__name__)

AUTHORITY_FILE = "authority.pem"  # what clients are given
_AUTHORITY_KEY_FILE = "authority.key"  # its key and its certificate
_GATEWAY_FILE = "gateway.pem"  # key, certificate and authority of the gateway: one file, so that they belong together
# Not counted from now on: a device without a battery for its clock may start in the past. The end is the last one that old
# clients can read (RFC 5280, section 4.1.2.5).
_AUTHORITY_BEGINS = datetime(2020, 1, 1, tzinfo=timezone.utc)
_AUTHORITY_ENDS = datetime(2049, 12, 31, tzinfo=timezone.utc)
_VALID = timedelta(days=90)
_RENEWED_BEFORE_END = timedelta(days=30)
_LOOK_SECONDS = 60.0  # an address that a router has changed is certified after this
_CLOCK_TOLERANCE = timedelta(days=1)  # by which the clock of a client may be late
_ALL_ADDRESSES = ("0.0.0.0", "::")
_DNS_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")


class OwnCertificate(NamedTuple):
    """A certificate that is valid now. `chain` is a file with key, certificate and authority, for its owner only."""

    chain: Path
    authority: Path
    fingerprint: str  # SHA-256 of the authority's certificate, in hexadecimal digits
    is_new: bool  # made by this call


def certified_names(listen: str, more: Sequence[str] = ()) -> tuple[str, ...]:
    """The names and addresses under which clients reach a gateway that listens on the address `listen`."""
    host = socket.gethostname().lower()
    addresses = ["127.0.0.1", "::1", *all_addresses()] if listen in _ALL_ADDRESSES else [listen.partition("%")[0]]
    names = dict.fromkeys([host, f"{host.partition('.')[0]}.local", "localhost", *more, *addresses])
    return tuple(name for name in names if _is_address(name) or _DNS_NAME.fullmatch(name))


def own_certificate(folder: Path, names: Sequence[str], now: datetime) -> OwnCertificate:
    """The certificate in this folder, or a new one if there is none, if it ends soon, or if it lacks one of the names.

    The authority stays, unless it may not vouch for one of the names. Raises BadSetting.
    """
    try:
        return _own_certificate(folder, names, now)
    except (OSError, ValueError) as error:
        reason = f"no certificate can be made or read in {folder} ({error}); without its files, new ones are made"
        raise BadSetting(setting="--tls", reason=reason) from None


def _own_certificate(folder: Path, names: Sequence[str], now: datetime) -> OwnCertificate:
    authority = _kept(folder / _AUTHORITY_KEY_FILE)
    if authority is None or not _may_vouch(authority[1], names):
        authority = _new_authority(names)
        write_atomically(folder / _AUTHORITY_KEY_FILE, _pem(*authority), private=True)
    key, certificate = authority
    public = folder / AUTHORITY_FILE
    if not public.exists() or x509.load_pem_x509_certificate(public.read_bytes()) != certificate:
        write_atomically(public, _pem(None, certificate))
    chain = folder / _GATEWAY_FILE
    kept = _kept(chain)
    is_new = kept is None or not _serves(kept[1], certificate, names, now)
    if is_new:
        write_atomically(chain, _pem(*_new_certificate(key, certificate, names, now), certificate), private=True)
    return OwnCertificate(chain, public, certificate.fingerprint(hashes.SHA256()).hex(), is_new)


def _kept(path: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate] | None:
    """The key and the first certificate in a file, or None if there is no file. Raises ValueError."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    key = load_pem_private_key(data, None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError(f"the key in {path} is of another kind")
    return key, x509.load_pem_x509_certificates(data)[0]


def _serves(made: x509.Certificate, authority: x509.Certificate, names: Sequence[str], now: datetime) -> bool:
    """Whether a certificate is of this authority and has these names, and does not end soon."""
    if made.issuer != authority.subject:
        return False
    alternatives = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    known = {str(each.value) for each in alternatives}
    in_time = made.not_valid_before_utc <= now < made.not_valid_after_utc - _RENEWED_BEFORE_END
    return in_time and known.issuperset(names)


def _may_vouch(authority: x509.Certificate, names: Sequence[str]) -> bool:
    limits = authority.extensions.get_extension_for_class(x509.NameConstraints).value
    domains = [str(each.value) for each in limits.permitted_subtrees or ()]
    return all(
        _is_address(name) or any(name == domain or name.endswith(f".{domain}") for domain in domains) for name in names
    )


def _new_authority(names: Sequence[str]) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP256R1())
    # A random part, since a client may know the authority of an earlier installation, which must not have the same name.
    subject = _named(f"Hearth on {socket.gethostname()[:32]}, {secrets.token_hex(4)}")
    local = [suffix.removeprefix(".") for suffix in LOCAL_SUFFIXES]
    domains = dict.fromkeys([*local, *(name for name in names if not _is_address(name))])
    made = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(_AUTHORITY_BEGINS)
        .not_valid_after(_AUTHORITY_ENDS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(is_authority=True), critical=True)
        .add_extension(x509.NameConstraints([x509.DNSName(domain) for domain in domains], None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return key, made.sign(key, hashes.SHA256())


def _new_certificate(
    authority_key: ec.EllipticCurvePrivateKey, authority: x509.Certificate, names: Sequence[str], now: datetime
) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP256R1())
    alternatives = [x509.IPAddress(ip_address(name)) if _is_address(name) else x509.DNSName(name) for name in names]
    made = (
        x509.CertificateBuilder(
            authority.subject, _named("Hearth gateway"), key.public_key(), x509.random_serial_number()
        )
        .not_valid_before(now - _CLOCK_TOLERANCE)
        .not_valid_after(now + _VALID)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(is_authority=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
    )
    return key, made.sign(authority_key, hashes.SHA256())


def _key_usage(is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_authority, key_cert_sign=is_authority, crl_sign=is_authority, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _named(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common_name)])


def _pem(key: ec.EllipticCurvePrivateKey | None, *certificates: x509.Certificate) -> bytes:
    own = [] if key is None else [key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())]
    return b"".join([*own, *(each.public_bytes(Encoding.PEM) for each in certificates)])


def _use(context: ssl.SSLContext, connection: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
    """Take the certificate from this context, all of it at once: it is loaded in a thread, and connections begin meanwhile."""
    connection.context = context


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


class OwnTls:
    """The certificate of a running gateway, which listens on the address `listen`, and is asked under the names `more`, too.

    It is renewed before it ends, and when the addresses change.
    """

    def __init__(
        self,
        folder: Path,
        listen: str,
        more: Sequence[str],
        now: Callable[[], datetime] = lambda: datetime.now(timezone.utc),
    ) -> None:
        """Make the certificate, or take that of earlier runs. Raises BadSetting."""
        self._now = now
        self._folder = folder
        self._listen = listen
        self._more = more
        made = self._current()
        self.chain, self.authority, self.fingerprint = made.chain, made.authority, made.fingerprint

    async def keep(self, context: ssl.SSLContext, interval_seconds: float = _LOOK_SECONDS) -> None:
        """Renew the certificate in time, for connections that begin from then on, until cancelled."""
        while True:
            await asyncio.sleep(interval_seconds)
            try:
                made = await on_disk(self._folder, FILE_SECONDS, self._current)
                if made.is_new:
                    renewed = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                    await on_disk(self._folder, FILE_SECONDS, renewed.load_cert_chain, made.chain)
                    context.sni_callback = partial(_use, renewed)
            except (BadSetting, DiskHung) as error:
                log.warning("%s", error)
                continue
            if made.fingerprint != self.fingerprint:
                self.fingerprint = made.fingerprint
                log.warning(
                    "clients have to trust another authority now: %s, SHA-256 %s", made.authority, made.fingerprint
                )

    def _current(self) -> OwnCertificate:
        names = certified_names(self._listen, self._more)
        return own_certificate(self._folder, names, self._now())
