"""What is cloned is what a rollout of the same commands would hold, and the clone loads again."""

import json

import numpy as np
import pytest

from bpo_jax import config as config_lib
from bpo_jax import packing, warmstart
from bpo_jax.environments import alfworld
from bpo_jax.interrupt import Interrupt
from bpo_jax.ledger import Ledger
from bpo_jax.models import policy, tokenizer
from bpo_jax.rollout.api import Answer, Turn
from bpo_jax.rollout.branching import Branching, BranchingConfig
from bpo_jax.rollout.dialogue import Dialogue
from bpo_jax.rollout.grower import Grower, Limits
from bpo_jax.sandbox.in_process import InProcessBackend
from tests import tiny_policy

ENVIRONMENT = alfworld.make()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_policy.write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def dialogue(folder):
    return Dialogue(tokenizer.load(folder))


def first_task():
    return next(ENVIRONMENT.tasks("train", seed=3))


class Reciter:
    """An engine that says given turns."""

    def __init__(self, turns):
        self.turns, self.free_slots, self.tokens = list(turns), 1, 0

    def open(self, ids, seed):
        self.free_slots, self.tokens = 0, len(ids)
        return 0

    def read(self, branch):
        self.answer = Answer(branch=branch, entropy=0.5)

    def say(self, branch, limit, markers=()):
        ids = self.turns.pop(0)
        self.tokens += len(ids)
        zeros = np.zeros(len(ids), np.float32)
        turn = Turn(token_ids=ids, logprobs=zeros, entropies=zeros, finish="stop")
        self.answer = Answer(branch=branch, turn=turn)

    def step(self):
        return [self.answer]

    def extend(self, branch, ids):
        self.tokens += len(ids)

    def length(self, branch):
        return self.tokens

    def free(self, branch):
        self.free_slots = 1


def rollout(chat, dialogue):
    """The tree that grows when a policy says what the assistant of a chat says."""
    said = [dialogue.turn_ids(m["content"]) for m in chat if m["role"] == "assistant"]
    grower = Grower(
        environment=ENVIRONMENT,
        backend=InProcessBackend(environment=ENVIRONMENT),
        engines=[Reciter(said)],
        dialogue=dialogue,
        limits=Limits(max_turns=99, max_turn_tokens=32, context=10_000),
    )
    flat = Branching(BranchingConfig(placement="none"))
    [tree] = grower.grow(
        [first_task()], roots=1, rule=flat, seed=0, temperature=1.0, ledger=Ledger()
    )
    return tree


def ids(tree):
    [path] = tree.paths()
    contexts = [d.context_ids.tolist() for d in tree.decisions()]
    return contexts, [action.token_ids.tolist() for action in path]


def test_a_demonstration_has_the_token_ids_of_a_rollout_of_its_commands(dialogue):
    chat, played = warmstart.play(ENVIRONMENT, first_task(), seed=1)
    tree, weights = warmstart.chat_tree(chat, dialogue)
    grown = rollout(chat, dialogue)
    assert ids(tree) == ids(grown)
    [*_, last] = grown.actions()
    assert last.info["won"]
    assert [a.text for a in tree.actions()] == played
    assert weights.coefficient.tolist() == [1.0] * len(played)


def test_mistakes_are_refused_commands_that_are_read_and_not_learned(dialogue):
    chat, played = warmstart.play(ENVIRONMENT, first_task(), seed=1, mistakes=0.5)
    tree, weights = warmstart.chat_tree(chat, dialogue)
    wrong = [weight == 0 for weight in weights.coefficient]
    assert any(wrong)
    assert all(weight in (0, 1) for weight in weights.coefficient)
    # A mistake takes no turn of the game, but every one of them is answered as the game does.
    assert [a.text for a, w in zip(tree.actions(), wrong, strict=True) if not w] == played
    answers = [d.context_ids for d, w in zip(tree.decisions()[1:], wrong, strict=False) if w]
    assert all("Nothing happens" in dialogue.text(a) for a in answers)
    batches = packing.pack([tree], [weights], rows=1, row_length=2048)
    learned = sum(float(batch.coefficient.sum()) for batch in batches)
    spoken = zip(tree.actions(), wrong, strict=True)
    assert learned == sum(len(action.token_ids) for action, w in spoken if not w)


def write_chats(path, *lines):
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    return str(path)


USER, REPLY = {"role": "user", "content": "look"}, {"role": "assistant", "content": "go"}


