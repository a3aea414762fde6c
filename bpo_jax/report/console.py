"""What a person sees while a run goes on, and the one screen at its end."""

from __future__ import annotations

import shutil
import sys
import time
from typing import Any, TextIO


class Progress:
    """A bar with the time left on a terminal; elsewhere a plain line now and then.

    Steps may be of any kind: how far the run has come is given as a fraction. The estimate of the
    time left counts from where this process began, so that a resumed run does not flatter itself.
    """

    def __init__(
        self,
        name: str,
        *,
        start: float = 0.0,
        stream: TextIO | None = None,
        every: float = 30.0,
    ):
        """Begins at fraction `start`; off a terminal, a line at most each `every` seconds."""
        self.stream = sys.stderr if stream is None else stream
        self.terminal = self.stream.isatty()
        self.name = name
        self._start = start
        self._every = every
        self._began = time.monotonic()
        self._last = -float("inf")
        self._drawn = False

    def show(self, fraction: float, text: str) -> None:
        """Draws the state of the run: how far it has come, from 0 to 1, and `text`."""
        now = time.monotonic()
        if not self.terminal and now - self._last < self._every and fraction < 1.0:
            return
        self._last = now
        left = self._left(fraction, now)
        if not self.terminal:
            self._write(f"{self.name} {fraction:4.0%} {text}, {left} left\n")
            return
        width = shutil.get_terminal_size().columns
        filled = round(20 * min(max(fraction, 0.0), 1.0))
        bar = "█" * filled + "░" * (20 - filled)
        line = f"{self.name} {bar} {fraction:4.0%} {left} left · {text}"
        self._write("\r" + line[: width - 1].ljust(width - 1))
        self._drawn = True

    def say(self, text: str) -> None:
        """Prints a line that stays, above the bar."""
        self.clear()
        self._write(text + "\n")

    def clear(self) -> None:
        """Takes the bar off the terminal."""
        if self._drawn:
            self._write("\r" + " " * (shutil.get_terminal_size().columns - 1) + "\r")
            self._drawn = False

    def _left(self, fraction: float, now: float) -> str:
        done = fraction - self._start
        if done <= 0:
            return "?"
        return duration((now - self._began) * max(1.0 - fraction, 0.0) / done)

    def _write(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()


def duration(seconds: float) -> str:
    """Seconds for people: 42s, 3m05s, 2h07m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def render_summary(summary: dict[str, Any], workdir: str) -> str:
    """The end of a run on one screen.

    Args:
      summary: the content of ``summary.json``.
      workdir: where the files are.
    """
    ledger = summary["ledger"]
    before, after = (_success(summary, f"eval/success_{when}") for when in ("initial", "final"))
    gain = ""
    if "eval/success_initial" in summary and "eval/success_final" in summary:
        points = 100 * (summary["eval/success_final"] - summary["eval/success_initial"])
        gain = f"   ({points:+.1f} points)"
    rows = [
        ("status", summary["status"]),
        ("algorithm", f"{summary['algorithm']}, seed {summary['seed']}"),
        ("success before", before),
        ("success after", after + gain),
        ("updates", f"{summary['updates']:,}"),
        ("wall time", duration(summary["wall_seconds"])),
        ("tokens decoded", f"{ledger['decoded']:,}"),
        ("returns, forks", f"{ledger['returns']:,}, {ledger['forks']:,}"),
        ("sandbox steps", f"{ledger['sandbox_steps']:,}"),
        (
            "tokens trained",
            f"{ledger['trained_unique']:,} (one trajectory at a time: {ledger['trained_flat']:,})",
        ),
        ("numbers", f"{workdir}/metrics.jsonl, {workdir}/summary.json"),
        ("checkpoints", f"{workdir}/checkpoints"),
    ]
    return "\n".join(f"  {name:<16}{value}" for name, value in rows)


def _success(summary: dict[str, Any], key: str) -> str:
    if key not in summary:
        return "not evaluated"
    return f"{summary[key]:.1%} of {summary[f'{key}_count']} tasks"
