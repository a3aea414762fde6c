"""Log-probabilities and entropies of tokens without the [tokens, vocabulary] matrix.

For a vocabulary of 152k the logits of one packed row would be larger than the model. They are
computed for a chunk of tokens at a time, reduced, and computed again in the backward pass.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def token_logprobs(
    hidden_nd: Float[Array, "n d"],
    head_dv: Float[Array, "d v"],
    target_n: Int[Array, "n"],
    *,
    temperature: float = 1.0,
    chunk: int = 1024,
) -> tuple[Float[Array, "n"], Float[Array, "n"]]:
    """Log-probability of each target and entropy of each distribution.

    With z = hidden @ head / temperature and p = softmax(z): logprob = log p[target] and
    entropy = -sum_v p_v log p_v, in nats. Both are differentiable in `hidden_nd` and `head_dv`:

      d logprob / dz_v = [v = target] - p_v,    d entropy / dz_v = -p_v (log p_v + entropy).

    Args:
      hidden_nd: hidden states at the positions where the targets are predicted.
      head_dv: the vocabulary matrix; multiplied in the dtype of `hidden_nd`, summed in float32.
      target_n: the predicted token ids.
      temperature: divides the logits.
      chunk: number of tokens whose logits live at once.

    Returns:
      Two float32 arrays (float64 if `hidden_nd` is).
    """
    if temperature <= 0:
        raise ValueError(f"temperature={temperature}: a distribution needs one above zero")
    n = hidden_nd.shape[0]
    chunk = max(1, min(chunk, n))
    missing = -n % chunk
    hidden = jnp.pad(hidden_nd, ((0, missing), (0, 0))).reshape(-1, chunk, hidden_nd.shape[1])
    target = jnp.pad(target_n, (0, missing)).reshape(-1, chunk)
    logprob, entropy = _chunked(1.0 / temperature, hidden, head_dv, target)
    return logprob.reshape(-1)[:n], entropy.reshape(-1)[:n]


def _logits(scale: float, hidden_cd: jax.Array, head_dv: jax.Array) -> jax.Array:
    accumulate = jnp.promote_types(hidden_cd.dtype, jnp.float32)
    logits = jnp.dot(hidden_cd, head_dv.astype(hidden_cd.dtype), preferred_element_type=accumulate)
    return logits * scale


def _reduce(scale, hidden_cd, head_dv, target_c):
    """(log-probability, entropy, log-normaliser) of one chunk."""
    logits_cv = _logits(scale, hidden_cd, head_dv)
    top_c = jnp.max(logits_cv, axis=-1)
    weights_cv = jnp.exp(logits_cv - top_c[:, None])
    total_c = jnp.sum(weights_cv, axis=-1)
    logz_c = top_c + jnp.log(total_c)
    mean_c = jnp.sum(weights_cv * logits_cv, axis=-1) / total_c
    picked_c = jnp.take_along_axis(logits_cv, target_c[:, None], axis=-1)[:, 0]
    return picked_c - logz_c, logz_c - mean_c, logz_c


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(scale, hidden, head_dv, target):
    return _forward(scale, hidden, head_dv, target)[0]


def _forward(scale, hidden, head_dv, target):
    logprob, entropy, logz = jax.lax.map(
        lambda chunk: _reduce(scale, chunk[0], head_dv, chunk[1]), (hidden, target)
    )
    return (logprob, entropy), (hidden, head_dv, target, entropy, logz)


def _backward(scale, saved, cotangents):
    hidden, head_dv, target, entropy, logz = saved
    accumulate = jnp.promote_types(hidden.dtype, jnp.float32)

    def step(head_grad_dv, chunk):
        hidden_cd, target_c, entropy_c, logz_c, d_logprob_c, d_entropy_c = chunk
        logp_cv = _logits(scale, hidden_cd, head_dv) - logz_c[:, None]
        # Everything that multiplies p_v, then the one entry of the target.
        factor_cv = d_logprob_c[:, None] + d_entropy_c[:, None] * (logp_cv + entropy_c[:, None])
        at_target_cv = jnp.arange(logp_cv.shape[-1]) == target_c[:, None]
        grad_cv = jnp.where(at_target_cv, d_logprob_c[:, None], 0.0) - jnp.exp(logp_cv) * factor_cv
        grad_cv = (grad_cv * scale).astype(hidden_cd.dtype)
        head = head_dv.astype(hidden_cd.dtype)
        grad_hidden_cd = jnp.einsum("cv,dv->cd", grad_cv, head, preferred_element_type=accumulate)
        head_grad_dv += jnp.einsum(
            "cd,cv->dv", hidden_cd, grad_cv, preferred_element_type=accumulate
        )
        return head_grad_dv, grad_hidden_cd.astype(hidden_cd.dtype)

    head_grad, hidden_grad = jax.lax.scan(
        step,
        jnp.zeros(head_dv.shape, accumulate),
        (hidden, target, entropy, logz, *cotangents),
    )
    return hidden_grad, head_grad.astype(head_dv.dtype), None


_chunked.defvjp(_forward, _backward)
