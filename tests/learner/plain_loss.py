"""The loss once more, in plain Python: one token, one action and one formula after the other."""

from __future__ import annotations

import itertools
import math

import numpy as np

from bpo_jax.learner.loss import LossSettings


def plain_loss(logprob, entropy, batch, settings: LossSettings, value=None) -> dict[str, float]:
    """The loss and the numbers that are logged of it, of arrays [B, T]."""
    trained = [(b, t) for b, t in np.ndindex(batch.tokens.shape) if batch.loss_mask[b, t] > 0]

    def name(place):
        return (place[0], batch.tree_id[place], batch.action_id[place])

    actions = [list(places) for _, places in itertools.groupby(trained, key=name)]
    loss = policy = kl = 0.0
    weights, clipped, capped, drift, gap, kept_entropy = [], 0, 0, [], [], []
    for action in actions:
        anchors = {}
        for place in action:
            behaviour = batch.behaviour_logprob[place]
            if settings.importance_cap is None:
                anchors[place] = behaviour
            elif batch.proximal_logprob is None:
                anchors[place] = logprob[place]
            else:
                anchors[place] = batch.proximal_logprob[place]
        moved = {p: logprob[p] - anchors[p] for p in action}
        apart = {p: anchors[p] - batch.behaviour_logprob[p] for p in action}
        if settings.ratio == "action":
            moved = dict.fromkeys(action, sum(moved.values()) / len(action))
            apart = dict.fromkeys(action, sum(apart.values()) / len(action))
        for place in action:
            q, a = batch.coefficient[place], batch.advantage[place]
            r, full = math.exp(moved[place]), math.exp(apart[place])
            u = 1.0 if settings.importance_cap is None else min(full, settings.importance_cap)
            capped += settings.importance_cap is not None and full > settings.importance_cap
            low, high = 1.0 - settings.clip_low, 1.0 + settings.clip_high
            f = min(r * a, min(max(r, low), high) * a)
            at_bound = (a > 0 and r > high) or (a < 0 and r < low)
            if settings.dual_clip is not None and a < 0:
                f = max(f, settings.dual_clip * a)
                at_bound = at_bound or r > settings.dual_clip
            policy -= q * u * f
            loss -= settings.entropy_weight * q * entropy[place]
            if settings.kl_weight:
                d = logprob[place] - batch.reference_logprob[place]
                k = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[settings.kl_estimator]
                kl += q * k
                drift.append(math.exp(-d) - 1 + d)
            weights.append(u * r)
            clipped += at_bound
            gap.append(logprob[place] - batch.behaviour_logprob[place])
            kept_entropy.append(entropy[place])
    loss += policy + settings.kl_weight * kl
    count = len(weights)
    numbers = {
        "loss/policy": policy,
        "loss/entropy": sum(kept_entropy) / count,
        "rollout/logprob_gap": sum(map(abs, gap)) / count,
        "diag/clip_fraction": clipped / count,
        "diag/approx_kl": sum(math.exp(g) - 1 - g for g in gap) / count,
        "diag/ess": sum(weights) ** 2 / (count * sum(w * w for w in weights)),
    }
    if settings.kl_weight:
        numbers |= {"loss/kl": kl, "diag/reference_kl": sum(drift) / count}
    if settings.importance_cap is not None:
        numbers["diag/importance_capped"] = capped / count
    if settings.value_weight:
        places = [p for p in np.ndindex(batch.tokens.shape) if batch.value_weight[p] > 0]
        w = np.array([batch.value_weight[p] for p in places])
        target = np.array([batch.value_target[p] for p in places])
        said = np.array([batch.value_prediction[p] for p in places])
        v = np.array([value[p] for p in places])
        squares = (v - target) ** 2
        if settings.value_clip is not None:
            near = said + np.minimum(
                np.maximum(v - said, -settings.value_clip), settings.value_clip
            )
            squares = np.maximum(squares, (near - target) ** 2)
        numbers["loss/value"] = float(w @ squares / 2)
        spread = w @ (target - w @ target / w.sum()) ** 2
        numbers["diag/value_explained"] = float(1 - w @ (v - target) ** 2 / spread)
        loss += settings.value_weight * numbers["loss/value"]
    return {"loss": loss, **numbers}
