"""Saving and reading what a run is; every part works without a trainer.

`strict_json`, `codec` and `tensor_file` turn nested Python state into JSON and safetensors and back. `disk`, `layout`,
`publish` and `verify` make a folder appear whole or not at all, and trust only folders that match their manifest.
`state_folder` joins the two. `portable` writes single ``.pt`` files, `weights` names and checks what is in a model,
`policy` and `retention` decide when to save and what to delete.
"""
