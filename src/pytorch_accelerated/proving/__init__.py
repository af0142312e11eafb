"""What `Trainer.replay` and `Trainer.prove` return, and what two runs are compared by."""

from pytorch_accelerated.proving.replay import Replay

__all__ = ["Replay"]
