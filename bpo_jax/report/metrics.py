"""The numbers of a run on disk: ``metrics.jsonl``, TensorBoard events and ``summary.json``.

``metrics.jsonl`` holds one object a line, each with ``step`` and ``kind`` ("train" or "eval"), and
is flushed line by line. A run that resumes cuts it back to its checkpoint's step, so that it reads
as if the run had never stopped.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
from collections.abc import Iterator
from typing import Any

METRICS = "metrics.jsonl"
SUMMARY = "summary.json"


class ReportError(RuntimeError):
    """A file of a run cannot be read or written; the message names it."""

    one_line = True  # the message says everything; a traceback would only hide it


@contextlib.contextmanager
def _named(path: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ReportError(
            f"{path}: {error.strerror or error}; free space or mend the folder, then resume with "
            "the same command"
        ) from error


def read(path: str | pathlib.Path) -> list[dict[str, Any]]:
    """The records of a ``metrics.jsonl``; a last line torn by a crash is left out.

    Raises:
      ReportError: the file cannot be read, or a line of it is no record.
    """
    path = pathlib.Path(path)
    records: list[dict[str, Any]] = []
    if not path.exists():
        return records
    with _named(path):
        content = path.read_bytes()
    lines = content.split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line.decode("utf-8"))
        except (RecursionError, ValueError) as error:
            if number == len(lines):  # without a line's end: torn, or nothing
                break
            raise _no_record(path, number) from error
        if (
            not isinstance(record, dict)
            or type(record.get("step")) is not int
            or not isinstance(record.get("kind"), str)
        ):
            raise _no_record(path, number)
        records.append(record)
    return records


def _no_record(path: pathlib.Path, number: int) -> ReportError:
    return ReportError(
        f"{path}: line {number} is no record with step and kind; move the file away, or start in "
        "another folder"
    )


def write_json(path: str | pathlib.Path, content: Any) -> None:
    """Writes JSON so that a reader sees the old file or the new one, never a part of it."""
    _replace(pathlib.Path(path), json.dumps(content, indent=2, sort_keys=True) + "\n")


class MetricsWriter:
    """Appends records to ``metrics.jsonl`` and, if wanted, to TensorBoard's event files."""

    def __init__(self, workdir: str | pathlib.Path, *, step: int = 0, tensorboard: bool = True):
        """Opens the files of `workdir`.

        Args:
          workdir: must exist.
          step: records of later steps are removed; 0 keeps the initial evaluation only.
          tensorboard: whether to write event files as well.
        """
        self.path = pathlib.Path(workdir) / METRICS
        kept = [record for record in read(self.path) if record["step"] <= step]
        _replace(self.path, "".join(map(_line, kept)))
        self.evaluated = {record["step"] for record in kept if record["kind"] == "eval"}
        """Steps that have an evaluation on record."""
        with _named(self.path):
            self._file = self.path.open("a", encoding="utf-8")
        self._events = None
        if tensorboard:
            import tensorboardX  # half a second, and only needed here

            self._events = tensorboardX.SummaryWriter(str(workdir), purge_step=step + 1)

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Appends one record; numbers that are not finite are left out (JSON has none)."""
        finite = {
            name: value
            for name, value in values.items()
            if not (isinstance(value, float) and not math.isfinite(value))
        }
        with _named(self.path):
            self._file.write(_line({"step": step, "kind": kind, **finite}))
            self._file.flush()
        if kind == "eval":
            self.evaluated.add(step)
        if self._events is not None:
            for name, value in finite.items():
                if isinstance(value, int | float):
                    self._events.add_scalar(name, value, step)
            self._events.flush()

    def close(self) -> None:
        self._file.close()
        if self._events is not None:
            self._events.close()


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record) + "\n"


def _replace(path: pathlib.Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    with _named(path):
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
