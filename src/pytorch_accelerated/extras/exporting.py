"""Writes a trained model for others to serve: ONNX, torch.export, or weights with the facts of their run."""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import json
import math
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytorch_accelerated.errors import ConfigurationError, DataError, PytorchAcceleratedError
from pytorch_accelerated.facts import require
from pytorch_accelerated.facts.trees import leaves, map_leaves, tensors_in
from pytorch_accelerated.ranks import has_shards
from pytorch_accelerated.utils import DataLoaderSlice

if TYPE_CHECKING:
    from pytorch_accelerated.trainer import Trainer

_TOLERANCE = 1e-4  # of what another runtime computes in single precision, relative to the largest output
_TOLERANCE_OF_HALF = 5e-2  # of a prediction in bfloat16 or float16: some of their 8 to 11 bits are lost in each layer
_KEY = "pytorch_accelerated"  # of the facts of the run


def export_model(trainer: Trainer, path: Path, loader: Any) -> Path:
    """Write the model; see `Trainer.export`. `loader` yields batches to predict for."""
    if path.suffix not in _WRITERS:
        raise ConfigurationError(f"The file {path} cannot be exported: its name must end in {', '.join(_WRITERS)}.")
    bare = trainer.get_model(keep_torch_compile=False)
    if has_shards(bare):
        raise ConfigurationError("A sharded model cannot be exported. Load its weights into a whole one first.")
    with _calls_of(trainer, bare) as calls:
        predictions = trainer.predict(DataLoaderSlice(loader, 1))
    if not calls:
        raise ConfigurationError(
            "`calculate_predict_batch_outputs` did not call the model itself, so its inputs are unknown. Export the "
            "part that it calls with `torch.onnx.export` or `torch.export`."
        )
    arguments, outputs = calls[0]
    ranks = trainer.run_context.parts.ranks
    with trainer.run_context.parts.mode.evaluating():
        model = copy.deepcopy(bare).cpu().eval()
    is_half = str(trainer.run_context.parts.accelerator.mixed_precision) != "no"
    tolerance = _TOLERANCE_OF_HALF if is_half else _TOLERANCE
    with trainer.run_context.control.saves.saving(path):
        takes = ranks.do_on_first(lambda: _publish(path, model, arguments, outputs, tolerance, _facts(trainer)))
    if takes:
        trainer.print(f"{path} takes {', '.join(takes)}.")
    if len(calls) > 1 or _difference(predictions, outputs) > _TOLERANCE:
        does = f"calls it {len(calls)} times" if len(calls) > 1 else "makes something else of its outputs"
        trainer.print(
            f"{path} has the model alone: `predict` {does}. Do that where the file is used, or put it into the model."
        )
    ranks.wait()
    return path


