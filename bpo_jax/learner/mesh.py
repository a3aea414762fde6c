"""The device mesh of the learner; `bpo_jax.models.partition` says what lives where on it."""

from __future__ import annotations

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from bpo_jax.models.partition import AXES, RULES
from bpo_jax.models.partition import param_shardings as param_shardings


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


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows of a batch over ``data`` and ``fsdp``; every other axis whole."""
    return NamedSharding(mesh, PartitionSpec(RULES["batch"]))


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())
