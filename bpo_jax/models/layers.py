"""The arithmetic of a decoder's layer: projections, norms and rotary positions.

Two of them have gradients written by hand. They are the derived ones, with every sum of products as
one matrix product; as derived, XLA turns whole activations around for a weight's gradient and sums
products many times slower than it multiplies.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from bpo_jax.models.config import DecoderConfig


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def linear(x: jax.Array, w: jax.Array, axes: int = 1) -> jax.Array:
    """The last `axes` axes of `x` times the first ones of `w`, without a bias."""
    return _linear_forward(x, w, axes)[0]


def _linear_forward(x, w, axes):
    # In plain sight, for `bpo_jax.models.remat` to know it for a matrix product.
    return jnp.tensordot(x, w, axes), (x, w)


def _linear_backward(axes, saved, d_out):
    x, w = saved
    tokens = tuple(range(x.ndim - axes))
    of_out, of_w = tuple(range(len(tokens), d_out.ndim)), tuple(range(axes, w.ndim))
    d_x = lax.dot_general(d_out, w, ((of_out, of_w), ((), ())))

    def over_tokens(left, right):
        return lax.dot_general(left, right, ((tokens, tokens), ((), ())))

    # XLA turns the left side around, so that is the narrower one.
    if d_out.size < x.size:
        d_w = jnp.moveaxis(over_tokens(d_out, x), range(-axes, 0), range(axes))
    else:
        d_w = over_tokens(x, d_out)
    return d_x, d_w


linear.defvjp(_linear_forward, _linear_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x: jax.Array, scale_d: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * scale over the last axis, computed in float32."""
    return _rms_norm_forward(x, scale_d, eps)[0]


def _rms_norm_forward(x, scale_d, eps):
    x32, scale = x.astype(jnp.float32), scale_d.astype(jnp.float32)
    shrink = lax.rsqrt(_dot(x32, x32) / x.shape[-1] + eps)
    return (x32 * shrink * scale).astype(x.dtype), (x, scale_d, shrink)


def _rms_norm_backward(eps, saved, d_out):
    x, scale_d, shrink = saved
    x32, scale, d_out = (a.astype(jnp.float32) for a in (x, scale_d, d_out))
    normed, d_normed = x32 * shrink, d_out * scale
    d_x = shrink * (d_normed - normed * (_dot(d_normed, normed) / x.shape[-1]))
    tokens = "btuv"[: x.ndim - 1]
    d_scale = jnp.einsum(f"{tokens}d,{tokens}d->d", d_out, normed)
    return d_x.astype(x.dtype), d_scale.astype(scale_d.dtype)


rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


def _dot(x: jax.Array, y: jax.Array) -> jax.Array:
    """Products summed over the last axis, which is kept with a size of 1."""
    return jnp.einsum("...d,...d->...", x, y)[..., None]


def rope_angles(config: DecoderConfig, position_bt: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines [b, t, 1, head_dim/2] of the rotary angles, float32."""
    half = config.head_dim // 2
    frequency = config.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    scaling = config.rope_scaling
    if scaling is not None:
        turns = scaling.original_max_positions * frequency / (2 * math.pi)
        kept = (turns - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        kept = jnp.clip(kept, 0.0, 1.0)
        frequency = frequency * (kept + (1.0 - kept) / scaling.factor)
    angle = position_bt[..., None, None].astype(jnp.float32) * frequency
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x_bthn: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turns the pairs (i, i + head_dim/2) of every head, in float32."""
    first, second = jnp.split(x_bthn.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_bthn.dtype)
