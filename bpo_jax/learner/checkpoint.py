"""Checkpoints: everything a run needs to go on, as one atomic Orbax record.

A checkpoint is a folder ``<step>`` with two items: ``state``, the arrays (parameters, optimiser
state), and ``record``, JSON (step, seeds, task iterator, branching thresholds, ledger, running
constants, and the parts of the config that must not change). Orbax writes it under a temporary name
and renames it when it is whole, so a process killed while saving leaves the one before. Nothing is
pickled.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp

from bpo_jax import disk

# Absl's messages about every file and thread are for the library's own debugging. Its errors are
# tracebacks of threads that could not write; the same error is raised to whoever waits for them.
for _name in ("absl", "asyncio"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)

_SPARE_BYTES = 1 << 20
"""What a checkpoint takes beside its arrays, generously."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or none of those present can be read."""

    one_line = True  # the message says everything; a traceback would only hide it


class ConfigMismatch(CheckpointError):
    """The checkpoint belongs to a run with another policy or algorithm."""


class Checkpoints:
    """The checkpoints of one work directory."""

    def __init__(self, directory: str | pathlib.Path, *, keep: int = 2):
        """Opens `directory`, creating it; `keep` is how many checkpoints stay."""
        self.directory = pathlib.Path(directory).resolve()
        with _writing(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
            self._manager = ocp.CheckpointManager(
                self.directory,
                item_names=("state", "record"),
                options=ocp.CheckpointManagerOptions(
                    max_to_keep=keep, enable_async_checkpointing=False
                ),
            )
        self._unreadable: set[int] = set()

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any, record: dict[str, Any]) -> None:
        """Writes one checkpoint and deletes those beyond `keep`.

        Args:
          step: the update after which it is taken; a step already saved is left as it is.
          state: pytree of arrays.
          record: JSON-ready.

        Raises:
          CheckpointError: it could not be written (a full disk, say); the one before is intact.
        """
        with _writing(self.directory):
            self._set_unreadable_aside()
            if step in self.steps():
                return
            self._check_space(state)
            args = ocp.args.Composite(
                state=ocp.args.StandardSave(state), record=ocp.args.JsonSave(record)
            )
            try:
                self._manager.save(step, args=args, force=True)
            except Exception:
                self._remove_leftovers()  # the room they take is wanted for what ends the run
                raise

    def _check_space(self, state: Any) -> None:
        """Looks before writing: where the disk fills up meanwhile, the library is noisy."""
        wanted = sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(state))
        if shutil.disk_usage(self.directory).free < wanted + _SPARE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _set_unreadable_aside(self) -> None:
        if not self._unreadable:
            return
        for unreadable in self._unreadable:
            (self.directory / str(unreadable)).rename(self.directory / f"unreadable-{unreadable}")
        self._unreadable.clear()
        self._manager.reload()

    def _remove_leftovers(self) -> None:
        """Removes what a save that did not come to its end has written."""
        for leftover in self.directory.glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def restore(
        self,
        like: Any,
        *,
        config: dict[str, Any] | None = None,
        step: int | None = None,
        latest: int | None = None,
        part: bool = False,
    ) -> tuple[int, Any, dict[str, Any]] | None:
        """Reads the newest checkpoint that is whole.

        Where that one cannot be read, the one before is tried. When the run goes on from there, the
        next `save` sets the unreadable ones aside as ``unreadable-<step>``.

        Args:
          like: pytree of arrays or shape structs with shardings: what is read, and where it goes.
          config: sections that must equal those in the record's ``config``; None for none.
          step: this checkpoint and no other.
          latest: pass over checkpoints of later steps.
          part: `like` is a dictionary of some entries of the saved state; the others are not read.

        Returns:
          (step, state, record), or None where there is no checkpoint to choose from.

        Raises:
          ConfigMismatch: it belongs to another policy or algorithm; names the first difference.
          CheckpointError: there are checkpoints, and none can be read; or `step` is not there.
        """
        steps = self.steps() if step is None else [s for s in self.steps() if s == step]
        if step is not None and not steps:
            have = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(
                f"{self.directory}: no checkpoint of step {step}; there are: {have}"
            )
        if latest is not None:
            steps = [s for s in steps if s <= latest]
        failure: Exception | None = None
        for candidate in reversed(steps):
            try:
                record = self._read(candidate, record=ocp.args.JsonRestore())["record"]
                if config is not None:
                    saved = {section: record["config"].get(section) for section in config}
                    _compare(saved, config, self.directory / str(candidate))
                state = self._read(candidate, state=_what(like, part))["state"]
                return candidate, state, record
            except ConfigMismatch:
                raise
            # Orbax and tensorstore raise a dozen types for a damaged file; all mean the same here.
            except Exception as error:
                failure = error
                logging.getLogger(__name__).warning(
                    "checkpoint %s cannot be read (%s); trying the one before it",
                    self.directory / str(candidate), _first_line(error),
                )  # fmt: skip
                self._unreadable.add(candidate)
        if failure is not None:
            raise CheckpointError(
                f"{self.directory}: no checkpoint can be read (last: {_first_line(failure)}); "
                "move the folder away to start anew"
            ) from failure
        return None

    def close(self) -> None:
        self._manager.close()

    def _read(self, step: int, **items: Any) -> Any:
        return self._manager.restore(step, args=ocp.args.Composite(**items))


def _what(like: Any, part: bool) -> ocp.args.CheckpointArgs:
    if not part:
        return ocp.args.StandardRestore(like)
    places = ocp.checkpoint_utils.construct_restore_args(like)
    return ocp.args.PyTreeRestore(like, restore_args=places, partial_restore=True)


def _compare(saved: dict[str, Any], now: dict[str, Any], where: pathlib.Path) -> None:
    # Through JSON, so that a tuple equals the list it was saved as.
    flat_saved, flat_now = (_flatten(json.loads(json.dumps(tree))) for tree in (saved, now))
    for key in sorted(flat_now):
        old, new = flat_saved.get(key), flat_now.get(key)
        if old != new:
            raise ConfigMismatch(
                f"{key}={new!r}, but checkpoint {where} was made with {old!r}; use that value, or "
                "another --workdir"
            )


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flatten(value, f"{prefix}.{name}" if prefix else name)
    return flat


@contextlib.contextmanager
def _writing(directory: pathlib.Path) -> Iterator[None]:
    """Turns what the operating system refuses into a `CheckpointError`."""
    try:
        yield
    except Exception as error:
        reason = disk.reason(error)
        if reason is None:
            raise
        raise CheckpointError(
            f"cannot write a checkpoint to {directory}: {reason}; free some space, mend the folder "
            "or choose another --workdir, then run the same command again (the last complete "
            "checkpoint is kept)"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
