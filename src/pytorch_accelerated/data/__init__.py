"""From datasets to batches on the device, for any number of ranks.

`building` makes a torch `DataLoader` for a dataset. `adapting` makes a `RunLoader` from any loader: a `planned_loader`
for map-style data, a `stream_loader` for the rest; it refuses unusable ones, and copies batches to the device.
`updates` defines `RunLoader` and what the loop gets from it. Below them, `ordering` and `sampling` decide the order of
samples, and `fetching`, `rows` and `streams` fetch batches. `resuming` saves and restores the position in a stream.
"""
