"""The policy as a model: decoder, tree attention, token log-probabilities, weights, presets."""

from bpo_jax.models.decoder import (
    Cache,
    Decoder,
    DecoderConfig,
    Params,
    RopeScaling,
    abstract,
    init,
    init_cache,
)
from bpo_jax.models.logprobs import token_logprobs
from bpo_jax.models.tree_attention import tree_attention

__all__ = [
    "Cache",
    "Decoder",
    "DecoderConfig",
    "Params",
    "RopeScaling",
    "abstract",
    "init",
    "init_cache",
    "token_logprobs",
    "tree_attention",
]
