"""Which keys a query of attention sees. numpy only.

Legend: B sequences of T tokens, Q queries and S keys of each.
"""

from __future__ import annotations

import numpy as np


def visible_keys(
    queries: np.ndarray, keys_S: np.ndarray, window: int | None = None, documents_BT: np.ndarray | None = None
) -> np.ndarray:
    """Returns whether each query sees each key, bool [..., Q, S]: a query sees the keys up to its position.

    Args:
        queries: Positions of the queries in their sequence, [Q], or [B, Q] where sequences differ.
        keys_S: Positions of the keys.
        window: How many keys a query sees at most, including the one at its position; None: all.
        documents_BT: The document of each token of a sequence, [B, T] or [T]; a query, here [Q], sees only keys of its
            document. None: each sequence is one document.
    """
    distance = queries[..., None] - keys_S
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    if documents_BT is not None:
        visible = visible & (documents_BT[..., queries, None] == documents_BT[..., None, keys_S])
    return visible


def attention_bias(visible: np.ndarray) -> np.ndarray:
    """Returns the term that attention adds to each score, float32: 0 for a visible key, else the lowest number."""
    return np.where(visible, np.float32(0), np.finfo(np.float32).min)
