"""What `Trainer.replay` and `Trainer.prove` return, and what two runs are compared by."""

from pytorch_accelerated.extras.proving.branch import NOT_TAKEN_BY_BRANCH
from pytorch_accelerated.extras.proving.diff import PartDifference, RecordDifference, RunDifference, diff
from pytorch_accelerated.extras.proving.factory import HELP, function_at, make_run
from pytorch_accelerated.extras.proving.prove import Check, Proof
from pytorch_accelerated.extras.proving.replay import Replay
from pytorch_accelerated.extras.proving.rewind import NOT_TAKEN, rewind
from pytorch_accelerated.extras.proving.trace import Parting, UpdateTrace

__all__ = [
    "HELP",
    "NOT_TAKEN",
    "NOT_TAKEN_BY_BRANCH",
    "function_at",
    "make_run",
    "Check",
    "PartDifference",
    "Parting",
    "Proof",
    "RecordDifference",
    "Replay",
    "RunDifference",
    "UpdateTrace",
    "diff",
    "rewind",
]
