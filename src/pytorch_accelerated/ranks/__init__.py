"""How a run becomes multiple processes."""

from pytorch_accelerated.ranks.compat import accelerate as _accelerate  # noqa: F401  # first, for it silences a warning
from pytorch_accelerated.ranks.compat.torch import forward_hook_stores, is_batch_norm, is_persistent, note_step
from pytorch_accelerated.ranks.held import held_parts
from pytorch_accelerated.ranks.keeping import Kept, kept
from pytorch_accelerated.ranks.numerics import listed
from pytorch_accelerated.ranks.optimizers import Optimizers
from pytorch_accelerated.ranks.preparation import PreparedModel, is_replicated
from pytorch_accelerated.ranks.ranks import Ranks
from pytorch_accelerated.ranks.sharding import Shard, has_shards, is_in_pieces, own_part, whole
from pytorch_accelerated.ranks.wrappers import Parallel

__all__ = [
    "Kept",
    "Optimizers",
    "Parallel",
    "PreparedModel",
    "Ranks",
    "Shard",
    "forward_hook_stores",
    "has_shards",
    "held_parts",
    "is_batch_norm",
    "is_in_pieces",
    "is_persistent",
    "is_replicated",
    "kept",
    "listed",
    "note_step",
    "own_part",
    "whole",
]
