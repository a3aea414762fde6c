"""AdamW with warm-up, as one optax transformation."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

SCHEDULES = ("constant", "cosine")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """AdamW (Loshchilov and Hutter 2019) and its schedule.

    Attributes:
      learning_rate: the peak.
      warmup: updates from 0 to the peak, linearly; the first update already takes a step.
      schedule: "constant", or "cosine" down to ``final_fraction`` of the peak at ``total``.
      total: updates of the whole run, for the cosine.
      final_fraction: where the cosine ends, as a fraction of the peak.
      b1, b2, eps: Adam's decay rates and the term that keeps its division finite.
      weight_decay: decoupled; norm scales and biases are left alone.
      max_grad_norm: gradients of a larger global norm are scaled down to it; 0 for no limit.
    """

    learning_rate: float
    warmup: int = 0
    schedule: str = "constant"
    total: int = 0
    final_fraction: float = 0.0
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0


def learning_rate(settings: OptimizerSettings) -> optax.Schedule:
    """The learning rate of update ``count`` = 0, 1, ..."""

    def schedule(count: Any) -> Any:
        rate: Any = settings.learning_rate
        if settings.schedule == "cosine":
            span = max(settings.total - settings.warmup, 1)
            done = jnp.clip((count - settings.warmup) / span, 0.0, 1.0)
            floor = settings.final_fraction
            rate = rate * (floor + (1.0 - floor) * 0.5 * (1.0 + jnp.cos(jnp.pi * done)))
        if settings.warmup:
            rate = rate * jnp.minimum(1.0, (count + 1) / settings.warmup)
        return rate

    if settings.schedule not in SCHEDULES:
        raise ValueError(f"schedule {settings.schedule!r}: expected one of {', '.join(SCHEDULES)}")
    return schedule


def decays(path: tuple[Any, ...]) -> bool:
    """Whether weight decay applies to the parameter at `path`: not to norms and biases.

    By name, not by rank: a stacked (scanned) bias has two axes as well.
    """
    names = jax.tree_util.keystr(path).lower()
    return not any(part in names for part in ("bias", "norm", "scale"))


def make(settings: OptimizerSettings) -> optax.GradientTransformation:
    """Clip by global norm, Adam, decoupled weight decay, scheduled learning rate, in this order."""

    def mask(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: decays(path), params)

    clip = settings.max_grad_norm
    # The same parts whatever the settings: then a checkpoint's state fits them all.
    return optax.chain(
        optax.clip_by_global_norm(clip) if clip > 0 else optax.identity(),
        optax.scale_by_adam(b1=settings.b1, b2=settings.b2, eps=settings.eps),
        optax.add_decayed_weights(settings.weight_decay, mask=mask),
        optax.scale_by_learning_rate(learning_rate(settings)),
    )
