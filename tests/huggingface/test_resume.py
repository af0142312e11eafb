"""A run that goes on from a checkpoint equals the run that was never interrupted, to the bit."""

import contextlib
import itertools
import json
import math
import pickle
import random
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pytorch_accelerated.errors import CheckpointError, InvalidCheckpointError
from pytorch_accelerated.huggingface import ExportableState, Trainer, TrainerCallback
from tests.chaos.size import some
from tests.huggingface.runs import (
    NoisyRows,
    OwnParts,
    Regression,
    Rows,
    StopAt,
    Stream,
    everything,
    losses,
    make_trainer,
    noisy_trainer,
    without_native_parts,
    without_speed,
)
from tests.support.processes import run_forked
from tests.support.resuming import assert_same


def run(folder: Path, *callbacks: Any, resume: Any = None, process_seed: int = 0, **arguments: Any) -> Trainer:
    """Three epochs of noisy rows in random order, with dropout; evaluations, and logs of several steps."""
    trainer = noisy_trainer(folder, *callbacks, **{"num_train_epochs": 3, "metric_for_best_model": "loss", **arguments})
    if resume is not None:
        # What the process did before must not matter.
        torch.manual_seed(process_seed)
        np.random.seed(process_seed)
        random.seed(process_seed)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("step", [1, 3])
def test_what_the_trainer_holds_comes_back_to_the_bit(step: int, tmp_path: Path) -> None:
    def trained(folder: str, *callbacks: Any, **arguments: Any) -> Any:
        trainer = make_trainer(tmp_path / folder, *callbacks, kind=OwnParts, gradient_accumulation_steps=2)
        trainer.train(**arguments)
        return trainer

    whole = trained("whole")
    trained("cut", StopAt(step))
    resumed = trained("cut", resume_from_checkpoint=str(tmp_path / "cut" / f"checkpoint-{step}"))
    assert_same(resumed.own_values(), whole.own_values())


