"""How well a policy does on a split, in all and by the kind of task."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from bpo_jax.ledger import Ledger
from bpo_jax.rollout.branching import Branching, BranchingConfig
from bpo_jax.rollout.grower import Grower
from bpo_jax.sandbox.api import Task
from bpo_jax.tree import Tree


def evaluate(
    grower: Grower, tasks: Sequence[Task], *, split: str, seed: int, temperature: float
) -> dict[str, Any]:
    """Plays every task once.

    Args:
      grower: holds the policy.
      tasks: what to play.
      split: where they come from, for the record.
      seed: of the sampling.
      temperature: of the sampling; 0 is greedy.

    Returns:
      ``eval/success`` (the fraction won), ``eval/count``, ``eval/successes``, ``eval/score`` (mean
      return), ``eval/turns`` (mean length), the first three under ``eval/<kind>/`` as well, and
      ``eval/masked``: tasks that infrastructure failures left without a result, counted nowhere
      else.
    """
    trees = grower.grow(
        tasks,
        roots=1,
        rule=Branching(BranchingConfig(placement="none")),
        seed=seed,
        temperature=temperature,
        ledger=Ledger(),  # the run's own counts what was spent on training
    )
    played = [result for tree in trees if (result := _result(tree)) is not None]
    by_kind: dict[str, list[bool]] = collections.defaultdict(list)
    for tree, result in zip(trees, map(_result, trees), strict=True):
        if result is not None:
            by_kind[str(tree.info["kind"])].append(result[0])
    metrics: dict[str, Any] = {
        "eval/split": split,
        "eval/masked": len(trees) - len(played),
        "eval/score": _mean([score for _, score, _ in played]),
        "eval/turns": _mean([float(turns) for _, _, turns in played]),
        **_counts("eval", [won for won, _, _ in played]),
    }
    for kind in sorted(by_kind):
        metrics |= _counts(f"eval/{kind}", by_kind[kind])
    return metrics


def _result(tree: Tree) -> tuple[bool, float, int] | None:
    """Whether the one trajectory won, its return and its turns; None where there is none."""
    for path in tree.paths():
        if path[-1].end != "masked":
            won = bool(path[-1].info.get("won", False))
            return won, sum(action.reward for action in path), len(path)
    return None


def _counts(prefix: str, won: Sequence[bool]) -> dict[str, Any]:
    return {
        f"{prefix}/success": _mean([float(w) for w in won]),
        f"{prefix}/count": len(won),
        f"{prefix}/successes": sum(won),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
