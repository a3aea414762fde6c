"""The bar, the plain lines and the last screen."""

import io

import pytest

from bpo_jax import ledger as ledger_lib
from bpo_jax.report import console


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (42, "42s"), (185, "3m05s"), (7620, "2h07m")]
)
def test_durations_are_short(seconds, text):
    assert console.duration(seconds) == text


def test_a_terminal_gets_one_line_that_is_drawn_again(monkeypatch):
    clock = iter([0.0, 10.0, 20.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    stream = Terminal()
    progress = console.Progress("train", stream=stream)
    progress.show(0.25, "success 10%")
    progress.show(0.5, "success 20%")
    text = stream.getvalue()
    assert "\n" not in text
    assert text.count("\r") == 2
    assert "25% 30s left" in text
    assert "50% 20s left" in text


def test_a_log_file_gets_a_plain_line_now_and_then(monkeypatch):
    clock = iter([0.0, 1.0, 2.0, 40.0, 41.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    stream = io.StringIO()
    progress = console.Progress("train", stream=stream, every=30.0)
    for fraction in (0.1, 0.2, 0.3, 1.0):
        progress.show(fraction, "ok")
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["10%", "30%", "100%"]
    assert "\r" not in stream.getvalue()


def test_the_time_left_of_a_resumed_run_counts_from_its_resumption(monkeypatch):
    clock = iter([0.0, 10.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    stream = Terminal()
    console.Progress("train", start=0.5, stream=stream).show(0.6, "")
    assert "40s left" in stream.getvalue()


def test_the_summary_says_before_after_and_where_the_files_are():
    summary = {
        "status": "finished", "algorithm": "bpo", "seed": 1, "updates": 60, "wall_seconds": 600.0,
        "ledger": ledger_lib.Ledger(decoded=123456).state_dict(),
        "eval/success_initial": 0.4, "eval/success_initial_count": 200,
        "eval/success_final": 0.625, "eval/success_final_count": 200,
    }  # fmt: skip
    text = console.render_summary(summary, "/runs/a")
    for part in ("40.0% of 200", "62.5% of 200", "+22.5 points", "10m00s", "123,456", "/runs/a"):
        assert part in text
    assert len(text.splitlines()) <= 24
