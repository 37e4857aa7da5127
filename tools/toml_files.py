"""Settings files in TOML, given by path or by the name of a built-in one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hearth.errors import BadSetting

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["read_settings_file", "tomllib"]


def read_settings_file(kind: str, name_or_path: str | Path, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Read a TOML file, or the built-in one of this name in `folder`; returns its path too. Raises BadSetting."""
    path = Path(name_or_path)
    if path.suffix != ".toml":
        path = folder / f"{name_or_path}.toml"
    try:
        return path, tomllib.loads(path.read_text())
    except FileNotFoundError:
        known = ", ".join(sorted(found.stem for found in folder.glob("*.toml")))
        reason = f"'{name_or_path}' is neither a file nor a built-in {kind}: {known}"
        raise BadSetting(setting=kind, reason=reason) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadSetting(setting=f"{kind} {path}", reason=str(error)) from None
