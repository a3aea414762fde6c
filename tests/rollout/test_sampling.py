"""Tokens are drawn from the distribution whose log-probabilities are reported."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpo_jax.rollout import sampling


def test_entropy_and_log_probabilities_are_those_at_the_temperature():
    logits = np.array([[0.0, 1.0, 3.0], [2.0, 2.0, 2.0]])
    p = np.exp(logits / 0.7)
    p /= p.sum(-1, keepdims=True)
    logp, entropy = sampling.log_softmax(jnp.array(logits), jnp.float32(0.7))
    # Float32 against float64.
    np.testing.assert_allclose(logp, np.log(p), atol=1e-6)
    np.testing.assert_allclose(entropy, -(p * np.log(p)).sum(-1), atol=1e-6)


def test_temperature_zero_takes_the_first_of_the_largest_logits_with_certainty():
    logp, entropy = sampling.log_softmax(jnp.array([[1.0, 5.0, 5.0]]), jnp.float32(0))
    assert logp[0].tolist() == [-np.inf, 0.0, -np.inf]
    assert entropy[0] == 0.0
    assert sampling.draw(logp, jnp.array([0.999]))[0] == 1


@pytest.mark.parametrize("vocabulary", [2, 7, 24, 1000])
def test_drawing_inverts_the_cumulative_distribution(vocabulary):
    logits = np.random.default_rng(vocabulary).normal(size=vocabulary) * 2
    p = np.exp(logits) / np.exp(logits).sum()
    u = np.linspace(0.0, 0.9999, 500)
    expected = np.searchsorted(np.cumsum(p), u, side="right")
    logp = jnp.log(jnp.broadcast_to(jnp.array(p, jnp.float32), (len(u), vocabulary)))
    drawn = np.asarray(sampling.draw(logp, jnp.array(u, jnp.float32)))
    # The float32 sums may put a point that lies on a border on its other side.
    assert (drawn != expected).mean() <= 0.01
    assert (
        np.abs(np.cumsum(p)[np.minimum(drawn, expected)] - u)[drawn != expected].max(initial=0.0)
        < 1e-5
    )


def test_a_token_of_probability_zero_is_never_drawn():
    p = jnp.array([[0.0, 0.5, 0.0, 0.0, 0.5, 0.0, 0.0]])
    for u in (0.0, 0.25, 0.5, 0.75, float(np.nextafter(np.float32(1), 0)), 1.0):
        assert int(sampling.draw(jnp.log(p), jnp.array([u]))[0]) in (1, 4)


def test_the_uniform_of_a_row_depends_on_its_key_and_position_only():
    keys = jnp.array([[0, 1], [0, 2], [3, 1]], jnp.uint32)
    positions = jnp.array([5, 5, 9])
    together = sampling.uniforms(keys, positions)
    alone = [sampling.uniforms(keys[i : i + 1], positions[i : i + 1])[0] for i in range(3)]
    assert together.tolist() == [float(u) for u in alone]
    assert len(set(together.tolist())) == 3


def test_the_frequencies_of_drawn_tokens_are_the_probabilities():
    p = np.array([0.5, 0.3, 0.15, 0.05])
    n = 20_000
    keys = jnp.stack([jnp.zeros(n, jnp.uint32), jnp.arange(n, dtype=jnp.uint32)], axis=1)
    u = sampling.uniforms(keys, jnp.full(n, 3))
    drawn = jax.jit(sampling.draw)(jnp.log(jnp.broadcast_to(jnp.array(p), (n, 4))), u)
    frequency = np.bincount(np.asarray(drawn), minlength=4) / n
    # Four standard deviations of a binomial share are at most 0.014 here.
    np.testing.assert_allclose(frequency, p, atol=0.014)
