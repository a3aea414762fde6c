"""From the learner's sharding to the samplers', on devices all the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax


def copies(params: Any, devices: Sequence[jax.Device]) -> list[Any]:
    """Whole parameters on each of `devices`, one pytree per device.

    Where a device holds a replica already, it is the replica itself and not a copy: it lives until
    the learner's next update donates it, by which time the samplers must have been given new ones.

    Args:
      params: pytree of arrays, sharded in any way.
      devices: of this process.
    """
    return [jax.device_put(params, device) for device in devices]
