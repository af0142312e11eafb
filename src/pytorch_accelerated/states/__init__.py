"""Saving and loading runs. Everything but `training_state` works without a trainer.

`codec` and `formats` turn nested Python state into JSON and safetensors and back. `disk`, `layout`,
`publish` and `verify` make a folder appear whole or not at all, and trust only folders that match their manifest.
`state_folder` combines these. `portable` reads and writes single ``.pt`` files, `weights` and `optimizers` check states
before they are loaded, `loading` loads them all or not at all. `policy` and `retention` decide when to save and what to
delete.
"""

from pytorch_accelerated.states import disk, layout, publish, verify
from pytorch_accelerated.states.layout import (
    MANIFEST_NAME,
    STATE_NAME,
    Manifest,
    dump_manifest,
    identity_of,
    parse_manifest,
)
from pytorch_accelerated.states.matching import require_kinds
from pytorch_accelerated.states.optimizers import read_optimizer_file
from pytorch_accelerated.states.policy import Retention, judged_states, read_metric_records
from pytorch_accelerated.states.portable import save_portable
from pytorch_accelerated.states.publish import explained, remove_state, replacing
from pytorch_accelerated.states.run_folder import FolderLock
from pytorch_accelerated.states.state_folder import part_names, read_state
from pytorch_accelerated.states.training_state import load_run, save_run
from pytorch_accelerated.states.verify import list_states, looks_like_state, read_manifest
from pytorch_accelerated.states.weights import canonical_state_dict

__all__ = [
    "FolderLock",
    "MANIFEST_NAME",
    "Manifest",
    "Retention",
    "STATE_NAME",
    "canonical_state_dict",
    "disk",
    "dump_manifest",
    "explained",
    "identity_of",
    "judged_states",
    "layout",
    "list_states",
    "load_run",
    "looks_like_state",
    "parse_manifest",
    "part_names",
    "publish",
    "read_manifest",
    "read_metric_records",
    "read_optimizer_file",
    "read_state",
    "remove_state",
    "replacing",
    "require_kinds",
    "save_portable",
    "save_run",
    "verify",
]
