"""All rows of a pass, in dataset order, each once; `StoredPredictions` opens predictions that went to a folder.

`collecting` keeps rows in blocks, joins the rows of all ranks, and has the collector in memory. The others use it:
`stored` (in a folder) and `padded` (rows that differ).
"""

from pytorch_accelerated.prediction.stored import StoredPredictions

__all__ = ["StoredPredictions"]
