"""The policy as a model: decoder, tree attention, token log-probabilities, weights, presets."""

from bpo_jax.models.config import DecoderConfig, RopeScaling
from bpo_jax.models.decoder import Cache, Decoder, Params, abstract, init, init_cache
from bpo_jax.models.logprobs import token_logprobs
from bpo_jax.models.presets import PRESETS, preset
from bpo_jax.models.tree_attention import tree_attention

__all__ = [
    "PRESETS",
    "Cache",
    "Decoder",
    "DecoderConfig",
    "Params",
    "RopeScaling",
    "abstract",
    "init",
    "init_cache",
    "preset",
    "token_logprobs",
    "tree_attention",
]
