"""One decoder for Qwen2.5, Qwen3 and Llama 3: a configuration says which of them it is.

The same parameters are run in two ways. `Decoder.__call__` scores packed trees: layers are scanned
(one compiled body, rematerialised if asked) and attention follows ``subtree_end``. The
sampler brings an attention of its own, over its cache: `Decoder.run_scanned` for many tokens,
`Decoder.run_unrolled` for one, since a scanned stack copies weights and cache slices every time.

Parameters are stacked along a leading ``layers`` axis and every one is declared once, in `Block` or
`Decoder`, with its shape, its logical axes and its initialiser; abstract shapes, sharding and
initial values all derive from that line.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from bpo_jax.models import partition
from bpo_jax.models.config import DecoderConfig as DecoderConfig
from bpo_jax.models.config import Remat as Remat
from bpo_jax.models.layers import linear, rms_norm, rope_angles, rotate
from bpo_jax.models.remat import rematerialised
from bpo_jax.models.tree_attention import tree_attention

Params = dict[str, Any]
"""Nested dictionary of arrays, the plain pytree that jitted functions take."""
KeysValues = tuple[jax.Array, jax.Array]
"""Keys and values of packed rows, [layers, b, t, kv_heads, head_dim] each."""


def _param(
    rngs: nnx.Rngs,
    config: DecoderConfig,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    initializer: Callable[..., jax.Array],
) -> nnx.Param:
    """Declares one parameter; `axes` are the logical names that sharding rules refer to."""
    value = initializer(rngs.params(), shape, jnp.dtype(config.param_dtype))
    # Placement is the caller's business (jit with out_shardings), so nothing is moved here.
    return nnx.Param(value, out_sharding=axes, eager_sharding=False)


def _normal(stddev: float) -> Callable[..., jax.Array]:
    return nnx.initializers.normal(stddev)


_ones, _zeros = nnx.initializers.ones, nnx.initializers.zeros
_INIT_STDDEV = 0.02
_small = _normal(_INIT_STDDEV)


class Block(nnx.Module):
    """One transformer layer: attention, then the gated feed-forward, each after an RMSNorm."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        def param(shape, axes, initializer=_small):
            return _param(rngs, config, shape, axes, initializer)

        c = config
        d, f, h, k, n = (
            c.hidden_size, c.intermediate_size, c.num_heads, c.num_kv_heads, c.head_dim
        )  # fmt: skip
        # What is added to the residual stream starts smaller, so that depth does not amplify it.
        into_residual = _normal(_INIT_STDDEV / math.sqrt(2 * c.num_layers))
        self.attention_norm = param((d,), ("embed",), _ones)
        self.q = param((d, h, n), ("embed", "heads", "head_dim"))
        self.k = param((d, k, n), ("embed", "kv_heads", "head_dim"))
        self.v = param((d, k, n), ("embed", "kv_heads", "head_dim"))
        self.o = param((h, n, d), ("heads", "head_dim", "embed"), into_residual)
        if c.qkv_bias:
            self.q_bias = param((h, n), ("heads", "head_dim"), _zeros)
            self.k_bias = param((k, n), ("kv_heads", "head_dim"), _zeros)
            self.v_bias = param((k, n), ("kv_heads", "head_dim"), _zeros)
        if c.o_bias:
            self.o_bias = param((d,), ("embed",), _zeros)
        if c.qk_norm:
            self.q_norm = param((n,), ("head_dim",), _ones)
            self.k_norm = param((n,), ("head_dim",), _ones)
        self.mlp_norm = param((d,), ("embed",), _ones)
        self.gate = param((d, f), ("embed", "mlp"))
        self.up = param((d, f), ("embed", "mlp"))
        self.down = param((f, d), ("mlp", "embed"), into_residual)
        self.config = config

    def __call__(
        self,
        x_btd: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        attend: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    ) -> jax.Array:
        """Runs the layer; `attend` maps rotated (q, k, v) to the heads' outputs."""
        c = self.config
        dtype = x_btd.dtype
        h_btd = rms_norm(x_btd, self.attention_norm[...], c.rms_norm_eps)
        q, k, v = (linear(h_btd, w[...].astype(dtype)) for w in (self.q, self.k, self.v))
        if c.qkv_bias:
            q = q + self.q_bias[...].astype(dtype)
            k = k + self.k_bias[...].astype(dtype)
            v = v + self.v_bias[...].astype(dtype)
        if c.qk_norm:
            q = rms_norm(q, self.q_norm[...], c.rms_norm_eps)
            k = rms_norm(k, self.k_norm[...], c.rms_norm_eps)
        out_bthn = attend(rotate(q, *rope), rotate(k, *rope), v)
        x_btd = x_btd + linear(out_bthn, self.o[...].astype(dtype), 2)
        if c.o_bias:
            x_btd = x_btd + self.o_bias[...].astype(dtype)
        h_btd = rms_norm(x_btd, self.mlp_norm[...], c.rms_norm_eps)
        gate = jax.nn.silu(linear(h_btd, self.gate[...].astype(dtype)))
        up = linear(h_btd, self.up[...].astype(dtype))
        return x_btd + linear(gate * up, self.down[...].astype(dtype))


