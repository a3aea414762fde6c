"""The policy of a run: a decoder's parameters and the tokenizer that goes with them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
from flax import nnx
from jax.sharding import Mesh, Sharding

from bpo_jax.models import decoder, hub, partition, presets, weights
from bpo_jax.models import tokenizer as tokenizer_lib
from bpo_jax.packaged import folder as folder

if TYPE_CHECKING:
    import transformers

DEFAULT_TOKENIZER = "package:quickstart"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Policy:
    """A decoder split into its parts.

    Attributes:
      config: sizes and dtypes.
      graphdef: the static half of the module.
      params: the parameters, a plain pytree.
      tokenizer: with a chat template.
      stop_ids: end what the model writes, by the configuration beside its tokenizer; may be empty.
    """

    config: decoder.DecoderConfig
    graphdef: nnx.GraphDef
    params: decoder.Params
    tokenizer: transformers.PreTrainedTokenizerBase
    stop_ids: tuple[int, ...] = ()

    def with_params(self, params: decoder.Params) -> Policy:
        """The same policy with other parameters."""
        return dataclasses.replace(self, params=params)


def _placed(shape: jax.ShapeDtypeStruct, sharding: Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def load(
    *,
    init: str,
    preset: str,
    tokenizer: str | None,
    context: int,
    seed: int,
    dtype: str = "float32",
    param_dtype: str = "float32",
    remat: decoder.Remat = "none",
    mesh: Mesh | None = None,
    abstract: bool = False,
    value_head: bool = False,
) -> Policy:
    """Loads or makes a policy.

    Args:
      init: "random", "package:<name>", a folder in Hugging Face's format, or the hub id of one.
      preset: for "random", a name in `presets` or a folder with a ``config.json``.
      tokenizer: folder or hub id; None for the one beside the parameters (for "random": beside the
        preset, or the one shipped with the package).
      context: longest branch; must be within what the model is made for.
      seed: of random parameters.
      dtype: of activations.
      param_dtype: of parameters.
      remat: what the backward pass computes again.
      mesh: devices that parameters are spread over as they are read or drawn, so that none of them,
        and no host, ever holds the whole model; the first device where None.
      abstract: leave the parameters out; the policy has their shapes, dtypes and places instead,
        for a checkpoint to be read into.
      value_head: with a critic's head beside the vocabulary; 0 where `init` has none.

    Raises:
      OSError: it is not there, or cannot be fetched.
      ValueError: a context the model is not made for, or a tokenizer with more ids than the model.
    """
    source = folder(preset) if init == "random" else hub.local(init, weights=not abstract)
    if init == "random" and not source.is_dir():
        config = presets.preset(preset)
        source = folder(DEFAULT_TOKENIZER)
    else:
        config = weights.read_config(source)
    config = dataclasses.replace(
        config, dtype=dtype, param_dtype=param_dtype, remat=remat, value_head=value_head
    )
    if context > config.max_positions:
        raise ValueError(
            f"policy.context={context}: this model is made for {config.max_positions} positions"
        )
    graphdef, shapes, axes = decoder.abstract(config)
    places = partition.param_shardings(mesh, shapes, axes) if mesh is not None else None
    if abstract:
        params = shapes if places is None else jax.tree.map(_placed, shapes, places)
    elif init == "random":
        graphdef, params = decoder.init(config, seed, places)
    else:
        _, params = weights.load(source, config, shardings=places)
    words_source = hub.local(tokenizer, weights=False) if tokenizer else source
    words = tokenizer_lib.load(words_source)
    if len(words) > config.vocab_size:
        raise ValueError(
            f"the tokenizer has {len(words)} ids, but the model only {config.vocab_size}"
        )
    return Policy(
        config=config,
        graphdef=graphdef,
        params=params,
        tokenizer=words,
        stop_ids=tokenizer_lib.stop_ids(words_source),
    )
