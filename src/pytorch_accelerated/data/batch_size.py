"""How many samples a batch has."""

from pytorch_accelerated.trees import count_rows as batch_size_of

__all__ = ["batch_size_of"]
