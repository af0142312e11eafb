"""Saving and loading runs. Everything but `training_state` works without a trainer.

`codec` and `formats` turn nested Python state into JSON and safetensors and back. `disk`, `layout`,
`publish` and `verify` make a folder appear whole or not at all, and trust only folders that match their manifest.
`state_folder` combines these. `portable` reads and writes single ``.pt`` files, `weights` and `optimizers` check states
before they are loaded, `loading` loads them all or not at all. `policy` and `retention` decide when to save and what to
delete.
"""
