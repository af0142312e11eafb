"""DeepSpeed's own checkpoints, such as those of transformers' Trainer: read without executing what the files contain.

The file ``latest`` names the folder of a step, in which each rank has the pieces of flat tensors that it updated. They
are put together by parameter, so a run may resume on any number of ranks, at any stage, and without DeepSpeed.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from pytorch_accelerated.errors import InvalidCheckpointError
from pytorch_accelerated.extras.deepspeed.pieces import COUNTS, MAIN, SCALE
from pytorch_accelerated.states import load_portable

# Others than "mp_rank_00" are of models that tensor parallelism has divided.
_RANK = re.compile(r"(?:.*zero_pp_rank_(\d+)_)?mp_rank_00_(model|optim)_states\.pt")
# What these files call besides plain values. Python 3.11 writes members of enumerations by "getattr".
_REPLACED = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "builtins.getattr",
)


class _Plain:
    """An object of a file by its attributes alone."""

    def __init__(self, *_: Any) -> None: ...


class DeepSpeedCheckpoint:
    """A checkpoint of DeepSpeed, of stage 1, 2 or 3, or of stage 0 in float32.

    Args:
        folder: the checkpoint.

    Raises:
        InvalidCheckpointError: if it is damaged, or of another kind.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            files = sorted(self._files())
            self._models = [load_portable(path) for kind, _, path in files if kind == "model"]
            with torch.serialization.safe_globals([(_Plain, name) for name in _REPLACED]):
                found = [load_portable(path) for kind, _, path in files if kind == "optim"]
            self._states = [each["optimizer_state_dict"] for each in found]
            self._shapes = {name: shape for group in self._model["param_shapes"] or () for name, shape in group.items()}
            self._entries = {name: self._whole(name, entry) for name, entry in self._pieces().items()}
        except (AttributeError, IndexError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
            raise InvalidCheckpointError(
                f"The checkpoint of DeepSpeed in {folder} cannot be read ({type(error).__name__}: {error}). Only ZeRO "
                "1 to 3 are read, and stage 0 in float32, all without tensor parallelism. Resume it with DeepSpeed's "
                "own `load_checkpoint`."
            ) from error

    def weights(self) -> dict[str, Any]:
        """The whole weights, by name."""
        saved = {name: value for name, value in self._model["module"].items() if name not in self._shapes}
        for name, shape in (self._model["frozen_param_shapes"] or {}).items():
            pieces = [each["frozen_param_fragments"][name] for each in self._models]
            saved[name] = torch.cat([piece.flatten() for piece in pieces])[: shape.numel()].view(shape)
        return saved | {name: entry[MAIN] for name, entry in self._entries.items()}

    def schedule(self) -> Any:
        """The state of a schedule that DeepSpeed stepped, if it did."""
        return self._model["lr_scheduler"]

    def optimizer(self, model: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
        """A state that `optimizer`, of `model`, can load."""
        if not self._states:
            return dict(self._model["optimizer"])
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        inner = self._states[0].get("base_optimizer_state") or self._states[0]["optimizer_state_dict"]
        saved, groups = iter(inner["param_groups"]), optimizer.state_dict()["param_groups"]
        state: dict[int, Any] = {}
        for group, own in zip(groups, optimizer.param_groups, strict=True):
            group.update({**next(saved, {}), "params": group["params"]} if group["params"] else {})
            for number, each in zip(group["params"], own["params"], strict=True):
                entry = dict(self._entries.get(names[id(each)], {}))
                if each.dtype.itemsize != 2:
                    entry.pop(MAIN, None)  # the weights themselves
                state[number] = entry
        counts = {name: self._model[name] for name in COUNTS if name in self._model}
        scale = {name: value for name, value in vars(self._states[0]["loss_scaler"]).items() if name in SCALE}
        return {"state": state, "param_groups": groups, "engine": {**counts, **scale}}

    @property
    def _model(self) -> dict[str, Any]:
        return self._models[0]

    def _files(self) -> Iterator[tuple[str, int, Path]]:
        """The files of all ranks, with their kind and rank."""
        step = (self._folder / "latest").read_text(encoding="utf-8").strip()
        for path in (self._folder / step).iterdir():
            if match := _RANK.fullmatch(path.name):
                yield match[2], int(match[1] or 0), path

    def _pieces(self) -> dict[str, dict[str, Any]]:
        """By parameter and entry, what the ranks have, in order; a number that all have is itself."""
        pieces: dict[str, dict[str, Any]] = {name: {} for name in self._shapes}
        for state in self._states:
            for name, start, count, flats in self._rows(state):
                for key, value in flats.items():
                    if isinstance(value, torch.Tensor) and value.ndim:
                        pieces[name].setdefault(key, []).append(value[start : start + count])
                    else:
                        pieces[name][key] = value
        return pieces

    def _rows(self, state: Mapping[str, Any]) -> Iterator[tuple[str, int, int, dict[str, Any]]]:
        """Each parameter of a rank, with the place of its numbers in flat tensors."""
        if "fp32_flat_groups" in state:  # stage 3
            entries = state["optimizer_state_dict"]["state"]
            parts = [{MAIN: flat, **entries.get(i, {})} for i, flat in enumerate(state["fp32_flat_groups"])]
            flats = {key: _joined([part[key] for part in parts]) for key in parts[0]}
            start = 0
            for name, shape in self._shapes.items():
                count = -(-shape.numel() // len(self._states))
                yield name, start, count, flats
                start += count
            return
        entries = state["base_optimizer_state"]["state"]
        for group, rows in enumerate(state["param_slice_mappings"]):
            flats = {MAIN: state["single_partition_of_fp32_groups"][group], **entries.get(group, {})}
            for name, row in rows.items():
                yield name, row.start, row.numel, flats

    def _whole(self, name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
        shape = self._shapes[name]
        return {
            # Parameters share one count of steps there, to which each would add here.
            key: torch.cat(value)[: shape.numel()].view(shape) if isinstance(value, list) else copy.deepcopy(value)
            for key, value in entry.items()
        }


def _joined(values: list[Any]) -> Any:
    is_flat = isinstance(values[0], torch.Tensor) and values[0].ndim
    return torch.cat(values) if is_flat else values[0]
