"""The environment: splits, streams, prompts, turns and sandboxes."""

import itertools
import json
import os

import pytest

from bpo_jax.action_formats import FORMATS
from bpo_jax.environments import alfworld
from bpo_jax.environments.alfworld.generator import KINDS
from bpo_jax.sandbox.api import InvalidAction


def _first(stream, count):
    return list(itertools.islice(stream, count))


def _started(**settings):
    environment = alfworld.make(**settings)
    task = next(environment.tasks("test", 0))
    sandbox = environment.start(task)
    return environment, task, sandbox, sandbox.reset()


def test_evaluation_splits_are_finite_fixed_and_balanced_over_the_kinds():
    environment = alfworld.make(held_out=12)
    tasks = list(environment.tasks("test", 0))
    assert len(tasks) == environment.tasks("test", 0).length == 12
    assert tasks == list(environment.tasks("test", 99))
    assert [task.kind for task in tasks] == [*KINDS, *KINDS]


def test_splits_share_no_game():
    environment = alfworld.make(held_out=60)
    ids = [
        {task.id for task in _first(environment.tasks(split, 0), 60)}
        for split in ("train", "valid", "test")
    ]
    assert all(len(found) == 60 for found in ids)
    assert not ids[0] & ids[1] and not ids[0] & ids[2] and not ids[1] & ids[2]


def test_no_training_seed_is_held_out():
    seeds = (
        int(task.id.rsplit("/", 1)[1])
        for seed in range(5)
        for task in _first(alfworld.make().tasks("train", seed), 20)
    )
    assert min(seeds) >= 1_000_000  # the held-out ones lie below


def test_training_stream_depends_on_its_seed_and_on_nothing_else():
    environment = alfworld.make()
    assert _first(environment.tasks("train", 1), 5) == _first(environment.tasks("train", 1), 5)
    assert _first(environment.tasks("train", 1), 5) != _first(environment.tasks("train", 2), 5)


@pytest.mark.parametrize("split", ["train", "test"])
def test_stream_resumes_where_it_was(split):
    environment = alfworld.make()
    stream = environment.tasks(split, 3)
    _first(stream, 4)
    state = json.loads(json.dumps(stream.state_dict()))
    resumed = environment.tasks(split, 3)
    resumed.load_state_dict(state)
    assert _first(resumed, 3) == _first(stream, 3)


def test_stream_does_not_resume_from_another_one():
    environment = alfworld.make()
    state = environment.tasks("train", 1).state_dict()
    with pytest.raises(ValueError, match="with seed 2 from one with 1"):
        environment.tasks("train", 2).load_state_dict(state)


def test_training_stream_never_ends():
    assert alfworld.make().tasks("train", 0).length is None


def test_kinds_can_be_chosen():
    environment = alfworld.make(kinds=["heat", "cool"])
    assert {task.kind for task in _first(environment.tasks("train", 0), 20)} == {"heat", "cool"}


def test_plain_prompt_is_the_first_observation_without_its_banner():
    environment, task, _, first = _started()
    (message,) = environment.prompt(task, first.observation)
    assert message == {"role": "user", "content": first.observation}
    assert first.observation.startswith("You are in the middle of a room.")
    assert f"Your task is to: {task.payload.text}" in first.observation


@pytest.mark.parametrize("protocol", ["plain", "bpo", "gigpo"])
def test_expert_wins_and_the_episode_ends(protocol):
    environment = alfworld.make(protocol=protocol)
    for task in _first(environment.tasks("test", 0), 6):
        sandbox = environment.start(task)
        result, expert = sandbox.reset(), environment.expert(task, 0)
        rewards = []
        while not (result.done or result.truncated):
            result = sandbox.step(
                environment.parse(environment.turn(expert.act(result.observation)))
            )
            rewards.append(result.reward)
        assert result.done and result.info["won"] and not result.truncated
        assert rewards == [0.0] * (len(rewards) - 1) + [10.0 if protocol == "gigpo" else 1.0]


def test_episode_is_truncated_at_its_last_turn():
    _, _, sandbox, _ = _started(max_turns=3)
    ends = [sandbox.step("look") for _ in range(3)]
    assert [end.truncated for end in ends] == [False, False, True]
    assert not ends[-1].done and not ends[-1].info["won"]


def test_winning_on_the_last_turn_is_not_a_truncation():
    _, task, _, _ = _started()
    walkthrough = task.payload.walkthrough
    sandbox = alfworld.make(max_turns=len(walkthrough)).start(task)
    sandbox.reset()
    last = [sandbox.step(command) for command in walkthrough][-1]
    assert last.done and not last.truncated


def test_command_that_does_nothing_is_invalid():
    _, _, sandbox, _ = _started()
    assert sandbox.step("fly to moon 1").info["invalid"]
    assert not sandbox.step("look").info["invalid"]


