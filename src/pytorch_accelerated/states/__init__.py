"""Saving and loading runs. Everything but `training_state` and `loading` works without a trainer.

A save, in this order: `training_state` collects what a state consists of, `state_folder` writes a folder of it,
`publish` makes the folder appear whole or not at all, `codec` turns nested values into JSON and safetensors. A resume:
`verify` finds a folder that matches its manifest, `state_folder` reads it, `loading` loads all of it or nothing, with
`weights` and `optimizers`, which check that a state fits.

`disk` has all operations that change the disk, `layout` the names of files and the manifest. `portable` reads and
writes single ``.pt`` files. `policy` says how often to save and which states to keep, `run_folder` keeps two runs out
of one folder.
"""

from pytorch_accelerated.states.codec import Encoded, chunks, dump_json, encode
from pytorch_accelerated.states.loading import load_run
from pytorch_accelerated.states.optimizers import read_optimizer_file
from pytorch_accelerated.states.policy import MEASURED_FILE, Retention, judged_states, read_metric_records
from pytorch_accelerated.states.portable import load_portable, save_portable
from pytorch_accelerated.states.run_folder import FolderLock
from pytorch_accelerated.states.state_folder import part_names, read_state
from pytorch_accelerated.states.training_state import save_run
from pytorch_accelerated.states.verify import list_states, read_manifest
from pytorch_accelerated.states.weights import canonical_state_dict

__all__ = [
    "Encoded",
    "FolderLock",
    "MEASURED_FILE",
    "Retention",
    "canonical_state_dict",
    "chunks",
    "dump_json",
    "encode",
    "judged_states",
    "list_states",
    "load_portable",
    "load_run",
    "part_names",
    "read_manifest",
    "read_metric_records",
    "read_optimizer_file",
    "read_state",
    "save_portable",
    "save_run",
]
