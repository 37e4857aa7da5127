"""Registry of admitted and revoked keys of apps or devices: a JSON file with a second copy, read again if it has changed."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from coordinator.serve.state import DurableFile
from hearth.errors import BadRequest

_NAME = re.compile(r"[a-z0-9-]{1,32}")
_APP = "app"  # the role of a key without an entry in `roles`


class RegisteredKeys(BaseModel):
    """Public keys, mapped to the names of their apps or devices."""

    model_config = ConfigDict(frozen=True)

    keys: dict[str, str] = {}  # admitted
    revoked: dict[str, str] = {}
    roles: dict[str, str] = {}  # of admitted keys that have another role than "app"


def device_keys(state_dir: Path) -> Callable[[], Collection[str]]:
    """Returns a function that returns the admitted device keys of a coordinator with this state directory."""
    devices = KeyRegistry(state_dir / "devices.json", "device")
    return lambda: devices.current.keys


class KeyRegistry:
    """Reads and changes the file. Changes are in force at once; `file.saved()` waits until they are on the disk.

    While the disk cannot be written, changes are kept in memory. If no copy can be read, the last list stays in force.
    """

    def __init__(self, path: Path, holder: Literal["app", "device"] = "app") -> None:
        self._holder = holder
        self.file = DurableFile(path, RegisteredKeys.model_validate_json, self._take)
        self.current = self.file.read() or RegisteredKeys()

    def add(self, name: str, public_key: str, role: str = _APP) -> None:
        """Admit a key; a repetition has no effect. Raises BadRequest for an invalid name or one in use, or a revoked key."""
        known = self.current
        if known.keys.get(public_key) == name and known.roles.get(public_key, _APP) == role:
            return
        if public_key in known.revoked:
            raise BadRequest(reason=f"this key of the {self._holder} '{known.revoked[public_key]}' was revoked")
        if not _NAME.fullmatch(name):
            reason = f"the {self._holder} name '{name}' may hold only a-z, 0-9 and -, at most 32 characters"
            raise BadRequest(reason=reason)
        if name in known.keys.values():
            raise BadRequest(reason=f"there is a key of the {self._holder} '{name}' already; revoke it first")
        roles = known.roles if role == _APP else {**known.roles, public_key: role}
        self._write({**known.keys, public_key: name}, known.revoked, roles)

    def revoke(self, name: str) -> None:
        """Revoke a key; a repetition has no effect. Raises BadRequest if no key has or had this name."""
        known = self.current
        revoked = {key: app for key, app in known.keys.items() if app == name}
        if not revoked and name in known.revoked.values():
            return
        if not revoked:
            names = ", ".join(sorted(known.keys.values())) or "none"
            raise BadRequest(reason=f"there is no key of the {self._holder} '{name}'; admitted are: {names}")
        remaining = {key: app for key, app in known.keys.items() if app != name}
        self._write(remaining, {**known.revoked, **revoked}, known.roles)

    def merge(self, theirs: RegisteredKeys) -> RegisteredKeys:
        """Add the keys that another coordinator of this home has admitted or revoked; returns those that were unknown here.

        A revocation is never taken back, so that it does not matter which of the two happened first. Of two keys with the
        same name, the one here stays.
        """
        known = self.current
        new_revoked = {key: name for key, name in theirs.revoked.items() if key not in known.revoked}
        all_revoked = {**known.revoked, **new_revoked}
        remaining = {key: name for key, name in known.keys.items() if key not in new_revoked}
        new_keys = {
            key: name
            for key, name in theirs.keys.items()
            if key not in all_revoked
            and key not in remaining
            and name not in remaining.values()
            and _NAME.fullmatch(name)
        }
        if new_keys or new_revoked:
            new_roles = {key: role for key, role in theirs.roles.items() if key in new_keys}
            self._write({**remaining, **new_keys}, all_revoked, {**known.roles, **new_roles})
        return RegisteredKeys(keys=new_keys, revoked=new_revoked)

    def replace(self, keys: RegisteredKeys) -> None:
        """Have these keys instead, those of the leader of this home."""
        self._take(keys)
        self.file.write(keys.model_dump_json(indent=1))

    def _take(self, keys: RegisteredKeys) -> None:
        self.current = keys

    def _write(self, keys: dict[str, str], revoked: dict[str, str], roles: dict[str, str]) -> None:
        """Keep and write these lists; of the roles, those of admitted keys."""
        roles = {key: role for key, role in roles.items() if key in keys}
        self.replace(RegisteredKeys(keys=keys, revoked=revoked, roles=roles))
