"""From datasets to batches on the device, for any number of ranks.

`building` makes a torch `DataLoader` for a dataset, and a `RunLoader` from any loader: a `planned_loader` for map-style
data, a `stream_loader` for the rest; it refuses unusable ones, and copies batches to the device. `updates` defines
`RunLoader` and what the loop gets from it. Below them, `ordering` and `sampling` decide the order of samples, and
`rows` and `streams` fetch batches, in this process or in `workers`. `resuming` saves and restores the position in a
stream.
`mixture` and `token_batches` are for users, who import their names from here.
"""

from pytorch_accelerated.data.counting import arguments_of_classes, has_ignored
from pytorch_accelerated.data.fingerprints import SharedRows, find_shared_rows
from pytorch_accelerated.data.mixture import Mixture
from pytorch_accelerated.data.ordering import LeftOut, own_generators_kept
from pytorch_accelerated.data.planned_loader import PlannedLoader
from pytorch_accelerated.data.rows import as_array_dataset
from pytorch_accelerated.data.run_plan import RunPlan
from pytorch_accelerated.data.token_batches import TokenBatches
from pytorch_accelerated.data.workers import objects_within

__all__ = [
    "LeftOut",
    "Mixture",
    "PlannedLoader",
    "RunPlan",
    "SharedRows",
    "TokenBatches",
    "arguments_of_classes",
    "as_array_dataset",
    "find_shared_rows",
    "has_ignored",
    "objects_within",
    "own_generators_kept",
]
