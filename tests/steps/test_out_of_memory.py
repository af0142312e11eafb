"""A batch that does not fit into memory is computed in parts, as if the run had been started with them."""

import functools
import gc
import weakref
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import SaveTrainingStateCallback, TrainerCallback
from pytorch_accelerated.errors import ConfigurationError, DataError
from pytorch_accelerated.steps.splitting import rows_of
from tests.support.reference import assert_same_parameters, regression_data, sgd
from tests.support.resuming import assert_same

SEED = 3
DOES_NOT_FIT = "does not fit into memory"
CPU_MESSAGE = "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"


class Memory(nn.Module):
    """As if there were memory for so many rows; the gradient of what goes through needs it too.

    Attributes:
        failures: how often it was not enough.
        sizes: of the batches that came.
    """

    def __init__(self, rows: int, *, in_backward: bool = False, error: type[RuntimeError] = torch.OutOfMemoryError):
        super().__init__()
        self.rows, self.in_backward, self.error = rows, in_backward, error
        self.failures = 0
        self.sizes: list[int] = []
        self.graphs: list[weakref.ref[Any]] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return inputs
        self.sizes.append(len(inputs))
        outputs = inputs * 1.0
        if not self.in_backward:
            self.use(len(inputs))
        elif outputs.requires_grad:
            part_of_graph = PartOfGraph(self)
            self.graphs.append(weakref.ref(part_of_graph))
            outputs.register_hook(part_of_graph.needs_memory)
        return outputs

    def use(self, rows: int) -> None:
        if rows > self.rows:
            self.failures += 1
            raise self.error("out of memory" if self.error is torch.OutOfMemoryError else CPU_MESSAGE)


