"""What packing a tree saves: scoring and training its branches in one row, or one by one.

    python benchmarks/tree_forward.py [--repeats=3] [--no-torch] [--table] [--long]

By default 16 branches share 75% of 1,024 tokens on the shape of SmolLM2-135M (random weights). Our
own flat path attends with the same block-skipping code, so the ratio is due to the tree alone. The
rival is transformers on PyTorch: every branch by itself, and all behind one cached prefix. Prints
one JSON object; seconds are medians, ratios medians over pairs of runs taken one after the other.

`flop_ratio` is what the ratio would be if time were FLOPs; those are counted from the shapes, with
attention's visible pairs only. A training step counts three times the forward pass: what
rematerialisation computes again is not counted.

Where Linux gives huge pages on request alone (``madvise`` in /sys/kernel/mm/transparent_hugepage),
``GLIBC_TUNABLES=glibc.malloc.hugetlb=1`` requests them: training is then 1.1 times as fast, since
the gigabytes that a step allocates anew need 500 times fewer page faults.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bpo_jax import packing
from bpo_jax.learner import update as update_lib
from bpo_jax.learner.loss import LossSettings
from bpo_jax.learner.optimizer import OptimizerSettings
from bpo_jax.models import decoder
from bpo_jax.models.config import DecoderConfig
from bpo_jax.tree import Action, Decision, Tree

SMOLLM2_135M = DecoderConfig(
    vocab_size=49_152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rope_theta=100_000.0,
    rms_norm_eps=1e-5,
    tie_embeddings=True,
    qkv_bias=False,
    max_positions=65_536,
    remat="dots",
)
FLAT_ROWS = 4
"""Branches of a micro-batch of the flat run; both runs then hold about as many tokens at once."""
CHUNK = 192
"""Tokens whose logits exist at once; a CPU's caches like fewer than an accelerator."""


def make_tree(config: DecoderConfig, *, branches: int, shared: int, length: int) -> Tree:
    """Branches of `length` tokens, the first `shared` of which are the prompt they all have."""
    rng = np.random.default_rng(0)

    def ids(count: int) -> np.ndarray:
        return rng.integers(0, config.vocab_size, count).astype(np.int32)

    def action() -> Action:
        count = length - shared
        logprobs = np.full(count, -np.log(config.vocab_size), np.float32)
        return Action(token_ids=ids(count), logprobs=logprobs, entropies=-logprobs, end="done")

    root = Decision(context_ids=ids(shared), actions=[action() for _ in range(branches)])
    return Tree(task_id="benchmark", root=root)


def deepened(config: DecoderConfig, *, depth: int, tokens: int) -> Tree:
    """A binary tree with `depth` forks on a path and about `tokens` tokens in all."""
    rng = np.random.default_rng(0)
    span = tokens // (2 ** (depth + 1) - 1)

    def ids() -> np.ndarray:
        return rng.integers(0, config.vocab_size, span).astype(np.int32)

    def action(left: int) -> Action:
        logprobs = np.zeros(span, np.float32)
        turn = Action(token_ids=ids(), logprobs=logprobs, entropies=logprobs)
        if left:
            turn.next = Decision(actions=[action(left - 1) for _ in range(2)])
        else:
            turn.end = "done"
        return turn

    actions = [action(depth - 1) for _ in range(2)] if depth else [action(0)]
    return Tree(task_id=f"depth {depth}", root=Decision(context_ids=ids(), actions=actions))


def pack(trees: list[Tree], *, rows: int, row_length: int) -> list[packing.TreeBatch]:
    weights = [
        packing.Weights(advantage=np.ones(n), coefficient=np.full(n, 1e-4))
        for n in (len(tree.actions()) for tree in trees)
    ]
    return packing.pack(trees, weights, rows=rows, row_length=row_length)


def visible_pairs(batches: list[packing.TreeBatch]) -> int:
    """How many (query, key) pairs attention has to compute."""
    return sum(
        int(np.sum(np.maximum(batch.subtree_end - np.arange(batch.tokens.shape[1]), 0)))
        for batch in batches
    )


def forward_flops(config: DecoderConfig, batches: list[packing.TreeBatch]) -> float:
    c = config
    per_layer = c.hidden_size * (
        2 * c.num_heads * c.head_dim + 2 * c.num_kv_heads * c.head_dim + 3 * c.intermediate_size
    )
    tokens = sum(batch.tokens.size for batch in batches)
    products = 2.0 * tokens * (c.num_layers * per_layer + c.hidden_size * c.vocab_size)
    return products + 4.0 * c.num_layers * visible_pairs(batches) * c.num_heads * c.head_dim


