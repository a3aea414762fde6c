"""How far each algorithm's expected gradient is from the policy gradient, by exact enumeration.

    python benchmarks/estimator_bias.py [--json] [--problems=5]

On random decision problems (three turns of two actions, some trajectories shorter, rewards on every
action, gamma 1) every tree a rule can grow is enumerated with its probability, so that what is
printed are sums in float64, not samples. A few seconds on one core; no accelerator.

Columns: `error` is |E g - grad J| / |grad J|, the mean over the problems and the largest; `angle`
the sine of the angle between the two, which no step size mends, likewise. `trees` is how many were
summed. Exits with 1 if an algorithm that claims to be unbiased is not, or one that is known not to
be appears so.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from bpo_jax.estimators import ALGORITHMS, Estimate
from bpo_jax.estimators.exact import mdp as mdp_lib
from bpo_jax.estimators.exact import schedulers as grow
from bpo_jax.estimators.exact.mdp import Mdp
from bpo_jax.tree import Tree

EXACT = 1e-10
"""An error below this is rounding."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """An algorithm on the trees of one rule.

    Attributes:
      algorithm: its name.
      forks: the rule, in words.
      scheduler: the rule.
      settings: of the algorithm.
      unbiased: what is claimed.
      critic: how much the critic errs; None where the algorithm has none.
    """

    algorithm: str
    forks: str
    scheduler: mdp_lib.Scheduler
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    unbiased: bool
    critic: float | None = None

    def estimator(self, mdp: Mdp) -> Callable[[Tree], Estimate]:
        """The algorithm with its settings; the critic errs in another way at every state."""
        estimate = functools.partial(
            ALGORITHMS[self.algorithm].estimate, gamma=mdp.gamma, **self.settings
        )
        if self.critic is None:
            return estimate
        rng = np.random.default_rng(0)
        said = {h: mdp.value(h) + self.critic * rng.normal() for h in mdp.policy}

        def with_critic(tree: Tree) -> Estimate:
            values = [said[mdp_lib.history_of(decision)] for decision in tree.decisions()]
            return estimate(tree, decision_values=np.asarray(values))

        return with_critic


FLAT = ("none", grow.depth_first(2, grow.nowhere))
FLAT_3 = ("none, 3 roots", grow.depth_first(3, grow.nowhere))
THRESHOLD = ("entropy above a threshold", grow.depth_first(2, grow.uncertain))
BACKBONE = ("entropy above a threshold, backbone only", grow.along_backbone(2, grow.uncertain))
ONE_ROOT = ("entropy above a threshold, 1 root", grow.along_backbone(1, grow.uncertain))
RETURNS = (
    "below a disappointing return, shared budget",
    grow.by_arrival(
        2, grow.budgeted(grow.after_disappointment, extra=2, shared=True), slowness=5
    ),
)  # fmt: skip
POST_HOC = ("most uncertain of a finished backbone", grow.post_hoc_top(2, forks=1, fresh=1))
POST_HOC_1 = (
    "most uncertain of a finished backbone, 1 root",
    grow.post_hoc_top(1, forks=1, fresh=1),
)
COINS = ("coins on a finished backbone", grow.post_hoc_coins(1, fresh=2))


def _case(
    algorithm: str, trees: tuple[str, mdp_lib.Scheduler], unbiased: bool, **rest: Any
) -> Case:
    critic = rest.pop("critic", None)
    return Case(
        algorithm=algorithm, forks=trees[0], scheduler=trees[1], settings=rest,
        unbiased=unbiased, critic=critic,
    )  # fmt: skip


CASES = (
    _case("bpo", FLAT, True),
    _case("bpo", THRESHOLD, True),
    _case("bpo", RETURNS, True),
    _case("bpo", ONE_ROOT, True, baseline=0.5),
    _case("bpo", THRESHOLD, False, flow_exponent=0.0),
    _case("bpo", POST_HOC, False),
    _case("post_hoc_ht", COINS, True, baseline=0.5),
    _case("bpo_paper", ONE_ROOT, False, lam=0.0),
    _case("bpo_paper", ONE_ROOT, False),
    _case("bpo_paper", POST_HOC_1, False, lam=0.0),
    _case("bpo_paper", POST_HOC_1, False),
    _case("bpo_paper", POST_HOC_1, False, propagate="siblings"),
    _case("rloo", FLAT, True),
    _case("rloo", FLAT, False, row_per_step=True),
    _case("dr_grpo", FLAT, False),
    _case("grpo", FLAT_3, False),
    _case("grpo", THRESHOLD, False),
    _case("gigpo", FLAT, True, omega=0.0),
    _case("gigpo", FLAT, False),
    _case("vineppo", BACKBONE, True),
    _case("vineppo", POST_HOC, False),
    _case("ppo", THRESHOLD, True, critic=1.0, lam=1.0),
    _case("ppo", THRESHOLD, True, critic=0.0, lam=0.9),
    _case("ppo", THRESHOLD, False, critic=1.0, lam=0.9),
)


def measure(case: Case, problems: int) -> dict[str, Any]:
    """Error and angle over so many problems."""
    errors, angles, trees = [], [], 0
    for seed in range(problems):
        mdp = mdp_lib.random_mdp(seed, gamma=1.0, early_end=0.2)
        expected = mdp_lib.expect(mdp, case.scheduler, case.estimator(mdp))
        exact = mdp.gradient()
        errors.append(mdp_lib.error(expected.gradient, exact))
        angles.append(mdp_lib.direction_error(expected.gradient, exact))
        trees += expected.outcomes
    settings = dict(case.settings)
    if case.critic is not None:
        settings["critic"] = "exact" if case.critic == 0.0 else "wrong"
    return {
        "algorithm": case.algorithm,
        "forks": case.forks,
        "settings": settings,
        "claim": "unbiased" if case.unbiased else "biased",
        "error": {"mean": float(np.mean(errors)), "max": max(errors)},
        "angle": {"mean": float(np.mean(angles)), "max": max(angles)},
        "trees": trees,
        "holds": (max(errors) < EXACT) == case.unbiased,
    }


def markdown(results: list[dict[str, Any]]) -> str:
    """The results as a table; what is rounding is shown as 0."""
    lines = [
        "| algorithm | forks | settings | error | at most | angle | at most | trees |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        exact = r["error"]["max"] < EXACT
        numbers = [r[what][which] for what in ("error", "angle") for which in ("mean", "max")]
        columns = [
            f"`{r['algorithm']}`",
            r["forks"],
            ", ".join(f"{name} {value}" for name, value in r["settings"].items()),
            *("0" if exact else f"{number:.3f}" for number in numbers),
            f"{r['trees']:,}",
        ]
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines)


def main() -> int:
    """Prints the table; 1 if a claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of Markdown")
    parser.add_argument("--problems", type=int, default=5, help="random problems, seeds from 0")
    args = parser.parse_args()
    results = [measure(case, args.problems) for case in CASES]
    print(json.dumps(results, indent=1) if args.json else markdown(results))
    broken = [r for r in results if not r["holds"]]
    for r in broken:
        print(f"not {r['claim']}: {r['algorithm']}, {r['forks']}, {r['settings']}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
