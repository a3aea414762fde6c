"""Small decision problems on which every claim about an estimator can be checked exactly.

`Mdp` is a random history-tabular softmax problem: a state is the tuple of actions so far, its
policy a softmax over its own logits, its rewards sit on edges. J and its gradient are exact.

A *scheduler* is how a tree is grown, written once as a generator: it yields the probabilities of
what is to be drawn next, an action or a coin, and is sent the index that came out. `outcomes`
replays it with every possible sequence of draws, so that expectations are sums, not samples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterator
from functools import cached_property

import numpy as np

from bpo_jax.estimators.api import Estimate
from bpo_jax.tree import Action, Decision, Tree

History = tuple[int, ...]
Draws = Generator[np.ndarray, int, Tree]
"""A scheduler in progress."""
Scheduler = Callable[["Mdp"], Draws]
Estimator = Callable[[Tree], Estimate]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Mdp:
    """A decision problem and a policy.

    Attributes:
      gamma: discount per turn.
      policy: state -> float64 [actions], the probabilities.
      reward: history after an action -> what the action earned.
      final: histories at which the trajectory ends.
      within: histories in the middle of a turn. Without any, every action is a turn of its own.
      marker: the token after which a turn may be forked, the first of it in a turn.
      observe: what is read after a history. By default all of it, so that no two look alike.
    """

    gamma: float
    policy: dict[History, np.ndarray]
    reward: dict[History, float]
    final: frozenset[History]
    within: frozenset[History] = frozenset()
    marker: int | None = None
    observe: Callable[[History], str] = str

    @cached_property
    def edges(self) -> dict[History, int]:
        """Number of each edge, named by the history it leads to."""
        names = [(*h, a) for h, p in self.policy.items() for a in range(len(p))]
        return {h: i for i, h in enumerate(names)}

    @cached_property
    def scores(self) -> np.ndarray:
        """float64 [edges, edges], the gradient of log pi of each edge in all logits."""
        scores = np.eye(len(self.edges))
        for history, p in self.policy.items():
            block = [self.edges[(*history, a)] for a in range(len(p))]
            scores[np.ix_(block, block)] -= p
        return scores

    def value(self, history: History = ()) -> float:
        """V of a state; 0 at an end."""
        if history in self.final:
            return 0.0
        p = self.policy[history]
        return float(sum(p[a] * self.action_value((*history, a)) for a in range(len(p))))

    def action_value(self, after: History) -> float:
        """Q of the action that leads to this history."""
        step = 1.0 if after in self.within else self.gamma
        return self.reward[after] + step * self.value(after)

    def discount(self, history: History) -> float:
        """Gamma to the power of the turns that are finished."""
        prefixes = (history[:t] for t in range(1, len(history) + 1))
        return self.gamma ** sum(prefix not in self.within for prefix in prefixes)

    def reach(self, history: History) -> float:
        """Probability that a trajectory passes through a history."""
        return float(np.prod([self.policy[history[:t]][a] for t, a in enumerate(history)]))

    def gradient(self) -> np.ndarray:
        """Gradient of J = V(start) in all logits, by the policy gradient theorem."""
        mass = [self.reach(h) * self.discount(h[:-1]) * self.action_value(h) for h in self.edges]
        return np.asarray(mass) @ self.scores

    def entropy(self, history: History) -> float:
        """Of the policy at a state, in nats."""
        p = self.policy[history]
        return float(-np.sum(p * np.log(p)))


def random_mdp(
    seed: int,
    *,
    depth: int = 3,
    actions: int = 2,
    gamma: float = 0.9,
    early_end: float = 0.0,
    terminal_only: bool = False,
) -> Mdp:
    """A random problem whose rewards are normal around 0.5 with deviation 1.

    Args:
      seed: which one.
      depth: actions after which every trajectory has ended.
      actions: to choose from at every state.
      gamma: discount.
      early_end: probability that a history before that is final.
      terminal_only: only the last action of a trajectory earns anything.
    """
    rng = np.random.default_rng(seed)
    policy: dict[History, np.ndarray] = {}
    reward: dict[History, float] = {}
    final = set()
    frontier: list[History] = [()]
    while frontier:
        history = frontier.pop(0)
        unnormalised = np.exp(rng.normal(size=actions))
        policy[history] = unnormalised / unnormalised.sum()
        for a in range(actions):
            after = (*history, a)
            ends = len(after) == depth or rng.random() < early_end
            drawn = 0.5 + float(rng.normal())
            reward[after] = drawn if ends or not terminal_only else 0.0
            if ends:
                final.add(after)
            else:
                frontier.append(after)
    return Mdp(gamma=gamma, policy=policy, reward=reward, final=frozenset(final))


def in_turns(mdp: Mdp, *lengths: int) -> Mdp:
    """The same problem with its actions as tokens, 1 the marker, in turns of these lengths.

    Rewards are paid at the end of a turn.
    """
    ends = np.cumsum(lengths)
    within = frozenset(h for h in mdp.policy if h and len(h) not in ends)
    reward = {h: 0.0 if h in within else r for h, r in mdp.reward.items()}
    return dataclasses.replace(mdp, reward=reward, within=within, marker=1)


# --- growing ------------------------------------------------------------------------------------


def start(mdp: Mdp) -> Decision:
    """The root decision; a decision's snapshot is its history."""
    return Decision(snapshot=(), observation=mdp.observe(()))


