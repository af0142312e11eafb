"""Checks that the parts of a training state have the form that a run writes, before a trainer is changed.

A folder that matches its manifest was not changed by accident, but it may still be forged, and some objects load any
state: a numpy generator whose state says that it is at position a million of its 624 numbers reads whatever lies there
in memory.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from pytorch_accelerated.checkpointing.optimizers import problem_of_optimizer_state
from pytorch_accelerated.checkpointing.rank_differences import check_difference, with_difference
from pytorch_accelerated.errors import InvalidCheckpointError
from pytorch_accelerated.tracking.loss import LossTracker
from pytorch_accelerated.tracking.step_records import records_of
from pytorch_accelerated.training.run_state import RunState

_SHARED = ("model", "optimizer", "scheduler", "scaler", "run", "callbacks", "extra")
_OPTIONAL = ("optimizer", "scheduler", "scaler")
_NUMPY_KEYS = 624
_CUDA_STATE_BYTES = 16
_MAX_SEED_BITS = 1024  # Python does not print ints of thousands of digits


def check_run_parts(facts: Mapping[str, Any], parts: Mapping[str, Any], *, source: object) -> None:
    """Refuse facts and decoded parts that no run has written; `source` names them in the error. Changes nothing."""
    try:
        _check_count(facts["ranks"], "ranks", least=1)
        if type(facts["seed"]) is not int or facts["seed"].bit_length() > _MAX_SEED_BITS:
            raise ValueError("its seed is not an int of usual size")
        _check_shared(facts, parts)
        for rank in range(facts["ranks"]):
            _check_own(parts[f"rank_{rank}"], f"rank_{rank}")
            _check_differences(parts, f"rank_{rank}")
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidCheckpointError(
            f"The training state {source} matches its manifest, but no run has written it ({type(error).__name__}: "
            f"{error}). Nothing was loaded; use another one."
        ) from error


def _check_shared(facts: Mapping[str, Any], parts: Mapping[str, Any]) -> None:
    for name in _SHARED:
        if not isinstance(parts[name], Mapping) and not (name in _OPTIONAL and parts[name] is None):
            raise TypeError(f"{name} is a {type(parts[name]).__name__}")
    problem = None if parts["optimizer"] is None else problem_of_optimizer_state(parts["optimizer"])
    if problem is not None:
        raise ValueError(f"optimizer: {problem}")
    run = parts["run"]
    run_state = RunState.from_state_dict(run["run_state"])
    for name, usual in vars(RunState()).items():
        value = getattr(run_state, name)
        if type(value) is not type(usual) or (type(value) is int and value < 0):
            raise ValueError(f"run.run_state.{name} is a {type(value).__name__}, or negative")
    if (run_state.updates, run_state.epochs) != (facts["updates"], facts["epochs"]):
        raise ValueError("its parts and its facts disagree about the number of updates or epochs")
    _check_count(run["epochs_before_run"], "run.epochs_before_run")
    _check_history(run["history"])
    recorder = run.get("recorder")  # None in older states
    if recorder is not None:
        _check_count(recorder["samples"], "run.recorder.samples")
        if type(recorder["seconds"]) is not float:
            raise TypeError("run.recorder.seconds is not a float")


def _check_history(history: Mapping[str, Any]) -> None:
    """Check the entries of our histories; a user's own history may have others, and must check them itself."""
    check_records(history.get("records", ()), "run.history.records")
    for name in ("read_positions", "step_read_positions"):
        for position in history.get(name, {}).values():
            _check_count(position, f"run.history.{name}")
    if "step_records" in history:
        _check_step_records(history["step_records"])
    _check_count(history.get("current_epoch", 0), "run.history.current_epoch")
    _check_count(history.get("updates_done", 0), "run.history.updates_done")
    if not isinstance(history.get("metric_name_prefix", ""), str):
        raise TypeError("run.history.metric_name_prefix is not a string")


def _check_step_records(table: Any) -> None:
    for record in records_of(table):
        for count in (record.epoch, record.update, record.samples, record.peak_memory or 0):
            _check_count(count, "a count in run.history.step_records")


