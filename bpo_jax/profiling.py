"""A profiler trace of some updates, for TensorBoard's profile plugin or Perfetto."""

from __future__ import annotations

import pathlib
import re


def parse_steps(text: str) -> range:
    """The updates in ``a:b``, b excluded, the first one being 1.

    Raises:
      ValueError: it is not such a text, or holds no update.
    """
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if not match or not 1 <= int(match[1]) < int(match[2]):
        raise ValueError("expected a:b with 1 <= a < b, for the updates a to b - 1")
    return range(int(match[1]), int(match[2]))


class Profile:
    """Traces what happens in the updates `steps` into a folder.

    Args:
      steps: as `parse_steps` reads them; None for nothing.
      folder: is made when tracing begins.
    """

    def __init__(self, steps: str | None, folder: pathlib.Path):
        self.steps = parse_steps(steps) if steps else range(0)
        self.folder = folder
        self.tracing = False

    def enter(self, step: int) -> bool:
        """Called as update `step` begins; whether a trace was completed by that."""
        completed = False
        if self.tracing and step not in self.steps:
            completed = self.close()
        if not self.tracing and step in self.steps:
            import jax  # Late: what checks a config runs before JAX is set up.

            jax.profiler.start_trace(str(self.folder))
            self.tracing = True
        return completed

    def close(self) -> bool:
        """Writes a trace that is under way; whether there was one."""
        if not self.tracing:
            return False
        import jax

        self.tracing = False
        jax.profiler.stop_trace()
        return True
