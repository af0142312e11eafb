"""The checkpoints of the Hugging Face trainer: training states beside the files of `save_model`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from pytorch_accelerated.callbacks.warning import warn_user
from pytorch_accelerated.checkpointing.disk import is_file
from pytorch_accelerated.checkpointing.layout import MANIFEST_NAME
from pytorch_accelerated.checkpointing.publish import begin, cover_changes, plain_files
from pytorch_accelerated.checkpointing.state_folder import part_names, read_state, write_encoded
from pytorch_accelerated.checkpointing.training_state import TRAINING_WEIGHTS, save_run
from pytorch_accelerated.checkpointing.verify import read_manifest
from pytorch_accelerated.huggingface.checkpoints.saving import StagedCheckpoint, weights_in
from pytorch_accelerated.huggingface.checkpoints.weights import BASE_KEY, WEIGHTS_NAME, fingerprint_of, frozen_base
from pytorch_accelerated.training.states import States


class CheckpointStates(States):
    """Writes, reads and loads checkpoints. All ranks must call its methods."""

    def choose_seed(self, state: Path | None = None) -> None:
        """Use the seed of the arguments, so that a second training has the same order of rows."""
        args = self.context.holder.args
        self.context.seed = args.seed if args.data_seed is None else args.data_seed

    def find(self, source: str | Path) -> Path | None:
        """The checkpoint itself, which the Hugging Face trainer has already found."""
        return Path(source)

    def resume(self, state: Path, skipped_weights: Collection[str] = ()) -> None:
        """Load the checkpoint as the Hugging Face trainer does."""
        self.context.training.resume(state)  # type: ignore[attr-defined]
        self.context.losses.reset()  # the next log is about the steps of this call

    def load_checkpoint(self, folder: Path) -> None:
        """Load what `write_checkpoint` wrote."""
        model = self.context.holder.model
        frozen = frozen_base(model)
        if frozen:
            _, parts = read_state(folder, ["extra"])
            saved = parts["extra"].get(BASE_KEY)
            if saved is not None and saved != fingerprint_of(model, frozen):
                warn_user(
                    self.context.ranks,
                    f"The frozen base of this {type(model).__name__} has other weights, or another dtype, than when "
                    f"{folder} was saved, which holds the adapter only. The run uses the base as it is now; load the "
                    "one that it began with.",
                )
        super().resume(folder, frozen)

    def take_read(self, folder: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """The contents of a checkpoint in which the files of a user's method hold the weights."""
        parts = part_names(read_manifest(folder))
        if "model" in parts or TRAINING_WEIGHTS in parts:
            return None
        facts, contents = read_state(folder)
        return facts, {**contents, "model": weights_in(folder, self.context.holder.model)}

    def write_checkpoint(
        self, folder: Path, write_files: Callable[[StagedCheckpoint], None], *, only_model: bool = False
    ) -> None:
        """Write the files of `write_files`, which all ranks call, and what a resume needs besides, to a folder.

        With `only_model`, a resume gets nothing else.
        """
        context, ranks, model = self.context, self.context.ranks, self.context.holder.model
        self.check_finite()
        folder_of_all = ranks.do_on_first(lambda: begin(folder, takes_in=True))
        staged = StagedCheckpoint(folder_of_all.staging, model)
        try:
            ranks.do_on_all(lambda: write_files(staged))
            if only_model:
                facts = {"updates": context.state.updates, "epochs": context.state.epochs}
                ranks.do_on_first(lambda: write_encoded(folder_of_all, facts, {}))
            else:
                frozen = frozen_base(model)
                save_run(
                    self.contents(),
                    folder_of_all,
                    {BASE_KEY: fingerprint_of(model, frozen)} if frozen else {},
                    skipped_weights=frozen,
                    weights_part=ranks.do_on_first(lambda: staged.weights_part),
                    has_optimizer_file=staged.has_optimizer,
                )
        finally:  # if it is still there
            if ranks.is_first:
                folder_of_all.abort()
        context.saves.add(folder, context.history, context.state)

    def cover_changes(self, folder: Path) -> None:
        """Make what callbacks have written into a checkpoint a part of it."""
        ranks = self.context.ranks

        def cover() -> set[str] | None:
            if not is_file(folder / MANIFEST_NAME):
                return None
            parts = part_names(read_manifest(folder))
            native = {f"{part}{suffix}" for part in parts for suffix in (".json", ".safetensors")}
            lost = {"model.json", WEIGHTS_NAME}.intersection(native, cover_changes(folder))
            return native if lost else None

        def copy(staged: StagedCheckpoint) -> None:
            assert native is not None
            names = [name for name in plain_files(folder) if name == WEIGHTS_NAME or name not in native]
            for name in names if ranks.is_first else ():
                (staged.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(folder / name, staged.folder / name)
            staged.has_optimizer = "optimizer.json" not in native

        ranks.wait()
        native = ranks.do_on_first(cover)
        if native is not None:  # the weights that the run needs were replaced
            self.write_checkpoint(folder, copy)