class LookAtBeginning(TrainerCallback):
    """Notes what a run begins with."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.should_save = control.should_save
        self.best = (state.best_metric, state.best_global_step, state.best_model_checkpoint)


@pytest.mark.parametrize("step", some((1, 3, 8), range(1, 9)))  # of 9, 3 in each epoch
def test_a_resumed_run_equals_the_uninterrupted_one(step: int, tmp_path: Path) -> None:
    whole = everything(run(tmp_path / "whole"))
    run(tmp_path / "parts", StopAt(step))
    resumed = run(tmp_path / "parts", resume=str(tmp_path / "parts" / f"checkpoint-{step}"), process_seed=5)
    assert_same(everything(resumed), whole)
    assert len(losses(resumed)) == 9


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"max_steps": 5}, {"max_steps": 8}),
        ({"num_train_epochs": 5 / 3}, {}),
        ({"callbacks": [StopAt(5, saves=False)]}, {}),
        ({"callbacks": [StopAt(5, saves=False)], "parts": {"train_dataset": Stream(11)}, "max_steps": 8}, {}),
    ],
)
def test_a_run_cut_within_an_epoch_and_saved_at_its_end_goes_on_as_if_it_had_not_been(
    first: dict[str, Any], second: dict[str, Any], tmp_path: Path
) -> None:
    """Three steps are an epoch. What was evaluated at the cut stays in the log, once and with its epoch."""
    stream = {name: first[name] for name in ("parts", "max_steps") if "parts" in first}
    arguments = {
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "lr_scheduler_type": "constant",
        **stream,
        **second,
    }
    whole = run(tmp_path / "whole", **arguments)
    cut = run(tmp_path / "parts", *first.pop("callbacks", ()), **{**arguments, **first})
    assert cut.state.global_step == 5
    again = run(tmp_path / "parts", resume=True, **{**arguments, **first, "max_steps": 5})
    assert without_speed(again.state.log_history[:-1]) == without_speed(cut.state.log_history[:-1])
    assert_same(again.model.state_dict(), cut.model.state_dict())
    resumed = run(tmp_path / "parts", resume=True, process_seed=5, **arguments)
    evaluated = [
        [entry["step"] for entry in each.state.log_history if "eval_loss" in entry] for each in (resumed, whole)
    ]
    assert evaluated[0] == sorted({5, *evaluated[1]})
    resumed.state.log_history = [
        entry for entry in resumed.state.log_history if entry["step"] != 5 or "eval_loss" not in entry
    ]
    assert_same(everything(resumed), everything(whole))


@pytest.mark.parametrize("resume", [None, False])
def test_none_and_false_start_over(resume: Any, tmp_path: Path) -> None:
    run(tmp_path, StopAt(2))
    trainer = make_trainer(tmp_path)
    trainer.train(resume_from_checkpoint=resume)
    assert len(losses(trainer)) == 10


@pytest.mark.parametrize("by_path", [True, False])
def test_a_checkpoint_is_passed_over_if_it_is_damaged_in_what_a_resume_reads(by_path: bool, tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")
    run(tmp_path / "parts", StopAt(4), save_strategy="steps", save_steps=1)
    newest = tmp_path / "parts" / "checkpoint-4"
    (newest / "training_args.json").write_text("{}")
    (newest / "training_args.bin").unlink()
    (newest / "README.md").write_text("mine")
    resumed = run(tmp_path / "parts", resume=str(newest) if by_path else True, save_strategy="no")
    torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
    weights = bytearray((newest / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (newest / "model.safetensors").write_bytes(weights)
    with pytest.warns(UserWarning, match="(?s)Resuming from .*checkpoint-3; skipped:.*model.safetensors was changed"):
        resumed = run(tmp_path / "parts", resume=str(newest) if by_path else True)
    torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
    older = tmp_path / "parts" / "checkpoint-2"
    (older / "model.safetensors").write_bytes(weights)
    with pytest.raises(InvalidCheckpointError, match="checkpoint-2.*model.safetensors was changed"):
        run(tmp_path / "parts", resume=str(older))  # another one is not what was asked for


@pytest.mark.parametrize(
    ("lost", "content"),
    [("manifest", None), ("manifest", "{"), ("manifest", "[]"), ("manifest and weights", None), ("native parts", "{}")],
)
def test_a_newest_checkpoint_without_a_readable_manifest_is_not_passed_over_in_silence(
    lost: str, content: str | None, tmp_path: Path
) -> None:
    run(tmp_path, StopAt(2), save_strategy="steps", save_steps=1)
    newest = tmp_path / "checkpoint-2"
    if lost == "native parts":
        without_native_parts(newest)
    if lost == "manifest and weights":
        (newest / "model.safetensors").unlink()
    manifest = newest / "manifest.json"
    manifest.unlink(missing_ok=True) if content is None else manifest.write_text(content)
    with pytest.warns(UserWarning, match="(?s)Resuming from .*checkpoint-1; skipped.*checkpoint-2.*manifest.json"):
        run(tmp_path, resume=True)


@pytest.mark.parametrize(
    ("name", "only_model"),
    [("optimizer.pt", False), *itertools.product(["model.safetensors", "trainer_state.json"], [True, False])],
)
def test_files_that_a_resume_reads_may_not_change(name: str, only_model: bool, tmp_path: Path) -> None:
    run(tmp_path, StopAt(1), save_only_model=only_model)
    path = tmp_path / "checkpoint-1" / name
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(InvalidCheckpointError, match=f"none of them is valid.*(?s:.)*{name} has"):
        run(tmp_path, resume=True)


def test_other_arguments_are_used(tmp_path: Path) -> None:
    run(tmp_path, StopAt(3), save_strategy="steps", save_steps=5)
    resumed = run(tmp_path, resume=True, save_strategy="steps", save_steps=10, per_device_train_batch_size=4)
    assert (resumed.state.save_steps, resumed.state.train_batch_size) == (10, 4)
    assert resumed.state.global_step == 6  # two for each epoch, the first of which was over


@pytest.mark.parametrize("has_native_parts", [True, False])
def test_kept_settings_of_the_optimizer_are_reported(has_native_parts: bool, tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")
    run(tmp_path / "parts", StopAt(3))
    folder = tmp_path / "parts" / "checkpoint-3"
    if not has_native_parts:
        without_native_parts(folder)
    changed: dict[str, Any] = {"learning_rate": 1.0, "weight_decay": 0.5, "adam_beta2": 0.9, "adam_epsilon": 1e-3}
    with pytest.warns(UserWarning, match="The optimizer resumes with the settings of the checkpoint") as told:
        resumed = run(tmp_path / "parts", resume=str(folder), **changed)
    assert len(told) == 1
    assert [line.strip() for line in str(told[0].message).splitlines()[1:-1]] == [
        "betas: (0.9, 0.999), not (0.9, 0.9)",
        "eps: 1e-08, not 0.001",
        "learning_rate: 0.1, not 1.0",
        "weight_decay: 0.0, not 0.5",
    ]
    torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("schedule", ["linear", "one cycle", "plateau"])
def test_settings_changed_by_a_schedule_or_a_callback_do_not_count_as_different(schedule: str, tmp_path: Path) -> None:
    class Sets(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            for group in kwargs["optimizer"].param_groups:
                group["lr"] /= 2

    def arguments() -> dict[str, Any]:
        if schedule == "plateau":
            return {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0}}
        if schedule == "linear":
            return {}
        model = Regression()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        one_cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20)
        return {"parts": {"model": model, "optimizers": (optimizer, one_cycle)}}

    run(tmp_path, Sets(), StopAt(3), **arguments())
    run(tmp_path, Sets(), resume=True, **arguments())  # without a warning


@pytest.mark.filterwarnings("ignore:.*by its name less is better")  # the highest loss
def test_a_vanished_best_checkpoint_is_forgotten(tmp_path: Path) -> None:
    # so that the first one is the best
    arguments: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "greater_is_better": True}
    run(tmp_path, StopAt(4), **arguments)
    state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(tmp_path / "checkpoint-2")
    shutil.rmtree(tmp_path / "checkpoint-2")
    with pytest.warns(UserWarning, match="best checkpoint so far, .*checkpoint-2.* no longer exists"):
        resumed = run(tmp_path, look := LookAtBeginning(), resume=True, **arguments)
    assert look.best == (None, None, None)
    evaluated = [entry for entry in resumed.state.log_history if "eval_loss" in entry and entry["step"] > 4]
    assert resumed.state.best_metric == max(entry["eval_loss"] for entry in evaluated)


def test_losses_after_a_resume_are_of_the_new_steps(tmp_path: Path) -> None:
    each = losses(run(tmp_path / "whole"))
    run(tmp_path / "parts", StopAt(5), logging_steps=3)
    resumed = run(tmp_path / "parts", resume=True, logging_steps=3)
    assert losses(resumed) == pytest.approx([sum(each[:3]) / 3, each[5], sum(each[6:]) / 3])
    summary = resumed.state.log_history[-1]
    assert summary["train_loss"] == pytest.approx(sum(each[5:]) / 4)
    # The last step of the second epoch, and the three of the third, all with the 11 rows of an epoch.
    for name, count in (("steps", 4), ("samples", 3 + 11)):
        assert summary[f"train_{name}_per_second"] * summary["train_runtime"] == pytest.approx(count, rel=0.1)


def test_data_may_start_over(tmp_path: Path) -> None:
    class Watching(Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
            seen.append(inputs["x"][0, 0].item())
            return super().training_step(model, inputs, num_items_in_batch)

    firsts = Rows(10).x[::2, 0].tolist()
    for ignores, expected in ((False, firsts[2:]), (True, firsts)):
        make_trainer(tmp_path, StopAt(2), num_train_epochs=1, save_strategy="no").train()
        seen: list[float] = []
        trainer = make_trainer(tmp_path, kind=Watching, num_train_epochs=1, ignore_data_skip=ignores)
        trainer.train(resume_from_checkpoint=True)
        assert seen == expected[: len(seen)]
        assert len(seen) == 3


class Renaming(Regression):
    """Saves under other names than it has, and takes these back."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {f"saved.{name}": value for name, value in super().state_dict(*args, **kwargs).items()}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        state = {name.removeprefix("saved."): value for name, value in state_dict.items()}
        return super().load_state_dict(state, strict=strict, assign=assign)


