"""Trees on disk: what was sampled, exactly, in two plain files.

A folder holds ``arrays.safetensors``, the token ids, log-probs and entropies of all actions and the
contexts of all decisions, one after the other, and ``trees.json``, everything else with how many
numbers of the arrays belong to what:

    {"format": "bpo_jax trees", "version": 1, "trees": [
      {"task_id": ..., "info": {...}, "decisions": [
        {"context": 12, "fresh": false, "entropy": 0.7, "measure": null, "inclusion": null,
         "mid_turn": false, "planned": 2, "observation": "...", "actions": [
           {"tokens": 5, "text": "...", "reward": 0.0, "end": null, "next": 1, "info": {...}}, ...
         ]}, ...]}, ...]}

Decisions stand in preorder, the root first; ``next`` is the index of one further down. Nothing is
pickled, so a file from somewhere else can do no harm. Snapshots of sandboxes are left out.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import typing
from collections.abc import Sequence
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from bpo_jax.tree import Action, Decision, End, Tree

FORMAT, VERSION = "bpo_jax trees", 1
ARRAYS, STRUCTURE = "arrays.safetensors", "trees.json"
_DTYPES = {
    "context_ids": np.dtype(np.int32),
    "token_ids": np.dtype(np.int32),
    "logprobs": np.dtype(np.float32),
    "entropies": np.dtype(np.float32),
}
_OF_ACTIONS = ("token_ids", "logprobs", "entropies")
_MEASURES = ("entropy", "measure", "inclusion")
_ENDS = (None, *typing.get_args(End))


class TreeFileError(ValueError):
    """A folder that holds no trees, or something else than it says."""


def save(trees: Sequence[Tree], folder: str | os.PathLike[str]) -> None:
    """Writes trees to a folder, which is made where it is missing; what it held is replaced.

    The structure is written last: where it is, the arrays are whole.

    Args:
      trees: finished or not. Their ``info`` must be of what JSON has; tuples come back as lists.
      folder: for the two files.

    Raises:
      ValueError: arrays of an action that differ in length, tokens that are no int32, or a number
        or an ``info`` that JSON cannot hold; nothing is written.
      OSError: the folder cannot be written to.
    """
    arrays: dict[str, list[np.ndarray]] = {name: [] for name in _DTYPES}
    content = {
        "format": FORMAT,
        "version": VERSION,
        "trees": [_describe(tree, arrays) for tree in trees],
    }
    text = json.dumps(content, allow_nan=False)
    flat = {
        name: np.concatenate([np.zeros(0, dtype), *arrays[name]]).astype(dtype)
        for name, dtype in _DTYPES.items()
    }
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STRUCTURE).unlink(missing_ok=True)
    safetensors.numpy.save_file(flat, folder / ARRAYS)
    partial = folder / f"{STRUCTURE}.partial"
    partial.write_text(text, encoding="utf-8")
    partial.replace(folder / STRUCTURE)


def load(folder: str | os.PathLike[str]) -> list[Tree]:
    """Reads what `save` has written.

    Raises:
      TreeFileError: a file is missing, damaged, of another version, or does not fit the other; the
        message says which and where.
    """
    folder = pathlib.Path(folder)
    path = folder / STRUCTURE
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except (OSError, ValueError, RecursionError) as error:
        raise TreeFileError(f"{path}: cannot be read ({_line(error)})") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise TreeFileError(f"{path}: holds no trees; expected 'format': {FORMAT!r}")
    if content.get("version") != VERSION:
        raise TreeFileError(
            f"{path}: version {content.get('version')!r}, but this program reads {VERSION}"
        )
    arrays = _read_arrays(folder / ARRAYS)
    reader = _Reader(path, arrays)
    trees = [
        reader.tree(entry, f"trees[{i}]")
        for i, entry in enumerate(reader.field(content, "trees", list, "file"))
    ]
    reader.check_used_up()
    return trees


# --- writing ------------------------------------------------------------------------------------


def _describe(tree: Tree, arrays: dict[str, list[np.ndarray]]) -> dict[str, Any]:
    decisions = _all_decisions(tree)
    number = {id(decision): i for i, decision in enumerate(decisions)}
    return {
        "task_id": tree.task_id,
        "info": _plain(tree.info, f"tree {tree.task_id!r}: info"),
        "decisions": [_describe_decision(d, tree.task_id, number, arrays) for d in decisions],
    }


def _all_decisions(tree: Tree) -> list[Decision]:
    """In preorder, those without actions included."""
    found, stack = [], [tree.root]
    while stack:
        decision = stack.pop()
        found.append(decision)
        stack.extend(a.next for a in reversed(decision.actions) if a.next is not None)
    return found


def _describe_decision(
    decision: Decision,
    task_id: str,
    number: dict[int, int],
    arrays: dict[str, list[np.ndarray]],
) -> dict[str, Any]:
    where = f"tree {task_id!r}, decision {number[id(decision)]}"
    context = np.asarray(decision.context_ids)
    arrays["context_ids"].append(_exactly(context, np.int32, f"{where}: context_ids"))
    actions = []
    for index, action in enumerate(decision.actions):
        here = f"{where}, action {index}"
        columns = [np.asarray(getattr(action, name)) for name in _OF_ACTIONS]
        if len({c.shape for c in columns}) != 1 or columns[0].ndim != 1:
            shapes = ", ".join(f"{n} {c.shape}" for n, c in zip(_OF_ACTIONS, columns, strict=True))
            raise ValueError(f"{here}: expected one number each for every token, found {shapes}")
        arrays["token_ids"].append(_exactly(columns[0], np.int32, f"{here}: token_ids"))
        for name, column in zip(_OF_ACTIONS[1:], columns[1:], strict=True):
            arrays[name].append(_exactly(column, np.float32, f"{here}: {name}"))
        actions.append(
            {
                "tokens": len(columns[0]),
                "text": action.text,
                "reward": _number(action.reward, f"{here}: reward"),
                "end": action.end,
                "next": None if action.next is None else number[id(action.next)],
                "info": _plain(action.info, f"{here}: info"),
            }
        )
    return {
        "context": len(decision.context_ids),
        "fresh": bool(decision.fresh),
        **{name: _number(getattr(decision, name), f"{where}: {name}") for name in _MEASURES},
        "mid_turn": bool(decision.mid_turn),
        "planned": int(decision.planned),
        "observation": decision.observation,
        "actions": actions,
    }


def _exactly(numbers: np.ndarray, dtype: type, where: str) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        same: np.ndarray = numbers.astype(dtype)
    if numbers.ndim != 1 or not np.array_equal(same, numbers, equal_nan=dtype is np.float32):
        raise ValueError(
            f"{where}: expected a row of {np.dtype(dtype)} numbers, found {numbers.dtype}"
            f" {numbers.shape} with others"
        )
    return same


def _number(value: float | None, where: str) -> float | None:
    if value is None:
        return None
    if not math.isfinite(value):
        raise ValueError(f"{where} is {value}, expected a finite number")
    return float(value)


def _plain(value: Any, where: str) -> Any:
    """The same of what JSON has."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return _number(value, where)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(x, f"{where}[{i}]") for i, x in enumerate(value)]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(x, f"{where}[{key!r}]") for key, x in value.items()}
    raise ValueError(
        f"{where} is a {type(value).__name__}; expected a text, number, True, False, None, or lists"
        " and dictionaries with texts as keys of these"
    )


