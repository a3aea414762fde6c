"""The replay command: what it counts, what it prints, how it exits."""

import json
import os
import pathlib
from typing import Any

import pytest

from bpo_jax.environments import replay
from bpo_jax.environments.alfworld import loader

needs_data = pytest.mark.skipif(
    not os.environ.get("ALFWORLD_DATA"),
    reason="official games: run `alfworld-download` and set ALFWORLD_DATA",
)


def write(path: pathlib.Path, value: Any) -> str:
    path.write_text(json.dumps(value))
    return str(path)


def game_name() -> str:
    """An official game at hand, as recordings name it."""
    root = loader.data_folder() / "json_2.1.1"
    return str(sorted(root.glob(f"*/*/*/{loader.GAME_FILE}"))[0].relative_to(root))


@pytest.mark.parametrize(
    "recording",
    [{"game": 3}, [1], "text", [], [{"game": "nowhere", "random": [{"cmd": "look", "obs": ""}]}]],
)
def test_a_bad_recording_is_told_in_one_line(
    recording: Any, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "json_2.1.1").mkdir()
    path = write(tmp_path / "recording.json", recording)
    assert replay.main(["alfworld", path, f"--data={tmp_path}"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("error: ")
    assert told.err.count("\n") == 1


def test_a_file_that_is_missing_or_no_json_is_named(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("[{")
    for path in (broken, tmp_path / "missing.json"):
        assert replay.main(["alfworld", str(path), f"--data={tmp_path}"]) == 2
        assert str(path) in capsys.readouterr().err


@needs_data
def test_every_list_of_steps_is_an_episode_from_the_start(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = {"cmd": "xyzzy", "obs": "Nothing happens.", "reward": 0, "won": False}
    idle = {"cmd": "inventory", "obs": "You are not carrying anything."}
    entry = {"game": game_name(), "note": ["text"], "one": [refused, idle], "two": [idle]}
    path = write(tmp_path / "recording.json", [entry])
    assert replay.main(["alfworld", path]) == 0
    assert capsys.readouterr().out == "steps=3 mismatches=0\n"


@needs_data
@pytest.mark.parametrize("wrong", [{"obs": "?"}, {"reward": 1}, {"won": True}, {"admissible": []}])
def test_a_difference_in_any_field_is_shown_and_counted(
    wrong: dict[str, Any], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [{"cmd": "xyzzy", "obs": "Nothing happens.", "reward": 0, "won": False} | wrong] * 2
    path = write(tmp_path / "recording.json", [{"game": game_name(), "random": steps}])
    assert replay.main(["--show=1", "alfworld", path]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "random[0] 'xyzzy'" in lines[0]
    assert next(iter(wrong)) in lines[1]
    assert lines[2:] == ["steps=2 mismatches=2"]


@needs_data
def test_recordings_of_the_original_engine_replay_without_a_difference(
    capsys: pytest.CaptureFixture[str],
) -> None:
    recordings = sorted(loader.data_folder().glob("golden/*transcripts*.json"))
    if not recordings:
        pytest.skip("no recordings beside the games (ALFWORLD_DATA/golden/*transcripts*.json)")
    for path in recordings:
        assert replay.main(["alfworld", str(path)]) == 0
        assert capsys.readouterr().out.endswith(" mismatches=0\n")