def check_records(records: Iterable[Any], path: str) -> None:
    """Raise any error if `records` are not records of metrics."""
    for name, _, epoch, update in records:
        if not isinstance(name, str):
            raise TypeError(f"{path} does not hold named values")
        _check_count(epoch, f"an epoch in {path}")
        _check_count(update, f"an update in {path}")


def _check_own(own: Mapping[str, Any], path: str) -> None:
    check_generators(own["generators"])
    if own.get("stream") is not None:  # older states have none
        _check_stream(own["stream"], f"{path}.stream")
    for name in ("losses", "gradient_norms"):
        state = own[name]
        numbers = [state["total"], state["count"], state["last"], *state.get("part_read", ())]
        for pending in (state["pending_losses"], state["pending_weights"]):
            if not isinstance(pending, list):
                raise TypeError(f"{path}.{name} holds a {type(pending).__name__} instead of numbers")
            numbers += pending
        if len(state["pending_losses"]) != len(state["pending_weights"]):
            raise ValueError(f"{path}.{name} has different numbers of losses and weights")
        if any(type(number) not in (int, float) for number in numbers):
            raise TypeError(f"{path}.{name} does not hold numbers")
        _check_count(state["batches_read"], f"{path}.{name}.batches_read")
        _check_count(state.get("part_start", 0), f"{path}.{name}.part_start")
        if state["first_non_finite"] is not None:
            _check_count(state["first_non_finite"], f"{path}.{name}.first_non_finite")
        LossTracker().add_state_dict(state)  # reads the pending losses


def _check_differences(parts: Mapping[str, Any], rank: str) -> None:
    """Check how a rank's states differ from rank 0's; older states store no differences."""
    own = parts[rank]
    for key, difference in own.get("callbacks", {}).items():
        check_difference(difference, f"{rank}.callbacks.{key}")
        with_difference(parts["callbacks"].get(key), difference)
    check_difference(own.get("history", []), f"{rank}.history")
    _check_history(with_difference(parts["run"]["history"], own.get("history", [])))


def _check_stream(stream: Mapping[str, Any], path: str) -> None:
    """Check the entries around the state of a dataset or loader, which must check its own state itself."""
    for name in ("epoch", "batch_size"):
        if stream[name] is not None:
            _check_count(stream[name], f"{path}.{name}")
    for name in ("batches", "workers"):
        _check_count(stream[name], f"{path}.{name}")
    for name in ("is_finished", "is_sharded"):
        if type(stream[name]) is not bool:
            raise TypeError(f"{path}.{name} is a {type(stream[name]).__name__}")
    if stream["state"] is not None and len(stream["state"].keys()) != 1:
        raise ValueError(f"{path}.state does not hold the state of one object")
    stream["borrowed"]


def check_generators(states: Mapping[str, Any]) -> None:
    """Raise any error if `states` was not made by `seeding.generator_states`.

    torch and random check their states when an unused generator loads them; numpy does not.
    """
    torch.Generator().set_state(states["torch"])
    version, internal, gauss_next = states["random"]
    random.Random().setstate((version, tuple(internal), gauss_next))
    algorithm, keys, position, has_gauss, cached_gaussian = states["numpy"]
    if algorithm != "MT19937" or keys.dtype != torch.int64 or keys.shape != (_NUMPY_KEYS,):
        raise ValueError("the state of numpy's generator is of another kind")
    if type(position) is not int or not 0 <= position <= _NUMPY_KEYS or type(has_gauss) is not int:
        raise ValueError("the state of numpy's generator has an invalid position")
    if keys.min() < 0 or keys.max() >= 2**32:
        raise ValueError("the state of numpy's generator has keys that do not fit into 32 bits")
    if type(cached_gaussian) is not float or type(gauss_next) not in (float, type(None)):
        raise TypeError("the cached normal number of a generator is not a float")
    for state in states.get("cuda", ()):
        if state.dtype != torch.uint8 or state.shape != (_CUDA_STATE_BYTES,):
            raise ValueError("the state of a CUDA generator has another dtype or size")


def _check_count(value: Any, name: str, *, least: int = 0) -> None:
    if type(value) is not int or value < least:
        raise ValueError(f"{name} is a {type(value).__name__}, or less than {least}")
