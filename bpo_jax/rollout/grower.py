"""Grows many trees at once, and never waits for one branch to go on with another.

A loop hands the engine what branches want to read and say, and the sandboxes what they do, and
takes up whatever becomes ready. Sandboxes work in threads beside it. Branches without a slot wait;
none is cut or dropped. The tokens of a branch are a function of its seed and of what it has read,
so the trees are the same in whatever order things become ready, but for rounding in the engine and
for budgets that several branches share.

With several engines, one per device, tasks are dealt out among them and grown side by side.
"""

from __future__ import annotations

import collections
import concurrent.futures
import threading
import time
from collections.abc import Callable, Sequence

from bpo_jax.ledger import Ledger
from bpo_jax.rollout.api import Engine
from bpo_jax.rollout.branching import Branching
from bpo_jax.rollout.dialogue import Dialogue
from bpo_jax.rollout.growth import Growth, Waits
from bpo_jax.rollout.lines import Limits, derive
from bpo_jax.sandbox import api
from bpo_jax.tree import Tree


class Grower:
    """Grows trees of an environment with an engine.

    Args:
      environment: the task family.
      backend: starts and forks its sandboxes.
      engines: sample; their slots bound how many branches speak at a time. A tree grows on one.
        Siblings that wait for a slot hold their sandboxes.
      dialogue: turns messages into token ids.
      limits: of every trajectory.
      threads: of sandboxes that work at the same time, for all engines together, though at least
        one for each. A backend that says it is ``inline`` needs none.
      deterministic: takes up what sandboxes have done in a fixed order and only when all have
        finished, so that the same arguments give the same trees to the last bit. Otherwise whatever
        is finished goes on at once.
      clock: in seconds.

    Attributes:
      waits: of the last call of `grow`.
    """

    def __init__(
        self,
        *,
        environment: api.Environment,
        backend: api.Backend,
        engines: Sequence[Engine],
        dialogue: Dialogue,
        limits: Limits,
        threads: int = 16,
        deterministic: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.environment = environment
        self.backend = backend
        self.engines = engines
        self.dialogue = dialogue
        self.limits = limits
        self.threads = 0 if backend.inline else threads
        self.deterministic = deterministic
        self.clock = clock
        self.waits = Waits()

    def grow(
        self,
        tasks: Sequence[api.Task],
        *,
        roots: int,
        rule: Branching,
        seed: int,
        temperature: float,
        ledger: Ledger,
    ) -> list[Tree]:
        """One tree per task.

        Evaluation is the same with one root, a rule that places nothing and its own ledger.

        Args:
          tasks: in the order of the result; a task may occur more than once.
          roots: M, trajectories that start at each task's first decision.
          rule: where to branch; read here, never updated.
          seed: of the sampling. A tree's tokens depend on it, on the task's id and on the policy.
          temperature: of the sampling, 0 for greedy.
          ledger: what is spent is added to it.

        Returns:
          Trees in the order of `tasks`. A task whose sandbox could not be started, or whose prompt
          leaves no room for a turn, gives a tree without actions, and ``info["error"]`` says why.

        Raises:
          ValueError: the rule needs one more slot than an engine has.
        """
        seeded = list(zip(tasks, _task_seeds(tasks, seed), strict=True))
        ways = min(len(self.engines), max(len(tasks), 1))
        growths: list[Growth] = []
        stopped = threading.Event()
        for part, engine in enumerate(self.engines[:ways]):
            engine.temperature = temperature
            growths.append(
                Growth(
                    environment=self.environment,
                    backend=self.backend,
                    engine=engine,
                    dialogue=self.dialogue,
                    limits=self.limits,
                    threads=max(1, self.threads // ways) if self.threads else 0,
                    deterministic=self.deterministic,
                    clock=self.clock,
                    tasks=seeded[part::ways],
                    roots=roots,
                    rule=rule,
                    stopped=stopped,
                )
            )
        if ways == 1:
            growths[0].run()
        else:
            with concurrent.futures.ThreadPoolExecutor(ways) as pool:
                try:
                    under_way = [pool.submit(growth.run) for growth in growths]
                    # The first to fail ends the wait, wherever it stands.
                    first = concurrent.futures.FIRST_EXCEPTION
                    for future in concurrent.futures.wait(under_way, return_when=first).done:
                        future.result()
                    for future in under_way:
                        future.result()
                except BaseException:
                    # The pool waits for its threads: let them end with the step they are in.
                    stopped.set()
                    raise
        self.waits = Waits()
        for growth in growths:
            ledger.add(growth.ledger)
            self.waits.sandboxes += growth.waits.sandboxes
            self.waits.device += growth.waits.device
        return [growths[i % ways].trees[i // ways] for i in range(len(tasks))]


def _task_seeds(tasks: Sequence[api.Task], seed: int) -> list[int]:
    """A seed per task, named by its id and by how often the id came before."""
    seen: collections.Counter[str] = collections.Counter()
    seeds = []
    for task in tasks:
        seeds.append(derive(seed, task.id, seen[task.id]))
        seen[task.id] += 1
    return seeds
