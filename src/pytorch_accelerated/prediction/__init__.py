"""All predictions of a pass, in dataset order, each once; `StoredPredictions` opens those that went to a folder.

`collecting` says what takes them. `rows` and `blocks` do this rank's part, `nested` takes tensors out of nested data,
`pieces` works out the order, and `in_memory` and `stored` put the rows of all ranks together.
"""

from pytorch_accelerated.prediction.stored import StoredPredictions

__all__ = ["StoredPredictions"]
