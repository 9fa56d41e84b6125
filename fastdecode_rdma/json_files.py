"""Objects in files of JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fastdecode_rdma.errors import ConfigError


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file.

    Raises:
        ConfigError: there is no such file, or it is not a JSON object.
    """
    if path.exists() and not path.is_file():
        raise ConfigError(f"cannot read {path}: it is no regular file")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value
