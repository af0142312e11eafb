"""What `Trainer.replay` and `Trainer.prove` return, and what two runs are compared by."""

from pytorch_accelerated.proving.diff import PartDifference, RecordDifference, RunDifference, diff
from pytorch_accelerated.proving.prove import Check, Proof
from pytorch_accelerated.proving.replay import Replay
from pytorch_accelerated.proving.trace import Parting, UpdateTrace

__all__ = [
    "Check",
    "PartDifference",
    "Parting",
    "Proof",
    "RecordDifference",
    "Replay",
    "RunDifference",
    "UpdateTrace",
    "diff",
]
