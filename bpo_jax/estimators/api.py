"""What an estimator is: a function from a tree to one advantage and one coefficient per action."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Estimate:
    """The policy gradient of one tree, up to the score of each action.

    The estimated gradient is ``sum_a coefficient[a] * advantage[a] * grad log pi(a)``.

    Attributes:
      advantage: float64 [A], in the order of ``tree.actions()``.
      coefficient: float64 [A], how much the action counts; 0 where no return lies below it. The
        loss multiplies it by 1/(prompts x constant), see `bpo_jax.learner`.
    """

    advantage: np.ndarray
    coefficient: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Algorithm:
    """An estimator and what it asks of the trees it is given.

    Attributes:
      name: the value of ``algorithm.name`` in a config.
      estimate: ``estimate(tree, *, gamma=1.0, **settings) -> Estimate``.
      branches: whether it accepts trees that fork below the root.
      placements: the rules for choosing forks that keep the estimate valid, the usual one first.
        ``"none"`` is a flat group.
    """

    name: str
    estimate: Callable[..., Estimate]
    branches: bool
    placements: tuple[str, ...]

    @property
    def settings(self) -> dict[str, Any]:
        """The settings `estimate` accepts besides ``gamma``, each with its default."""
        parameters = inspect.signature(self.estimate).parameters.values()
        return {
            p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "gamma"
        }
