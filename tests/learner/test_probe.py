"""Projected gradients against gradients, on a model small enough to have them all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpo_jax import packing
from bpo_jax.estimators import by_turn
from bpo_jax.learner import probe
from bpo_jax.models import decoder, scoring
from tests.learner.test_update import CONFIG, make_learner, make_state, make_trees


@pytest.fixture(scope="module")
def case():
    trees, weights = make_trees(2)
    learner = make_learner()
    params = make_state(learner).params
    return learner, params, trees, packing.pack(trees, weights, rows=1, row_length=32)


def gradients(params, trees, batches):
    """Of every action's log-probability, in the structure of the parameters, by hand."""
    graphdef = decoder.abstract(CONFIG)[0]

    @jax.jit
    def gradient(params, batch, here):
        def total(params):
            logprob_bt, _ = scoring.token_scores(graphdef, params, batch, chunk=16)
            return jnp.sum(jnp.where(here, logprob_bt, 0.0))

        return jax.grad(total)(params)

    found = {}
    for batch in batches:
        trained = batch.loss_mask > 0
        pairs = np.stack([batch.tree_id[trained], batch.action_id[trained]], axis=1)
        for tree, action in np.unique(pairs, axis=0).tolist():
            here = trained & (batch.tree_id == tree) & (batch.action_id == action)
            found[tree, action] = gradient(params, batch, here)
    return found


def dot(x, y) -> float:
    return float(sum(jax.tree.leaves(jax.tree.map(np.vdot, x, y))))


def test_a_score_is_the_gradient_along_a_direction(case):
    learner, params, trees, batches = case
    scores = probe.action_scores(learner, params, trees, batches, directions=2, seed=3)
    exact = gradients(params, trees, batches)
    for d in range(2):
        u = probe.direction(params, jax.random.fold_in(jax.random.key(3), d))
        for (tree, action), gradient in exact.items():
            # A central difference in float32.
            assert scores[tree][action, d] * np.sqrt(2) == pytest.approx(
                dot(gradient, u), rel=0.02, abs=0.02
            )


def test_inner_products_of_scores_are_those_of_gradients_in_the_mean(case):
    learner, params, trees, batches = case
    directions = 32
    scores = probe.action_scores(learner, params, trees, batches, directions=directions, seed=0)
    exact = gradients(params, trees, batches)
    for (tree, action), gradient in exact.items():
        square = scores[tree][action] @ scores[tree][action]
        # Four standard deviations of a chi-squared mean.
        assert square == pytest.approx(dot(gradient, gradient), rel=4 * np.sqrt(2 / directions))


def test_they_are_what_the_second_comparison_needs(case):
    learner, params, trees, batches = case
    scores = probe.action_scores(learner, params, trees, batches, directions=4, seed=0)
    assert [s.shape for s in scores] == [(len(t.actions()), 4) for t in trees]
    for number, action in enumerate(trees[0].actions()):
        action.reward = float(number)
    (turn,) = by_turn(trees, scores=scores)
    assert turn.moments is not None
    assert turn.moments.forked_square > 0.0
