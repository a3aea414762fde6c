"""The benchmarks run, on shapes too small to measure anything, and count what they say."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib

import numpy as np
import pytest

from benchmarks import decode, estimator_bias, sandbox_latency, tree_forward
from bpo_jax.estimators import ALGORITHMS

TINY = dataclasses.replace(
    tree_forward.SMOLLM2_135M, vocab_size=64, hidden_size=24, intermediate_size=32, num_layers=1,
    num_heads=3, num_kv_heads=1, head_dim=8,
)  # fmt: skip


def test_the_comparison_reports_both_passes_and_their_ratios():
    args = argparse.Namespace(
        branches=4, length=64, shared=0.75, repeats=1, torch=False, train=True
    )
    result = tree_forward.compare(args, TINY)
    assert (result["flat_tokens"], result["unique_tokens"]) == (256, 48 + 4 * 16)
    for name in ("score", "train"):
        assert result[name]["ratio"] > 0
        assert result[name]["flop_ratio"] > 1


@pytest.mark.parametrize("shared", [0, 48])
def test_visible_pairs_are_counted_one_by_one(shared):
    tree = tree_forward.make_tree(TINY, branches=3, shared=max(shared, 1), length=64)
    (batch,) = tree_forward.pack([tree], rows=1, row_length=256)
    i, j = np.arange(256)[:, None], np.arange(256)
    seen = (j <= i) & (i < batch.subtree_end[0][None])
    assert tree_forward.visible_pairs([batch]) == seen.sum()


def test_a_chain_costs_what_the_formula_for_a_causal_model_says():
    tree = tree_forward.make_tree(TINY, branches=1, shared=1, length=128)
    batches = tree_forward.pack([tree], rows=1, row_length=128)
    per_layer = 24 * 24 * 2 + 2 * 24 * 8 + 3 * 24 * 32
    expected = 2 * 128 * (per_layer + 24 * 64) + 4 * (128 * 129 // 2) * 24
    assert tree_forward.forward_flops(TINY, batches) == expected


def test_sampling_is_reported_for_every_batch_and_for_forks():
    args = argparse.Namespace(repeats=1, tokens=4, torch=False, batches=[1, 4], contexts=[32])
    result = decode.run(args, TINY)
    assert [(r["batch"], r["context"]) for r in result["batches"]] == [(1, 32), (4, 32)]
    assert all(r["tokens_per_s"] > 0 for r in result["batches"])
    assert result["forks"]["ratio"] > 0
    # 24 shared tokens and 8 of their own: the page that is shared in part is copied by all but one.
    assert 1 <= result["forks"]["pages_per_unique"] < 2


def test_every_claim_about_bias_holds_and_stands_in_the_docs():
    results = [estimator_bias.measure(case, problems=5) for case in estimator_bias.CASES]
    assert [r for r in results if not r["holds"]] == []
    assert {r["algorithm"] for r in results} == set(ALGORITHMS)
    page = pathlib.Path(__file__).parents[1] / "docs" / "estimators.md"
    assert estimator_bias.markdown(results) in page.read_text(encoding="utf-8")


def test_slow_sandboxes_are_compared_with_fast_ones():
    args = argparse.Namespace(repeats=1, branches=4, turns=2, tokens=4)
    result = sandbox_latency.run(args, TINY)
    assert result["tokens_per_s"] > 0 and result["tokens_per_s_without_latency"] > 0
    # A policy this small has nothing to do while its sandboxes are at work.
    assert result["ratio"] < 0.5 < result["engine_idle"]