@pytest.mark.parametrize("native", [True, False])
def test_a_model_loads_its_weights_in_its_own_way(native: bool, tmp_path: Path) -> None:
    def model() -> dict[str, Any]:
        return {"parts": {"model": Renaming(dropout=0.4)}}

    best: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True}
    whole = run(tmp_path / "whole", **best, **model())
    run(tmp_path / "parts", StopAt(4), **best, **model())
    if not native:
        without_native_parts(tmp_path / "parts" / "checkpoint-4")
    resumed = run(tmp_path / "parts", resume=str(tmp_path / "parts" / "checkpoint-4"), **best, **model())
    assert_same(everything(resumed)["model"], everything(whole)["model"])


class Counting(TrainerCallback, ExportableState):
    """Counts steps in an attribute; `name` is its argument."""

    def __init__(self, name: str = "unnamed") -> None:
        self.name, self.steps = name, 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps += 1

    def state(self) -> dict[str, Any]:
        return {"args": {"name": self.name}, "attributes": {"steps": self.steps}}


def test_callbacks_are_recreated_from_their_states(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="Counting"):  # two of a class
        run(tmp_path, Counting("first"), Counting("second"), StopAt(4))
    fresh = Counting(), Counting()
    with pytest.warns(UserWarning, match="Counting"):
        resumed = run(tmp_path, *fresh, resume=True, restore_callback_states_from_checkpoint=True)
    restored = [callback for callback in resumed.callback_handler.callbacks if isinstance(callback, Counting)]
    assert [(callback.name, callback.steps) for callback in restored] == [("first", 9), ("second", 9)]
    assert [callback.steps for callback in fresh] == [0, 0]


