"""Log-probabilities and entropies of tokens without the [tokens, vocabulary] matrix.

For a vocabulary of 152k the logits of one packed row would be larger than the model. They are
computed for a chunk of tokens at a time, reduced, and computed again in the backward pass.

On a mesh every device goes through its own rows and its own part of the vocabulary; the matrix is
gathered once over ``fsdp`` and its gradient scattered once, not once a chunk.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from bpo_jax.models import partition


def token_logprobs(
    hidden_btd: Float[Array, "b t d"],
    head_dv: Float[Array, "d v"],
    target_bt: Int[Array, "b t"],
    *,
    temperature: float = 1.0,
    chunk: int = 1024,
    mesh: Mesh | None = None,
) -> tuple[Float[Array, "b t"], Float[Array, "b t"]]:
    """Log-probability of each target and entropy of each distribution.

    With z = hidden @ head / temperature and p = softmax(z): logprob = log p[target] and
    entropy = -sum_v p_v log p_v, in nats. Both are differentiable in `hidden_btd` and `head_dv`:

      d logprob / dz_v = [v = target] - p_v,    d entropy / dz_v = -p_v (log p_v + entropy).

    Args:
      hidden_btd: hidden states at the positions where the targets are predicted. A single row may
        come, and goes, without its first axis.
      head_dv: the vocabulary matrix; multiplied in the dtype of `hidden_btd`, summed in float32.
      target_bt: the predicted token ids.
      temperature: divides the logits.
      chunk: number of tokens whose logits live at once, on every device.
      mesh: rows and vocabulary are split over it (`bpo_jax.models.partition`).

    Returns:
      Two float32 arrays (float64 if `hidden_btd` is).

    Raises:
      ValueError: a temperature of 0 or less, or rows that do not divide over the mesh.
    """
    if temperature <= 0:
        raise ValueError(f"temperature={temperature}: a distribution needs one above zero")
    if hidden_btd.ndim == 2:
        logprob, entropy = token_logprobs(
            hidden_btd[None], head_dv, target_bt[None], temperature=temperature, chunk=chunk
        )
        return logprob[0], entropy[0]
    b, t, _ = hidden_btd.shape
    places = _Places.on(mesh, b, head_dv.shape)
    # Chunks of one size with little padding.
    count = -(-t * (b // places.row_ways) // chunk)
    length = max(1, -(-t // count))
    missing = -t % length
    hidden = jnp.pad(hidden_btd, ((0, 0), (0, missing), (0, 0)))
    target = jnp.pad(target_bt, ((0, 0), (0, missing)))
    logprob, entropy = _chunked(places, length, 1.0 / temperature, hidden, head_dv, target)
    return logprob[:, :t], entropy[:, :t]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Places:
    """Where rows and the vocabulary matrix live, and the sums over devices that follow."""

    mesh: Mesh | None
    row_ways: int = 1
    row_axes: tuple[str, ...] = ()
    embed_axis: str | None = None
    vocab_axis: str | None = None

    @classmethod
    def on(cls, mesh: Mesh | None, rows: int, head_shape: tuple[int, ...]) -> _Places:
        if mesh is None or mesh.size == 1:
            return cls(mesh=None)
        ways = partition.ways(mesh, "batch")
        if rows % ways:
            raise ValueError(f"{rows} rows do not divide over {ways} devices of a {mesh.shape}")
        embed, vocab = partition.spec(mesh, ("embed", "vocab"), head_shape)
        row_axes = partition.spec(mesh, ("batch",), (rows,))[0]
        return cls(
            mesh=mesh, row_ways=ways, row_axes=row_axes, embed_axis=embed, vocab_axis=vocab
        )  # fmt: skip

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], outs: str) -> Any:
        """``fn`` on every device; the first argument is the matrix, the others begin with rows.

        `outs` has a letter for each result: "r" begins with rows, "m" is a matrix.
        """
        if self.mesh is None:
            return fn(*args)
        rows, matrix = PartitionSpec(self.row_axes), PartitionSpec(self.embed_axis, self.vocab_axis)
        return jax.shard_map(
            fn,
            mesh=self.mesh,
            in_specs=(matrix, *(rows for _ in args[1:])),
            out_specs=tuple(matrix if out == "m" else rows for out in outs),
            # What is the same on which devices is stated by the sums below.
            check_vma=False,
        )(*args)

    def gather(self, matrix: jax.Array) -> jax.Array:
        if self.embed_axis is None:
            return matrix
        return jax.lax.all_gather(matrix, self.embed_axis, axis=0, tiled=True)

    def scatter(self, matrix: jax.Array) -> jax.Array:
        """Sums a gradient of the gathered matrix over rows; each device keeps its own part."""
        rest = tuple(axis for axis in self.row_axes if axis != self.embed_axis)
        if self.embed_axis is not None:
            matrix = jax.lax.psum_scatter(
                matrix, self.embed_axis, scatter_dimension=0, tiled=True
            )  # fmt: skip
        return jax.lax.psum(matrix, rest) if rest else matrix

    def first_id(self, size: int) -> jax.Array | int:
        """The token id of this device's first column."""
        return 0 if self.vocab_axis is None else jax.lax.axis_index(self.vocab_axis) * size

    def most(self, x: jax.Array) -> jax.Array:
        return x if self.vocab_axis is None else jax.lax.pmax(x, self.vocab_axis)

    def total(self, x: Any) -> Any:
        """Sums what devices with other parts of the vocabulary have."""
        return x if self.vocab_axis is None else jax.lax.psum(x, self.vocab_axis)


