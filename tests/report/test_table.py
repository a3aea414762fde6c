"""The table of runs, from summaries on disk."""

import json

from bpo_jax.report import table

SUMMARY = {
    "algorithm": "bpo",
    "seed": 3,
    "eval/success_initial": 0.25,
    "eval/success_initial_count": 200,
    "eval/success_initial_successes": 50,
    "eval/success_final": 0.5,
    "eval/success_final_count": 200,
    "eval/success_final_successes": 100,
    "updates": 60,
    "wall_seconds": 90.0,
    "ledger": {
        "returns": 4800,
        "decoded": 123456,
        "trained_unique": 1000,
        "trained_flat": 2000,
    },
}


def test_a_row_holds_both_successes_with_counts_and_the_gain(tmp_path, capsys):
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    assert table.main([str(tmp_path)]) == 0
    row = capsys.readouterr().out.splitlines()[2]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:5] == ["bpo", "3", "25.0% (50/200)", "50.0% (100/200)", "+25.0"]
    assert cells[5:] == ["60", "4,800", "123,456", "1,000", "2,000", "1.5"]


def test_what_was_not_evaluated_is_a_dash(tmp_path, capsys):
    unfinished = {k: v for k, v in SUMMARY.items() if not k.startswith("eval/success_final")}
    (tmp_path / "summary.json").write_text(json.dumps(unfinished))
    assert table.main([str(tmp_path)]) == 0
    cells = [c.strip() for c in capsys.readouterr().out.splitlines()[2].strip("|").split("|")]
    assert cells[3:5] == ["-", "-"]


def test_a_folder_without_a_summary_is_named(tmp_path, capsys):
    assert table.main([str(tmp_path)]) == 2
    assert str(tmp_path / "summary.json") in capsys.readouterr().err


def test_a_damaged_summary_is_named(tmp_path, capsys):
    (tmp_path / "summary.json").write_text('{"algorithm": ')
    assert table.main([str(tmp_path)]) == 2
    assert "summary.json" in capsys.readouterr().err


def test_an_unknown_flag_is_refused(capsys):
    assert table.main(["--sort=seed"]) == 2
    assert "--sort=seed: unknown flag" in capsys.readouterr().err


def test_a_summary_of_another_shape_is_named_in_one_line(tmp_path, capsys):
    for content in ("[]", "3", "[" * 100_000, json.dumps(SUMMARY | {"ledger": []})):
        (tmp_path / "summary.json").write_text(content)
        assert table.main([str(tmp_path)]) == 2
        error = capsys.readouterr().err
        assert "summary.json: not the summary" in error
        assert error.count("\n") == 1


def test_a_name_that_is_no_text_is_shown(tmp_path, capsys):
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY | {"algorithm": 7}))
    assert table.main([str(tmp_path)]) == 0
    assert "| 7 " in capsys.readouterr().out