@pytest.mark.parametrize("restores", [True, False])
def test_callbacks_and_control_are_unchanged_unless_the_old_ones_are_requested(restores: bool, tmp_path: Path) -> None:
    run(tmp_path, Counting(), StopAt(4))
    look, given = LookAtBeginning(), Counting()
    resumed = run(tmp_path, look, given, resume=True, restore_callback_states_from_checkpoint=restores)
    assert look.should_save == restores
    assert (given in resumed.callback_handler.callbacks) != restores
    assert given.steps == (0 if restores else 5)


def test_missing_callbacks_are_named(tmp_path: Path) -> None:
    run(tmp_path, Counting("first"), StopAt(4))
    with pytest.warns(UserWarning, match="states of the callbacks Counting, which this trainer does not have"):
        run(tmp_path, resume=True, restore_callback_states_from_checkpoint=True)


def test_a_saved_state_may_lack_a_part(tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")

    class Genuine(transformers.TrainerCallback, transformers.trainer_callback.ExportableState):  # type: ignore[misc]
        def __init__(self, name: str = "unnamed") -> None:
            self.name = name

        def state(self) -> dict[str, Any]:
            return {"args": {"name": self.name}}

    class Ours(Counting):
        def state(self) -> dict[str, Any]:
            return {"attributes": {"steps": self.steps}}

    run(tmp_path, Genuine("saved"), Ours(), StopAt(4))
    resumed = run(tmp_path, Genuine(), Ours(), resume=True, restore_callback_states_from_checkpoint=True)
    restored = {type(callback): callback for callback in resumed.callback_handler.callbacks}
    assert (restored[Genuine].name, restored[Ours].steps) == ("saved", 9)


# ------------------------------------------------------------------------------------------------------ a loss scaler


@contextlib.contextmanager
def float16_on_the_cpu(trainer: Trainer) -> Iterator[None]:
    """What `fp16` does on a GPU. torch can do it on the CPU, too; accelerate just does not."""
    accelerator = trainer.accelerator
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerator, "native_amp", True)
        patch.setattr(accelerator.state, "_mixed_precision", "fp16")
        patch.setattr(trainer._engine, "_precision_at_start", "fp16")
        patch.setattr(accelerator, "scaler", torch.amp.GradScaler("cpu", init_scale=2.0**15, growth_interval=2))
        yield


