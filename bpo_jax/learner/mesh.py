"""The device mesh and the one table that says which model axis lives on which mesh axis.

Arrays are annotated with *logical* axis names where they are declared; `RULES` maps those to mesh
axes, so changing how a model is spread over devices changes this table and nothing else. ``data``
replicates the model, ``fsdp`` shards parameters and optimiser state and is a batch axis too,
``tensor`` splits heads, the feed-forward layer and the vocabulary.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "tensor")

RULES: dict[str, str | tuple[str, ...] | None] = {
    "batch": ("data", "fsdp"),
    "layers": None,
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
    "vocab": "tensor",
}


def make_mesh(
    *, data: int = 1, fsdp: int = -1, tensor: int = 1, devices: list[jax.Device] | None = None
) -> Mesh:
    """A mesh with the axes ``data``, ``fsdp`` and ``tensor``.

    Args:
      data, fsdp, tensor: sizes; one of them may be -1, "all that is left".
      devices: which devices; all of them by default.

    Raises:
      ValueError: the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = {"data": data, "fsdp": fsdp, "tensor": tensor}
    open_axes = [name for name, size in sizes.items() if size == -1]
    known = 1
    for size in sizes.values():
        known *= size if size != -1 else 1
    if len(open_axes) == 1 and known > 0 and len(devices) % known == 0:
        sizes[open_axes[0]] = len(devices) // known
        known = len(devices)
    if known != len(devices) or min(sizes.values()) < 1:
        raise ValueError(
            f"mesh data={data} fsdp={fsdp} tensor={tensor} does not fit {len(devices)} devices: "
            "the sizes must multiply to that number (at most one may be -1)"
        )
    # Auto: the compiler propagates shardings; jax's default, Explicit, would want them in types.
    return jax.make_mesh(
        tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices
    )


def sharding(mesh: Mesh, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> NamedSharding:
    """Where an array with logical `axes` lives.

    An axis whose size its mesh axes do not divide is replicated (two key/value heads on four
    tensor devices, say).

    Raises:
      KeyError: an axis name without a rule.
    """
    spec: list[Any] = []
    for name, size in zip(axes, shape, strict=True):
        target = RULES[name] if name is not None else None
        parts = (target,) if isinstance(target, str) else (target or ())
        ways = 1
        for part in parts:
            ways *= mesh.shape[part]
        spec.append(target if parts and size % ways == 0 else None)
    return NamedSharding(mesh, PartitionSpec(*spec))


def param_shardings(mesh: Mesh, shapes: Any, axes: Any) -> Any:
    """Shardings of a tree of parameters.

    Args:
      mesh: see `make_mesh`.
      shapes: tree of arrays or shape structs.
      axes: the same tree with the tuple of logical axis names of every parameter.
    """
    return jax.tree.map(lambda leaf, names: sharding(mesh, names, leaf.shape), shapes, axes)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows of a batch over ``data`` and ``fsdp``; every other axis whole."""
    return NamedSharding(mesh, PartitionSpec(RULES["batch"]))


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())