@contextlib.contextmanager
def _calls_of(trainer: Trainer, model: nn.Module) -> Iterator[list[tuple[tuple[Any, Any], Any]]]:
    """The arguments and outputs of all calls of a model, on the CPU. Meanwhile it is the model of `trainer`."""
    calls: list[tuple[tuple[Any, Any], Any]] = []

    def note(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls.append(map_leaves(_on_cpu, ((args, kwargs), output), keep_mappings=True))

    hook = model.register_forward_hook(note, with_kwargs=True)
    wrapped, trainer.model = trainer.model, model  # replicas in a wrapper would each make a call, of a part of the rows
    try:
        yield calls
    finally:
        trainer.model = wrapped
        hook.remove()


def _on_cpu(leaf: Any) -> Any:
    return leaf.detach().cpu().clone() if isinstance(leaf, torch.Tensor) else leaf


def _facts(trainer: Trainer) -> dict[str, Any]:
    """What the file says about where it comes from."""
    history = trainer.run_history
    latest = {name: history.get_latest_metric(name) for name in history.get_metric_names()}
    return {
        "model": type(trainer.get_model()).__name__,
        "inputs": [],
        "epoch": history.current_epoch - 1,
        "updates": history.updates_done,
        "metrics": {name: float(value) for name, value in latest.items() if isinstance(value, (int, float))},
        "seed": trainer.run_context.asked.seed,
        "torch": torch.__version__,
    }


def _publish(
    path: Path, model: nn.Module, arguments: Any, outputs: Any, tolerance: float, facts: dict[str, Any]
) -> list[str]:
    """Write the files next to their places, check what they compute, and move them there; returns what they take."""
    with torch.no_grad():
        exact = model(*arguments[0], **arguments[1])
    if _difference(exact, outputs) > tolerance:
        raise PytorchAcceleratedError(
            f"On the CPU in single precision, the model for {path} computes something else than in `predict`, so "
            "nothing was written. Does its `forward` draw random numbers, decide by values, or change something?"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=path.parent) as folder:
        try:
            found = _WRITERS[path.suffix](Path(folder) / path.name, model, arguments, facts)
        except (PytorchAcceleratedError, OSError):
            raise
        except Exception as error:
            raise _cannot_be_exported(path, model, error) from error
        if _difference(found, exact) > _TOLERANCE:
            raise PytorchAcceleratedError(
                f"The file for {path} computes something else than the model, so nothing was written. Does its "
                "`forward` decide by values, or change something?"
            )
        for file in sorted(Path(folder).iterdir(), key=lambda file: file.name == path.name):  # the main one last
            os.replace(file, path.parent / file.name)
    return list(facts["inputs"])


def _cannot_be_exported(path: Path, model: nn.Module, error: Exception) -> PytorchAcceleratedError:
    halves = {str(each.dtype).removeprefix("torch.") for each in model.parameters()} & {"bfloat16", "float16"}
    advice = (
        "Usually its `forward` decides by values of a tensor, as in `if x.sum() > 0`, which a file can't: use "
        "`torch.where`, decide by shapes or settings, or export the weights alone, as .safetensors."
    )
    if halves and path.suffix == ".onnx":
        advice = (
            f"Its parameters are {', '.join(halves)}, in which ONNX Runtime computes little on the CPU: convert the "
            "model and the data with `.float()`, or export a .pt2 file."
        )
    what = str(error).strip().partition("\n")[0].rstrip(".")
    return PytorchAcceleratedError(
        f"The model cannot be exported as {path}, and nothing was written: {type(error).__name__}: {what}. {advice}"
    )


def _difference(found: Any, expected: Any) -> float:
    """The largest difference of two nests of tensors, relative to the largest value; infinite if shapes differ."""
    pairs = list(itertools.zip_longest(leaves(found), tensors_in(expected)))
    largest = 0.0
    for one, other in pairs:
        if one is None or other is None or torch.as_tensor(one).shape != other.shape:
            return math.inf
        if other.numel():
            difference = (torch.as_tensor(one).double() - other.double()).abs().max().item()
            largest = max(largest, difference / max(1.0, other.double().abs().max().item()))
    return largest


def _dynamic_shapes(arguments: Mapping[str, Any]) -> Any:
    """The dimensions of the arguments that may have any size: the rows, and others as far as the model allows."""
    tensors = [each for each in tensors_in(arguments) if each.ndim]
    rows = len(tensors[0]) if tensors else 0
    if rows < 2:
        raise DataError("To export a model for batches of any size, give at least two rows of data.")
    batch = torch.export.Dim("batch")

    def shape_of(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.ndim:
            return None
        first = batch if len(leaf) == rows else torch.export.Dim.AUTO
        return {0: first, **dict.fromkeys(range(1, leaf.ndim), torch.export.Dim.AUTO)}

    return map_leaves(shape_of, arguments)


def _exported(model: nn.Module, arguments: Any, facts: dict[str, Any]) -> torch.export.ExportedProgram:
    """The program; adds what it takes to the facts."""
    args, kwargs = arguments
    by_name = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    program = torch.export.export(model, args, dict(kwargs), dynamic_shapes=_dynamic_shapes(by_name))
    inputs = [node for node in program.graph.nodes if node.name in program.graph_signature.user_inputs]
    for name, tensor in ((each.name, each.meta.get("val")) for each in inputs):
        if isinstance(tensor, torch.Tensor):
            sizes = ", ".join(_size_in_words(size, program) for size in tensor.shape)
            facts["inputs"].append(f"{name} ({sizes}) {str(tensor.dtype).removeprefix('torch.')}")
    return program


def _size_in_words(size: Any, program: torch.export.ExportedProgram) -> str:
    if not isinstance(size, torch.SymInt) or not size.node.expr.is_Symbol:
        return str(size)
    limit = str(getattr(program.range_constraints.get(size.node.expr), "upper", None))
    return f"any up to {limit}" if limit.isdigit() else "any"


def _write_onnx(path: Path, model: nn.Module, arguments: Any, facts: dict[str, Any]) -> Any:
    require("onnxscript", needed_by="An export to ONNX")
    require("onnxruntime", needed_by="An export to ONNX")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch, about its own parts
        program = torch.onnx.export(_exported(model, arguments, facts), dynamo=True, verbose=False)
    assert program is not None
    program.model.metadata_props[_KEY] = json.dumps(facts)
    program.save(path)
    return program(*arguments[0], **arguments[1])


def _write_program(path: Path, model: nn.Module, arguments: Any, facts: dict[str, Any]) -> Any:
    program = _exported(model, arguments, facts)
    torch.export.save(program, path, extra_files={f"{_KEY}.json": json.dumps(facts)})
    return torch.export.load(path).module()(*arguments[0], **arguments[1])


def _write_weights(path: Path, model: nn.Module, arguments: Any, facts: dict[str, Any]) -> Any:
    files = require("safetensors.torch", needed_by="An export to safetensors")
    files.save_model(model, str(path), metadata={_KEY: json.dumps(facts)})
    files.load_model(model, path)
    return model(*arguments[0], **arguments[1])


# Each writes a file, and returns what the file computes for the arguments.
_WRITERS: dict[str, Callable[[Path, nn.Module, Any, dict[str, Any]], Any]] = {
    ".onnx": _write_onnx,
    ".pt2": _write_program,
    ".safetensors": _write_weights,
}
