"""Constants an estimator may use because they come from earlier updates only.

Estimated on the trees they are applied to, the same numbers would bias the gradient.
"""

from __future__ import annotations

import math
from typing import Any

from bpo_jax.estimators.bpo import Shrinkage


class RunningConstants:
    """Running means of the variance split, of returns and of the flow.

    Args:
      memory: weight of the past, 0 to less than 1; the first value counts in full.
    """

    def __init__(self, memory: float = 0.9):
        self.memory = memory
        self._values: dict[str, float] = {}

    def update(
        self,
        diagnostics: dict[str, float],
        *,
        length: float,
        mean_return: float,
        flow_normalizer: float = 1.0,
    ) -> None:
        """Takes in one update, after its estimates were made.

        Args:
          diagnostics: of `tree_diagnostics`.
          length: mean number of actions of a trajectory, weighted by flow.
          mean_return: discounted from the start, weighted by flow.
          flow_normalizer: the one these estimates were made with.
        """
        seen = {
            "between": diagnostics["diag/B"],
            "within": diagnostics["diag/W"],
            "root_variance": diagnostics["diag/root_variance"],
            "flow": diagnostics["diag/coefficient_sum"] * flow_normalizer,
            "length": length,
            "return": mean_return,
        }
        for name, value in seen.items():
            if math.isfinite(value):
                old = self._values.get(name, value)
                self._values[name] = self.memory * old + (1.0 - self.memory) * value

    def shrinkage(self, roots: int) -> tuple[Shrinkage, ...]:
        """For `bpo`'s ``shrinkage``: empty until the variances have been seen once.

        Forks below forks use the same numbers; exact ones would be conditional on the fork above.
        """
        needed = ("between", "within", "root_variance")
        if roots < 2 or any(name not in self._values for name in needed):
            return ()
        return (
            Shrinkage(
                between=max(self._values["between"], 0.0),
                within=self._values["within"],
                inherited=self._values["root_variance"] / (roots - 1),
            ),
        )

    @property
    def baseline(self) -> float:
        """For `bpo`'s ``baseline``: the mean return, 0 before the first update.

        One number for all tasks, so it does not see that some are harder than others.
        """
        return self._values.get("return", 0.0)

    @property
    def flow_normalizer(self) -> float:
        """For `bpo`'s ``flow_normalizer``: keeps the step size whatever the flow exponent is.

        The running sum of a tree's flow as the exponent makes it, over the sum at exponent 1, which
        is the length of a trajectory; 1 before the first update.
        """
        if self._values.get("length", 0.0) <= 0.0 or self._values.get("flow", 0.0) <= 0.0:
            return 1.0
        return self._values["flow"] / self._values["length"]

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return dict(self._values)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._values = {name: float(value) for name, value in state.items()}
