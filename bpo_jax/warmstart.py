"""Warm start: clone an expert, or chats from a file, into a policy that reinforcement can improve.

Demonstrations become trees of one branch with exactly the token ids a rollout would have, so that
what is cloned is what will be sampled. Now and then a refused command is put between the expert's
turns: it is read, not learned, and shows the policy what follows a mistake. The result is a folder
in Hugging Face's format:
``WORKDIR/policy`` with ``config.json``, ``model.safetensors``, the tokenizer and
``provenance.json``, which says how it was made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import json
import pathlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from ml_collections import config_dict

import bpo_jax
from bpo_jax import config as config_lib
from bpo_jax import packing
from bpo_jax.interrupt import Abort, Interrupt
from bpo_jax.learner import checkpoint as checkpoint_lib
from bpo_jax.learner import cloning
from bpo_jax.learner import mesh as mesh_lib
from bpo_jax.learner import update as update_lib
from bpo_jax.models import decoder, policy, presets, tokenizer, weights
from bpo_jax.report import console
from bpo_jax.report import metrics as metrics_lib
from bpo_jax.rollout.dialogue import Dialogue
from bpo_jax.sandbox.api import Environment
from bpo_jax.sandbox.in_process import InProcessBackend
from bpo_jax.tree import Action, Decision, Tree

CHUNK = 256
"""Demonstrations packed together: enough that rows are nearly full."""
DEMONSTRATION_STREAM = 7
"""Keeps the tasks that are demonstrated apart from those a run with the same seed trains on."""
LOG_EVERY = 50

Chat = Sequence[Mapping[str, Any]]
"""Messages; one of the assistant may carry ``"weight": 0``: to be read, not to be learned."""


def run(config: config_dict.ConfigDict, workdir: str) -> dict[str, Any]:
    """Clones demonstrations into ``WORKDIR/policy``, from the newest checkpoint if there is one.

    Checkpoints lie in ``WORKDIR/checkpoints-warmstart``.

    Args:
      config: resolved; ``config.warmstart`` says how much and how fast.
      workdir: an existing folder.

    Returns:
      What stands in ``summary.json``.

    Raises:
      ConfigError: the chats cannot be read, or none of them fits a row.
      NonFiniteGradients: many steps in a row could not be taken.
    """
    began = time.monotonic()
    settings = config.warmstart
    make_chats = _chat_source(config)
    start = _starting_policy(config, make_chats)
    cloner = cloning.make(
        start.config,
        learning_rate=settings.learning_rate,
        warmup=settings.warmup,
        updates=settings.updates,
        context_weight=settings.observation_weight,
        chunk=config.loss.chunk,
        mesh=mesh_lib.make_mesh(**config.mesh.to_dict()),
    )
    state = cloner.start(start.params)
    # Not the folder a training run in the same workdir would look into.
    checkpoints = checkpoint_lib.Checkpoints(
        pathlib.Path(workdir) / "checkpoints-warmstart", keep=config.checkpoint.keep
    )
    last = min(settings.stop or settings.updates, settings.updates)
    identity = _identity(config)
    # Where `stop` was lowered, newer checkpoints are passed over.
    found = checkpoints.restore(state, config=identity, latest=last)
    done, tokens = 0, 0
    if found is not None:
        done, state, record = found
        tokens = record["tokens"]
    metrics = metrics_lib.MetricsWriter(workdir, step=done, tensorboard=config.log.tensorboard)
    progress = console.Progress("warmstart", start=done / last)
    fitting = Fitting()
    dialogue = Dialogue(
        start.tokenizer,
        thinking=config.rollout.thinking,
        date=datetime.date.fromisoformat(config.rollout.date),
    )
    batches = _batches(make_chats, dialogue, config, fitting)
    sums: list[Any] = []
    status = "interrupted"

    def save() -> None:
        checkpoints.save(done, state, {"config": identity, "tokens": tokens})

    def summary() -> dict[str, Any]:
        return {
            "status": status,
            "seed": config.seed,
            "updates": done,
            "tokens": tokens,
            "left_out": fitting.left_out,
            "wall_seconds": time.monotonic() - began,
            "version": bpo_jax.__version__,
            "policy": str(folder),
            "config": config.to_dict(),
        }

    folder = pathlib.Path(workdir) / "policy"
    with Interrupt() as interrupt:
        try:
            warned = False
            for batch in itertools.islice(batches, done, last):
                if fitting.left_out and not warned:
                    warned = True
                    progress.say(fitting.warning(settings.row_length))
                # The state is donated to each step: between a step and its count there is none.
                with interrupt.shield():
                    state, numbers = cloner.step(state, cloner.put(batch))
                    sums.append(numbers)
                    done, tokens = done + 1, tokens + int((batch.tree_id >= 0).sum())
                    if done % LOG_EVERY == 0 or done == last:
                        means = cloning.means(sums)
                        _check(means, len(sums), done)
                        sums.clear()
                        metrics.write("train", done, means | {"tokens": tokens})
                        chance = f"token probability {means['probability']:.1%}"
                        progress.show(done / last, f"{chance} loss {means['loss']:.3f}")
                    if done % settings.checkpoint_every == 0 or done == last:
                        save()
            status = "finished"
        except Abort:
            # Perhaps half a step has happened to the arrays: the last checkpoint stands.
            done = max((step for step in checkpoints.steps() if step <= last), default=0)
        except KeyboardInterrupt:
            # A second signal leaves the last checkpoint standing.
            with contextlib.suppress(KeyboardInterrupt), interrupt.shield():
                save()
            progress.say(f"interrupted after update {done}; the same command goes on from there")
        finally:
            progress.clear()
            metrics.close()
        with interrupt.shield():
            if status == "finished":
                counts = {"updates": done, "tokens": tokens, "left_out": fitting.left_out}
                _export(folder, start, state.params, config, counts)
                progress.say(
                    f"policy: {folder}\nevaluate it: --mode=eval --config.policy.init={folder}"
                )
            result = summary()
            metrics_lib.write_json(pathlib.Path(workdir) / metrics_lib.SUMMARY, result)
    return result


def _identity(config: config_dict.ConfigDict) -> dict[str, Any]:
    """The part of a config that a checkpoint must agree with."""
    free = ("stop", "checkpoint_every")
    return {
        "warmstart": {k: v for k, v in config.warmstart.to_dict().items() if k not in free},
        "policy": config.policy.to_dict(),
        "environment": config.environment.to_dict(),
        "mesh": config.mesh.to_dict(),
        "cpu_devices": config.cpu_devices,
        "seed": config.seed,
    }


def _check(means: dict[str, float], steps: int, done: int) -> None:
    if means["skipped"] == steps:
        raise update_lib.NonFiniteGradients(
            f"update {done}: none of the last {steps} could be made, because their gradients are "
            "not finite or nothing has a weight; lower warmstart.learning_rate or check the chats"
        )


# Demonstrations.


def play(
    environment: Environment,
    task: Any,
    *,
    seed: int,
    mistakes: float = 0.0,
) -> tuple[list[dict[str, Any]], list[str]]:
    """The expert's play of one task.

    Args:
      environment: with an expert.
      task: to play.
      seed: of the expert and of the mistakes.
      mistakes: probability of a mistake before each of the expert's turns; one that the sandbox
        does not refuse is left out.

    Returns:
      The chat, and the expert's commands.

    Raises:
      ConfigError: the environment has no expert.
    """
    expert = environment.expert(task, seed)
    if expert is None:
        raise config_lib.ConfigError(
            "environment: it has no expert to clone; give chats with --config.warmstart.data=FILE"
        )
    rng = np.random.default_rng(seed)
    backend = InProcessBackend(environment=environment)
    sandbox = backend.start(task)
    played: list[str] = []
    try:
        result = sandbox.reset()
        chat: list[dict[str, Any]] = list(environment.prompt(task, result.observation))

        def say(command: str, answer: str, weight: int) -> None:
            turn = {"role": "assistant", "content": environment.turn(command), "weight": weight}
            chat.extend([turn, {"role": "user", "content": answer}])

        while not (result.done or result.truncated):
            command = expert.act(result.observation)
            while rng.random() < mistakes:
                wrong = expert.mistake()
                # Tried in a fork: what is refused changes nothing, and nothing else may happen.
                [fork] = backend.fork(sandbox.snapshot(), 1)
                refusal = fork.step(wrong)
                if refusal.info.get("invalid"):
                    say(wrong, refusal.observation, 0)
            result = sandbox.step(command)
            played.append(command)
            say(command, result.observation, 1)
    finally:
        sandbox.close()
    return chat[:-1], played  # nobody reads what follows the last action


def read_chats(path: str) -> list[Chat]:
    """Chats from a file with one ``{"messages": [{"role", "content"}, ...]}`` a line.

    A chat opens with messages of the system or the user; from the first of the assistant on,
    assistant and user take turns. A message of the assistant may carry a ``"weight"`` from 0 (read
    only) to 1 (the default). What follows the assistant's last message is left out.

    Raises:
      ConfigError: names the first line that is none.
    """
    chats: list[Chat] = []
    try:
        # Not splitlines(): JSON may hold the other line ends of Unicode as they are.
        lines = pathlib.Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise config_lib.ConfigError(
            f"warmstart.data={path!r}: cannot be read ({error})"
        ) from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"warmstart.data={path}, line {number}"
        try:
            chat = [_message(m) for m in json.loads(line)["messages"]]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise config_lib.ConfigError(
                f'{where}: expected {{"messages": [{{"role": ..., "content": ...}}, ...]}} '
                f"({type(error).__name__}: {error})"
            ) from error
        while chat and chat[-1]["role"] != "assistant":
            chat.pop()
        opening = list(itertools.takewhile(lambda m: m["role"] != "assistant", chat))
        turns = chat[len(opening) :]
        roles = ["assistant" if i % 2 == 0 else "user" for i in range(len(turns))]
        if not opening or not turns or [m["role"] for m in turns] != roles:
            raise config_lib.ConfigError(
                f"{where}: expected an opening by system or user, then assistant and user in turn"
            )
        chats.append(chat)
    if not chats:
        raise config_lib.ConfigError(f"warmstart.data={path}: holds no chat")
    return chats


def _message(message: Any) -> dict[str, Any]:
    role, content, weight = message["role"], message["content"], message.get("weight", 1)
    if role not in ("system", "user", "assistant"):
        raise ValueError(f"role {role!r} is none of system, user, assistant")
    if not isinstance(content, str):
        raise TypeError(f"content {content!r} is no text")
    content.encode()  # half a surrogate pair is JSON, but no text a tokenizer takes
    if not isinstance(weight, (int, float)) or not 0 <= weight <= 1:
        raise ValueError(f"weight {weight!r} is no number from 0 to 1")
    return {"role": role, "content": content, "weight": float(weight)}


def chat_tree(chat: Chat, dialogue: Dialogue) -> tuple[Tree, packing.Weights]:
    """A chat as a tree of one branch, with the token ids a rollout of it would have.

    Returns:
      The tree, and the weight of each of its actions as their coefficients.
    """
    opening = list(itertools.takewhile(lambda m: m["role"] != "assistant", chat))
    decision = root = Decision(context_ids=dialogue.prompt_ids(opening))
    turns = chat[len(opening) :]
    for reply, answer in itertools.zip_longest(turns[::2], turns[1::2]):
        ids = dialogue.turn_ids(reply["content"])
        zeros = np.zeros(len(ids), np.float32)
        action = Action(token_ids=ids, logprobs=zeros, entropies=zeros, text=reply["content"])
        decision.actions.append(action)
        if answer is None:
            action.end = "done"
        else:
            decision = Decision(
                context_ids=dialogue.observation_ids(answer["content"], stopped=True)
            )
            action.next = decision
    weight = np.array([reply.get("weight", 1) for reply in turns[::2]], np.float64)
    tree = Tree(task_id="demonstration", root=root)
    return tree, packing.Weights(advantage=np.ones_like(weight), coefficient=weight)


def _chat_source(config: config_dict.ConfigDict) -> Any:
    """A function that starts the endless, seeded stream of chats from its beginning."""
    if config.warmstart.data is not None:
        chats = read_chats(config.warmstart.data)

        def from_file() -> Iterator[Chat]:
            rng = np.random.default_rng([config.seed, DEMONSTRATION_STREAM])
            while True:
                yield from (chats[i] for i in rng.permutation(len(chats)))

        return from_file
    environment = config_lib.make_environment(config)

    def from_expert() -> Iterator[Chat]:
        stream = int(
            np.random.SeedSequence([config.seed, DEMONSTRATION_STREAM]).generate_state(1)[0]
        )
        tasks = environment.tasks(config.environment.train_split, seed=stream)
        for index, task in enumerate(tasks):
            chat, _ = play(
                environment, task, seed=stream + index, mistakes=config.warmstart.mistakes
            )
            yield chat

    return from_expert


# Training.


@dataclasses.dataclass(frozen=True)
class _Start:
    config: decoder.DecoderConfig
    params: Any
    tokenizer: Any


def _starting_policy(config: config_dict.ConfigDict, make_chats: Any) -> _Start:
    """The policy to begin with; a random one without a tokenizer gets one made for the chats."""
    c = config.policy
    source = policy.folder(c.preset)
    own_words = c.tokenizer is not None or (source / "tokenizer.json").is_file()
    try:
        mesh = mesh_lib.make_mesh(**config.mesh.to_dict())
        if c.init != "random" or own_words:
            loaded = policy.load(seed=config.seed, mesh=mesh, **c.to_dict())
            return _Start(loaded.config, loaded.params, loaded.tokenizer)
        model = weights.read_config(source) if source.is_dir() else presets.preset(c.preset)
        model = dataclasses.replace(model, dtype=c.dtype, param_dtype=c.param_dtype, remat=c.remat)
    except (ValueError, OSError) as error:
        raise config_lib.ConfigError(f"policy: {' '.join(str(error).split())}") from error
    if c.context > model.max_positions:
        raise config_lib.ConfigError(
            f"policy.context={c.context}: this model is made for {model.max_positions} positions"
        )
    sample = itertools.islice(make_chats(), config.warmstart.tokenizer_chats)
    texts = [message["content"] for chat in sample for message in chat]
    words = tokenizer.train(texts, config.warmstart.vocab_size)
    model = dataclasses.replace(model, vocab_size=-(-len(words) // 128) * 128)
    _, shapes, axes = decoder.abstract(model)
    places = mesh_lib.param_shardings(mesh, shapes, axes)
    return _Start(model, decoder.init(model, config.seed, places)[1], words)


@dataclasses.dataclass
class Fitting:
    """How many demonstrations were read so far, and how many of them are longer than a row."""

    read: int = 0
    left_out: int = 0

    def warning(self, row_length: int) -> str:
        """What to say about those left out."""
        return (
            f"{self.left_out} of the first {self.read} demonstrations are left out: longer than "
            f"warmstart.row_length={row_length}"
        )


def _batches(
    make_chats: Any, dialogue: Dialogue, config: config_dict.ConfigDict, fitting: Fitting
) -> Iterator[packing.TreeBatch]:
    """The endless, seeded stream of micro-batches; the n-th is the same in every run."""
    settings = config.warmstart
    rng = np.random.default_rng([config.seed, DEMONSTRATION_STREAM, 1])
    chats = make_chats()
    while True:
        pairs = [chat_tree(chat, dialogue) for chat in itertools.islice(chats, CHUNK)]
        fitting.read += len(pairs)
        pairs = [pair for pair in pairs if _length(pair[0]) <= settings.row_length]
        fitting.left_out += CHUNK - len(pairs)
        if not pairs:
            raise config_lib.ConfigError(
                f"warmstart.row_length={settings.row_length}: not one demonstration of {CHUNK} "
                "fits a row; make rows longer"
            )
        trees, emphasis = zip(*pairs, strict=True)
        batches = packing.pack(trees, emphasis, rows=settings.rows, row_length=settings.row_length)
        # Packing goes by length; the order of updates must not.
        yield from (batches[i] for i in rng.permutation(len(batches)))


def _length(tree: Tree) -> int:
    contexts = sum(len(d.context_ids) for d in tree.decisions())
    return contexts + sum(len(a.token_ids) for a in tree.actions())


def _export(
    folder: pathlib.Path,
    start: _Start,
    params: Any,
    config: config_dict.ConfigDict,
    counts: dict[str, int],
) -> None:
    weights.save(folder, start.config, params, dtype="bfloat16")
    start.tokenizer.save_pretrained(folder)
    given = [flag for flag in sys.argv[1:] if not flag.startswith("--workdir")]
    provenance = {
        "command": " ".join(["python -m bpo_jax.main", *given, "--workdir=DIR"]),
        "began_with": _began_with(config),
        "version": bpo_jax.__version__,
        "seed": config.seed,
        **counts,
        "environment": config.environment.to_dict(),
        "warmstart": config.warmstart.to_dict(),
    }
    (folder / "provenance.json").write_text(json.dumps(provenance, indent=2), encoding="utf-8")


def _began_with(config: config_dict.ConfigDict) -> dict[str, Any] | None:
    """How the policy that was begun with was made, where that is on record."""
    record = policy.folder(config.policy.init) / "provenance.json"
    return json.loads(record.read_text(encoding="utf-8")) if record.is_file() else None