def scaled_run(folder: Path, *callbacks: Any, resume: Any = None, **arguments: Any) -> tuple[Trainer, dict[str, Any]]:
    """A run in float16, whose gradients are infinite now and then, and all that it has come to."""
    # One row at a time, because infinite gradients of several can add up to NaN, which equals nothing.
    arguments = {"per_device_train_batch_size": 1, "parts": {"train_dataset": NoisyRows(11)}, **arguments}
    trainer = make_trainer(folder, *callbacks, **arguments)
    with contextlib.nullcontext() if trainer.args.fp16 else float16_on_the_cpu(trainer):
        trainer.train(resume_from_checkpoint=resume)
        scaler = trainer.accelerator.scaler.state_dict()
    return trainer, {**everything(trainer), "scaler": scaler}


@pytest.mark.parametrize(("step", "has_native_parts"), [(3, True), (11, False)])
def test_a_resume_restores_the_scale_of_the_loss(step: int, has_native_parts: bool, tmp_path: Path) -> None:
    whole, expected = scaled_run(tmp_path / "whole")
    norms = [entry["grad_norm"] for entry in whole.state.log_history if "grad_norm" in entry]
    skipped = len(norms) - sum(map(math.isfinite, norms))
    assert 0 < skipped < len(norms)
    assert expected["schedule"]["last_epoch"] == len(norms) - skipped
    _, at_stop = scaled_run(tmp_path / "parts", StopAt(step))
    folder = tmp_path / "parts" / f"checkpoint-{step}"
    assert torch.load(folder / "scaler.pt", weights_only=True) == at_stop["scaler"]
    if not has_native_parts:
        without_native_parts(folder)
    _, resumed = scaled_run(tmp_path / "parts", resume=str(folder))
    assert_same(resumed, expected)


@pytest.mark.gpu
@pytest.mark.usefixtures("_process_without_a_trainer")
def test_a_run_in_float16_resumes_exactly(tmp_path: Path) -> None:
    dtypes: set[torch.dtype] = set()
    arguments: dict[str, Any] = {"fp16": True, "use_cpu": False}
    whole, expected = scaled_run(tmp_path / "whole", **arguments)
    assert {parameter.dtype for parameter in whole.model.parameters()} == {torch.float32}
    whole.model.linear.register_forward_hook(lambda module, inputs, output: dtypes.add(output.dtype))
    whole.evaluate()
    assert dtypes == {torch.float16}
    _, at_stop = scaled_run(tmp_path / "parts", StopAt(4), **arguments)
    folder = tmp_path / "parts" / "checkpoint-4"
    assert torch.load(folder / "scaler.pt", weights_only=True) == at_stop["scaler"]
    _, resumed = scaled_run(tmp_path / "parts", resume=True, **arguments)
    assert_same(resumed, expected)


# ------------------------------------------------------------------------------------------- folders without our parts


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth"])
def test_a_file_that_would_have_to_be_executed_is_refused(name: str, tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "executed",))

    run(tmp_path, StopAt(2))
    folder = without_native_parts(tmp_path / "checkpoint-2")
    torch.save({"state": Payload()}, folder / name)
    weights_before = Regression().state_dict()
    trainer = make_trainer(tmp_path)
    with pytest.raises(CheckpointError, match=name):
        trainer.train(resume_from_checkpoint=str(folder))
    assert not (tmp_path / "executed").exists()
    torch.testing.assert_close(trainer.model.state_dict(), weights_before, rtol=0, atol=0)


