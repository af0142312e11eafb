"""Training states of accelerate's `save_state`, which pytorch-accelerated 0.1 writes, are recognized and refused."""

from __future__ import annotations

import contextlib
from pathlib import Path

from pytorch_accelerated.checkpointing.layout import MANIFEST_NAME
from pytorch_accelerated.errors import InvalidCheckpointError

_PATTERNS = (
    "random_states_*.pkl",
    "custom_checkpoint_*.pkl",
    "optimizer.bin",
    "optimizer_*.bin",
    "trainer_metadata.pt",
)


def refuse_accelerate_states(folder: Path) -> None:
    """Refuse a folder that accelerate wrote, or one that holds such folders and no state of ours.

    Folders that can't be read are ignored here; reading them later raises an error.

    Raises:
        InvalidCheckpointError: says what the folders are, and how to load their contents.
    """
    inside: list[Path] = []
    with contextlib.suppress(OSError):
        inside = sorted(child for child in folder.iterdir() if child.is_dir() and not child.is_symlink())
    for place in (folder, *inside):
        with contextlib.suppress(OSError):
            if (place / MANIFEST_NAME).exists():
                return
    for state in (folder, *reversed(inside)):
        names: list[str] = []
        with contextlib.suppress(OSError):
            names = sorted({path.name for pattern in _PATTERNS for path in state.glob(pattern)})
        if names:
            raise InvalidCheckpointError(
                f"{state} is a training state of accelerate's `save_state`, as pytorch-accelerated 0.1 writes them: it "
                f"has {', '.join(names)}. Such files are pickles, which can run any code, so they are not read. Use a "
                "portable checkpoint instead: in the version that wrote the state, load it and call "
                "`trainer.save_checkpoint('model.pt')`; here call `trainer.load_checkpoint('model.pt')`, which loads "
                "weights, optimizer and scheduler."
                + (
                    f" The weights alone are in {state / 'model.safetensors'}: "
                    "`model.load_state_dict(safetensors.torch.load_file(...))`."
                    if (state / "model.safetensors").is_file()
                    else ""
                )
            )