# --- reading ------------------------------------------------------------------------------------


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _read_arrays(path: pathlib.Path) -> dict[str, np.ndarray]:
    try:
        arrays = safetensors.numpy.load_file(path)
    except (OSError, ValueError, KeyError, safetensors.SafetensorError) as error:
        raise TreeFileError(f"{path}: cannot be read ({_line(error)})") from error
    found = {name: (array.dtype, array.ndim) for name, array in arrays.items()}
    if found != {name: (dtype, 1) for name, dtype in _DTYPES.items()}:
        expected = ", ".join(f"{name} ({dtype})" for name, dtype in _DTYPES.items())
        there = ", ".join(f"{name} ({dtype}, {axes} axes)" for name, (dtype, axes) in found.items())
        raise TreeFileError(f"{path}: expected the rows {expected}, found {there or 'nothing'}")
    if not len(arrays["token_ids"]) == len(arrays["logprobs"]) == len(arrays["entropies"]):
        raise TreeFileError(f"{path}: token_ids, logprobs and entropies differ in length")
    return arrays


_KINDS = {int: "a whole number", str: "a text", bool: "true or false", list: "a list",
          dict: "an object", float: "a number"}  # fmt: skip


class _Reader:
    """Takes a structure apart, and from the arrays what belongs to each part in turn."""

    def __init__(self, path: pathlib.Path, arrays: dict[str, np.ndarray]):
        self.path = path
        self.arrays = arrays
        self.contexts = 0
        self.tokens = 0

    def fail(self, where: str, problem: str) -> TreeFileError:
        return TreeFileError(f"{self.path}: {where}: {problem}")

    def field(
        self, entry: Any, name: str, kind: type, where: str, *, optional: bool = False
    ) -> Any:
        if not isinstance(entry, dict):
            raise self.fail(where, f"expected an object, found {entry!r:.60}")
        if name not in entry:
            raise self.fail(where, f"{name!r} is missing")
        value = entry[name]
        if optional and value is None:
            return None
        # Whole numbers are numbers too, truth values are not.
        fits = type(value) is kind or (kind is float and type(value) is int)
        if not fits:
            raise self.fail(where, f"{name!r} is {value!r:.60}, expected {_KINDS[kind]}")
        if kind is float and not math.isfinite(value):
            raise self.fail(where, f"{name!r} is {value}, expected a finite number")
        return kind(value) if kind is float else value

    def tree(self, entry: Any, where: str) -> Tree:
        entries = self.field(entry, "decisions", list, where)
        if not entries:
            raise self.fail(where, "no decisions; expected at least the root")
        decisions: list[Decision] = []
        links: list[tuple[Action, int, int, str]] = []
        for i, one in enumerate(entries):
            here = f"{where}.decisions[{i}]"
            decision = self.decision(one, here)
            for j, other in enumerate(self.field(one, "actions", list, here)):
                there = f"{here}.actions[{j}]"
                action = self.action(other, there)
                decision.actions.append(action)
                following = self.field(other, "next", int, there, optional=True)
                if following is not None:
                    links.append((action, i, following, there))
            decisions.append(decision)
        reached = set()
        for action, above, following, there in links:
            if not above < following < len(decisions) or following in reached:
                raise self.fail(
                    there,
                    f"'next' is {following}, expected a decision further down, up to"
                    f" {len(decisions) - 1}, that nothing else leads to",
                )
            reached.add(following)
            action.next = decisions[following]
        if len(reached) != len(decisions) - 1:
            lost = next(i for i in range(1, len(decisions)) if i not in reached)
            raise self.fail(where, f"nothing leads to decision {lost}")
        return Tree(
            task_id=self.field(entry, "task_id", str, where),
            root=decisions[0],
            info=self.field(entry, "info", dict, where),
        )

    def decision(self, entry: Any, where: str) -> Decision:
        count = self.field(entry, "context", int, where)
        start, self.contexts = self.contexts, self.contexts + count
        self.check_room(where, "context", count, self.contexts, len(self.arrays["context_ids"]))
        return Decision(
            context_ids=self.arrays["context_ids"][start : self.contexts].copy(),
            fresh=self.field(entry, "fresh", bool, where),
            **{name: self.field(entry, name, float, where, optional=True) for name in _MEASURES},
            mid_turn=self.field(entry, "mid_turn", bool, where),
            planned=self.field(entry, "planned", int, where),
            observation=self.field(entry, "observation", str, where),
        )

    def action(self, entry: Any, where: str) -> Action:
        count = self.field(entry, "tokens", int, where)
        start, self.tokens = self.tokens, self.tokens + count
        self.check_room(where, "tokens", count, self.tokens, len(self.arrays["token_ids"]))
        end = self.field(entry, "end", str, where, optional=True)
        if end not in _ENDS:
            raise self.fail(where, f"'end' is {end!r}, expected null, done, truncated or masked")
        token_ids, logprobs, entropies = (
            self.arrays[name][start : self.tokens].copy() for name in _OF_ACTIONS
        )
        return Action(
            token_ids=token_ids,
            logprobs=logprobs,
            entropies=entropies,
            text=self.field(entry, "text", str, where),
            reward=self.field(entry, "reward", float, where),
            end=end,
            info=self.field(entry, "info", dict, where),
        )

    def check_room(self, where: str, name: str, count: int, upto: int, there: int) -> None:
        if count < 0 or upto > there:
            raise self.fail(
                where, f"{name!r} is {count}, which does not fit the {there} in {ARRAYS}"
            )

    def check_used_up(self) -> None:
        left = {
            "context ids": len(self.arrays["context_ids"]) - self.contexts,
            "sampled tokens": len(self.arrays["token_ids"]) - self.tokens,
        }
        for what, count in left.items():
            if count:
                raise self.fail("file", f"{count} {what} in {ARRAYS} belong to nothing")
