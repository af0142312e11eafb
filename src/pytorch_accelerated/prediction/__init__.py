"""All rows of a pass, in dataset order, each once; `StoredPredictions` opens predictions that went to a folder.

`collecting` makes the collector of a prediction: `in_memory` or `stored`, which take rows of one kind through `rows`
and `blocks`. `padded` takes rows that differ. `arriving` brings rows off the device, `nested` is about their structure,
`pieces` works out their order, and `joining` exchanges them between the ranks.
"""

from pytorch_accelerated.prediction.stored import StoredPredictions

__all__ = ["StoredPredictions"]