class Decoder(nnx.Module):
    """A causal language model without its softmax; see the module's docstring."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        d, v = config.hidden_size, config.vocab_size
        self.config = config
        self.embedding = _param(rngs, config, (v, d), ("vocab", "embed"), _normal(_INIT_STDDEV))

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
        def stack(rngs: nnx.Rngs) -> Block:
            return Block(config, rngs=rngs)

        self.layers = stack(rngs)
        self.final_norm = _param(rngs, config, (d,), ("embed",), _ones)
        if not config.tie_embeddings:
            self.head = _param(rngs, config, (d, v), ("embed", "vocab"), _normal(_INIT_STDDEV))
        if config.value_head:
            self.value = _param(rngs, config, (d,), ("embed",), _zeros)
            self.value_bias = _param(rngs, config, (), (), _zeros)

    def __call__(
        self,
        tokens_bt: Int[Array, "b t"],
        position_bt: Int[Array, "b t"],
        subtree_end_bt: Int[Array, "b t"],
        *,
        mesh: Mesh | None = None,
    ) -> Float[Array, "b t d"]:
        """Hidden states of packed trees, after the final norm.

        Args:
          tokens_bt: token ids in preorder.
          position_bt: depth of every token in its own path; the rotary position.
          subtree_end_bt: one past the last token below each; see `tree_attention`.
          mesh: devices the rows and the model are spread over; see `bpo_jax.models.partition`.

        Returns:
          Hidden states in ``config.dtype``. The prediction of token i is read at its parent.
        """

        def attend(_, q, k, v):
            return self._attend(q, k, v, subtree_end_bt, mesh=mesh), None

        return self._stack(tokens_bt, position_bt, attend, None, mesh)[0]

    def extend(
        self,
        tokens_bs: Int[Array, "b s"],
        position_bs: Int[Array, "b s"],
        index_bs: Int[Array, "b s"],
        subtree_end_bt: Int[Array, "b t"],
        keys_values: KeysValues,
        *,
        mesh: Mesh | None = None,
    ) -> tuple[Float[Array, "b s d"], KeysValues]:
        """Hidden states of some tokens of packed trees, given the keys and values of the others.

        Args:
          tokens_bs: ids of the tokens to compute.
          position_bs: their depths.
          index_bs: their indices in the row, ascending; -1 for padding.
          subtree_end_bt: of all tokens of the row.
          keys_values: of all tokens of the row; what stands at `index_bs` is replaced.
          mesh: as above.

        Returns:
          Hidden states as above, and the keys and values with the new ones in their places.
        """
        rows = jnp.arange(index_bs.shape[0])[:, None]
        # Past the end, where a write is dropped.
        place_bs = jnp.where(index_bs < 0, subtree_end_bt.shape[1], index_bs)

        def attend(kv, q, k, v):
            k, v = (
                old.at[rows, place_bs].set(new.astype(old.dtype), mode="drop")
                for old, new in zip(kv, (k, v), strict=True)
            )
            return self._attend(q, k, v, subtree_end_bt, index_bs, mesh=mesh), (k, v)

        return self._stack(tokens_bs, position_bs, attend, keys_values, mesh)

    def _attend(self, q, k, v, subtree_end_bt, index_bs=None, *, mesh):
        return tree_attention(
            q,
            k.astype(q.dtype),
            v.astype(q.dtype),
            subtree_end_bt,
            index_bs,
            implementation=self.config.attention,
            mesh=mesh,
        )

    def _stack(
        self,
        tokens_bs: jax.Array,
        position_bs: jax.Array,
        attend: Callable[..., tuple[jax.Array, Any]],
        per_layer: Any,
        mesh: Mesh | None,
    ) -> tuple[jax.Array, Any]:
        """Runs all layers; ``attend(of this layer, q, k, v)`` also returns what is stacked."""
        c = self.config
        rope = rope_angles(c, position_bs)
        graphdef, stacked = nnx.split(self.layers)

        def layer(x_bsd, inputs):
            params, of_layer = inputs
            kept = []

            def attend_here(q, k, v):
                out, keep = attend(of_layer, q, k, v)
                kept.append(keep)
                return out

            x_bsd = nnx.merge(graphdef, params)(x_bsd, rope, attend_here)
            return partition.constrain(x_bsd, mesh, ("batch", "length", None)), kept[0]

        layer = rematerialised(layer, c.remat)
        x_bsd = partition.constrain(self._embed(tokens_bs), mesh, ("batch", "length", None))
        x_bsd, kept = jax.lax.scan(layer, x_bsd, (nnx.to_pure_dict(stacked), per_layer))
        return rms_norm(x_bsd, self.final_norm[...], c.rms_norm_eps), kept

    def run_scanned(
        self,
        tokens_bs: Int[Array, "b s"],
        position_bs: Int[Array, "b s"],
        attend: Callable[..., tuple[jax.Array, Any]],
    ) -> tuple[Float[Array, "b s d"], Any]:
        """Hidden states after the final norm, with an attention of the caller's own.

        Args:
          tokens_bs: token ids.
          position_bs: their rotary positions.
          attend: ``attend(layer, q_bshd, k_bskd, v_bskd)`` gives the heads' outputs [b, s, h, d]
            and something to keep; the layer is a traced number. One body is compiled for all.

        Returns:
          Hidden states, and what was kept, stacked over layers.
        """
        layers = jnp.arange(self.config.num_layers)
        return self._stack(tokens_bs, position_bs, attend, layers, None)

    def run_unrolled(
        self,
        tokens_bs: Int[Array, "b s"],
        position_bs: Int[Array, "b s"],
        attend: Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array],
        blocks: tuple[Params, ...],
    ) -> Float[Array, "b s d"]:
        """As `run_scanned`, with a body for every layer, which `attend` knows as a plain number.

        Args:
          blocks: ``self.blocks()``, computed outside a loop so that it is not repeated inside.
        """
        graphdef = nnx.graphdef(self.layers)
        rope = rope_angles(self.config, position_bs)
        x_bsd = self._embed(tokens_bs)
        for index, params in enumerate(blocks):
            x_bsd = nnx.merge(graphdef, params)(x_bsd, rope, functools.partial(attend, index))
        return rms_norm(x_bsd, self.final_norm[...], self.config.rms_norm_eps)

    def blocks(self) -> tuple[Params, ...]:
        """The parameters of every layer by itself."""
        stacked = nnx.to_pure_dict(nnx.state(self.layers))
        return tuple(
            jax.tree.map(lambda p, i=index: p[i], stacked)
            for index in range(self.config.num_layers)
        )

    def head_dv(self) -> Float[Array, "d v"]:
        """The matrix that turns hidden states into logits."""
        return self.embedding[...].T if self.config.tie_embeddings else self.head[...]

    def values(self, hidden_btd: Float[Array, "b t d"]) -> Float[Array, "b t"]:
        """The value head on hidden states, in float32; 0 everywhere before it is trained.

        Raises:
          ValueError: the configuration has none.
        """
        if not self.config.value_head:
            raise ValueError("this decoder has no value head; build it with value_head=True")
        value_d, bias = (p[...].astype(jnp.float32) for p in (self.value, self.value_bias))
        return hidden_btd.astype(jnp.float32) @ value_d + bias

    def _embed(self, tokens: jax.Array) -> jax.Array:
        return self.embedding[...].at[tokens].get(mode="clip").astype(jnp.dtype(self.config.dtype))


def init(config: DecoderConfig, seed: int, shardings: Any = None) -> tuple[nnx.GraphDef, Params]:
    """Builds a decoder with random parameters, which do not depend on where they live.

    Args:
      config: of the model.
      seed: of the parameters.
      shardings: where each parameter lives, in the structure of the parameters; every device draws
        its own part alone. On the first device where None.

    Returns:
      The static description of the module and its parameters as a nested dictionary; inside a
      jitted function ``nnx.merge(graphdef, params)`` is the `Decoder` again.
    """
    draw = jax.jit(_draw, static_argnums=0, out_shardings=shardings)
    return abstract(config)[0], draw(config, jax.random.key(seed))


def _draw(config: DecoderConfig, key: jax.Array) -> Params:
    _, params = nnx.split(Decoder(config, rngs=nnx.Rngs(key)))
    return nnx.to_pure_dict(params)


def abstract(config: DecoderConfig) -> tuple[nnx.GraphDef, Params, Params]:
    """Describes a decoder without allocating it.

    Returns:
      The static description, the parameters as ``jax.ShapeDtypeStruct``, and in the same structure
      the tuple of logical axis names of every parameter.
    """
    shapes = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(shapes)
    axes = jax.tree.map(
        lambda p: p.get_metadata("out_sharding"), state,
        is_leaf=lambda x: isinstance(x, nnx.Variable),
    )  # fmt: skip
    return graphdef, nnx.to_pure_dict(state), nnx.to_pure_dict(axes)
