"""Where the policies lie that are shipped with the package; JAX-free, so that names are checked."""

from __future__ import annotations

import pathlib
import re

PREFIX = "package:"
ASSETS = pathlib.Path(__file__).parent / "assets"


def folder(name: str) -> pathlib.Path:
    """The folder of "package:<name>", which is shipped with bpo_jax, or `name` as a path."""
    if name.startswith(PREFIX):
        return ASSETS / name.removeprefix(PREFIX)
    return pathlib.Path(name)


def is_hub_id(name: str) -> bool:
    """Whether `name` can only be a model on a hub, "owner/model", and no path that is mistyped."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name):
        return False
    return not pathlib.Path(name).exists() and not pathlib.Path(name).parent.is_dir()


def names() -> list[str]:
    """The policies that are shipped, as "package:<name>"."""
    return sorted(PREFIX + path.parent.name for path in ASSETS.glob("*/model.safetensors"))
