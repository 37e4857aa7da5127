"""The apps that this home has admitted, and those it has shut out: one JSON file, read at every request if it changed."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from hearth.errors import BadRequest, BadSetting
from hearth.files import write_atomically

_NAME = re.compile(r"^[a-z0-9-]{1,32}$")


class _Apps(BaseModel):
    model_config = ConfigDict(frozen=True)

    keys: dict[str, str] = {}  # public key: name
    revoked: dict[str, str] = {}


class AppRegistry:
    """Public keys by name. Changes are on the disk before they are answered."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self._apps = _Apps()

    def add(self, name: str, public_key: str) -> None:
        """Admit a key. Raises BadRequest for a bad name, or one that is in use."""
        apps = self._current()
        if not _NAME.match(name):
            raise BadRequest(reason=f"the app name '{name}' may hold only a-z, 0-9 and -, at most 32 characters")
        if name in apps.keys.values():
            raise BadRequest(reason=f"there is an app '{name}' already; revoke it first")
        self._write(_Apps(keys={**apps.keys, public_key: name}, revoked=apps.revoked))

    def revoke(self, name: str) -> None:
        """Shut an app out. Raises BadRequest when there is none of this name."""
        apps = self._current()
        gone = {key: app for key, app in apps.keys.items() if app == name}
        if not gone:
            raise BadRequest(reason=f"there is no app '{name}'")
        left = {key: app for key, app in apps.keys.items() if app != name}
        self._write(_Apps(keys=left, revoked={**apps.revoked, **gone}))

    def name_of(self, public_key: str) -> str | None:
        apps = self._current()
        return apps.keys.get(public_key) or apps.revoked.get(public_key)

    def is_admitted(self, public_key: str) -> bool:
        return public_key in self._current().keys

    def is_revoked(self, public_key: str) -> bool:
        return public_key in self._current().revoked

    def names(self) -> list[str]:
        return sorted(self._current().keys.values())

    def revoked_names(self) -> list[str]:
        return sorted(set(self._current().revoked.values()))

    def _current(self) -> _Apps:
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return _Apps()
        stamp = (status.st_mtime_ns, status.st_size)
        if stamp != self._stamp:
            try:
                self._apps = _Apps.model_validate_json(self._path.read_bytes())
            except (ValidationError, ValueError):
                raise BadSetting(setting=str(self._path), reason="the list of apps cannot be read") from None
            self._stamp = stamp
        return self._apps

    def _write(self, apps: _Apps) -> None:
        write_atomically(self._path, apps.model_dump_json(indent=1))