class Ours:
    """The learner's own scoring and update, on one device."""

    def __init__(self, config: DecoderConfig):
        self.config = config
        self.learner = update_lib.make(
            config,
            loss=LossSettings(),
            optimizer=OptimizerSettings(learning_rate=1e-6),
            chunk=CHUNK,
        )
        self.params = self.learner.place(decoder.init(config, 0)[1])
        self.state: Any = None

    def score(self, batches: list[packing.TreeBatch]) -> None:
        for batch in batches:
            self.learner.score(self.params, self.learner.put(batch)).block_until_ready()

    def train(self, batches: list[packing.TreeBatch]) -> None:
        if self.state is None:
            self.state = self.learner.start(self.params)
        self.state, _ = update_lib.update(self.learner, self.state, [batches])
        jax.block_until_ready(self.state)


def seconds(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def alternate(
    runs: dict[str, Callable[[], Any]], repeats: int, once: tuple[str, ...] = ()
) -> dict[str, list[float]]:
    """Times of every run, in turns so that each meets the same machine.

    A turn before the first warms up. Runs in `once` have the last turn only.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            if name in once and turn < repeats:
                continue
            took = seconds(run)
            print(f"  turn {turn} of {repeats}: {name} {took:.1f}s", file=sys.stderr)
            if turn:
                times[name].append(took)
    return times


def median_ratio(slow: list[float], fast: list[float]) -> float:
    """Of runs in the same turn; a run that had the last turn only is compared with that."""
    pairs = zip(slow, fast[-len(slow) :], strict=True)
    return statistics.median(a / b for a, b in pairs)


def matmul_gflops(size: int = 2048, repeats: int = 5) -> float:
    """The best rate of one plain float32 product."""
    x = jnp.ones((size, size))
    product = jax.jit(lambda x: x @ x)
    product(x).block_until_ready()
    best = min(seconds(lambda: product(x).block_until_ready()) for _ in range(repeats))
    return 2.0 * size**3 / best / 1e9


def torch_runs(
    config: DecoderConfig, tree: Tree, shared: int, dtype: str
) -> dict[str, Callable[[], Any]]:
    """Scoring with transformers: every branch by itself, and behind one cached prefix."""
    import torch
    import transformers

    hf = transformers.LlamaConfig(**(config.to_hf() | {"architectures": None}))
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(hf).to(getattr(torch, dtype)).eval()
    prompt = tree.root.context_ids
    flat = np.stack([np.concatenate([prompt, a.token_ids]) for a in tree.root.actions])
    ids = torch.from_numpy(flat.astype(np.int64))

    def logprobs(logits: Any, targets: Any) -> Any:
        return torch.log_softmax(logits.float(), -1).gather(-1, targets[..., None])[..., 0]

    @torch.no_grad()
    def each() -> None:
        for part in ids.split(FLAT_ROWS):
            logprobs(model(part[:, :-1], use_cache=False).logits, part[:, 1:])

    @torch.no_grad()
    def cached() -> None:
        first = model(ids[:1, :shared], use_cache=True)
        logprobs(first.logits[:, :-1], ids[:1, 1:shared])
        for part in ids.split(FLAT_ROWS):
            cache = transformers.DynamicCache()
            for number, layer in enumerate(first.past_key_values.layers):
                keys, values = (
                    x.expand(len(part), -1, -1, -1) for x in (layer.keys, layer.values)
                )  # fmt: skip
                cache.update(keys, values, number)
            out = model(part[:, shared:-1], past_key_values=cache, use_cache=True)
            logprobs(out.logits, part[:, shared + 1 :])

    return {f"transformers_{dtype}_flat": each, f"transformers_{dtype}_prefix": cached}


def compare(args: argparse.Namespace, config: DecoderConfig) -> dict[str, Any]:
    shared = int(args.length * args.shared)
    tree = make_tree(config, branches=args.branches, shared=shared, length=args.length)
    chains, _ = packing.flatten(
        tree, packing.Weights(advantage=np.ones(args.branches), coefficient=np.ones(args.branches))
    )
    flat = pack(chains, rows=min(FLAT_ROWS, args.branches), row_length=args.length)
    unique = packing.token_counts(tree)[0]
    packed = pack([tree], rows=1, row_length=-(-unique // 128) * 128)
    flops = {"flat": forward_flops(config, flat), "tree": forward_flops(config, packed)}
    ours = Ours(config)
    runs = {"flat": lambda: ours.score(flat), "tree": lambda: ours.score(packed)}
    if args.torch:
        runs |= torch_runs(config, tree, shared, "float32")
        runs |= torch_runs(config, tree, shared, "bfloat16")
    rate = matmul_gflops()
    # Where the processor has no bfloat16 units these take minutes.
    slow_ones = ("transformers_bfloat16_flat", "transformers_bfloat16_prefix")
    times = {"score": alternate(runs, args.repeats, once=slow_ones)}
    if args.train:
        steps = {"flat": lambda: ours.train(flat), "tree": lambda: ours.train(packed)}
        times["train"] = alternate(steps, args.repeats)
    rate = max(rate, matmul_gflops())
    result: dict[str, Any] = {
        "branches": args.branches,
        "length": args.length,
        "shared": shared,
        "flat_tokens": args.branches * args.length,
        "unique_tokens": unique,
        "matmul_gflops": round(rate, 1),
    }
    for name, passes in (("score", 1), ("train", 3)):
        if name not in times:
            continue
        slow, fast = times[name]["flat"], times[name]["tree"]
        tree_s = statistics.median(fast)
        gflops = passes * flops["tree"] / tree_s / 1e9
        result[name] = {
            "flat_s": round(statistics.median(slow), 3),
            "tree_s": round(tree_s, 3),
            "tree_s_range": [round(min(fast), 3), round(max(fast), 3)],
            "ratio": round(median_ratio(slow, fast), 3),
            "flop_ratio": round(flops["flat"] / flops["tree"], 3),
            "gflops": round(gflops, 1),
            "of_matmul": round(gflops / rate, 3),
        }
    for name in runs:
        if name.startswith("transformers"):
            result[name] = {
                "s": round(statistics.median(times["score"][name]), 3),
                "ratio": round(median_ratio(times["score"][name], times["score"]["tree"]), 3),
            }
    return result


def table(config: DecoderConfig, repeats: int) -> list[dict[str, Any]]:
    """Cost of scoring by branch count and by depth: it follows tokens and visible pairs."""
    config = dataclasses.replace(config, num_layers=4)
    ours = Ours(config)
    trees = [
        (f"{n} branches", make_tree(config, branches=n, shared=768, length=1024))
        for n in (1, 2, 4, 8, 16)
    ]
    trees += [(f"depth {d}", deepened(config, depth=d, tokens=4096)) for d in (0, 1, 2, 3, 4)]
    lines = []
    for name, tree in trees:
        unique, flat = packing.token_counts(tree)
        batch = pack([tree], rows=1, row_length=-(-unique // 128) * 128)
        ours.score(batch)
        took = statistics.median(seconds(lambda b=batch: ours.score(b)) for _ in range(repeats))
        flops = forward_flops(config, batch)
        lines.append(
            {
                "tree": name,
                "unique_tokens": unique,
                "flat_tokens": flat,
                "visible_pairs": visible_pairs(batch),
                "s": round(took, 3),
                "gflops": round(flops / took / 1e9, 1),
            }
        )
    return lines


def long_row(config: DecoderConfig, tokens: int = 32_768) -> dict[str, Any]:
    """One row of `tokens` packed tokens: its time, and the peak of the whole process."""
    config = dataclasses.replace(config, remat="none")
    branches = 32
    length = 1024 + (tokens - 1024) // branches
    tree = make_tree(config, branches=branches, shared=1024, length=length)
    batch = pack([tree], rows=1, row_length=tokens)
    ours = Ours(config)
    took = seconds(lambda: ours.score(batch))
    try:
        Ours(dataclasses.replace(config, attention="dense")).score(batch)
        dense = "computed"
    except ValueError as error:
        dense = f"refused: {error}"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"tokens": tokens, "s": round(took, 1), "peak_gib": round(peak, 2), "dense": dense}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--branches", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a branch")
    parser.add_argument("--shared", type=float, default=0.75, help="fraction all have in common")
    parser.add_argument("--layers", type=int, default=SMOLLM2_135M.num_layers)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-torch", dest="torch", action="store_false")
    parser.add_argument("--no-train", dest="train", action="store_false")
    parser.add_argument("--table", action="store_true", help="cost by branches and depth instead")
    parser.add_argument("--long", action="store_true", help="one row of 32,768 tokens instead")
    args = parser.parse_args()
    config = dataclasses.replace(SMOLLM2_135M, num_layers=args.layers)
    if args.table:
        print(json.dumps({"table": table(config, args.repeats)}, indent=1))
    elif args.long:
        print(json.dumps(long_row(config), indent=1))
    else:
        print(json.dumps(compare(args, config), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
