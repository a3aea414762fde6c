"""Where to branch: a rule that decides, and pays, before any child of a decision is sampled.

The estimator is unbiased because the number of children of a decision is *predictable*: a function
of what is known when the decision is reached (its own next-token entropy, how the branch came here,
what is left of the budgets, a threshold from earlier updates) and never of the actions sampled
there or below. Budgets limit forks only; a rollout that has begun is never cut to save budget.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np

from bpo_jax.tree import Tree

Placement = Literal["none", "threshold", "random"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BranchingConfig:
    """What the rule may do.

    Attributes:
      placement: "none" never forks, "threshold" forks where the entropy of the next token is at
        least the threshold, "random" forks with a fixed probability.
      siblings: K, the children of a fork.
      forks_per_root: the most forks below one root action.
      forks_per_tree: the most forks in one tree; None leaves the per-root limit alone.
      min_gap: turns from a root's start or from a fork to the next fork on the same path, at least.
      nested: every child of a fork may fork again; otherwise only its first, the backbone.
      quantile: of the entropies of earlier updates, the threshold; "random" forks with
        probability ``1 - quantile``, so that both place equally many.
      initial_threshold: nats, until the first update has been seen.
      memory: weight of the past in the running threshold, 0 to less than 1.
      seed: of the random placement.
    """

    placement: Placement = "threshold"
    siblings: int = 3
    forks_per_root: int = 2
    forks_per_tree: int | None = None
    min_gap: int = 1
    nested: bool = False
    quantile: float = 0.7
    initial_threshold: float = 0.5
    memory: float = 0.8
    seed: int = 0

    def __post_init__(self) -> None:
        if self.placement not in ("none", "threshold", "random"):
            raise ValueError(
                f"branching.placement={self.placement!r}: expected none, threshold or random"
            )
        if self.placement != "none" and self.siblings < 2:
            raise ValueError(
                f"branching.siblings={self.siblings}: a fork has at least 2 children; for flat "
                "groups set branching.placement='none'"
            )
        if self.forks_per_root < 0 or (self.forks_per_tree or 0) < 0:
            raise ValueError("branching budgets are counts of forks and cannot be negative")
        if self.min_gap < 1:
            raise ValueError(f"branching.min_gap={self.min_gap}: at least 1 turn")
        if not 0.0 < self.quantile < 1.0:
            raise ValueError(f"branching.quantile={self.quantile}: strictly between 0 and 1")
        if not 0.0 <= self.memory < 1.0:
            raise ValueError(f"branching.memory={self.memory}: from 0 to less than 1")


@dataclasses.dataclass(kw_only=True)
class Budget:
    """Forks made so far in one tree: in all, and below each root action."""

    tree: int = 0
    roots: dict[int, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Path:
    """How a branch came to the decision it stands at.

    Attributes:
      root: index of the root action it started with.
      turn: turns taken so far; 0 at the root decision.
      since_fork: turns since the last fork on the path, or since the start.
      backbone: at every fork above, this path went on with the first child.
      seed: of the branch, with `turn` a stable name of the decision.
    """

    root: int
    turn: int
    since_fork: int
    backbone: bool
    seed: int


class Branching:
    """The rule and its running threshold.

    The threshold is frozen while trees grow and moves only in `update`, between two updates.
    """

    def __init__(self, config: BranchingConfig):
        self.config = config
        self._threshold: float | None = None

    @property
    def threshold(self) -> float:
        """Nats; ``initial_threshold`` before the first `update`."""
        return self.config.initial_threshold if self._threshold is None else self._threshold

    def decide(self, path: Path, entropy: float, budget: Budget) -> int:
        """The number of children of a decision, charged to `budget` at once.

        Args:
          path: how the branch came here.
          entropy: of the distribution of the decision's first token, in nats.
          budget: of the tree; changed in place when the decision becomes a fork.

        Returns:
          K: 1, or ``siblings`` at a fork. The root decision is never forked beyond its roots.
        """
        c = self.config
        spent = budget.roots.get(path.root, 0)
        allowed = (
            c.placement != "none"
            and path.turn > 0
            and path.since_fork >= c.min_gap
            and (c.nested or path.backbone)
            and spent < c.forks_per_root
            and (c.forks_per_tree is None or budget.tree < c.forks_per_tree)
        )
        if not allowed or not self._chosen(path, entropy):
            return 1
        budget.tree += 1
        budget.roots[path.root] = spent + 1
        return c.siblings

    def _chosen(self, path: Path, entropy: float) -> bool:
        if self.config.placement == "threshold":
            return entropy >= self.threshold
        # Its own randomness, named by the decision: neither the sampler's nor the order's.
        name = f"{self.config.seed}/{path.seed}/{path.turn}"
        word = hashlib.blake2b(name.encode(), digest_size=8).digest()
        return int.from_bytes(word, "little") < (1.0 - self.config.quantile) * 2**64

    def update(self, trees: Iterable[Tree]) -> None:
        """Moves the threshold towards the quantile of the entropies just seen.

        threshold <- memory * threshold + (1 - memory) * quantile; the first update sets it. Root
        decisions are left out, since they are never candidates.
        """
        seen = [
            d.entropy
            for tree in trees
            for d in tree.decisions()
            if d is not tree.root and d.entropy is not None
        ]
        if not seen:
            return
        quantile = float(np.quantile(np.array(seen, np.float64), self.config.quantile))
        if not math.isfinite(quantile):
            raise ValueError(f"entropy quantile is {quantile}: the policy's logits are not finite")
        if self._threshold is None:
            self._threshold = quantile
        else:
            m = self.config.memory
            self._threshold = m * self._threshold + (1.0 - m) * quantile

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {"threshold": self._threshold}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        value = state["threshold"]
        self._threshold = None if value is None else float(value)