def test_chats_are_read_with_their_weights_and_end_with_the_assistant(tmp_path):
    path = write_chats(
        tmp_path / "chats.jsonl",
        {"messages": [USER, REPLY | {"weight": 0}, USER, REPLY, USER]},
        "",
        '{"messages": [{"role": "user", "content": "a\u2028b"}, {"role": "assistant", '
        '"content": "go", "weight": 0.5}]}',
    )
    first, second = warmstart.read_chats(path)
    assert [m["role"] for m in first] == ["user", "assistant"] * 2
    assert [m["weight"] for m in first[1::2]] == [0.0, 1.0]
    assert second[0]["content"] == "a\u2028b"
    assert second[1]["weight"] == 0.5


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        "[" * 100_000,
        {"messages": [USER | {"content": None}, REPLY]},
        {"messages": [USER | {"content": 3}, REPLY]},
        {"messages": [USER | {"content": "\ud800"}, REPLY]},
        {"messages": [USER | {"role": "tool"}, REPLY]},
        {"messages": [USER, REPLY | {"weight": -0.1}]},
        {"messages": [USER, REPLY | {"weight": 1.5}]},
        {"messages": [USER, REPLY | {"weight": float("nan")}]},
        {"messages": [USER, REPLY | {"weight": "1"}]},
        {"messages": [USER, REPLY, REPLY]},
        {"messages": [REPLY]},
        {"messages": "ab"},
    ],
)
def test_a_line_that_is_no_chat_is_named(tmp_path, line):
    path = write_chats(tmp_path / "chats.jsonl", {"messages": [USER, REPLY]}, line)
    with pytest.raises(config_lib.ConfigError, match="line 2: expected"):
        warmstart.read_chats(path)


@pytest.mark.parametrize("name", ["missing.jsonl", "nul\0.jsonl"])
def test_a_file_that_cannot_be_read_is_named(tmp_path, name):
    with pytest.raises(config_lib.ConfigError, match="cannot be read"):
        warmstart.read_chats(str(tmp_path / name))


def make_config(folder, chats, **changes):
    config = config_lib.base()
    config.policy.init = "random"
    config.policy.preset = str(folder)
    config.policy.context = 384
    config.log.tensorboard = False
    settings = {"data": chats, "updates": 3, "rows": 1, "row_length": 128, "warmup": 1}
    config.warmstart.update({**settings, **changes})
    return config_lib.resolve(config, mode="warmstart")


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    short = {"messages": [USER, REPLY, USER, REPLY]}
    long = {"messages": [USER | {"content": "look " * 200}, REPLY]}
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", *[short] * 15, long)


@pytest.fixture(scope="module")
def cloned(folder, chats, tmp_path_factory):
    """One uninterrupted warm start."""
    workdir = tmp_path_factory.mktemp("cloned")
    return workdir, warmstart.run(make_config(folder, chats), str(workdir))


def test_a_clone_is_a_folder_that_gives_the_same_token_ids(cloned, dialogue):
    workdir, summary = cloned
    assert (summary["status"], summary["updates"]) == ("finished", 3)
    # One of sixteen demonstrations is longer than a row, in each chunk that was read.
    assert summary["left_out"] == 16
    written = json.loads((workdir / "policy" / "provenance.json").read_text())
    assert written["left_out"] == 16
    loaded = policy.load(init=summary["policy"], preset="tiny", tokenizer=None, context=384, seed=0)
    text = "You are in the middle of a room. Go to drawer 12!"
    before, after = dialogue.turn_ids(text), Dialogue(loaded.tokenizer).turn_ids(text)
    assert before.tolist() == after.tolist()
    assert not (workdir / "checkpoints").exists()


@pytest.mark.slow
def test_an_interrupted_clone_goes_on_as_if_it_had_not_been(
    cloned, folder, chats, tmp_path, monkeypatch
):
    shield = Interrupt.shield
    calls = []

    def interrupted(self):
        calls.append(self)
        self._pending = len(calls) == 2
        return shield(self)

    monkeypatch.setattr(Interrupt, "shield", interrupted)
    summary = warmstart.run(make_config(folder, chats), str(tmp_path))
    assert (summary["status"], summary["updates"]) == ("interrupted", 2)
    monkeypatch.undo()
    reference, expected = cloned
    summary = warmstart.run(make_config(folder, chats), str(tmp_path))
    assert (summary["status"], summary["tokens"]) == ("finished", expected["tokens"])
    one, two = (
        (path / "policy" / "model.safetensors").read_bytes() for path in (reference, tmp_path)
    )
    assert one == two


def test_a_preset_that_does_not_exist_is_refused(chats):
    with pytest.raises(config_lib.ConfigError, match="nothing-there"):
        make_config("nothing-there", chats)


def test_a_random_policy_without_a_tokenizer_gets_one_and_the_dtypes_asked_for(folder, chats):
    config = make_config("tiny", chats).copy_and_resolve_references()
    config.policy.param_dtype = "bfloat16"
    config.warmstart.vocab_size = 300
    start = warmstart._starting_policy(config, warmstart._chat_source(config))
    assert len(start.tokenizer) <= 300 <= start.config.vocab_size == 384
    assert str(start.params["embedding"].dtype) == start.config.param_dtype == "bfloat16"
