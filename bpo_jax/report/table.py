"""A table of finished runs side by side.

    python -m bpo_jax.report.table DIR [DIR ...]

reads the ``summary.json`` of every folder and prints Markdown, one row a run.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

COLUMNS = (
    "algorithm",
    "seed",
    "success before",
    "success after",
    "points",
    "updates",
    "returns",
    "tokens decoded",
    "trained, unique",
    "trained, flat",
    "minutes",
)


def render(summaries: Sequence[dict[str, Any]]) -> str:
    """Markdown; what a run has not measured is a dash."""
    rows = [COLUMNS, *map(_row, summaries)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def _row(summary: dict[str, Any]) -> tuple[str, ...]:
    ledger = summary["ledger"]
    before, after = (summary.get(f"eval/success_{when}") for when in ("initial", "final"))
    points = "-" if before is None or after is None else f"{100 * (after - before):+.1f}"
    return (
        str(summary["algorithm"]),
        str(summary["seed"]),
        _share(summary, "initial"),
        _share(summary, "final"),
        points,
        f"{summary['updates']:,}",
        f"{ledger['returns']:,}",
        f"{ledger['decoded']:,}",
        f"{ledger['trained_unique']:,}",
        f"{ledger['trained_flat']:,}",
        f"{summary['wall_seconds'] / 60:.1f}",
    )


def _share(summary: dict[str, Any], when: str) -> str:
    key = f"eval/success_{when}"
    if key not in summary:
        return "-"
    return f"{summary[key]:.1%} ({summary[f'{key}_successes']}/{summary[f'{key}_count']})"


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 2 where a folder has no readable summary."""
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if argv else 2
    unknown = [argument for argument in argv if argument.startswith("-")]
    if unknown:
        print(f"{unknown[0]}: unknown flag; expected folders of runs", file=sys.stderr)
        return 2
    summaries = []
    for folder in argv:
        path = pathlib.Path(folder) / "summary.json"
        try:
            summary = json.loads(path.read_text(encoding="utf-8"))
            _row(summary)
        # AttributeError: the summary, or a part of it, is no object.
        except (
            AttributeError, KeyError, OSError, RecursionError, TypeError, ValueError
        ) as error:  # fmt: skip
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            print(f"{path}: not the summary of a training run ({reason})", file=sys.stderr)
            return 2
        summaries.append(summary)
    print(render(summaries))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