class PartOfGraph:
    """Lives as long as the graph that has it as a hook."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def needs_memory(self, gradient: torch.Tensor) -> None:
        self.memory.use(len(gradient))


def model_with(memory: nn.Module, *, noisy: bool = False) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        noise = (nn.BatchNorm1d(4), nn.Dropout(0.3)) if noisy else ()
        return nn.Sequential(nn.Linear(3, 4), *noise, memory, nn.Tanh(), nn.Linear(4, 2)).double()


class Seeded(Trainer):
    def training_run_start(self) -> None:
        torch.manual_seed(7)  # for dropout


def make(memory: nn.Module, *callbacks: Any, noisy: bool = False, base: type[Trainer] = Seeded) -> Trainer:
    model = model_with(memory, noisy=noisy)
    return base(model, nn.MSELoss(), sgd(model), callbacks=callbacks, seed=SEED)


def train(
    trainer: Trainer, size: int = 24, batch_size: int = 8, steps: int = 1, *, split: bool = True, **arguments: Any
) -> Any:
    arguments = {"num_epochs": 2, "per_device_batch_size": batch_size, **arguments}
    return trainer.train(regression_data(size), gradient_accumulation_steps=steps, split_on_oom=split, **arguments)


def everything(trainer: Trainer) -> dict[str, Any]:
    history = {name: trainer.run_history.get_metric_values(name) for name in trainer.run_history.get_metric_names()}
    history.pop("split_batch_size", None)
    return {
        "model": dict(trainer.model.state_dict()),
        "optimizer": trainer.optimizer.state_dict(),
        "generator": torch.default_generator.get_state(),
        "history": history,
        "updates": trainer.run_state.updates,
    }


class Events(TrainerCallback):
    def __init__(self) -> None:
        self.starts = 0
        self.ends: list[dict[str, Any]] = []
        self.steps: list[int] = []

    def on_train_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        self.starts += 1

    def on_train_step_end(self, trainer: Trainer, batch: Any, batch_output: Any, step: int, **kwargs: Any) -> None:
        assert len(batch_output["model_outputs"]) == batch_output["batch_size"] == len(batch[0])
        self.ends.append({**batch_output, "loss": batch_output["loss"].item()})
        self.steps.append(step)


# The same as


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize(("room", "parts"), [(4, 2), (3, 4), (2, 4), (1, 8)])
def test_a_split_run_equals_to_the_bit_one_that_accumulates_the_parts(
    room: int, parts: int, in_backward: bool, error: type[RuntimeError]
):
    noisy = parts < 8  # BatchNorm refuses batches of 1
    small = make(Memory(99), noisy=noisy)
    train(small, batch_size=8 // parts, steps=parts, split=False)
    expected = everything(small)
    split = make(memory := Memory(room, in_backward=in_backward, error=error), events := Events(), noisy=noisy)
    with pytest.warns(UserWarning, match=DOES_NOT_FIT) as caught:
        history = train(split)
    found = everything(split)
    losses = found["history"].pop("train_loss_epoch"), expected["history"].pop("train_loss_epoch")
    assert losses[0] == pytest.approx(losses[1], rel=1e-13)  # the mean of means in another order
    assert_same(found, expected)
    assert memory.failures == {2: 1, 4: 2, 8: 3}[parts], "the size was not remembered"
    assert len(caught) == 1
    assert history.get_metric_values("split_batch_size") == [8 // parts, 8 // parts]
    assert events.starts == len(events.ends) == 6
    assert events.steps == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize(
    ("size", "batch_size", "steps", "room"), [(25, 7, 3, 2), (23, 8, 2, 3), (9, 5, 1, 1), (10, 8, 1, 3)]
)
def test_odd_sizes_give_the_updates_of_whole_batches(
    size: int, batch_size: int, steps: int, room: int, in_backward: bool
):
    whole, split = (
        make(Memory(99), of_whole := Events()),
        make(Memory(room, in_backward=in_backward), events := Events()),
    )
    expected = train(whole, size, batch_size, steps, split=False)
    with pytest.warns(UserWarning, match=DOES_NOT_FIT):
        history = train(split, size, batch_size, steps)
    assert_same_parameters(split.model, whole.model, tolerance=1e-12)
    for found, other in zip(events.ends, of_whole.ends, strict=True):
        torch.testing.assert_close(found["loss"], other["loss"], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found["model_outputs"], other["model_outputs"], rtol=1e-12, atol=1e-12)
    found = history.get_metric_values("train_loss_epoch")
    assert found == pytest.approx(expected.get_metric_values("train_loss_epoch"), rel=1e-12)


class BeforeBatch(TrainerCallback):
    """Does something before a batch of each epoch."""

    def __init__(self, at: int, action: Callable[[Trainer], object]) -> None:
        self.at, self.action = at, action

    def on_train_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.run_state.batches_in_epoch == self.at:
            self.action(trainer)


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("at", [0, 1, 2, 4])
def test_nothing_remembers_the_attempt_that_failed(at: int, in_backward: bool):
    """In each batch of an update, which begins again: its first batches, too, are computed in parts."""
    # The same split, chosen without a failure.
    announce = BeforeBatch(at - at % 3, lambda trainer: setattr(trainer.run_state, "rows_that_fit", 4))
    train(announced := make(Memory(99), announce, noisy=True), size=40, steps=3)
    memory = Memory(99, in_backward=in_backward)
    # As a neighbour on the device would take memory away.
    split = make(memory, BeforeBatch(at, lambda trainer: setattr(memory, "rows", 5)), noisy=True)
    with pytest.warns(UserWarning, match=rf"epoch 1, batch {at}, counted from 0.*parts of 4 "):
        train(split, size=40, steps=3)
    assert memory.failures == 1
    assert_same(everything(split), everything(announced))


def test_a_run_that_has_room_is_the_same_with_and_without():
    plain, ready = make(Memory(99), noisy=True), make(Memory(99), noisy=True)
    train(plain, steps=2, split=False)
    expected = everything(plain)
    history = train(ready, steps=2)
    assert_same(everything(ready), expected)
    assert "split_batch_size" not in history.get_metric_names()


def test_clipping_and_items_counted_beforehand():
    class Counts(Seeded):
        """The loss is the mean over rows whose first target is positive."""

        def count_batch_items(self, batch: Any) -> int:
            return int((batch[1][:, 0] > 0).sum())

        def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
            outputs, used = self.model(batch[0]), batch[1][:, 0] > 0
            loss = ((outputs - batch[1]) * used[:, None]).square().sum() / (2 * used.sum())  # without any: NaN
            return {"loss": loss, "model_outputs": outputs, "batch_size": len(used), **self.extra(used)}

        def extra(self, used: torch.Tensor) -> dict[str, Any]:
            return {"num_items_in_batch": int(used.sum())}

    class CountsLate(Counts):
        count_batch_items = Trainer.count_batch_items  # type: ignore[assignment]

        def extra(self, used: torch.Tensor) -> dict[str, Any]:
            return {"num_items_in_batch": used.sum()}

    for base in (Counts, CountsLate):
        whole, split = make(Memory(99), base=base), make(Memory(1, in_backward=True), base=base)
        expected = train(whole, steps=2, split=False, gradient_clip_norm=0.5)
        with pytest.warns(UserWarning, match=DOES_NOT_FIT):
            history = train(split, steps=2, gradient_clip_norm=0.5)
        assert_same_parameters(split.model, whole.model)
        for name in ("train_loss_epoch", "gradient_norm"):
            found = history.get_metric_values(name)
            assert found == pytest.approx(expected.get_metric_values(name), rel=1e-12)


class NamedBatches(Seeded):
    """Batches and outputs in containers of several kinds."""

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        outputs = self.model(batch["x"])
        loss = nn.functional.mse_loss(outputs, batch["more"][0])
        named = UserDict({"logits": outputs, "half": (outputs / 2, None)})
        accuracy = (outputs > 0).double().mean()
        words = {"accuracy": accuracy, "note": "x" * len(outputs)}
        return {"loss": loss, "model_outputs": named, "batch_size": len(outputs), **words}


def test_batches_and_outputs_may_be_nested():
    inputs, targets = regression_data(8)
    seen: list[dict[str, Any]] = []

    class Sees(TrainerCallback):
        def on_train_step_end(self, trainer: Trainer, batch: Any, batch_output: Any, **kwargs: Any) -> None:
            seen.append(batch_output)

    rows = [{"x": x, "more": [target]} for x, target in zip(inputs, targets, strict=True)]
    models = []
    for room in (99, 3):
        trainer = make(Memory(room), Sees(), base=NamedBatches)
        run = functools.partial(trainer.train, rows, 1, per_device_batch_size=8, split_on_oom=True)
        if room == 99:
            run()
        else:
            with pytest.warns(UserWarning, match=DOES_NOT_FIT):
                run()
        models.append(trainer.model)
    assert_same_parameters(models[1], models[0], tolerance=1e-12)
    whole, split = seen
    torch.testing.assert_close(split["model_outputs"]["logits"], whole["model_outputs"]["logits"])
    torch.testing.assert_close(split["model_outputs"]["half"][0], whole["model_outputs"]["half"][0])
    assert isinstance(split["model_outputs"], UserDict)
    assert split["model_outputs"]["half"][1] is None
    torch.testing.assert_close(split["accuracy"], whole["accuracy"])
    assert split["note"] == ["xx"] * 4, "what cannot be joined is a list of the parts'"


# What users see


def test_a_resumed_run_goes_on_with_the_size_that_fits(tmp_path: Path):
    with pytest.warns(UserWarning, match=DOES_NOT_FIT):
        train(whole := make(Memory(3), SaveTrainingStateCallback(tmp_path, save_every_n_steps=4)))
    resumed = make(memory := Memory(99))
    train(resumed, resume_from=tmp_path / "step_4")
    assert set(memory.sizes) == {2}
    assert_same(everything(resumed), everything(whole))


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_a_single_sample_that_does_not_fit_ends_the_run_with_advice(error: type[RuntimeError], in_backward: bool):
    trainer = make(memory := Memory(0, in_backward=in_backward, error=error))
    words = "out of memory" if error is torch.OutOfMemoryError else "DefaultCPUAllocator"
    with pytest.raises(torch.OutOfMemoryError, match=f"{words}.* A single sample of the batch does not fit") as caught:
        train(trainer)
    assert type(caught.value.__cause__) is error
    assert memory.sizes == [8, 4, 2, 1]


def test_a_callback_that_runs_out_of_memory_is_not_called_again():
    class Hungry(TrainerCallback):
        def on_train_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
            raise torch.OutOfMemoryError("mine")

    trainer = make(memory := Memory(99), Hungry())
    with pytest.raises(torch.OutOfMemoryError, match="^mine"):
        train(trainer)
    assert memory.sizes == [8]


def test_a_failed_attempt_leaves_no_graph_behind():
    memory = Memory(4, in_backward=True)

    class Looks(TrainerCallback):
        def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
            alive.append(sum(graph() is not None for graph in memory.graphs))

    alive: list[int] = []
    gc.disable()
    try:
        with pytest.warns(UserWarning, match=DOES_NOT_FIT):
            train(make(memory, Looks()), num_epochs=1)
    finally:
        gc.enable()
    assert len(memory.graphs) == 7
    assert alive == [0, 0, 0]


def test_splitting_and_skipping_together():
    class BadLoss(Seeded):
        def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
            output = super().calculate_train_batch_loss(batch)
            if self.run_state.updates == 1:
                output["loss"] = output["loss"] * float("nan")
            return output

    trainer = make(memory := Memory(4, in_backward=True), base=BadLoss)
    with pytest.warns(UserWarning, match=f"cannot be applied|{DOES_NOT_FIT}") as caught:
        history = train(trainer, nonfinite_policy="skip")
    assert sorted("cannot be applied" in str(each.message) for each in caught) == [False, True]
    assert (trainer.run_state.skipped_updates, memory.failures) == (1, 1)
    assert all(value < 99 for value in history.get_metric_values("train_loss_epoch"))


# What is refused


@pytest.mark.parametrize(
    "batch",
    [
        (torch.ones(4, 2), "name"),
        {"x": torch.ones(4), "y": torch.ones(3)},
        [torch.ones(4), torch.ones(())],
        torch.ones(()),
        torch.ones(0, 2),
        {"x": torch.ones(4), "n": 5},
        (),
        object(),
    ],
    ids=["a string", "other lengths", "a number in it", "a number", "no rows", "an int", "nothing", "an object"],
)
def test_batches_that_cannot_be_split_are_refused(batch: Any):
    with pytest.raises(DataError, match="cannot be split"):
        rows_of(batch)


def test_what_cannot_be_split_is_refused_before_memory_runs_out():
    class Own(Trainer):
        def _perform_forward_and_backward_passes(self, batch: Any, step: int) -> None:
            super()._perform_forward_and_backward_passes(batch, step)

    with pytest.raises(ConfigurationError, match="_perform_forward_and_backward_passes` is overridden"):
        train(make(Memory(99), base=Own))
    with pytest.raises(DataError, match="'name'.*cannot be split"):
        make(Memory(99)).train([{"x": torch.ones(3), "name": "a"}] * 4, 1, split_on_oom=True)
    with pytest.raises(DataError, match="one row for each sample"):  # the first dimension is the time
        rows_of(torch.zeros(6, 4, 3), samples=4)
