"""Predictions: all of them, in the order of the data, each once; and the trainer is afterwards as it was before."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import TrainerCallback
from pytorch_accelerated.errors import (
    ConfigurationError,
    DataError,
    HookOutputError,
    StopTrainingError,
)
from pytorch_accelerated.prediction import StoredPredictions
from tests.support import batch_shapes
from tests.support.batch_shapes import SHAPES, Samples
from tests.support.reference import assert_same_numbers, regression_data, sgd, tiny_model

SIZE = 11
INPUTS, TARGETS = regression_data(SIZE)


def trainer_of(model: nn.Module | None = None, *callbacks: Any, base: type[Trainer] = Trainer) -> Trainer:
    # Nothing that only training needs.
    return base(model or tiny_model(), None, None, callbacks=callbacks)  # type: ignore[arg-type]


def outputs_of(model: nn.Module, inputs: torch.Tensor = INPUTS) -> torch.Tensor:
    with torch.no_grad():
        return model(inputs)  # type: ignore[no-any-return]


class Items(Dataset[Any]):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


class StreamOf(IterableDataset[Any]):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


DATASETS: dict[str, Callable[[], Any]] = {
    "inputs": lambda: INPUTS,
    "array": lambda: INPUTS.numpy(),
    "inputs and targets": lambda: (INPUTS, TARGETS),
    "TensorDataset": lambda: TensorDataset(INPUTS, TARGETS),
    "TensorDataset of inputs": lambda: TensorDataset(INPUTS),
    "subset": lambda: Subset(TensorDataset(torch.cat([TARGETS @ TARGETS.T[:, :3], INPUTS])), range(SIZE, 2 * SIZE)),
    "dict": lambda: {"input": INPUTS, "labels": TARGETS},
    "samples": lambda: Items(list(INPUTS)),
    "pairs": lambda: Items(list(zip(INPUTS, TARGETS, strict=True))),
    "named samples": lambda: Items([{"input": row} for row in INPUTS]),
    "stream": lambda: StreamOf(list(INPUTS)),
    "ready loader": lambda: DataLoader(TensorDataset(INPUTS), 4),
    "batches": lambda: [INPUTS[:5], INPUTS[5:]],
}


@pytest.mark.parametrize("kind", DATASETS)
def test_any_kind_of_data_is_predicted_for(kind: str) -> None:
    trainer = trainer_of()
    dataset: Any = iter(DATASETS[kind]()) if kind == "batches" else DATASETS[kind]()
    assert_same_numbers(trainer.predict(dataset, per_device_batch_size=3), outputs_of(trainer.model))


@pytest.mark.parametrize(("batch_size", "workers"), [(1, 0), (2, 2), (3, 0), (SIZE, 0), (100, 2)])
def test_every_batch_size_and_number_of_workers_gives_the_same_rows(batch_size: int, workers: int) -> None:
    trainer = trainer_of()
    found = trainer.predict(Items(list(INPUTS)), batch_size, {"num_workers": workers})
    assert_same_numbers(found, outputs_of(trainer.model))


def test_a_loader_in_another_order_gives_its_own_order() -> None:
    trainer = trainer_of()
    order = [3, 1, 4, 1, 5]
    expected = outputs_of(trainer.model)[order]
    assert_same_numbers(trainer.predict(TensorDataset(INPUTS), 2, {"sampler": order}), expected)
    assert_same_numbers(
        trainer.predict(DataLoader(TensorDataset(INPUTS), batch_sampler=[[3], [1, 4], [1, 5]])), expected
    )


@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize(
    ("settings", "complaint"), [({"shuffle": True}, "loader shuffles"), ({"drop_last": True}, "drop_last=True")]
)
def test_a_loader_that_shuffles_or_drops_samples_is_refused(
    settings: dict[str, Any], complaint: str, ready: bool
) -> None:
    data = TensorDataset(INPUTS)
    arguments: Any = (DataLoader(data, 4, **settings),) if ready else (data, 4, settings)
    with pytest.raises(ConfigurationError, match=complaint):
        trainer_of().predict(*arguments)


@pytest.mark.parametrize("inference_mode", [False, True])
def test_inference_mode_is_used_on_request_and_changes_no_number(inference_mode: bool) -> None:
    modes: list[tuple[bool, bool]] = []
    model = tiny_model()
    model.register_forward_hook(
        lambda module, inputs, outputs: modes.append((torch.is_inference_mode_enabled(), outputs.requires_grad))
    )
    trainer = Trainer(model, nn.MSELoss(), sgd(model), callbacks=(), inference_mode=inference_mode)
    plain = Trainer(model, nn.MSELoss(), sgd(model), callbacks=())
    data = regression_data(5)
    assert trainer.evaluate(data) == plain.evaluate(data)
    assert torch.equal(trainer.predict(data), plain.predict(data))
    assert modes == [(inference_mode, False), (False, False)] * 2
    trainer.train(data, 1, data)
    assert modes[-2:] == [(False, True), (inference_mode, False)]


def test_a_collate_function_makes_the_batches() -> None:
    trainer = trainer_of()
    words = ["a", "abc", "ab"]

    def lengths(batch: list[str]) -> torch.Tensor:
        return torch.tensor([[float(len(word))] * 3 for word in batch]).double()

    expected = outputs_of(trainer.model, lengths(words))
    assert_same_numbers(trainer.predict(words, 2, collate_fn=lengths), expected)
    trainer.collate_fn = lengths  # the one that was used last, unless another one is given
    assert_same_numbers(trainer.predict(words, 2), expected)


# -------------------------------------------------------------------------------------------------------- structures


class Structured(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"logits": x.float(), "nothing": None, "hidden": (x[:, :1], [x.sum(1) > 0])}


@pytest.mark.parametrize("batch_size", [1, 4, SIZE])
def test_nested_outputs_keep_their_structure_and_dtypes(batch_size: int, tmp_path: Path) -> None:
    stored = trainer_of(Structured()).predict(INPUTS, batch_size, output_path=tmp_path / "predictions")
    assert isinstance(stored, StoredPredictions)
    assert len(stored) == SIZE
    for found in (trainer_of(Structured()).predict(INPUTS, batch_size), stored.load()):
        assert list(found) == ["logits", "hidden"]
        assert torch.equal(found["logits"], INPUTS.float())
        assert type(found["hidden"]) is tuple
        assert torch.equal(found["hidden"][0], INPUTS[:, :1])
        assert torch.equal(found["hidden"][1][0], INPUTS.sum(1) > 0)


# ------------------------------------------------------------------------------------------ one result for each sample


@pytest.mark.parametrize("batch_size", [1, 2, 4, 100])
@pytest.mark.parametrize("kind", SHAPES)
def test_batches_of_any_shape_give_each_sample_its_prediction(kind: str, batch_size: int, tmp_path: Path) -> None:
    trainer = batch_shapes.trainer_of(kind)
    expected = batch_shapes.predictions(trainer, kind)
    arguments: Any = {"per_device_batch_size": batch_size, "collate_fn": SHAPES[kind].collate}
    found = trainer.predict(Samples(), **arguments)
    assert_equal_results(list(found), expected)
    if isinstance(found, torch.Tensor):
        stored = trainer.predict(Samples(), output_path=tmp_path / "predictions", **arguments)
        assert_equal_results(list(stored.load()), expected)
    else:
        with pytest.raises(HookOutputError, match="one result per sample.*without `output_path`"):
            trainer.predict(Samples(), output_path=tmp_path / "predictions", **arguments)


class AsGiven(Trainer):
    """Predicts what `outputs` makes of the inputs of a batch."""

    outputs: Callable[[torch.Tensor], Any]

    def calculate_predict_batch_outputs(self, batch: Any) -> Any:
        return self.outputs(batch)


def predicted(outputs: Callable[[torch.Tensor], Any], dataset: Any = INPUTS) -> Any:
    trainer = trainer_of(base=AsGiven)
    trainer.outputs = outputs  # type: ignore[attr-defined]
    return trainer.predict(dataset, 2)


def test_lists_that_may_be_rows_as_well_are_read_as_the_others_of_their_pass() -> None:
    """Batches of two samples, in lists of two tensors."""
    both = predicted(lambda batch: [batch[:, 0], batch[:, 1]] if len(batch) == 2 else [batch[:, 0], batch[:, 1] * 1])
    assert [rows.shape for rows in both] == [(SIZE,), (SIZE,)], "the last batch has one sample and two tensors"
    lengths = [2, 2, 2, 2, 5, 1]
    begins = [sum(lengths[:index]) for index in range(len(lengths))]

    def cut(batch: torch.Tensor) -> list[torch.Tensor]:
        return [torch.full((lengths[int(row)],), float(row)) for row in batch]

    found = predicted(cut, torch.arange(6))
    assert [len(each) for each in found] == lengths, begins
    assert [float(each[0]) for each in found] == list(range(6))


def test_samples_in_dimension_1_are_an_error_that_names_the_remedy() -> None:
    with pytest.raises(HookOutputError, match=r"returned 3 rows for a batch of 2 samples.*outputs.transpose\(0, 1\)"):
        predicted(lambda batch: batch.T)
    assert_same_numbers(predicted(lambda batch: batch.T.transpose(0, 1)), INPUTS)


def assert_equal_results(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        if isinstance(other, dict):
            assert_equal_results([one[name] for name in other], list(other.values()))
        else:
            assert_same_numbers(one, other)


# --------------------------------------------------------------------------------------- before, during and after it


class Watching(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_prediction_run_start(self, trainer: Trainer, *, num_batches: int | None = None, **kwargs: Any) -> None:
        self.seen.append(("start", num_batches, trainer.model.training, torch.is_grad_enabled()))

    def on_prediction_step_end(self, trainer: Trainer, batch: Any, predictions: torch.Tensor, **kwargs: Any) -> None:
        assert_same_numbers(predictions, outputs_of(trainer.model, batch))
        self.seen.append((len(batch), predictions.requires_grad))

    def on_prediction_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.seen.append("end")


def test_events_are_fired_for_each_batch() -> None:
    trainer_of(None, watching := Watching()).predict(INPUTS, 4)
    assert watching.seen == [("start", 3, False, True), (4, False), (4, False), (3, False), "end"]


def test_layers_are_in_evaluation_mode_and_afterwards_as_they_were() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 2)).double()
    model[0].eval()  # frozen by its user
    trainer = trainer_of(model)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert torch.equal(trainer.predict(INPUTS, SIZE), trainer.predict(INPUTS, SIZE))
    assert [module.training for module in model.modules()] == [True, False, True, True]
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert trainer.model is model


@pytest.mark.parametrize("error", [StopTrainingError("enough"), OSError("cannot read sample 7")])
def test_a_stop_or_error_in_the_middle_gives_no_half_of_the_predictions(error: Exception, tmp_path: Path) -> None:
    class Stops(TrainerCallback):
        def on_prediction_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
            raise error

    trainer = trainer_of(None, Stops())
    with pytest.raises(type(error), match=str(error)):
        trainer.predict(INPUTS, 4, output_path=tmp_path / "predictions")
    assert list(tmp_path.iterdir()) == []
    trainer.callback_handler.clear_callbacks()
    assert_same_numbers(trainer.predict(INPUTS, 4), outputs_of(trainer.model))


# ------------------------------------------------------------------------------------------------------------ on disk


def test_arguments_that_cannot_work_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    trainer = trainer_of()
    path = tmp_path / "predictions"
    attempts: list[tuple[Any, type[Exception]]] = [
        (lambda: trainer.predict(INPUTS, 0, output_path=path), ConfigurationError),
        (lambda: trainer.predict((INPUTS, TARGETS[1:]), output_path=path), DataError),
        (lambda: trainer.predict(INPUTS, 4, {"no_such": 1}, output_path=path), TypeError),
        (lambda: trainer.predict(INPUTS, output_path=3), TypeError),  # type: ignore[arg-type]
    ]
    for attempt, error in attempts:
        with pytest.raises(error):
            attempt()
        assert list(tmp_path.iterdir()) == []
    (path / "something").mkdir(parents=True)
    with pytest.raises(ConfigurationError, match="exists already"):
        trainer.predict(INPUTS, output_path=path)


def test_a_batch_that_the_default_hook_cannot_take_is_explained() -> None:
    with pytest.raises(DataError, match="Override `calculate_predict_batch_outputs`"):
        trainer_of().predict(["text", "more text"], 2, collate_fn=lambda samples: frozenset(samples))
    with pytest.raises(DataError, match="'x', but the model takes input: none"):
        trainer_of(nn.Linear(2, 1)).predict({"x": INPUTS})
