"""The policy as a model: decoder, tree attention, token log-probabilities, weights, presets."""

from bpo_jax.models.config import DecoderConfig, RopeScaling
from bpo_jax.models.decoder import Decoder, Params, abstract, init
from bpo_jax.models.logprobs import token_logprobs
from bpo_jax.models.presets import PRESETS, preset
from bpo_jax.models.tree_attention import tree_attention

__all__ = [
    "PRESETS",
    "Decoder",
    "DecoderConfig",
    "Params",
    "RopeScaling",
    "abstract",
    "init",
    "preset",
    "token_logprobs",
    "tree_attention",
]
