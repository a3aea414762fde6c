"""One run: grow trees, estimate advantages, pack, update, log, checkpoint, evaluate.

`train` is the loop; `Run` holds what the loop works with. Nothing else in the program knows the
whole of it.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import datetime
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import config_dict

import bpo_jax
from bpo_jax import config as config_lib
from bpo_jax import estimators, evaluation, packing
from bpo_jax.estimators.running import RunningConstants
from bpo_jax.interrupt import Abort, Interrupt
from bpo_jax.learner import checkpoint as checkpoint_lib
from bpo_jax.learner import loss as loss_lib
from bpo_jax.learner import mesh as mesh_lib
from bpo_jax.learner import optimizer as optimizer_lib
from bpo_jax.learner import probe as probe_lib
from bpo_jax.learner import update as update_lib
from bpo_jax.learner import weight_sync
from bpo_jax.ledger import Ledger
from bpo_jax.models import policy as policy_lib
from bpo_jax.profiling import Profile
from bpo_jax.report import console
from bpo_jax.report import metrics as metrics_lib
from bpo_jax.rollout.branching import Branching, BranchingConfig
from bpo_jax.rollout.dialogue import Dialogue
from bpo_jax.rollout.engine import PagedEngine
from bpo_jax.rollout.grower import Grower
from bpo_jax.rollout.lines import Limits
from bpo_jax.sandbox.in_process import InProcessBackend
from bpo_jax.tree import Action, Tree

GRAD_NORM_WINDOW = 20
"""Updates over which the variance of the gradient's norm is logged."""
MOST_SKIPPED = 3
"""Updates in a row that may be skipped for a gradient that is not finite."""


def train(config: config_dict.ConfigDict, workdir: str) -> dict[str, Any]:
    """Trains until a budget is spent, from the newest checkpoint in `workdir` if there is one.

    Args:
      config: resolved (`bpo_jax.config.resolve`).
      workdir: an existing folder.

    Returns:
      What stands in ``summary.json`` at the end.
    """
    began = time.monotonic()
    status = "failed"
    run = Run(config, workdir)
    with contextlib.ExitStack() as stack:
        interrupt = stack.enter_context(Interrupt())
        run.resume()
        metrics = metrics_lib.MetricsWriter(
            workdir, step=run.step, tensorboard=config.log.tensorboard
        )
        stack.callback(metrics.close)
        progress = console.Progress(config.algorithm.name, start=run.fraction_spent())
        if run.step:
            progress.say(f"resumed after update {run.step} from {workdir}/checkpoints")
        profile = Profile(config.profile.steps, pathlib.Path(workdir) / "profile")
        stack.callback(profile.close)
        before = run.elapsed

        def clock() -> float:
            return before + time.monotonic() - began

        try:
            while True:
                if run.checkpoint_due():
                    with interrupt.shield():
                        run.save()
                if run.evaluation_due() and run.step not in metrics.evaluated:
                    numbers = run.evaluate()
                    metrics.write("eval", run.step, numbers | {"time/wall": clock()})
                    progress.say(_evaluation_line(run.step, numbers))
                if run.finished():
                    break

                if profile.enter(run.step + 1):
                    progress.say(f"profiler trace written to {profile.folder}")
                timer = Timer()
                with timer("rollout"):
                    trees = run.grow()
                with timer("pack"):
                    kept = run.filter(trees)
                    estimates = run.estimate(kept)
                    minibatches = run.pack(kept, estimates)
                with timer("score"):
                    minibatches = run.score(minibatches)
                    scores = run.probe(kept)
                with interrupt.shield():
                    with timer("update"):
                        numbers = run.update(kept, minibatches)
                    numbers |= tree_metrics(trees, config.algorithm.gamma)
                    numbers["tree/unstarted"] = config.batch.tasks - len(trees)
                    numbers["tree/filtered"] = len(trees) - len(kept)
                    numbers |= estimators.tree_diagnostics(
                        kept, estimates, gamma=config.algorithm.gamma
                    )
                    numbers |= turn_metrics(kept, config.algorithm.gamma, scores)
                    run.learn_constants(trees, numbers)
                    run.elapsed = clock()
                    run.commit()
                    numbers |= run.ledger.metrics() | timer.metrics() | {"time/wall": run.elapsed}
                    numbers |= {
                        "time/wait_sandboxes": run.grower.waits.sandboxes,
                        "time/wait_device": run.grower.waits.device,
                    }
                    metrics.write("train", run.step, numbers)
                progress.show(run.fraction_spent(), _update_line(run, numbers, timer))
            status = "finished" if run.step >= (config.budget.updates or np.inf) else "budget"
        except Abort:
            # Perhaps half an update has happened to the arrays: the last checkpoint stands.
            status = "interrupted"
            run.restore_committed()
        except KeyboardInterrupt:
            status = "interrupted"
            # A signal while saving changes nothing; after a second one the last checkpoint stands.
            with contextlib.suppress(KeyboardInterrupt), interrupt.shield():
                run.restore_committed()
                progress.say("interrupted; saving the last completed update")
                run.save()
        finally:
            progress.clear()
            run.elapsed = clock()
            summary = run.summary(status, metrics_lib.read(metrics.path))
            metrics_lib.write_json(pathlib.Path(workdir) / metrics_lib.SUMMARY, summary)
    print(console.render_summary(summary, workdir), file=sys.stderr)
    return summary


