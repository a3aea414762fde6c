"""What the backward pass of a layer keeps of the forward pass, and what it computes again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax

Remat = Literal["none", "dots", "full"]

ATTENTION_RESULTS = "attention results"
"""What every attention calls its output and normaliser, which its backward pass starts from."""


def rematerialised(layer: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """`layer`, to be scanned, with a backward pass that computes again what is not kept.

    "none" keeps everything. "dots" keeps matrix products and the results of attention, which is a
    product more than twice as dear, and computes what lies between. "full" keeps the input alone.
    """
    policies = jax.checkpoint_policies
    if remat == "none":
        return layer
    keep = {
        "full": policies.nothing_saveable,
        "dots": policies.save_from_both_policies(
            policies.dots_with_no_batch_dims_saveable,
            policies.save_only_these_names(ATTENTION_RESULTS),
        ),
    }
    # Inside a scan the barriers against common subexpressions would only cost time.
    return jax.checkpoint(layer, policy=keep[remat], prevent_cse=False)
