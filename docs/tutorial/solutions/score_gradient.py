"""Solution of `score_gradient`."""

from __future__ import annotations

import numpy as np


def score_gradient(d_act: np.ndarray, act: np.ndarray, expert_pair_indices: np.ndarray) -> np.ndarray:
    d_scores = np.zeros(len(expert_pair_indices))
    used = expert_pair_indices >= 0
    d_scores[expert_pair_indices[used]] = (d_act[used] * act[used]).sum(axis=1)
    return d_scores
