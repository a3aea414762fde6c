"""Records survive crashes and read after a resume as if there had been none."""

import json
import math
import pathlib

import pytest

from bpo_jax.report import metrics as metrics_lib
from bpo_jax.report.metrics import MetricsWriter


def open_writer(folder, step=0):
    return MetricsWriter(folder, step=step, tensorboard=False)


def test_every_record_is_a_line_with_step_and_kind(tmp_path):
    writer = open_writer(tmp_path)
    writer.write("eval", 0, {"eval/success": 0.5})
    writer.write("train", 1, {"loss/policy": 0.25})
    # Before close: each line is flushed.
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 0, "kind": "eval", "eval/success": 0.5},
        {"step": 1, "kind": "train", "loss/policy": 0.25},
    ]


def test_numbers_json_does_not_have_are_left_out(tmp_path):
    open_writer(tmp_path).write("train", 1, {"diag/B": math.nan, "diag/W": 1.0})
    assert metrics_lib.read(tmp_path / "metrics.jsonl") == [
        {"step": 1, "kind": "train", "diag/W": 1.0}
    ]


def test_resuming_cuts_back_to_the_checkpoint(tmp_path):
    writer = open_writer(tmp_path)
    writer.write("eval", 0, {})
    for step in range(1, 5):
        writer.write("train", step, {})
    writer.write("eval", 4, {})
    writer.close()
    resumed = open_writer(tmp_path, step=2)
    assert resumed.evaluated == {0}
    resumed.write("train", 3, {"again": 1})
    steps = [(r["step"], r["kind"]) for r in metrics_lib.read(tmp_path / "metrics.jsonl")]
    assert steps == [(0, "eval"), (1, "train"), (2, "train"), (3, "train")]


def test_a_line_torn_by_a_crash_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "kind": "train"}\n{"step": 2, "ki')
    assert metrics_lib.read(path) == [{"step": 1, "kind": "train"}]
    open_writer(tmp_path, step=5).write("train", 2, {})
    assert [r["step"] for r in metrics_lib.read(path)] == [1, 2]


@pytest.mark.parametrize(
    "content",
    [
        b"[1]\n",
        b"3\n",
        b'{"step": 1}\n',
        b'{"step": "1", "kind": "train"}\n',
        b"\xff\xfe\x00\n",
        b'{"ste\n{"step": 1, "kind": "train"}\n',
        b"[" * 100_000 + b"\n",
    ],
)
def test_a_file_of_something_else_is_refused_by_line(content, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content)
    with pytest.raises(metrics_lib.ReportError, match=r"metrics\.jsonl: line 1 is no record"):
        metrics_lib.read(path)
    assert path.read_bytes() == content
    assert metrics_lib.ReportError.one_line


def test_a_file_that_cannot_be_read_or_written_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(metrics_lib.ReportError, match=r"metrics\.jsonl: Is a directory"):
        metrics_lib.read(tmp_path / "metrics.jsonl")
    with pytest.raises(metrics_lib.ReportError, match=r"summary\.json: No such file"):
        metrics_lib.write_json(tmp_path / "gone" / "summary.json", {})


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line(tmp_path):
    writer = open_writer(tmp_path)
    writer._file = open("/dev/full", "a", encoding="utf-8")  # noqa: SIM115
    with pytest.raises(metrics_lib.ReportError, match="No space left"):
        writer.write("train", 1, {})


def test_event_files_are_written(tmp_path):
    writer = MetricsWriter(tmp_path, tensorboard=True)
    writer.write("train", 1, {"loss/policy": 0.25, "eval/split": "valid"})
    writer.close()
    (events,) = tmp_path.glob("events.out.tfevents.*")
    assert b"loss/policy" in events.read_bytes()


def test_json_is_replaced_whole(tmp_path):
    path = tmp_path / "summary.json"
    metrics_lib.write_json(path, {"a": 1})
    metrics_lib.write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 2}
    assert list(tmp_path.iterdir()) == [path]
