"""What an estimator is: a function from a tree to one advantage and one coefficient per action."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

PREDICTABLE = ("threshold", "random", "fixed", "uniform", "oracle")
"""Rules for forks that settle the number of children before the first is drawn. The oracle's value
gaps come from rollouts that are thrown away."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Estimate:
    """The policy gradient of one tree, up to the score of each action.

    The estimated gradient is ``sum_a coefficient[a] * advantage[a] * grad log pi(a)``.

    Attributes:
      advantage: float64 [A], in the order of ``tree.actions()``.
      coefficient: float64 [A], how much the action counts; 0 where no return lies below it. The
        loss multiplies it by 1/(prompts x constant), see `bpo_jax.learner`.
      value_target: float64 [D], in the order of ``tree.decisions()``, what a critic should have
        said; None without a critic, as the two below.
      value_prediction: float64 [D], what it said.
      value_weight: float64 [D], how much each target counts.
    """

    advantage: np.ndarray
    coefficient: np.ndarray
    value_target: np.ndarray | None = None
    value_prediction: np.ndarray | None = None
    value_weight: np.ndarray | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Algorithm:
    """An estimator and what it asks of the trees it is given.

    Attributes:
      name: the value of ``algorithm.name`` in a config.
      estimate: ``estimate(tree, *, gamma=1.0, **settings) -> Estimate``. With a critic it also
        takes ``decision_values``, float64 [D].
      placements: the rules for choosing forks it may be used with, the usual one first; ``"none"``
        is a flat group.
      implies: values of config keys, by their dotted names, where a config leaves them None.
      critic: whether it needs predicted values of decisions.
    """

    name: str
    estimate: Callable[..., Estimate]
    placements: tuple[str, ...]
    implies: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    critic: bool = False

    @property
    def branches(self) -> bool:
        """Whether it accepts trees that fork below the root."""
        return self.placements != ("none",)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings `estimate` accepts besides ``gamma``, each with its default."""
        parameters = inspect.signature(self.estimate).parameters.values()
        return {
            p.name: p.default
            for p in parameters
            if p.kind is p.KEYWORD_ONLY and p.default is not p.empty and p.name != "gamma"
        }
