"""All rows of a pass, in dataset order, each once; `StoredPredictions` opens predictions that went to a folder.

`rows` keeps rows in blocks and joins those of all ranks. Collectors use it: `collecting` (in memory), `stored` (in a
folder) and `padded` (rows that differ).
"""

from pytorch_accelerated.prediction.stored import StoredPredictions

__all__ = ["StoredPredictions"]