def history_of(decision: Decision) -> History:
    """The actions that lead to a decision."""
    return decision.snapshot


def attach(mdp: Mdp, decision: Decision, *choices: int) -> Action:
    """Takes an action, by its number, at a decision; or several tokens as one action."""
    passed = [(*history_of(decision), *choices[: i + 1]) for i in range(len(choices))]
    after = passed[-1]
    ended = after in mdp.final
    action = Action(
        reward=mdp.reward[after],
        next=None if ended else _arrive(mdp, after),
        end="done" if ended else None,
        info={"edges": [mdp.edges[h] for h in passed], "choice": choices[-1]},
    )
    decision.actions.append(action)
    return action


def _arrive(mdp: Mdp, history: History) -> Decision:
    return Decision(
        snapshot=history, mid_turn=history in mdp.within, observation=mdp.observe(history)
    )


def sample(mdp: Mdp, decision: Decision) -> Generator[np.ndarray, int, Action]:
    """Draws one action: the tokens of a turn, to its end or to where it may first be forked."""
    choices: list[int] = []
    while True:
        history = (*history_of(decision), *choices)
        if choices and history not in mdp.within:
            break
        if choices and choices[-1] == mdp.marker and not decision.mid_turn:
            break
        choices.append((yield mdp.policy[history]))
    return attach(mdp, decision, *choices)


def finish(mdp: Mdp, action: Action) -> Generator[np.ndarray, int, list[Action]]:
    """Rolls out to the end without branching; the actions from the given one on."""
    path = [action]
    while path[-1].next is not None:
        path.append((yield from sample(mdp, path[-1].next)))
    return path


def coin(probability: float) -> Generator[np.ndarray, int, bool]:
    """True with this probability."""
    return bool((yield np.asarray([1.0 - probability, probability])))


# --- expectations -------------------------------------------------------------------------------


def outcomes(mdp: Mdp, scheduler: Scheduler) -> Iterator[tuple[float, Tree]]:
    """Every tree a scheduler can grow, with its probability."""
    choices: list[int] = []
    while True:
        draws = scheduler(mdp)
        offered: list[np.ndarray] = []
        try:
            options = next(draws)
            while True:
                offered.append(options)
                if len(offered) > len(choices):
                    choices.append(_next_possible(options, -1))
                options = draws.send(choices[len(offered) - 1])
        except StopIteration as done:
            probability = 1.0
            for options, choice in zip(offered, choices, strict=True):
                probability *= options[choice]
            yield float(probability), done.value
        while choices:
            following = _next_possible(offered[len(choices) - 1], choices.pop())
            if following >= 0:
                choices.append(following)
                break
        if not choices:
            return


def _next_possible(options: np.ndarray, after: int) -> int:
    """The next index with a positive probability, -1 when there is none."""
    return next((i for i in range(after + 1, len(options)) if options[i] > 0.0), -1)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Expectation:
    """Exact means over everything a scheduler can grow, given that some return exists.

    Attributes:
      gradient: of the estimated gradient.
      root_value: of the estimated value of the start.
      outcomes: how many trees were summed.
    """

    gradient: np.ndarray
    root_value: float
    outcomes: int


def expect(mdp: Mdp, scheduler: Scheduler, estimator: Estimator) -> Expectation:
    """Sums a gradient estimate over all outcomes of a scheduler.

    Raises:
      AssertionError: the probabilities of the outcomes do not add up to 1.
    """
    mass = np.zeros(len(mdp.edges))
    value, certainty, survived, count = 0.0, 0.0, 0.0, 0
    for probability, tree in outcomes(mdp, scheduler):
        count += 1
        certainty += probability
        result = estimator(tree)
        weights = probability * result.coefficient * result.advantage
        for action, weight in zip(tree.actions(), weights.tolist(), strict=True):
            mass[action.info["edges"]] += weight
        root_value = estimated_value(tree.root, mdp.gamma)
        if root_value is not None:
            survived += probability
            value += probability * root_value
    np.testing.assert_allclose(certainty, 1.0, rtol=1e-12)
    return Expectation(
        gradient=mass @ mdp.scores / survived, root_value=value / survived, outcomes=count
    )


def estimated_value(decision: Decision, gamma: float) -> float | None:
    """Mean over children of reward and discounted value, by its definition; None if all masked."""
    values = []
    for action in decision.actions:
        below = 0.0 if action.next is None else estimated_value(action.next, gamma)
        if action.end != "masked" and below is not None:
            step = 1.0 if action.next is not None and action.next.mid_turn else gamma
            values.append(action.reward + step * below)
    return sum(values) / len(values) if values else None


def error(gradient: np.ndarray, exact: np.ndarray) -> float:
    """Norm of the difference, relative to the exact gradient."""
    return float(np.linalg.norm(gradient - exact) / np.linalg.norm(exact))


def direction_error(gradient: np.ndarray, exact: np.ndarray) -> float:
    """The smallest `error` any rescaling reaches: the sine of the angle (1 when opposed)."""
    cosine = gradient @ exact / (np.linalg.norm(gradient) * np.linalg.norm(exact))
    return float(np.sqrt(max(0.0, 1.0 - max(cosine, 0.0) ** 2)))
