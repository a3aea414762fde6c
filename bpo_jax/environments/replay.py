"""Replays recordings of the original environments on the native ones and counts what differs.

    python -m bpo_jax.environments.replay alfworld TRANSCRIPTS.json --data=DIR

prints the first differences and, as its last line, `steps=N mismatches=M`. It exits with 0 if
nothing differs, with 1 if something does, and with 2 if the recording or the data cannot be used.

A benchmark is a function that adds its own sub-command; that command's `play` yields, for every
recorded step, where it is and what differs there.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bpo_jax.environments.alfworld import engine, loader

Checked = Iterator[tuple[str, list[str]]]
"""For every recorded step: where it is, and one line for each field that differs."""


class BadRecording(ValueError):
    """The recording cannot be replayed; the message says why."""


def read_recording(path: str) -> Any:
    """The JSON value in a file.

    Raises:
      BadRecording: the file cannot be read or holds no JSON.
    """
    try:
        return json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise BadRecording(f"cannot read {path}: {error.strerror}") from error
    except (RecursionError, ValueError) as error:
        raise BadRecording(f"{path} is not JSON: {error}") from error


def differences(recorded: dict[str, Any], played: dict[str, Any]) -> list[str]:
    """One line for each field that both have and that differs."""
    return [
        f"{field}: recorded {recorded[field]!r}, played {value!r}"
        for field, value in played.items()
        if field in recorded and recorded[field] != value
    ]


def add_alfworld(commands: Any) -> None:
    """Add the sub-command for ALFWorld transcripts."""
    parser = commands.add_parser("alfworld", help="transcripts of ALFWorld's text games")
    parser.add_argument("recording", help="JSON: a list of {game, <episode>: [steps], ...}")
    parser.add_argument("--data", help="folder that holds json_2.1.1 (default: $ALFWORLD_DATA)")
    parser.set_defaults(play=lambda args: play_alfworld(args.recording, args.data))


def play_alfworld(recording: str, data: str | None) -> Checked:
    """Replay ALFWorld transcripts.

    Every key of an entry that holds a list of steps is an episode from a fresh start. A step
    {cmd, obs, admissible, reward, won} tells the state after `cmd`; one without `cmd` tells the
    start. A field that is absent is not compared.

    Args:
      recording: path of the JSON file.
      data: the folder that holds `json_2.1.1`; None for what `ALFWORLD_DATA` says.

    Yields:
      Where each step is, and its differences.

    Raises:
      BadRecording: the file is no such recording.
      loader.GameFileError: a game in it is missing or unusable.
    """
    entries = read_recording(recording)
    folder = loader.data_folder(data) / "json_2.1.1"
    if isinstance(entries, dict):
        entries = [entries]
    if not isinstance(entries, list):
        raise BadRecording(f"{recording} holds no list of games")
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict) or not isinstance(entry.get("game"), str):
            raise BadRecording(f"{recording}: entry {number} names no game")
        path = folder / entry["game"]
        game = loader.load_game(path if path.suffix else path / loader.GAME_FILE)
        for key, steps in entry.items():
            if not _is_episode(steps):
                continue
            state = engine.initial_state(game)
            for at, step in enumerate(steps):
                where = f"{entry['game']} {key}[{at}]"
                command = _command(step, where)
                if command is None:
                    state = engine.initial_state(game)
                    text, reward, won = engine.first_observation(game), 0, engine.won(game, state)
                else:
                    state, text, reward, won = engine.step(game, state, command)
                    where += f" {command!r}"
                played = {"obs": text, "reward": reward, "won": won}
                if "admissible" in step:
                    played["admissible"] = engine.admissible(game, state)
                yield where, differences(step, played)


def _is_episode(value: Any) -> bool:
    """Whether a value is a list of steps."""
    return (
        isinstance(value, list)
        and len(value) > 0
        and any(isinstance(step, dict) and ("cmd" in step or "obs" in step) for step in value)
    )


def _command(step: Any, where: str) -> str | None:
    """The command of a step; None at a start."""
    command = step.get("cmd") if isinstance(step, dict) else 0
    if command is not None and not isinstance(command, str):
        raise BadRecording(f"{where} is no step: {str(step)[:80]}")
    return command


BENCHMARKS: tuple[Callable[[Any], None], ...] = (add_alfworld,)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bpo_jax.environments.replay",
        description="Replay recordings of an original environment on the native one.",
    )
    parser.add_argument("--show", type=int, default=10, help="how many differing steps to print")
    commands = parser.add_subparsers(required=True, metavar="BENCHMARK")
    for add in BENCHMARKS:
        add(commands)
    args = parser.parse_args(argv)
    steps = mismatches = 0
    try:
        for where, lines in args.play(args):
            steps += 1
            mismatches += bool(lines)
            if lines and mismatches <= args.show:
                print("\n  ".join([where, *lines]))
    except (BadRecording, loader.GameFileError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not steps:
        print("error: the recording holds no steps", file=sys.stderr)
        return 2
    print(f"steps={steps} mismatches={mismatches}")
    return 1 if mismatches else 0


if __name__ == "__main__":
    sys.exit(main())
