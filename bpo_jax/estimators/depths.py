"""Whether branching pays, turn by turn: what advantages and what the gradient vary by.

At turn t let G be a return, V(s) its mean given the state s that was reached, and

    B = Var V(s),    W = E Var(G | s),    Var G = B + W

K siblings at each of R states are compared with each other; N independent trajectories with all the
others. The advantage of an action at turn t has the square

    forked:  W K / (K - 1)          flat:  (B + W) N / (N - 1)

and the part of the gradient estimate that comes from turn t, the mean of psi A over its actions
with psi = grad log pi(a|s), has the variance (summed over parameters)

    forked:  (Gamma - |g|^2) / R  +  [E|psi A|^2 - (K-2)/(K-1) Gamma] / (R K)
             with E|psi A|^2 = mu + E(S W(s)) / (K-1)
    flat:    [mu0 - (N-2)/(N-1) |g|^2 + E(S) Var G / (N-1)] / N

    g(s) = E[psi (G - V(s)) | s],  g = E g(s),  Gamma = E|g(s)|^2,  S = E[|psi|^2 | s],
    mu = E |psi|^2 (G - V(s))^2,   mu0 = E |psi|^2 (G - E G)^2

Lower squares of advantages are not yet a lower variance of the gradient: forks visit fewer distinct
states, which is the first term. Both sides of both comparisons are estimated here; the second needs
the actions' psi, or projections of them that keep inner products in the mean.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from bpo_jax import tree as tree_lib
from bpo_jax.estimators import values


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moments:
    """What the variance of one turn's part of the gradient is made of.

    Attributes:
      mean_square: |g|^2.
      state_square: Gamma.
      forked_square: E|psi A|^2 with A the siblings' advantage.
      score_square: E(S).
      pair_square: E |psi|^2 (G - G')^2 with G' an independent return: mu0 + E(S) Var G.
    """

    mean_square: float
    state_square: float
    forked_square: float
    score_square: float
    pair_square: float

    def forked_variance(self, states: float, siblings: float) -> float:
        """Of R states with K siblings each."""
        within = self.forked_square - (siblings - 2) / (siblings - 1) * self.state_square
        return (self.state_square - self.mean_square) / states + within / (states * siblings)

    def flat_variance(self, returns: float, return_variance: float) -> float:
        """Of N independent trajectories, of whose returns the variance is given."""
        spread = self.score_square * return_variance
        square = self.pair_square - spread + spread / (returns - 1)
        return (square - (returns - 2) / (returns - 1) * self.mean_square) / returns


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """What the forks at one turn of the backbones show.

    Attributes:
      turn: turns taken before.
      forks: how many were seen.
      states: R, mean number of them in a tree that has any.
      siblings: K, mean number of their children.
      returns: N, mean number of returns of those trees.
      between: B; nan where no tree has two of them.
      within: W.
      moments: nan where `between` is; None where no scores were given.
    """

    turn: int
    forks: int
    states: float
    siblings: float
    returns: float
    between: float
    within: float
    moments: Moments | None = None

    def metrics(self) -> dict[str, float]:
        """Named ``B``, ``W``, ``rho``, ``forks``, and both sides of each comparison."""
        b, w = self.between, self.within
        spread = max(b, 0.0) + w if not math.isnan(b) else math.nan
        k, n = self.siblings, self.returns
        found = {
            "forks": float(self.forks),
            "B": b,
            "W": w,
            "rho": max(b, 0.0) / spread if spread > 0.0 else math.nan,
            "advantage_square_forked": w * k / (k - 1.0),
            "advantage_square_flat": spread * n / (n - 1.0),
        }
        if self.moments is not None:
            found["gradient_variance_forked"] = self.moments.forked_variance(self.states, k)
            found["gradient_variance_flat"] = self.moments.flat_variance(n, spread)
        return found


def by_turn(
    trees: Sequence[tree_lib.Tree],
    *,
    gamma: float = 1.0,
    scores: Sequence[np.ndarray] | None = None,
) -> list[Turn]:
    """Splits the variance at every turn at which a backbone forked.

    G is the return from the start of one trajectory through each child, on along first actions, so
    that forks further down change nothing. Only forks on backbones count, one a root and turn:
    these are independent given that the roots forked. All estimates are unbiased but that of the
    flat gradient's variance, which has a product of two means in it.

    Args:
      trees: finished.
      gamma: discount per turn, in (0, 1].
      scores: of each tree a float [A, D], grad log pi of every action or projections of it.
    """
    seen: dict[int, list[_Forks]] = {}
    for index, tree in enumerate(trees):
        solved = values.solve(tree, gamma)
        for turn, forks in _forks(solved, None if scores is None else scores[index]).items():
            seen.setdefault(turn, []).append(forks)
    return [_measure(turn, seen[turn]) for turn in sorted(seen)]


@dataclasses.dataclass(kw_only=True, eq=False)
class _Forks:
    """Of one tree at one turn: returns [K] and scores [K, D] of every fork's children."""

    count: int
    returns: list[np.ndarray] = dataclasses.field(default_factory=list)
    scores: list[np.ndarray] = dataclasses.field(default_factory=list)


def _forks(solved: values.Values, scores: np.ndarray | None) -> dict[int, _Forks]:
    going_on, lived = values.trajectory_returns(solved)
    total = solved.earlier + solved.discount * going_on
    backbone = solved.backbone
    root = np.cumsum(solved.parent == values.ROOT)
    count = int(np.sum(solved.leaf & solved.valid))
    found: dict[int, _Forks] = {}
    taken: set[tuple[int, int]] = set()
    for above in np.flatnonzero(backbone & ~solved.leaf).tolist():
        children = np.flatnonzero((solved.parent == above) & lived)
        if len(children) < 2:
            continue
        turn = int(solved.depth[children[0]])
        if (root[above], turn) in taken:
            continue  # in the middle of a turn that forked at its start
        taken.add((root[above], turn))
        forks = found.setdefault(turn, _Forks(count=count))
        forks.returns.append(total[children])
        if scores is not None:
            forks.scores.append(np.asarray(scores, np.float64)[children])
    return found


def _measure(turn: int, trees: list[_Forks]) -> Turn:
    every = [g for tree in trees for g in tree.returns]
    between = []
    for tree in trees:
        if len(tree.returns) > 1:
            noise = np.mean([np.var(g, ddof=1) / len(g) for g in tree.returns])
            between.append(np.var([g.mean() for g in tree.returns], ddof=1) - noise)
    return Turn(
        turn=turn,
        forks=len(every),
        states=_mean([len(tree.returns) for tree in trees]),
        siblings=_mean([len(g) for g in every]),
        returns=_mean([tree.count for tree in trees]),
        between=_mean(between),
        within=_mean([float(np.var(g, ddof=1)) for g in every]),
        moments=_moments(trees) if trees[0].scores else None,
    )


def _moments(trees: list[_Forks]) -> Moments:
    state, forked, score, mean, pair = [], [], [], [], []
    for tree in trees:
        blocks = []
        for g, psi in zip(tree.returns, tree.scores, strict=True):
            k = len(g)
            advantage = g - (g.sum() - g) / (k - 1)
            x = psi * advantage[:, None]
            squares = np.sum(x**2, axis=1)
            # Two siblings' terms have 1 + 1/(K-1)^2 times |g(s)|^2 in the mean: each also stands in
            # the other's baseline.
            crossed = (np.sum(x.sum(axis=0) ** 2) - squares.sum()) / (k * (k - 1))
            state.append(crossed / (1.0 + 1.0 / (k - 1) ** 2))
            forked.append(squares.mean())
            score.append(np.mean(np.sum(psi**2, axis=1)))
            blocks.append(x.mean(axis=0))
        count = len(blocks)
        for i in range(count):
            for j in range(count):
                if i != j:
                    apart = tree.returns[i][:, None] - tree.returns[j]
                    square = np.sum(tree.scores[i] ** 2, axis=1)
                    pair.append(float(np.mean(square[:, None] * apart**2)))
                    mean.append(float(blocks[i] @ blocks[j]))
    return Moments(
        mean_square=_mean(mean),
        state_square=_mean(state),
        forked_square=_mean(forked),
        score_square=_mean(score),
        pair_square=_mean(pair),
    )


def _mean(numbers: Sequence[float]) -> float:
    return float(np.mean(numbers)) if len(numbers) else math.nan
