"""The compute ledger: what a run has spent, counted where it is spent.

Comparisons between algorithms are made at matched decoded tokens and at matched returns; both are
read from here.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(kw_only=True)
class Ledger:
    """Cumulative counts.

    Attributes:
      decoded: tokens sampled from the policy while training; every sampled token once.
      probed: tokens sampled to judge where to branch (probes, rollouts of an oracle) and thrown
        away; not among the decoded ones.
      prefilled: tokens computed without sampling (prompts and observations).
      cache_saved: prefix tokens a fork did not have to compute again.
      sandbox_steps: actions executed in sandboxes.
      replayed_steps: actions executed again to rebuild a lost sandbox.
      snapshots: sandbox states saved.
      forks: decisions below the root that were given more than one child.
      trained_unique: tokens of the trees that went through the learner, each once, also where a
        tree was split over rows and a part repeats its path.
      trained_flat: the tokens the same trajectories would be one by one.
      returns: trajectories that ended with a return.
      updates: optimiser steps.
    """

    decoded: int = 0
    probed: int = 0
    prefilled: int = 0
    cache_saved: int = 0
    sandbox_steps: int = 0
    replayed_steps: int = 0
    snapshots: int = 0
    forks: int = 0
    trained_unique: int = 0
    trained_flat: int = 0
    returns: int = 0
    updates: int = 0

    def add(self, other: Ledger) -> None:
        """Adds what was counted elsewhere."""
        for name, count in other.state_dict().items():
            setattr(self, name, getattr(self, name) + count)

    def metrics(self) -> dict[str, int]:
        """Counts keyed ``ledger/<name>``."""
        return {f"ledger/{k}": v for k, v in self.state_dict().items()}

    def state_dict(self) -> dict[str, int]:
        return dataclasses.asdict(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        for name in self.state_dict():
            setattr(self, name, int(state.get(name, 0)))
