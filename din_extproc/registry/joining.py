"""Matching of registered nodes to pools.

Invariant: nodes of one pool have the same model and engine, and what else the pool names: dtype, tensor-parallel size, compute capability.
"""

from din_extproc.domain.membership import Registration
from din_extproc.domain.node import Pool, meets_capability


def find_mismatch(registration: Registration, pool: Pool) -> str:
    """Return why the node does not match the pool; "" if it does."""
    node = registration.node
    if registration.pool and registration.pool != pool.name:
        return f"it wants to join {registration.pool!r}"
    pairs = (
        ("model", node.model, pool.model),
        ("dtype", node.dtype, pool.dtype or node.dtype),
        ("tp_world_size", node.tp_world_size, pool.tp_world_size or node.tp_world_size),
        ("engine", registration.engine, pool.engine),
    )
    for name, has, wants in pairs:
        if has != wants:
            return f"{name} is {has or 'not given'}, the pool's is {wants}"
    if not meets_capability(node.compute_capability, pool.compute_capability):
        return f"compute_capability is {node.compute_capability or 'not given'}, the pool's is {pool.compute_capability}"
    if node.max_seq_len < pool.min_seq_len:
        return f"max_seq_len is {node.max_seq_len}, the pool wants {pool.min_seq_len}"
    return ""
