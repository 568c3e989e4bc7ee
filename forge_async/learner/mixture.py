"""Mixtures of experts: which layers are, by config.json, and how evenly their experts are used."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np


def num_experts(config: Mapping[str, Any]) -> int:
    """Experts of a layer of a Qwen3-MoE; config.json has them under either of two names."""
    return int(config.get("num_experts") or config["num_local_experts"])


def has_experts(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer of a Qwen3-MoE is a mixture (transformers' own rule)."""
    sparse = (layer + 1) % (config.get("decoder_sparse_step") or 1) == 0
    return sparse and layer not in (config.get("mlp_only_layers") or ())


def load_figures(counts: np.ndarray) -> dict[str, float]:
    """Figures of a step by their names in the metrics row.

    Args:
        counts: [layers, experts], tokens that took each expert.

    Returns the largest share of a layer's choices that fell on one expert (1 / experts where all are used alike), and
    the entropy of the choices over that of an even use (1 where all are used alike, 0 where one takes all), its mean
    over layers. Nothing without tokens.
    """
    totals = counts.sum(1, keepdims=True)
    if not totals.all():
        return {}
    shares = counts / totals
    entropies = -(shares * np.log(np.where(shares > 0, shares, 1.0))).sum(1)
    return {
        "router/share_max": float(shares.max()),
        "router/entropy_fraction": float(entropies.mean() / math.log(max(counts.shape[1], 2))),
    }
