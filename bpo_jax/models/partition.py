"""Which axis of a model lives on which axis of the device mesh: one table, what follows from it.

Arrays are described by *logical* axis names where they are declared; `RULES` maps those to mesh
axes, so changing how a model is spread over devices changes this table and nothing else. ``data``
replicates the model, ``fsdp`` shards parameters and optimiser state and is a batch axis too,
``tensor`` splits heads, the feed-forward layer and the vocabulary.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "tensor")

RULES: dict[str, str | tuple[str, ...] | None] = {
    "batch": ("data", "fsdp"),
    "length": None,
    "layers": None,
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
    "vocab": "tensor",
}

Axes = tuple[str | None, ...]
"""Logical names of an array's axes; None for one that is never split."""


def ways(mesh: Mesh, name: str | None) -> int:
    """Into how many parts the logical axis `name` is split.

    Raises:
      KeyError: an axis name without a rule.
    """
    target = RULES[name] if name is not None else None
    parts = (target,) if isinstance(target, str) else (target or ())
    count = 1
    for part in parts:
        count *= mesh.shape[part]
    return count


def spec(mesh: Mesh, axes: Axes, shape: tuple[int, ...]) -> PartitionSpec:
    """How an array of `shape` with logical `axes` is split.

    An axis whose size its mesh axes do not divide is replicated (two key/value heads on four
    tensor devices, say).
    """
    targets: list[Any] = []
    for name, size in zip(axes, shape, strict=True):
        divides = size % ways(mesh, name) == 0
        targets.append(RULES[name] if name is not None and divides else None)
    return PartitionSpec(*targets)


def sharding(mesh: Mesh, axes: Axes, shape: tuple[int, ...]) -> NamedSharding:
    """`spec` on its mesh."""
    return NamedSharding(mesh, spec(mesh, axes, shape))


def param_shardings(mesh: Mesh, shapes: Any, axes: Any) -> Any:
    """Shardings of a tree of parameters.

    Args:
      mesh: with the axes `AXES`.
      shapes: tree of arrays or shape structs.
      axes: the same tree with the tuple of logical axis names of every parameter.
    """
    return jax.tree.map(lambda leaf, names: sharding(mesh, names, leaf.shape), shapes, axes)


def constrain(x: jax.Array, mesh: Mesh | None, axes: Axes) -> jax.Array:
    """`x`, held to its place on the mesh where there is one."""
    if mesh is None or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, sharding(mesh, axes, x.shape))
