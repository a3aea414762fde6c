"""Rows of keys and values: one row a branch, each as long as the cache.

A row also carries the hidden state of its last token, from which the next token is sampled, so that
copying a row is all that forking a branch takes.

`RowStore` holds the rows of an engine in one of a few sizes and moves them between sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from bpo_jax.models import decoder


class Rows(NamedTuple):
    """Attributes:
    layers: keys and values of every layer, as `decoder.init_cache` lays them out; rows lead.
    hidden: [rows, hidden_size], the last token's hidden state.
    """

    layers: decoder.Cache
    hidden: jax.Array


def empty(config: decoder.DecoderConfig, rows: int, length: int) -> Rows:
    """Rows of zeros with room for `length` tokens each."""
    return Rows(
        layers=decoder.init_cache(config, rows, length, config.dtype),
        hidden=jnp.zeros((rows, config.hidden_size), config.dtype),
    )


def time_axes(config: decoder.DecoderConfig) -> Rows:
    """The axis along which each array of `Rows` grows with its length; None where it does not."""
    short, long = (jax.eval_shape(lambda n=n: empty(config, 1, n)) for n in (8, 16))
    return jax.tree.map(
        lambda a, b: next((i for i in range(a.ndim) if a.shape[i] != b.shape[i]), -1), short, long
    )


def take(rows: Rows, index_n: Int[Array, "n"], axes: Rows, length: int) -> Rows:
    """A new cache made of the rows at `index_n`, cut or padded to `length` tokens."""

    def one(x, axis):
        if axis >= 0 and length < x.shape[axis]:
            x = jax.lax.slice_in_dim(x, 0, length, axis=axis)
        x = jnp.take(x, index_n, axis=0, mode="clip")
        if axis >= 0 and length > x.shape[axis]:
            widths = [(0, length - x.shape[i] if i == axis else 0) for i in range(x.ndim)]
            x = jnp.pad(x, widths)
        return x

    return jax.tree.map(one, rows, axes)


def put(rows: Rows, part: Rows, index_n: Int[Array, "n"], count: Int[Array, ""]) -> Rows:
    """Writes the first `count` rows of `part` to the rows `index_n`, in place where donated."""

    def body(i, out):
        return jax.tree.map(
            lambda x, new: jax.lax.dynamic_update_index_in_dim(
                x, jax.lax.dynamic_index_in_dim(new, i, keepdims=False), index_n[i], 0
            ),
            out,
            part,
        )

    return jax.lax.fori_loop(0, count, body, rows)


def copy(
    rows: Rows, source_n: Int[Array, "n"], target_n: Int[Array, "n"], count: Int[Array, ""]
) -> Rows:
    """Copies row ``source[i]`` to row ``target[i]`` for i < count, in place where donated."""

    def body(i, out):
        return jax.tree.map(
            lambda x: jax.lax.dynamic_update_index_in_dim(
                x, jax.lax.dynamic_index_in_dim(x, source_n[i], keepdims=False), target_n[i], 0
            ),
            out,
        )

    return jax.lax.fori_loop(0, count, body, rows)


class RowStore:
    """The rows of an engine, in a batch size and a length taken from two short lists.

    Args:
      config: of the decoder.
      row_sizes: batch sizes, ascending.
      lengths: cache lengths, ascending.
      jit: ``jax.jit``, or one that counts.
    """

    def __init__(
        self,
        config: decoder.DecoderConfig,
        row_sizes: Sequence[int],
        lengths: Sequence[int],
        jit: Callable[..., Any] = jax.jit,
    ):
        self.row_sizes, self.lengths = tuple(row_sizes), tuple(lengths)
        self._config = config
        axes = time_axes(config)

        def take_rows(rows, index_n, *, length):
            return take(rows, index_n, axes, length)

        self._take = jit(take_rows, static_argnames="length")
        self._put = jit(put, donate_argnums=0)
        self._copy = jit(copy, donate_argnums=0)
        self.size, self.length = self.row_sizes[0], self.lengths[0]
        self.rows = empty(config, self.size, self.length)

    def resize(self, index: Sequence[int], size: int, length: int) -> None:
        """Keeps the rows at `index`, in that order, in a cache of another size.

        It goes there in steps between neighbouring sizes, which keeps the number of compiled copies
        small: batch first when that shrinks, last when it grows, for the fewest bytes.
        """
        while (self.size, self.length) != (size, length):
            if size < self.size or length == self.length:
                self.size = _towards(self.row_sizes, self.size, size)
            else:
                self.length = _towards(self.lengths, self.length, length)
            index = index[: self.size]
            self.rows = self._take(self.rows, padded(index, self.size), length=self.length)
            index = range(len(index))

    def checkout(self, index: Sequence[int], size: int) -> Rows:
        """A batch of `size` to compute with: the cache itself, or a copy of the rows at `index`."""
        if size == self.size:
            return self.rows
        return self._take(self.rows, padded(index, size), length=self.length)

    def checkin(self, work: Rows, index: Sequence[int], size: int) -> None:
        """Takes back what `checkout` gave."""
        if size == self.size:
            self.rows = work
        else:
            self.rows = self._put(self.rows, work, padded(index, size), np.int32(len(index)))

    def copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copies rows `source` to rows `target`."""
        most = self.row_sizes[-1]
        self.rows = self._copy(
            self.rows, padded(source, most), padded(target, most), np.int32(len(source))
        )

    def warmup(self, size: int, length: int) -> None:
        """Empties the cache in this size; compiles the copies inside it and to its neighbours."""
        self.size, self.length = size, length
        self.rows = empty(self._config, size, length)
        self.copy([], [])
        for near in _neighbours(self.row_sizes, size):
            self._take(self.rows, padded([], near), length=length)
        for near in _neighbours(self.lengths, length):
            self._take(self.rows, padded([], size), length=near)


def padded(index: Sequence[int], size: int) -> np.ndarray:
    """`index` as int32 [size], followed by zeros."""
    out = np.zeros(size, np.int32)
    out[: len(index)] = index
    return out


def fitting(sizes: Sequence[int], wanted: int) -> int:
    """The smallest of the ascending `sizes` that is at least `wanted`."""
    return next(s for s in sizes if s >= wanted)


def _towards(sizes: Sequence[int], now: int, wanted: int) -> int:
    at = sizes.index(now)
    return sizes[at + (wanted > now) - (wanted < now)]


def _neighbours(sizes: Sequence[int], now: int) -> list[int]:
    at = sizes.index(now)
    return [*sizes[max(at - 1, 0) : at], *sizes[at + 1 : at + 2]]