def _chunks(x: jax.Array, length: int) -> jax.Array:
    """[b, t, ...] as [t / length, b, length, ...]."""
    return jnp.moveaxis(x.reshape(x.shape[0], -1, length, *x.shape[2:]), 1, 0)


def _rows(x: jax.Array) -> jax.Array:
    """The inverse of `_chunks`."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _dot(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    accumulate = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.einsum(spec, x, y, preferred_element_type=accumulate)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _chunked(places, length, scale, hidden_btd, head_dv, target_bt):
    return _forward(places, length, scale, hidden_btd, head_dv, target_bt)[0]


def _forward(places: _Places, length, scale, hidden_btd, head_dv, target_bt):
    def local(head_dv, hidden_btd, target_bt):
        head_dv = places.gather(head_dv).astype(hidden_btd.dtype)
        first = places.first_id(head_dv.shape[1])

        def reduce(chunk):
            hidden_bcd, target_bc = chunk
            logits = _dot("bcd,dv->bcv", hidden_bcd, head_dv) * scale
            top = places.most(jnp.max(logits, axis=-1))
            weights = jnp.exp(logits - top[..., None])
            here = target_bc - first
            picked = jnp.take_along_axis(logits, here[..., None], axis=-1, mode="clip")[..., 0]
            picked = jnp.where((here >= 0) & (here < logits.shape[-1]), picked, 0.0)
            # A product that is not written out is computed again for each of its sums.
            mean = jnp.einsum("bcv,bcv->bc", weights, logits)
            total, mean, picked = places.total((jnp.sum(weights, axis=-1), mean, picked))
            logz = top + jnp.log(total)
            return picked - logz, logz - mean / total, logz

        chunks = _chunks(hidden_btd, length), _chunks(target_bt, length)
        return tuple(_rows(x) for x in jax.lax.map(reduce, chunks))

    logprob, entropy, logz = places.run(local, (head_dv, hidden_btd, target_bt), "rrr")
    return (logprob, entropy), (hidden_btd, head_dv, target_bt, entropy, logz)


def _backward(places: _Places, length, scale, saved, cotangents):
    hidden_btd, head_dv, target_bt, entropy_bt, logz_bt = saved

    def local(head_dv, hidden_btd, *per_token):
        head_dv = places.gather(head_dv)
        head = head_dv.astype(hidden_btd.dtype)
        ids = places.first_id(head.shape[1]) + jnp.arange(head.shape[1])

        def step(d_head_dv, chunk):
            hidden_bcd, target, entropy, logz, d_logprob, d_entropy = chunk
            logp = _dot("bcd,dv->bcv", hidden_bcd, head) * scale - logz[..., None]
            # Everything that multiplies p_v, then the one entry of the target.
            factor = d_logprob[..., None] + d_entropy[..., None] * (logp + entropy[..., None])
            at_target = jnp.where(ids == target[..., None], d_logprob[..., None], 0.0)
            grad = ((at_target - jnp.exp(logp) * factor) * scale).astype(hidden_bcd.dtype)
            d_hidden_bcd = places.total(_dot("bcv,dv->bcd", grad, head))
            d_head_dv += _dot("bcd,bcv->dv", hidden_bcd, grad)
            return d_head_dv, d_hidden_bcd.astype(hidden_bcd.dtype)

        accumulate = jnp.promote_types(hidden_btd.dtype, jnp.float32)
        chunks = tuple(_chunks(x, length) for x in (hidden_btd, *per_token))
        d_head, d_hidden = jax.lax.scan(step, jnp.zeros(head.shape, accumulate), chunks)
        return places.scatter(d_head).astype(head_dv.dtype), _rows(d_hidden)

    args = (head_dv, hidden_btd, target_bt, entropy_bt, logz_bt, *cotangents)
    d_head_dv, d_hidden_btd = places.run(local, args, "mr")
    return d_hidden_btd, d_head_dv, None


_chunked.defvjp(_forward, _backward)
