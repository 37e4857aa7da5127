"""Registry of admitted and revoked apps: one JSON file, read again at a request if it has changed."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from hearth.errors import BadRequest, BadSetting
from hearth.files import write_atomically

_NAME = re.compile(r"^[a-z0-9-]{1,32}$")


class Apps(BaseModel):
    """Public keys, mapped to the names of their apps."""

    model_config = ConfigDict(frozen=True)

    keys: dict[str, str] = {}  # admitted apps
    revoked: dict[str, str] = {}


class AppRegistry:
    """Reads and changes the file. Changes are written to disk before the request is answered."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file_stamp: tuple[int, int] | None = None
        self._apps = Apps()

    def add(self, name: str, public_key: str) -> None:
        """Admit a key. Raises BadRequest for an invalid name or one in use."""
        apps = self.current()
        if not _NAME.match(name):
            raise BadRequest(reason=f"the app name '{name}' may hold only a-z, 0-9 and -, at most 32 characters")
        if name in apps.keys.values():
            raise BadRequest(reason=f"there is an app '{name}' already; revoke it first")
        self._write(Apps(keys={**apps.keys, public_key: name}, revoked=apps.revoked))

    def revoke(self, name: str) -> None:
        """Revoke an app. Raises BadRequest if no app has this name."""
        apps = self.current()
        revoked = {key: app for key, app in apps.keys.items() if app == name}
        if not revoked:
            raise BadRequest(reason=f"there is no app '{name}'")
        remaining = {key: app for key, app in apps.keys.items() if app != name}
        self._write(Apps(keys=remaining, revoked={**apps.revoked, **revoked}))

    def current(self) -> Apps:
        """The apps; reads the file if it has changed. Raises BadSetting."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return Apps()
        stamp = (status.st_mtime_ns, status.st_size)
        if stamp != self._file_stamp:
            try:
                self._apps = Apps.model_validate_json(self._path.read_bytes())
            except ValueError:
                raise BadSetting(setting=str(self._path), reason="the list of apps cannot be read") from None
            self._file_stamp = stamp
        return self._apps

    def _write(self, apps: Apps) -> None:
        write_atomically(self._path, apps.model_dump_json(indent=1))
