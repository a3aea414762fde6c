"""Finding and reading official games: what is read, and what is refused, in which words."""

import json
import os
import pathlib
from typing import Any

import pytest

from bpo_jax.environments.alfworld import engine, loader

TASK = "pick_and_place_simple-Mug-None-Desk-308"

needs_data = pytest.mark.skipif(
    not os.environ.get("ALFWORLD_DATA"),
    reason="official games: run `alfworld-download` and set ALFWORLD_DATA",
)


def write(data: pathlib.Path, text: str, task: str = TASK) -> pathlib.Path:
    """A game file with this text in a data folder."""
    path = data / "json_2.1.1" / "valid_seen" / task / "trial_1" / loader.GAME_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def official() -> dict[str, Any]:
    """The JSON of the first official game at hand."""
    first = sorted(loader.data_folder().glob(f"json_2.1.1/*/*/*/{loader.GAME_FILE}"))[0]
    return dict(json.loads(first.read_text(encoding="utf-8")))


def whole(**changes: Any) -> str:
    """A game file that has every key."""
    game = {
        "pddl_domain": "(define (domain d))",
        "grammar": 'grammar :: """{"task": [{"rhs": "Your task is to: rest."}]}""";',
        "pddl_problem": "(define (problem p))",
        "walkthrough": [],
        "solvable": True,
    }
    return json.dumps(game | changes)


def test_without_data_the_error_names_the_download(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    with pytest.raises(loader.GameFileError, match="alfworld-download"):
        loader.find_games("train")


def test_a_folder_without_games_is_an_error_that_names_it(tmp_path: pathlib.Path) -> None:
    with pytest.raises(loader.GameFileError, match=r"json_2.1.1.*alfworld-download"):
        loader.find_games("train", tmp_path)
    (tmp_path / "json_2.1.1" / "train").mkdir(parents=True)
    with pytest.raises(loader.GameFileError, match=f"(?s){tmp_path}.*alfworld-download"):
        loader.find_games("train", tmp_path)


def test_games_the_benchmark_leaves_out_are_not_found(tmp_path: pathlib.Path) -> None:
    kept = write(tmp_path, whole())
    write(tmp_path, whole(solvable=False), "pick_and_place_simple-Cup-None-Desk-308")
    write(tmp_path, whole(), "pick_heat_then_place_in_recep-AppleSliced-None-Fridge-1")
    write(tmp_path, whole(), "pick_and_place_with_movable_recep-Pen-Bowl-Desk-3")
    assert loader.find_games("valid_seen", tmp_path) == [kept]


def test_an_unknown_split_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(loader.GameFileError, match="valid_seen"):
        loader.find_games("test", tmp_path)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (whole()[:100], "not whole JSON"),
        ("", "not whole JSON"),
        ("[" * 100_000, "not whole JSON"),
        (whole(pddl_problem="(" * 100_000), "cannot be played"),
        (json.dumps({"grammar": ""}), "lacks pddl_domain, pddl_problem"),
        ("[]", "lacks pddl_domain"),
        (whole(), "lacks the action"),
        (whole(pddl_domain=3), "not all texts"),
        (whole(pddl_domain="(define (domain d)"), "cut short"),
        (whole(pddl_domain="(define (:action fly))"), "'fly'"),
    ],
)
def test_a_file_that_is_no_such_game_is_named_with_the_release_needed(
    tmp_path: pathlib.Path, text: str, complaint: str
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(loader.GameFileError) as caught:
        loader.load_game(path)
    message = str(caught.value)
    assert complaint in message
    assert str(path) in message
    assert "2.1.2 or newer" in message
    assert "\n" not in message


def test_a_folder_in_place_of_a_game_is_named(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "json_2.1.1" / "valid_seen" / TASK / "trial_1" / loader.GAME_FILE
    path.mkdir(parents=True)
    with pytest.raises(loader.GameFileError, match=r"game\.tw-pddl: Is a directory"):
        loader.load_game(path)
    with pytest.raises(loader.GameFileError, match="alfworld-download"):
        loader.find_games("valid_seen", tmp_path)
    assert loader.GameFileError.one_line


def test_a_missing_file_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(loader.GameFileError, match=loader.GAME_FILE):
        loader.load_game(tmp_path / loader.GAME_FILE)


@needs_data
@pytest.mark.parametrize(
    ("key", "old", "new", "complaint"),
    [
        ("grammar", "move {o} to {r}", "put {o} in/on {r}", "older release"),
        ("grammar", "You arrive at {r.name}.", "You arrive at loc {lend}.", "'go'"),
        ("grammar", "Your task is to: ", "Do this: ", '"task"'),
        (
            "pddl_domain",
            "(isClean ?o)\n            )",
            "(isHot ?o)\n            )",
            "'cleanobject'",
        ),
        ("pddl_domain", "(:action help", "(:action halp", "'halp'"),
        ("pddl_problem", "(:init", "(:init (floats agent1)", "'floats'"),
        ("pddl_problem", "(:goal", "(:gaol", ":goal"),
    ],
)
def test_other_rules_and_other_texts_are_refused(
    tmp_path: pathlib.Path, key: str, old: str, new: str, complaint: str
) -> None:
    game = official()
    assert old in game[key]
    path = write(tmp_path, json.dumps(game | {key: game[key].replace(old, new)}))
    with pytest.raises(loader.GameFileError, match=r"2\.1\.2 or newer") as caught:
        loader.load_game(path)
    assert complaint in str(caught.value)


@needs_data
def test_a_task_type_that_is_none_of_the_six_is_refused(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path, json.dumps(official()), "juggle-Mug-None-Desk-308")
    with pytest.raises(loader.GameFileError, match="juggle"):
        loader.load_game(path)


@needs_data
def test_what_cleans_and_how_commands_are_spelt_is_read_from_the_file(
    tmp_path: pathlib.Path,
) -> None:
    game = official()
    domain = game["pddl_domain"].replace("(receptacleType ?r SinkType)", "")
    grammar = game["grammar"].replace("move {o} to {r}", "lay {o} on {r}")
    path = write(tmp_path, json.dumps(game | {"pddl_domain": domain, "grammar": grammar}))
    rules = loader.load_game(path).rules
    assert rules.cleaners == {"sinkbasin"}
    assert rules.commands["put"] == "lay {o} on {r}"


@needs_data
def test_every_official_game_at_hand_is_won_by_its_walkthrough() -> None:
    paths = sorted(loader.data_folder().glob(f"json_2.1.1/*/*/*/{loader.GAME_FILE}"))[:100]
    for path in paths:
        game = loader.load_game(path)
        state, won = engine.initial_state(game), False
        assert not engine.won(game, state)
        for command in game.walkthrough or ():
            state, text, _, won = engine.step(game, state, command)
            assert text != engine.REFUSED
        assert won, game.id