def test_only_gigpo_lists_admissible_commands_and_charges_unreadable_turns():
    _, _, sandbox, first = _started()
    assert "admissible" not in first.info
    assert sandbox.step("").reward == 0.0
    _, _, sandbox, first = _started(protocol="gigpo")
    listed = first.observation.split("Admissible commands:\n")[1].splitlines()
    assert "look" in listed and "help" not in listed
    assert set(listed) == set(first.info["admissible"]) - {"help"}
    assert sandbox.step("").reward == -0.1
    assert sandbox.step("fly to moon 1").reward == 0.0


@pytest.mark.parametrize(
    ("protocol", "text", "command"),
    [
        ("plain", " go to desk 1\n", "go to desk 1"),
        ("bpo", "go to desk 1", "go to desk 1"),
        ("bpo", "<think>the desk\nlooks good</think>\n\ngo to desk 1\n", "go to desk 1"),
        ("gigpo", "<think>a</think> <action> Go to desk 1 </action>", "go to desk 1"),
        ("gigpo", "<think>an <action>x</action>?</think><action>look</action>", "look"),
    ],
)
def test_readable_turns(protocol, text, command):
    assert alfworld.make(protocol=protocol).parse(text) == command


@pytest.mark.parametrize(
    ("protocol", "text", "reason"),
    [
        ("bpo", "", "got 0 lines"),
        ("bpo", "go to desk 1\nlook", "got 2 lines"),
        ("bpo", "<think>on and on", "not closed"),
        ("gigpo", "<action>look</action>", "between <think>"),
        ("gigpo", "<think>a</think>look", "between <action>"),
        ("gigpo", "<think>a</think><action> </action>", "between <action>"),
        ("gigpo", "<think>a</think><action>look</action><action>help</action>", "one action"),
    ],
)
def test_unreadable_turns(protocol, text, reason):
    turn = alfworld.make(protocol=protocol).parse(text)
    assert isinstance(turn, InvalidAction) and reason in turn.reason


@pytest.mark.parametrize("protocol", ["plain", "bpo", "gigpo"])
def test_turn_is_what_parse_reads(protocol):
    environment = alfworld.make(protocol=protocol)
    assert environment.parse(environment.turn("look")) == "look"
    assert environment.parse(environment.turn("look", "Where am I?")) == "look"


@pytest.mark.parametrize("protocol", ["plain", "bpo", "gigpo"])
@pytest.mark.parametrize("name", FORMATS)
def test_any_action_format_goes_with_any_protocol(protocol, name):
    environment, task, _, first = _started(protocol=protocol, action_format=name)
    *told, asked = environment.prompt(task, first.observation)
    assert asked == {"role": "user", "content": first.observation}
    system = told[0]["content"] if told else ""
    assert FORMATS[name].instructions in system
    assert bool(told) == (protocol != "plain" or name != "plain")
    assert environment.parse(environment.turn("look", "Where am I?")) == "look"
    assert environment.markers == FORMATS[name].markers


def test_an_unreadable_turn_costs_what_the_protocol_says():
    assert alfworld.make(protocol="gigpo").parse("look").penalty == 0.1
    assert alfworld.make(protocol="bpo").parse("").penalty == 0.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"action_format": "xml"}, "unknown action format 'xml': expected one of plain, "),
        ({"size": "huge"}, "unknown size 'huge'"),
        ({"protocol": "chat"}, "unknown protocol 'chat': expected one of plain, bpo, gigpo"),
        ({"kinds": ("heat", "toast")}, "expected kinds to be some of put"),
        ({"kinds": ()}, "expected kinds to be some of put"),
        ({"max_turns": 0}, "expected max_turns of 1 or more, got 0"),
        ({"held_out": 0}, "expected 1 <= held_out"),
        ({"data": "/nonexistent"}, "alfworld-download"),
    ],
)
def test_bad_arguments_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        alfworld.make(**settings)


def test_unknown_split_is_refused():
    with pytest.raises(ValueError, match="unknown split 'dev': expected one of train, valid, test"):
        alfworld.make().tasks("dev", 0)


needs_data = pytest.mark.skipif(
    not os.environ.get("ALFWORLD_DATA"),
    reason="official games: set ALFWORLD_DATA to the folder that holds json_2.1.1",
)


@needs_data
def test_official_training_stream_shuffles_every_pass_and_resumes():
    environment = alfworld.make(data=os.environ["ALFWORLD_DATA"], kinds=["look"])
    count = len(environment._paths("train"))
    if count > 100:
        pytest.skip("one pass over the full data takes too long here")
    ids = [task.id for task in _first(environment.tasks("train", 0), 2 * count)]
    assert sorted(ids[:count]) == sorted(ids[count:])
    assert ids[:count] != ids[count:]
    stream = environment.tasks("train", 0)
    stream.load_state_dict({"split": "train", "seed": 0, "position": count})
    assert [task.id for task in _first(stream, 3)] == ids[count : count + 3]


@needs_data
def test_official_evaluation_split_is_finite():
    environment = alfworld.make(data=os.environ["ALFWORLD_DATA"])
    stream = environment.tasks("valid_unseen", 0)
    assert next(stream).id.startswith("valid_unseen/")
    assert stream.length > 0
