"""How fast branches are sampled, and what it saves that forks share their past.

    python benchmarks/decode.py [--repeats=5] [--tokens=64] [--no-torch]

The shape is SmolLM2-135M's (random weights, float32, greedy, no stop token). For every batch size
and context, tokens are generated after the contexts have been computed: by our engine, and by
transformers' `generate` on PyTorch with the same numbers, whose time for the contexts alone is
measured and taken off. The last entry compares 64 branches that share three quarters of their
context as forks with 64 that were opened one by one. Prints one JSON object; rates are medians,
ratios medians over pairs of runs taken one after the other, with their range.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks.tree_forward import SMOLLM2_135M
from bpo_jax.models import decoder
from bpo_jax.models.config import DecoderConfig
from bpo_jax.rollout.engine import PagedEngine
from bpo_jax.rollout.pages import pages_of
from bpo_jax.rollout.rounds import read_all, say_all

BATCHES, CONTEXTS = (1, 8, 16, 64), (256, 768)


class Ours:
    """Engines of one policy, one for every batch size and context."""

    def __init__(self, config: DecoderConfig):
        self.config = config
        self.graphdef, self.params = decoder.init(config, 0)

    def engine(self, batch: int, context: int, tokens: int) -> PagedEngine:
        return PagedEngine(
            graphdef=self.graphdef,
            config=self.config,
            params=self.params,
            stop_ids=[self.config.vocab_size],  # never sampled
            slots=batch,
            context=context + tokens,
            temperature=0.0,
        )

    def separate(self, engine: PagedEngine, prompts: np.ndarray, tokens: int) -> float:
        """Seconds to sample after contexts that were computed one by one."""
        branches = [engine.open(prompt, seed=i) for i, prompt in enumerate(prompts)]
        read_all(engine, branches)
        return self._timed(engine, branches, tokens)

    def forked(
        self, engine: PagedEngine, prompts: np.ndarray, shared: int, tokens: int
    ) -> tuple[float, float]:
        """Seconds to sample forks of one context, and their pages beside what they need."""
        first = engine.open(prompts[0][:shared], seed=0)
        read_all(engine, [first])
        branches = [first, *engine.fork(first, range(1, len(prompts)))]
        for branch, prompt in zip(branches, prompts, strict=True):
            engine.extend(branch, prompt[shared:])
        read_all(engine, branches)
        own = prompts.shape[1] - shared
        pages = engine.stats()["pages"] / pages_of(shared + own * len(prompts))
        return self._timed(engine, branches, tokens), pages

    def _timed(self, engine: PagedEngine, branches: list[int], tokens: int) -> float:
        began = time.perf_counter()
        say_all(engine, branches, [tokens] * len(branches))
        seconds = time.perf_counter() - began
        for branch in branches:
            engine.free(branch)
        return seconds


def transformers_sampler(config: DecoderConfig) -> Callable[[np.ndarray, int], float]:
    """A function that gives the seconds transformers takes to sample after contexts."""
    import torch
    import transformers

    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            tie_word_embeddings=config.tie_embeddings,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
    ).eval()

    def generate(ids: Any, tokens: int) -> float:
        began = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
            )
        return time.perf_counter() - began

    def sample(prompts: np.ndarray, tokens: int) -> float:
        ids = torch.from_numpy(prompts.astype(np.int64))
        # One token costs the contexts and what every token costs but the decoding itself.
        return generate(ids, tokens + 1) - generate(ids, 1)

    return sample


def paired(repeats: int, ours: Callable[[], float], other: Callable[[], float]) -> dict[str, Any]:
    """Medians of seconds and of how much longer the other takes, with the range of that."""
    ours(), other()  # compile, and warm caches
    pairs = [(ours(), other()) for _ in range(repeats)]
    ratios = [b / a for a, b in pairs]
    return {
        "ours_s": statistics.median(a for a, _ in pairs),
        "other_s": statistics.median(b for _, b in pairs),
        "ratio": round(statistics.median(ratios), 3),
        "range": [round(min(ratios), 3), round(max(ratios), 3)],
    }


def run(args: argparse.Namespace, config: DecoderConfig) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    ours = Ours(config)
    rival = transformers_sampler(config) if args.torch else None
    result: dict[str, Any] = {"tokens": args.tokens, "batches": []}
    for context in args.contexts:
        for batch in args.batches:
            prompts = rng.integers(0, config.vocab_size, (batch, context)).astype(np.int32)
            engine = ours.engine(batch, context, args.tokens)

            def sample(engine=engine, prompts=prompts):
                return ours.separate(engine, prompts, args.tokens)

            def other(prompts=prompts):
                return rival(prompts, args.tokens) if rival else float("nan")

            row = paired(args.repeats, sample, other)
            row = {
                "batch": batch,
                "context": context,
                "tokens_per_s": round(batch * args.tokens / row["ours_s"], 1),
                "transformers_tokens_per_s": round(batch * args.tokens / row["other_s"], 1),
                "ratio": row["ratio"],
                "range": row["range"],
            }
            print(json.dumps(row), file=sys.stderr)
            result["batches"].append(row)
    result["forks"] = forks(ours, args, max(args.batches), max(args.contexts))
    return result


def forks(ours: Ours, args: argparse.Namespace, batch: int, context: int) -> dict[str, Any]:
    shared = context * 3 // 4
    prompts = np.random.default_rng(1).integers(0, ours.config.vocab_size, (batch, context))
    prompts[:, :shared] = prompts[0, :shared]
    engine = ours.engine(batch, context, args.tokens)
    pages = []

    def forked() -> float:
        seconds, ratio = ours.forked(engine, prompts, shared, args.tokens)
        pages.append(ratio)
        return seconds

    row = paired(args.repeats, forked, lambda: ours.separate(engine, prompts, args.tokens))
    return {
        "branches": batch,
        "context": context,
        "shared": shared,
        "tokens_per_s": round(batch * args.tokens / row["ours_s"], 1),
        "unshared_tokens_per_s": round(batch * args.tokens / row["other_s"], 1),
        "ratio": row["ratio"],
        "range": row["range"],
        "pages_per_unique": round(max(pages), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="pairs of runs")
    parser.add_argument("--tokens", type=int, default=64, help="sampled by every branch")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--no-torch", dest="torch", action="store_false")
    args = parser.parse_args()
    result = {"platform": jax.default_backend()} | run(args, SMOLLM2_135M)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
