"""Chunked log-probabilities are the plain ones, with their gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpo_jax.models import token_logprobs

N, D, V = 37, 16, 50


def naive(hidden, head, target, temperature):
    logp = jax.nn.log_softmax(hidden @ head / temperature)
    return logp[jnp.arange(len(target)), target], -jnp.sum(jnp.exp(logp) * logp, axis=-1)


def inputs(dtype):
    rng = np.random.default_rng(0)
    hidden, head = rng.normal(size=(N, D)).astype(dtype), rng.normal(size=(D, V)).astype(dtype)
    return hidden, head, rng.integers(0, V, N), rng.normal(size=(2, N)).astype(dtype)


def relative(x, y):
    return float(np.linalg.norm(np.asarray(x) - y) / np.linalg.norm(y))


# Float32 sums of 50 terms; in float64 the two differ by rounding alone.
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-5), (np.float64, 1e-12)])
@pytest.mark.parametrize("chunk", [8, 64])
def test_both_outputs_and_both_gradients_are_those_of_the_full_matrix(dtype, tolerance, chunk):
    with jax.enable_x64(dtype is np.float64):
        hidden, head, target, cotangents = inputs(dtype)

        def chunked(hidden, head):
            return token_logprobs(hidden, head, target, temperature=0.7, chunk=chunk)

        def plain(hidden, head):
            return naive(hidden, head, target, 0.7)

        def total(function):
            def scalar(hidden, head):
                outputs = function(hidden, head)
                return sum(jnp.sum(c * x) for c, x in zip(cotangents, outputs, strict=True))

            return jax.jit(jax.grad(scalar, argnums=(0, 1)))(hidden, head)

        for got, expected in zip(chunked(hidden, head), plain(hidden, head), strict=True):
            assert got.dtype == dtype
            assert relative(got, np.asarray(expected)) < tolerance
        for got, expected in zip(total(chunked), total(plain), strict=True):
            assert relative(got, np.asarray(expected)) < tolerance


def test_the_logits_of_all_tokens_never_exist_at_once():
    n, d, v = 4096, 8, 2048
    shapes = [
        jax.ShapeDtypeStruct(s, t)
        for s, t in (((n, d), jnp.float32), ((d, v), jnp.float32), ((n,), jnp.int32))
    ]

    def total(hidden, head, target):
        logprob, entropy = token_logprobs(hidden, head, target, chunk=128)
        return jnp.sum(logprob + entropy)

    compiled = jax.jit(jax.grad(total, argnums=(0, 1))).lower(*shapes).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < n * v * 4 / 4


def test_entropy_of_a_uniform_distribution_is_the_logarithm_of_its_size():
    logprob, entropy = token_logprobs(jnp.zeros((3, D)), jnp.ones((D, V)), jnp.arange(3))
    np.testing.assert_allclose(entropy, np.log(V), rtol=1e-6)
    np.testing.assert_allclose(logprob, -np.log(V), rtol=1e-6)


def test_a_temperature_of_zero_is_refused():
    with pytest.raises(ValueError, match="temperature=0"):
        token_logprobs(jnp.zeros((1, D)), jnp.ones((D, V)), jnp.zeros(1, int), temperature=0)