def pickled(value: Any) -> bytes:
    """The pickle of `value`. A list is a call: a function's name, its arguments, and perhaps a state to set."""
    if isinstance(value, list):
        name, arguments, *states = value
        built = (pickled(state) + pickle.BUILD for state in states)
        return b"".join([b"c", name.replace(" ", "\n").encode(), b"\n", pickled(arguments), pickle.REDUCE, *built])
    if isinstance(value, tuple):
        return b"".join([pickle.MARK, *map(pickled, value), pickle.TUPLE])
    if isinstance(value, type):
        return f"c{value.__module__}\n{value.__name__}\n".encode()
    if isinstance(value, bytes):
        return pickled(["_codecs encode", (value.decode("latin-1"), "latin-1")])
    return pickle.dumps(value, 2)[2:-1]


POINTERS = b"A" * 8 * 624
EMPTY = "numpy._core.multiarray _reconstruct", (np.ndarray, (0,), b"b")
OF_OBJECTS = ["numpy dtype", ("O8", False, True)]
FORGED: dict[str, Any] = {
    "an array made of a buffer": ["numpy ndarray", ((624,), "O", POINTERS)],
    "objects as bytes": [*EMPTY, (1, (624,), OF_OBJECTS, False, POINTERS)],
    "a type that says it has none": [
        *EMPTY, (1, (624,), [*OF_OBJECTS, (3, "|", None, None, None, -1, -1, 0)], False, POINTERS)
    ],
    "numbers with a field of objects": [
        "numpy ndarray",
        ((624,), ["numpy dtype", ("u8", False, True), (3, "|", None, ("a",), {"a": 0}, 8, 8, 0)], POINTERS),
    ],
    "a memory of other size": ["numpy ndarray", ((2**40,), "u4", b"A" * 8, 0, (0,))],
}  # fmt: skip


READS = """
import sys, pathlib
from pytorch_accelerated.errors import InvalidCheckpointError
from pytorch_accelerated.huggingface.checkpoints.states import read_generator_states
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.pth")):
    try:
        print(read_generator_states(path)["numpy"][1].sum().item(), flush=True)
    except InvalidCheckpointError:
        print("refused", flush=True)
"""


def test_arrays_of_forged_pointers_are_refused_and_do_not_end_the_interpreter(tmp_path: Path) -> None:
    """In another process, since it may crash."""
    genuine = np.arange(624, dtype=np.uint32)
    for number, forged in enumerate([*FORGED.values(), None]):
        state = {"python": random.getstate(), "cpu": torch.get_rng_state()}
        torch.save({**state, "numpy": ("MT19937", genuine, 624, 0, 0.0)}, path := tmp_path / f"{number}.pth")
        if forged is None:
            continue
        with zipfile.ZipFile(path) as archive:
            records = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in records.items():
                if name.endswith("/data.pkl"):
                    added = pickled("numpy") + pickled(("MT19937", forged, 624, 0, 0.0)) + pickle.SETITEM
                    data = data[: -len(pickle.STOP)] + added + pickle.STOP
                archive.writestr(name, data)
    lines = run_forked(READS, tmp_path).stdout.split()
    assert lines == ["refused"] * len(FORGED) + [str(sum(range(624)))]


@pytest.mark.parametrize(
    "change", [{"numpy": ("MT19937", [0] * 624, 10**6, 0, 0.0)}, {"python": (3, (1, 2), None)}, {}]
)
def test_generators_that_are_none_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    run(tmp_path, StopAt(2))
    path = without_native_parts(tmp_path / "checkpoint-2") / "rng_state.pth"
    torch.save({**torch.load(path, weights_only=True), **change} if change else {}, path)
    with pytest.raises(InvalidCheckpointError, match=r"rng_state.pth .*delete it to resume with other random numbers"):
        run(tmp_path, resume=str(path.parent))