def evaluate(config: config_dict.ConfigDict, workdir: str) -> dict[str, Any]:
    """Evaluates a checkpoint in `workdir`, or the initial policy, and prints the result.

    The environment may be another than the one trained on, the policy may not. The result is also
    written to ``eval-<split>.json``.
    """
    run = Run(config, workdir)
    run.load_policy(config.eval.step)
    numbers = run.evaluate() | {"step": run.step}
    path = pathlib.Path(workdir) / f"eval-{config.eval.split}.json"
    metrics_lib.write_json(path, numbers)
    for name in sorted(name for name in numbers if name.endswith("/success")):
        count = numbers[name.removesuffix("success") + "count"]
        print(f"  {name:<40}{numbers[name]:.1%} of {count}")
    print(f"  after update {run.step}; all numbers: {path}")
    return numbers


class Timer:
    """Seconds spent in each phase of an update."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - began

    def metrics(self) -> dict[str, float]:
        """Seconds keyed ``time/<phase>``."""
        return {f"time/{phase}": seconds for phase, seconds in self.seconds.items()}


class Run:
    """Everything a run works with, and the state that makes it resumable.

    `commit` marks an update as complete; what is saved is always the last committed state, never a
    half of one.
    """

    def __init__(self, config: config_dict.ConfigDict, workdir: str):
        self.config = config
        self.algorithm = estimators.ALGORITHMS[config.algorithm.name]
        environment = config_lib.make_environment(config)
        mesh = mesh_lib.make_mesh(**config.mesh.to_dict())
        try:
            policy = policy_lib.load(
                seed=config.seed,
                mesh=mesh,
                value_head=self.algorithm.critic,
                **config.policy.to_dict(),
            )
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise config_lib.ConfigError(f"policy.init={config.policy.init!r}: {reason}") from error
        self.learner = update_lib.make(
            policy.config,
            loss=loss_lib.LossSettings(
                **{
                    field.name: config.loss[field.name]
                    for field in dataclasses.fields(loss_lib.LossSettings)
                }
            ),
            optimizer=optimizer_lib.OptimizerSettings(
                total=config.budget.updates or 0, **config.optimizer.to_dict()
            ),
            temperature=config.rollout.temperature,
            chunk=config.loss.chunk,
            train_trunk=config.loss.value_trunk,
            mesh=mesh,
        )
        params = self.learner.place(policy.params)
        self.state = self.learner.start(params)
        # The initial policy; reloaded, not saved, when a run resumes.
        self.reference = params if config.loss.kl_weight else None
        self.dialogue = dialogue = Dialogue(
            policy.tokenizer,
            stop_ids=policy.stop_ids,
            thinking=config.rollout.thinking,
            date=datetime.date.fromisoformat(config.rollout.date),
            overflow=config.rollout.overflow,
            observation_tokens=config.rollout.observation_tokens,
        )
        devices = jax.local_devices()
        self.engines = [
            PagedEngine(
                graphdef=policy.graphdef,
                config=policy.config,
                params=params,
                stop_ids=dialogue.stop_ids,
                slots=-(-config.rollout.slots // len(devices)),
                context=config.policy.context,
                tokens=config.rollout.kv_tokens,
                decode=dialogue.text,
            )
            for params in weight_sync.copies(self.state.params, devices)
        ]
        self.grower = Grower(
            environment=environment,
            backend=InProcessBackend(environment=environment),
            engines=self.engines,
            dialogue=dialogue,
            limits=Limits(
                max_turns=environment.max_turns,
                max_turn_tokens=config.rollout.action_tokens,
                context=config.policy.context,
                **{
                    name: config.rollout[name]
                    for name in (
                        "invalid_penalty",
                        "max_invalid",
                        "max_seconds",
                        "retries",
                        "step_seconds",
                    )
                },
            ),
            threads=config.rollout.sandbox_threads,
            deterministic=config.rollout.deterministic,
        )
        self._check_prompt(dialogue)
        self.tasks = environment.tasks(config.environment.train_split, seed=config.seed)
        self.rule = Branching(BranchingConfig(seed=config.seed, **config.branching.to_dict()))
        self.constants = RunningConstants()
        self.ledger = Ledger()
        self.grad_norms: list[float] = []
        self.skipped = 0
        self.elapsed = 0.0
        self.checkpoints = checkpoint_lib.Checkpoints(
            pathlib.Path(workdir) / "checkpoints", keep=config.checkpoint.keep
        )
        self.commit()

    def _check_prompt(self, dialogue: Dialogue) -> None:
        """Looks at the first task, so that a context that is too small is refused at once."""
        environment = self.grower.environment
        task = next(environment.tasks(self.config.environment.train_split, seed=self.config.seed))
        sandbox = environment.start(task)
        length = len(dialogue.prompt_ids(environment.prompt(task, sandbox.reset().observation)))
        sandbox.close()
        if length + self.config.rollout.action_tokens > self.config.policy.context:
            raise config_lib.ConfigError(
                f"policy.context={self.config.policy.context}: the first task's prompt is {length} "
                f"tokens long, and rollout.action_tokens={self.config.rollout.action_tokens} must "
                "fit beside it"
            )

    # The state.

    @property
    def step(self) -> int:
        """Updates completed."""
        return self.ledger.updates

    def record(self) -> dict[str, Any]:
        """What a checkpoint holds beside the arrays."""
        return copy.deepcopy(
            {
                "config": identity(self.config),
                "tasks": self.tasks.state_dict(),
                "branching": self.rule.state_dict(),
                "constants": self.constants.state_dict(),
                "ledger": self.ledger.state_dict(),
                "grad_norms": self.grad_norms,
                "skipped": self.skipped,
                "elapsed": self.elapsed,
            }
        )

    def load_record(self, record: dict[str, Any]) -> None:
        """Puts everything but the arrays back to where `record` was taken."""
        self.tasks.load_state_dict(record["tasks"])
        self.rule.load_state_dict(record["branching"])
        self.constants.load_state_dict(record["constants"])
        self.ledger.load_state_dict(record["ledger"])
        self.grad_norms = list(record["grad_norms"])
        self.skipped = record["skipped"]
        self.elapsed = record["elapsed"]

    def commit(self) -> None:
        """Marks the present state as the one to save."""
        self.committed = self.record()

    def restore_committed(self) -> None:
        """Forgets what has happened since the last `commit`; arrays change only in `update`."""
        self.load_record(self.committed)

    def resume(self) -> None:
        """Restores the newest checkpoint, where there is one."""
        found = self.checkpoints.restore(self.state, config=identity(self.config))
        if found is None:
            return
        _, self.state, record = found
        self.load_record(record)
        self.commit()
        self.sync_weights()

    def load_policy(self, step: int | None) -> None:
        """Restores the parameters alone, of the newest checkpoint where `step` is None."""
        # Longer games may need a longer context, so only what makes the parameters is compared.
        policy = {name: self.config.policy[name] for name in ("init", "preset", "tokenizer")}
        found = self.checkpoints.restore(self.state, config={"policy": policy}, step=step)
        if found is not None:
            _, self.state, record = found
            self.ledger.load_state_dict(record["ledger"])
            self.sync_weights()

    def sync_weights(self) -> None:
        """Gives the samplers the learner's parameters."""
        copies = weight_sync.copies(self.state.params, jax.local_devices())
        for engine, params in zip(self.engines, copies, strict=True):
            engine.set_weights(params, version=self.step)

    def save(self) -> None:
        """Writes a checkpoint of the last committed state."""
        self.checkpoints.save(self.step, self.state, self.committed)

    # What is due.

    def fraction_spent(self) -> float:
        """How far the run has come, from 0 to 1, by the budget that is nearest its end."""
        budget = self.config.budget
        spent = (
            (self.ledger.updates, budget.updates),
            (self.ledger.decoded, budget.decoded_tokens),
            (self.ledger.returns, budget.returns),
        )
        return max(used / limit for used, limit in spent if limit is not None)

    def finished(self) -> bool:
        """Whether a budget is spent."""
        return self.fraction_spent() >= 1.0

    def checkpoint_due(self) -> bool:
        # One at the very start, so that the workdir belongs to this configuration from then on.
        return self.step % self.config.checkpoint.every == 0 or self.finished()

    def evaluation_due(self) -> bool:
        every = self.config.eval.every
        return self.step == 0 or self.finished() or bool(every and self.step % every == 0)

    # The steps of an update.

    def grow(self) -> list[Tree]:
        """The next tasks' trees; a task that could not be started has none."""
        tasks = [next(self.tasks) for _ in range(self.config.batch.tasks)]
        trees = self.grower.grow(
            tasks,
            roots=self.config.algorithm.roots,
            rule=self.rule,
            seed=named_seed(self.config.seed, 1, self.step),
            temperature=self.config.rollout.temperature,
            ledger=self.ledger,
        )
        if self.config.rollout.check_dialogue:
            environment = self.grower.environment
            for task, tree in zip(tasks, trees, strict=True):
                self.dialogue.check_tree(tree, environment.prompt(task, tree.root.observation))
        return [tree for tree in trees if tree.root.actions]

    def filter(self, trees: Sequence[Tree]) -> list[Tree]:
        """The trees to learn from: all, but for those that ``rollout.filter`` leaves out."""
        gamma = self.config.algorithm.gamma
        return [t for t in trees if not self.config.rollout.filter or returns_vary(t, gamma)]

    def estimate(self, trees: Sequence[Tree]) -> list[estimators.Estimate]:
        """Advantages and coefficients, with constants from earlier updates only."""
        c = self.config.algorithm
        learnt = {
            "flow_normalizer": self.flow_normalizer(),
            "shrinkage": self.constants.shrinkage(c.roots) if c.shrinkage else (),
            "baseline": self.constants.baseline if c.baseline else 0.0,
        }
        given = c.to_dict() | learnt
        settings = {name: given[name] for name in self.algorithm.settings if name in given}
        settings["gamma"] = c.gamma
        if not self.algorithm.critic:
            return [self.algorithm.estimate(tree, **settings) for tree in trees]
        estimates = [
            self.algorithm.estimate(tree, decision_values=predicted, **settings)
            for tree, predicted in zip(trees, self.predict_values(trees), strict=True)
        ]
        if self.step >= self.config.loss.value_warmup:
            return estimates
        return [dataclasses.replace(e, coefficient=np.zeros_like(e.coefficient)) for e in estimates]

    def probe(self, trees: Sequence[Tree]) -> list[np.ndarray] | None:
        """Projected gradients of the actions' log-probs, where they are to be logged."""
        if not self.config.log.gradient_directions:
            return None
        return probe_lib.action_scores(
            self.learner,
            self.state.params,
            trees,
            self._pack_unweighted(trees),
            directions=self.config.log.gradient_directions,
            seed=named_seed(self.config.seed, 3, self.step) % 2**32,
        )

    def predict_values(self, trees: Sequence[Tree]) -> list[np.ndarray]:
        """What the critic says of every tree's decisions, 0 where no return lies below."""
        batches = self._pack_unweighted(trees)
        said = [self.learner.values(self.state.params, self.learner.put(b)) for b in batches]
        per_action = packing.unpack(trees, batches, said)
        return [
            packing.first_of_each_decision(tree, numbers)
            for tree, numbers in zip(trees, per_action, strict=True)
        ]

    def flow_normalizer(self) -> float:
        """1, but for flow exponents that change how much a tree counts in all."""
        return 1.0 if self.config.algorithm.flow_exponent == 1 else self.constants.flow_normalizer

    def pack(
        self, trees: Sequence[Tree], estimates: Sequence[estimators.Estimate]
    ) -> list[list[packing.TreeBatch]]:
        """Minibatches of micro-batches; the coefficients hold 1 / (P C)."""
        batch = self.config.batch
        # P counts the tasks issued, not those that came to something.
        prompts = batch.tasks // batch.minibatches
        scale = 1.0 / (prompts * self.config.loss.normalizer)
        return [
            self._pack(
                trees[part :: batch.minibatches], estimates[part :: batch.minibatches], scale
            )
            for part in range(batch.minibatches)
        ]

    def _pack_unweighted(self, trees: Sequence[Tree]) -> list[packing.TreeBatch]:
        nothing = [np.zeros(len(tree.actions())) for tree in trees]
        weights = [packing.Weights(advantage=zero, coefficient=zero) for zero in nothing]
        return self._pack(trees, weights, scale=1.0)

    def _pack(
        self, trees: Sequence[Tree], estimates: Sequence[packing.Weighted], scale: float
    ) -> list[packing.TreeBatch]:
        batch = self.config.batch
        return packing.pack(
            trees,
            estimates,
            row_length=batch.row_length,
            rows=batch.rows,
            buckets=batch.row_buckets,
            path_length=batch.path_length,
            scale=scale,
        )

    def score(self, minibatches: list[list[packing.TreeBatch]]) -> list[list[packing.TreeBatch]]:
        """Fills in log-probs that the loss wants: of the reference, of the policy as it is now."""
        batch = self.config.batch
        # In the first step of an update the policy as it is now is the one being trained.
        proximal = self.config.loss.importance_cap is not None and (
            batch.minibatches * batch.epochs > 1
        )
        policies = {
            "reference_logprob": self.reference,
            "proximal_logprob": self.state.params if proximal else None,
        }
        for name, params in policies.items():
            if params is not None:
                minibatches = [
                    [
                        dataclasses.replace(
                            b, **{name: np.asarray(self.learner.score(params, self.learner.put(b)))}
                        )
                        for b in minibatch
                    ]
                    for minibatch in minibatches
                ]
        return minibatches

    def update(
        self, trees: Sequence[Tree], minibatches: list[list[packing.TreeBatch]]
    ) -> dict[str, Any]:
        """Changes the parameters and hands them to the engine."""
        self.state, numbers = update_lib.update(
            self.learner, self.state, minibatches, epochs=self.config.batch.epochs
        )
        self.ledger.updates += 1
        counts = [packing.token_counts(tree) for tree in trees]
        for unique, flat in counts:
            self.ledger.trained_unique += unique * self.config.batch.epochs
            self.ledger.trained_flat += flat * self.config.batch.epochs
        numbers |= row_metrics(minibatches, sum(unique for unique, _ in counts))
        self.sync_weights()
        self.skipped = self.skipped + 1 if numbers["diag/skipped"] else 0
        if self.skipped >= MOST_SKIPPED:
            update_lib.check_finite(numbers, step=self.step)
        return numbers

    def learn_constants(self, trees: Sequence[Tree], numbers: dict[str, Any]) -> None:
        """Moves what later updates may use, after this one has used the old values."""
        self.rule.update(trees)
        self.constants.update(
            numbers,
            length=numbers["rollout/length"],
            mean_return=numbers["rollout/return"],
            flow_normalizer=self.flow_normalizer(),
        )
        self.grad_norms = [*self.grad_norms, numbers["diag/grad_norm"]][-GRAD_NORM_WINDOW:]
        numbers["diag/grad_norm_var"] = float(np.var(self.grad_norms))
        numbers["diag/threshold"] = self.rule.threshold

    # Evaluation and the end.

    def evaluate(self) -> dict[str, Any]:
        """Success on the evaluation split."""
        c = self.config.eval
        began = time.monotonic()
        tasks = []
        for task in self.grower.environment.tasks(c.split, seed=self.config.seed):
            tasks.append(task)
            if len(tasks) == c.tasks:
                break
        numbers = evaluation.evaluate(
            self.grower,
            tasks,
            split=c.split,
            # The same at every step: then two evaluations differ by the policy alone.
            seed=named_seed(self.config.seed, 2),
            temperature=c.temperature,
        )
        return numbers | {"time/eval": time.monotonic() - began}

    def summary(self, status: str, records: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The content of ``summary.json``."""
        summary = {
            "status": status,
            "algorithm": self.config.algorithm.name,
            "seed": self.config.seed,
            "config": self.config.to_dict(),
            "version": bpo_jax.__version__,
            "updates": self.step,
            "wall_seconds": self.elapsed,
            "ledger": self.ledger.state_dict(),
        }
        steps = {"initial": 0, "final": self.step}
        for record in records:
            for when, step in steps.items():
                if record["kind"] == "eval" and record["step"] == step:
                    summary[f"eval/success_{when}"] = record.get("eval/success")
                    summary[f"eval/success_{when}_count"] = record["eval/count"]
                    summary[f"eval/success_{when}_successes"] = record["eval/successes"]
        return summary


def identity(config: config_dict.ConfigDict) -> dict[str, Any]:
    """The part of a config that a checkpoint must agree with: all that the numbers depend on.

    The budget is left out, so that it can be raised to go on.
    """
    sections = (
        "environment", "policy", "algorithm", "branching", "rollout", "loss", "optimizer", "batch",
        "mesh",
    )  # fmt: skip
    return {
        "seed": config.seed,
        "cpu_devices": config.cpu_devices,
        **{name: config[name].to_dict() for name in sections},
    }


def named_seed(*names: int) -> int:
    """A 64-bit seed of its own for every sequence of numbers."""
    return int(np.random.SeedSequence(names).generate_state(1, np.uint64)[0])


def row_metrics(
    minibatches: Sequence[Sequence[packing.TreeBatch]], unique: int
) -> dict[str, float]:
    """How well the rows are used.

    ``diag/padding`` is the share of their tokens that are padding, ``diag/repeated`` the share of
    the others that are there once more, because a tree is longer than a row. All trees together
    have `unique` tokens. Empty where there is nothing to train on.
    """
    tokens, room = packing.fill(batch for minibatch in minibatches for batch in minibatch)
    if not tokens:
        return {}
    return {"diag/padding": 1 - tokens / room, "diag/repeated": 1 - unique / tokens}


def returns_vary(tree: Tree, gamma: float) -> bool:
    """Whether two trajectories of the tree earned different returns; masked ones have none."""
    returns = [
        sum(gamma**turn * action.reward for turn, action in enumerate(path))
        for path in tree.paths()
        if path[-1].end != "masked"
    ]
    return bool(returns) and max(returns) - min(returns) > 1e-9 * max(1.0, *map(abs, returns))


def tree_metrics(trees: Sequence[Tree], gamma: float) -> dict[str, float]:
    """What the trees looked like and how their trajectories went.

    ``rollout/*`` are flow-weighted, so they estimate what one trajectory of the policy would give
    however often trees forked; ``rollout/length`` is in turns. ``tree/*`` are means over trees,
    ``tree/masked`` the share of trajectories lost to infrastructure failures. Beside them a run
    logs ``tree/unstarted``, tasks that have no tree at all, and ``tree/filtered``, trees that
    ``rollout.filter`` has left out of the update and of the diagnostics, but not of these numbers.
    """
    success, returned, length, depths, masked, leaves = [], [], [], [], 0, 0
    for tree in trees:
        solved = estimators.solve(tree, gamma)
        ends = [i for i in np.flatnonzero(solved.leaf & solved.valid)]
        turns = {id(path[-1]): _turns(path) for path in tree.paths()}
        actions = tree.actions()
        leaves += len(turns)
        masked += sum(action.end == "masked" for action in actions)
        depths.append(max(turns.values(), default=0))
        if ends:
            weight = solved.weight[ends]
            won = [bool(actions[i].info.get("won", False)) for i in ends]
            success.append(float(weight @ np.asarray(won, np.float64)))
            length.append(float(weight @ [turns[id(actions[i])] for i in ends]))
            returned.append(float(solved.root_value))
    count = max(len(trees), 1)
    return {
        "rollout/success": _mean(success),
        "rollout/return": _mean(returned),
        "rollout/length": _mean(length),
        "tree/roots": sum(len(tree.root.actions) for tree in trees) / count,
        "tree/leaves": leaves / count,
        "tree/forks": sum(len(tree.forks()) for tree in trees) / count,
        "tree/depth": _mean(depths),
        "tree/masked": masked / max(leaves, 1),
    }


def _turns(path: Sequence[Action]) -> int:
    return sum(action.next is None or not action.next.mid_turn for action in path)


def turn_metrics(
    trees: Sequence[Tree], gamma: float, scores: Sequence[np.ndarray] | None
) -> dict[str, float]:
    """Whether branching pays at each turn that was forked: ``turn/<turns before>/<name>``."""
    found = estimators.by_turn(trees, gamma=gamma, scores=scores)
    return {f"turn/{t.turn:02d}/{name}": x for t in found for name, x in t.metrics().items()}


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else float("nan")


def _evaluation_line(step: int, numbers: dict[str, Any]) -> str:
    return (
        f"evaluation after update {step}: success {numbers['eval/success']:.1%} of "
        f"{numbers['eval/count']} {numbers['eval/split']} tasks ({numbers['time/eval']:.0f}s)"
    )


def _update_line(run: Run, numbers: dict[str, Any], timer: Timer) -> str:
    return (
        f"update {run.step}: success {numbers['rollout/success']:.0%}, "
        f"return {numbers['rollout/return']:.2f}, "
        f"{numbers['tree/leaves'] * run.config.batch.tasks:.0f} trajectories, "
        f"{timer.seconds['rollout']:.1f}+{timer.seconds['update']:.1f}s"
    )
