"""Dataclasses as JSON on disk: written whole and private, checked field by field when read."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

__all__ = ["build", "read_object", "row", "write_object"]

T = TypeVar("T")


def write_object(path: str | os.PathLike[str], content: Mapping[str, object]) -> None:
    """Write ``content`` whole or not at all, in a file that only its owner reads."""
    target = Path(path)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")  # mkstemp: mode 0600
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, separators=(",", ":"))
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_object(
    path: str | os.PathLike[str], kind: str, version: int, error: Callable[[str], Exception]
) -> dict[str, Any]:
    """The JSON object in ``path``, which must say that it is a ``kind`` of this ``version``."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as cause:
        raise error(f"{path} is not JSON ({cause}); need a file that scrimp saved.") from cause
    if not isinstance(content, dict) or content.get("format") != kind:
        raise error(f"{path} does not hold a {kind}; need a file that scrimp saved.")
    if content.get("version") != version:
        raise error(
            f"{path} is a {kind} of version {content.get('version')!r}; this scrimp reads version {version}. "
            "Make it anew."
        )
    return content


def row(data: Any) -> dict[str, object]:
    """The fields of a flat dataclass, by name."""
    return {field.name: getattr(data, field.name) for field in fields(data)}


def build(cls: type[T], content: object, where: str, error: Callable[[str], Exception]) -> T:
    """A ``cls`` from a JSON object that has every field, of the annotated type, and no other field."""
    kind: Any = cls
    types: dict[str, Any] = _types(kind)
    if not isinstance(content, dict) or content.keys() != types.keys():
        have = sorted(content) if isinstance(content, dict) else type(content).__name__
        raise error(f"{where}: need the fields {', '.join(types)}; have {have}.")
    return cls(**{name: convert(kind, content[name], f"{where}.{name}", error) for name, kind in types.items()})


@cache
def _types(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls)}


def convert(kind: Any, content: object, where: str, error: Callable[[str], Exception]) -> Any:
    """``content`` as a ``kind``: a scalar, an optional one, or a tuple of one kind."""
    if kind is float and type(content) in (int, float):
        return float(content)  # type: ignore[arg-type]
    if kind in (int, str, bool) and type(content) is kind:
        return content
    if get_origin(kind) is tuple and isinstance(content, list):
        return tuple(convert(get_args(kind)[0], item, where, error) for item in content)
    if NoneType in get_args(kind):
        rest = next(option for option in get_args(kind) if option is not NoneType)
        return None if content is None else convert(rest, content, where, error)
    raise error(f"{where}: need {kind}, have {content!r}.")
