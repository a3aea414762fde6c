"""The list of block pairs that a kernel has to visit, made to fit a TPU core's scalar memory.

A kernel's grid walks along the list and reads from it which blocks to fetch next. One list holds
the pairs of all rows, so that rows with few live pairs do not wait for rows with many.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

_NO_PAIR = 2**31 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pairs:
    """How a list writes a pair: row, major and minor block in the bits of one int32.

    Steps of the same row and major block follow each other.

    Attributes:
      major: blocks of the side that gathers something.
      minor: blocks of the other side.
    """

    major: int
    minor: int

    @property
    def bits(self) -> tuple[int, int]:
        return (self.major - 1).bit_length(), (self.minor - 1).bit_length()

    def listed(self, live_bij: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The live pairs in order.

        Args:
          live_bij: bool [b, major, minor].

        Returns:
          int32 [1 + b * major * minor + 1], the pairs from place 1 on, and everywhere else what is
          no pair; and how many there are. A grid must not be empty, so the first pair of all is
          listed where none is live.
        """
        major_bits, minor_bits = self.bits
        row, i, j = (lax.broadcasted_iota(jnp.int32, live_bij.shape, n) for n in range(3))
        live_bij = live_bij | (~jnp.any(live_bij) & (row + i + j == 0))
        pair_bij = (((row << major_bits) | i) << minor_bits) | j
        pairs = jnp.sort(jnp.where(live_bij, pair_bij, _NO_PAIR).ravel())
        pairs = jnp.pad(pairs, 1, constant_values=_NO_PAIR)
        return pairs, jnp.sum(live_bij, dtype=jnp.int32)

    def at(self, pairs: Any, n: Any) -> tuple[Any, Any, Any]:
        """Row, major and minor block of step `n`."""
        major_bits, minor_bits = self.bits
        pair = pairs[n + 1]
        i = (pair >> minor_bits) & ((1 << major_bits) - 1)
        return pair >> (major_bits + minor_bits), i, pair & ((1 << minor_bits) - 1)

    def ends(self, pairs: Any, n: Any) -> tuple[Any, Any]:
        """Whether step `n` is the first and the last of its major block."""
        before, here, after = (pairs[n + m] >> self.bits[1] for m in range(3))
        return before != here, after != here
