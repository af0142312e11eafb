"""From datasets to batches on the device, for any number of ranks.

`building` makes a torch `DataLoader` for a dataset, `adapting` makes a loader of the run from any loader: a
`planned_loader` for data that has samples by index, a `stream_loader` for the rest. `updates` has what the loop gets
from both, `checking` what is refused. Below them, `ordering` and `sampling` decide which samples come where,
`fetching`, `arrays` and `streams` get their batches, and `prefetch` takes those to the device. `resuming` lets a stream
go on from its own state.
"""
