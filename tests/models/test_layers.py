"""Hand-written gradients of a layer's parts are the derived ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpo_jax.models.layers import linear, rms_norm
from bpo_jax.models.remat import rematerialised
from bpo_jax.models.tree_attention import tree_attention


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def assert_same_function(got, expected, *arguments):
    """The same results and gradients, to within the rounding of float32 sums of 100 terms."""
    result, pull = jax.vjp(got, *arguments)
    expected_result, expected_pull = jax.vjp(expected, *arguments)
    cotangent = normal(*result.shape, seed=1)
    ours, derived = (result, *pull(cotangent)), (expected_result, *expected_pull(cotangent))
    for x, y in zip(ours, derived, strict=True):
        assert x.shape == y.shape
        np.testing.assert_allclose(x, y, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("spec", "x_shape", "w_shape", "axes"),
    [
        ("btd,df->btf", (2, 50, 8), (8, 12), 1),
        ("btf,fd->btd", (2, 50, 12), (12, 8), 1),
        ("btd,dhn->bthn", (2, 50, 8), (8, 3, 4), 1),
        ("bthn,hnd->btd", (2, 50, 3, 4), (3, 4, 8), 2),
        ("bthn,hnd->btd", (2, 50, 3, 4), (3, 4, 16), 2),
    ],
)
def test_a_projection_sums_over_the_axes_both_have(spec, x_shape, w_shape, axes):
    assert_same_function(
        lambda x, w: linear(x, w, axes),
        lambda x, w: jnp.einsum(spec, x, w),
        normal(*x_shape), normal(*w_shape, seed=2),
    )  # fmt: skip


@pytest.mark.parametrize("shape", [(2, 50, 8), (2, 25, 2, 8)])
def test_rms_norm_divides_by_the_root_of_the_mean_square(shape):
    assert_same_function(
        lambda x, scale: rms_norm(x, scale, 1e-5),
        lambda x, scale: x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5) * scale,
        normal(*shape), normal(8, seed=2),
    )  # fmt: skip


def test_gradients_have_the_dtype_of_what_they_are_of():
    x, w, scale = jnp.ones((2, 4), jnp.bfloat16), jnp.ones((4, 4), jnp.bfloat16), jnp.ones(4)

    def total(x, w, scale):
        return jnp.sum(rms_norm(linear(x, w), scale, 1e-5).astype(jnp.float32))

    grads = jax.grad(total, argnums=(0, 1, 2))(x, w, scale)
    assert [g.dtype for g in grads] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]


def test_dots_computes_no_product_and_no_attention_again():
    end = jnp.full((1, 64), 64)

    def layer(x, w):
        q = linear(x, w).reshape(1, 64, 2, 4)
        out = tree_attention(q, q, q, end, implementation="chunked", block=16)
        return rms_norm(x + linear(out, w.reshape(2, 4, 8), 2), w[0], 1e-5), None

    def operations(remat):
        def total(x, w):
            return jnp.sum(jax.lax.scan(rematerialised(layer, remat), x, w)[0])

        jaxpr = str(jax.make_jaxpr(jax.grad(total, argnums=1))(normal(1, 64, 8), normal(3, 8, 8)))
        return {name: jaxpr.count(name) for name in ("dot_general[", "while[")}

    # The mean squares of a norm are small products, which are not kept.
    assert operations("dots")["while["] == operations("none")["while["]
    assert operations("dots")["dot_general["] == operations("none")["dot_general["] + 1
    assert operations("full")["while["] > operations("none")["while["]
