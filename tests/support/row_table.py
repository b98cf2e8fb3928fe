"""The row table by its definition: which rows a rank has, in which order, and which tokens lose theirs."""

import numpy as np

ROW_BLOCK = 128


def row_table(ids, rank, local_experts):
    """Definition of the canonical order. `ids` is [ranks, slots], clean; returns [rows, 2] of (rank, slot)."""
    blocks = []
    for expert in range(rank * local_experts, (rank + 1) * local_experts):
        rows = np.argwhere(ids == expert)  # by rank, then by slot
        blocks.append(np.pad(rows, ((0, -len(rows) % ROW_BLOCK), (0, 0)), constant_values=-1))
    return np.concatenate(blocks)


def clean(ids, experts):
    """A token with any id outside [-1, experts) loses all its slots. `ids` is [ranks, tokens, K]."""
    bad = ((ids < -1) | (ids >= experts)).any(-1, keepdims=True)
    return np.where(bad, -1, ids).reshape(len(ids), -1)
