"""Where to branch: a rule that decides, and pays, before any child of a decision is sampled.

The estimator is unbiased because the number of children of a decision is *predictable*: a function
of what is known when the decision is reached (a measure of its own state, how the branch came here,
what is left of the budgets, a threshold from earlier updates) and never of the actions sampled
there or below. Budgets limit forks only; a rollout that has begun is never cut to save budget.

Placements whose name begins with ``post_hoc`` choose among the decisions of a trajectory that has
ended, and are here for the published recipe and for the estimator that corrects for the choice.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

import numpy as np

from bpo_jax.tree import Action, Tree

Placement = Literal[
    "none", "threshold", "random", "fixed", "uniform", "oracle", "post_hoc_top_m", "post_hoc_ht"
]
PLACEMENTS: tuple[str, ...] = get_args(Placement)

EVEN_SHARE = 0.1
"""Of the expected number of post-hoc forks, the part that falls on all decisions alike."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BranchingConfig:
    """What the rule may do.

    Attributes:
      placement: "none" never forks; "threshold" where the entropy of the next action is at least
        the threshold; "random" with a fixed probability; "fixed" at the given turns; "uniform" at
        turns spaced evenly over the expected length of a trajectory; "oracle" where the returns
        of trajectories tried out from there spread at least as far as the threshold. These are
        predictable. "post_hoc_top_m" forks the `forks_per_root` decisions of greatest entropy of a
        trajectory that has ended; "post_hoc_ht" each of them with a probability that grows with
        its entropy and is recorded, `forks_per_root` on average.
      siblings: K, the children of a fork.
      forks_per_root: the most forks below one root action.
      forks_per_tree: the most forks in one tree; None leaves the per-root limit alone. Branches
        that grow at the same time are charged in the order in which they ask.
      min_gap: turns from a root's start or from a fork to the next fork on the same path, at least.
      min_gap_tokens: the same in tokens of the context.
      nested: every child of a fork may fork again; otherwise only its first, the backbone.
      turns: of "fixed", counted from 0, at whose beginning (or marker) to fork.
      boundary: "turn" forks before a turn begins; "marker" inside it, behind its first marker.
      markers: texts that end the thought and begin the action.
      entropy: "first_token" is that of the next token's distribution; "probe" that of `probes`
        short continuations, which are thrown away.
      probes: how many.
      probe_tokens: the longest of them.
      oracle_rollouts: trajectories tried out, and thrown away, at every candidate of "oracle".
      quantile: of the measures of earlier updates, the threshold; "random" forks with
        probability ``1 - quantile``, so that both place equally many.
      initial_threshold: nats (for "oracle": of the return), until the first update has been seen.
      initial_length: turns that "uniform" expects, until the first update has been seen.
      memory: weight of the past in the running threshold and length, 0 to less than 1.
      seed: of the placement's own randomness.
    """

    placement: Placement = "threshold"
    siblings: int = 3
    forks_per_root: int = 2
    forks_per_tree: int | None = None
    min_gap: int = 1
    min_gap_tokens: int = 0
    nested: bool = False
    turns: Sequence[int] | None = None
    boundary: Literal["turn", "marker"] = "turn"
    markers: Sequence[str] | None = None
    entropy: Literal["first_token", "probe"] = "first_token"
    probes: int = 8
    probe_tokens: int = 16
    oracle_rollouts: int = 4
    quantile: float = 0.7
    initial_threshold: float = 0.5
    initial_length: float = 10.0
    memory: float = 0.8
    seed: int = 0

    def __post_init__(self) -> None:
        for name, allowed in {
            "placement": PLACEMENTS,
            "boundary": ("turn", "marker"),
            "entropy": ("first_token", "probe"),
        }.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(
                    f"branching.{name}={value!r}: expected one of {', '.join(allowed)}"
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
        if self.placement == "fixed" and not self.turns:
            raise ValueError("branching.turns is empty: the fixed placement forks at these turns")
        if self.boundary == "marker" and not (self.markers and all(self.markers)):
            raise ValueError(
                f"branching.markers={self.markers!r}: branching.boundary='marker' needs the texts "
                "that end a thought; this action format has none of its own"
            )
        if self.post_hoc and self.nested:
            raise ValueError(
                f"branching.nested: {self.placement} forks trajectories that have ended, not their "
                "siblings"
            )
        if self.post_hoc and self.entropy == "probe":
            raise ValueError(
                f"branching.entropy='probe': {self.placement} goes by the entropy of first tokens, "
                "since probes would have to be made at every turn"
            )
        if self.entropy == "probe" and min(self.probes, self.probe_tokens) < 1:
            raise ValueError("branching.probes and branching.probe_tokens: at least 1 of each")
        if self.placement == "oracle" and self.oracle_rollouts < 2:
            raise ValueError(
                f"branching.oracle_rollouts={self.oracle_rollouts}: returns spread from 2 on"
            )

    @property
    def post_hoc(self) -> bool:
        """Forks are chosen when a trajectory has ended."""
        return self.placement.startswith("post_hoc")

    @property
    def measure(self) -> Literal["first_token", "probe", "oracle"]:
        """What a candidate is judged by."""
        return "oracle" if self.placement == "oracle" else self.entropy


@dataclasses.dataclass(kw_only=True)
class Budget:
    """Forks made so far in one tree: in all, and below each root action."""

    tree: int = 0
    roots: dict[int, int] = dataclasses.field(default_factory=dict)

    def charge(self, root: int) -> None:
        """Pays for a fork below a root action."""
        self.tree += 1
        self.roots[root] = self.roots.get(root, 0) + 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Path:
    """How a branch came to the decision it stands at.

    Attributes:
      root: index of the root action it started with.
      turn: turns taken so far; 0 at the root decision.
      since_fork: turns since the last fork on the path, or since the start.
      tokens_since_fork: the same in tokens.
      backbone: at every fork above, this path went on with the first child.
      seed: of the branch, which names its random numbers.
    """

    root: int
    turn: int
    since_fork: int
    tokens_since_fork: int = 0
    backbone: bool
    seed: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """What a post-hoc placement makes of a trajectory that has ended.

    Attributes:
      forks: indices of the candidates to fork, ascending.
      inclusion: for every candidate the probability with which it was to be among them, given the
        trajectory; None where the choice was not drawn.
    """

    forks: tuple[int, ...]
    inclusion: tuple[float, ...] | None = None


class Branching:
    """The rule and what it has learned from earlier updates.

    Threshold and expected length are frozen while trees grow and move only in `update`, between
    two updates.
    """

    def __init__(self, config: BranchingConfig):
        self.config = config
        self._threshold: float | None = None
        self._length: float | None = None

    @property
    def threshold(self) -> float:
        """Nats, or of the return; ``initial_threshold`` before the first `update`."""
        return self.config.initial_threshold if self._threshold is None else self._threshold

    @property
    def length(self) -> float:
        """Turns a backbone is expected to have; ``initial_length`` before the first `update`."""
        return self.config.initial_length if self._length is None else self._length

    def allows(self, path: Path, budget: Budget) -> bool:
        """Whether a decision on this path may become a fork, whatever the policy thinks there.

        The root decision is never forked beyond its roots.
        """
        c = self.config
        return (
            c.placement != "none"
            and not c.post_hoc
            and path.turn > 0
            and path.since_fork >= c.min_gap
            and path.tokens_since_fork >= c.min_gap_tokens
            and (c.nested or path.backbone)
            and budget.roots.get(path.root, 0) < c.forks_per_root
            and (c.forks_per_tree is None or budget.tree < c.forks_per_tree)
        )

    def decide(self, path: Path, measure: float, budget: Budget) -> int:
        """The number of children of a decision, charged to `budget` at once.

        Args:
          path: how the branch came here.
          measure: of the state: an entropy in nats, or the spread of returns for "oracle".
          budget: of the tree; changed in place when the decision becomes a fork.

        Returns:
          K: 1, or ``siblings`` at a fork.
        """
        if not self.allows(path, budget) or not self._chosen(path, measure):
            return 1
        budget.charge(path.root)
        return self.config.siblings

    def _chosen(self, path: Path, measure: float) -> bool:
        c = self.config
        if c.placement == "fixed":
            return path.turn in (c.turns or ())
        if c.placement == "uniform":
            return path.turn in self._even_turns()
        if c.placement == "random":
            return self._uniform(path) < 1.0 - c.quantile
        # Where most candidates' returns do not spread at all, neither does their quantile.
        return measure >= self.threshold and (c.placement != "oracle" or measure > 0.0)

    def _even_turns(self) -> set[int]:
        """Turns that divide the expected length into equal parts."""
        parts = self.config.forks_per_root + 1
        return {max(1, round(self.length * k / parts)) for k in range(1, parts)}

    def _uniform(self, path: Path) -> float:
        """In [0, 1): the decision's own random number, not the sampler's nor of any order."""
        name = f"{self.config.seed}/{path.seed}/{path.turn}"
        word = hashlib.blake2b(name.encode(), digest_size=8).digest()
        return int.from_bytes(word, "little") / 2**64

    def choose(self, candidates: Sequence[tuple[Path, float]], budget: Budget) -> Choice:
        """The decisions to fork of a trajectory that has ended, charged to `budget`.

        Args:
          candidates: its decisions below the root, in order, with the entropy of each.
          budget: of the tree; limits "post_hoc_top_m" only, since an inclusion that depends on what
            is left would not have the probability it is recorded with.
        """
        if self.config.placement == "post_hoc_top_m":
            return self._choose_top(candidates, budget)
        if self.config.placement == "post_hoc_ht":
            return self._choose_drawn(candidates, budget)
        raise ValueError(f"placement {self.config.placement!r} decides before, not after")

    def _choose_top(self, candidates: Sequence[tuple[Path, float]], budget: Budget) -> Choice:
        c = self.config
        forks: list[int] = []
        for index in sorted(range(len(candidates)), key=lambda i: (-candidates[i][1], i)):
            path, _ = candidates[index]
            if (
                budget.roots.get(path.root, 0) < c.forks_per_root
                and (c.forks_per_tree is None or budget.tree < c.forks_per_tree)
                and path.since_fork >= c.min_gap
                and path.tokens_since_fork >= c.min_gap_tokens
                and all(
                    abs(path.since_fork - other.since_fork) >= c.min_gap
                    and abs(path.tokens_since_fork - other.tokens_since_fork) >= c.min_gap_tokens
                    for other, _ in (candidates[i] for i in forks)
                )
            ):
                budget.charge(path.root)
                forks.append(index)
        return Choice(forks=tuple(sorted(forks)))

    def _choose_drawn(self, candidates: Sequence[tuple[Path, float]], budget: Budget) -> Choice:
        total, count = sum(entropy for _, entropy in candidates), len(candidates)
        inclusion, forks = [], []
        for index, (path, entropy) in enumerate(candidates):
            # None may be left out for sure: a first token without entropy is not an action without.
            share = entropy / total if total else 1 / count
            mixed = (1 - EVEN_SHARE) * share + EVEN_SHARE / count
            inclusion.append(min(1.0, self.config.forks_per_root * mixed))
            if self._uniform(path) < inclusion[-1]:
                budget.charge(path.root)
                forks.append(index)
        return Choice(forks=tuple(forks), inclusion=tuple(inclusion))

    def update(self, trees: Iterable[Tree]) -> None:
        """Moves the threshold and the expected length towards what was just seen.

        x <- memory * x + (1 - memory) * seen; the first update sets it. Seen are the quantile of
        the measures of all decisions but the roots, which are never candidates, and the mean number
        of turns of the backbones.
        """
        trees = list(trees)
        inside = self.config.boundary == "marker"
        measures = [
            d.entropy if self.config.measure == "first_token" else d.measure
            for tree in trees
            for d in tree.decisions()
            if d is not tree.root and d.mid_turn == inside
        ]
        seen = [measure for measure in measures if measure is not None]
        if seen:
            quantile = float(np.quantile(np.array(seen, np.float64), self.config.quantile))
            if not math.isfinite(quantile):
                raise ValueError(
                    f"entropy quantile is {quantile}: the policy's logits are not finite"
                )
            self._threshold = self._moved(self._threshold, quantile)
        lengths = [_turns(root) for tree in trees for root in tree.root.actions]
        if lengths:
            self._length = self._moved(self._length, sum(lengths) / len(lengths))

    def _moved(self, old: float | None, seen: float) -> float:
        m = self.config.memory
        return seen if old is None else m * old + (1.0 - m) * seen

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state."""
        return {"threshold": self._threshold, "length": self._length}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        threshold, length = state["threshold"], state.get("length")
        self._threshold = None if threshold is None else float(threshold)
        self._length = None if length is None else float(length)


def _turns(action: Action) -> int:
    """Turns from `action` to the end of its trajectory, by the first child of every decision."""
    count = 1
    while action.next is not None:
        count += not action.next.mid_turn
        action = action.next.actions[0]
    return count
