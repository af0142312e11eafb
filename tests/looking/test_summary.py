"""The summary counts what one update really is, and leaves nothing behind."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.errors import ArgumentTypeError, ConfigurationError
from pytorch_accelerated.extras.looking import rehearsal
from tests.looking.worlds import everything, make, results
from tests.support.resuming import assert_same

WAYS: dict[str, dict[str, Any]] = {
    "mlp": {"train_dataloader_kwargs": {"generator": torch.Generator()}},
    "cnn": {"gradient_accumulation_steps": 2, "gradient_clip_norm": 0.5},
    "dicts": {},
}


def look_at(trainer: Trainer, data: Any, look: str, **arguments: Any) -> None:
    positional = {"summary": (data,), "find_lr": (data,), "preflight": (data, 2, data)}[look]
    getattr(trainer, look)(*positional, per_device_batch_size=8, **arguments)


@pytest.mark.parametrize("look", ["summary", "preflight", "find_lr"])
@pytest.mark.parametrize("kind", WAYS)
def test_a_look_changes_nothing_and_neither_does_it_change_the_runs_after_it(kind: str, look: str) -> None:
    found = []
    for is_looked_at in (False, True):
        trainer, data = make(kind, mixed_precision="bf16")
        WAYS["mlp"]["train_dataloader_kwargs"]["generator"].manual_seed(1)
        trainer.train(data, 1, per_device_batch_size=8, **WAYS[kind])  # so that there is a state of the optimizer
        for parameter in trainer.get_model().parameters():
            parameter.grad = torch.rand_like(parameter)
        trainer.get_model().eval()
        if is_looked_at:
            before = everything(trainer)
            look_at(trainer, data, look, **WAYS[kind])
            assert_same(everything(trainer), before)
        trainer.train(data, 2, data, per_device_batch_size=8, **WAYS[kind])
        found.append(results(trainer))
    assert_same(found[1], found[0])


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("look", ["summary", "preflight", "find_lr"])
def test_an_error_in_a_look_leaves_nothing_behind(look: str, error: type[BaseException]) -> None:
    trainer, data = make("cnn")
    trainer.train(data, 1)
    before = everything(trainer)

    def failing(loss: torch.Tensor) -> None:
        loss.backward()
        raise error

    trainer.backward_step = failing  # type: ignore[method-assign]
    with pytest.raises(error):
        look_at(trainer, data, look)
    del trainer.backward_step
    assert_same(everything(trainer), before)


def test_models_that_a_run_shards_are_kept_on_disk_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "is_replicated", lambda accelerator: False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    trainer, data = make("dicts")
    trainer.train(data, 1)
    before = everything(trainer)
    trainer.summary(data)
    assert_same(everything(trainer), before)
    assert list(tmp_path.glob(".rehearsal*")) == []


def test_counts_are_those_of_an_update_by_hand() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    model[0].bias.requires_grad_(False)
    trainer = Trainer(model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters()), callbacks=())
    rows, labels = torch.randn(40, 4), torch.randint(0, 3, (40,))
    summary = trainer.summary((rows, labels), per_device_batch_size=5, gradient_accumulation_steps=3)
    assert (summary.parameters, summary.trainable) == (67, 59)
    assert (summary.parameter_bytes, summary.gradient_bytes) == (67 * 4, 59 * 4)
    assert summary.optimizer_bytes == 59 * 4 * 2 + 3 * 4  # two moments, and the number of steps of three tensors
    # Forward: both layers. Backward: the gradients of both weights, and of the hidden values.
    of_a_row = 2 * (4 * 8 + 8 * 3) * 2 + 2 * 8 * 3
    assert summary.operations == 3 * 5 * of_a_row
    assert summary.batches == 3
    assert [(one.name, one.depth, one.output_shape) for one in summary.modules] == [
        ("Sequential", 0, (5, 3)),
        ("0", 1, (5, 8)),
        ("1", 1, (5, 8)),
        ("2", 1, (5, 3)),
    ]
    # Kept for the backward pass: inputs, hidden values (which the ReLU and the layer after it share), the logarithms of
    # the probabilities, the labels and the sum of their weights.
    assert summary.activation_bytes == 4 * (5 * 4 + 5 * 8 + 5 * 3) + 8 * 5 + 4
    assert summary.memory_bytes > summary.activation_bytes


def test_parameters_that_no_optimizer_has_are_not_counted_as_trained_and_named() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    trainer = Trainer(model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters()), callbacks=())
    model[1] = nn.Linear(8, 3)  # as for another number of classes
    rows = torch.randn(8, 4), torch.randint(0, 3, (8,))
    told = "The optimizer has 2 parameters that neither the model nor the trainer has, while '1.weight', '1.bias'"
    with pytest.warns(UserWarning, match=told):
        summary = trainer.summary(rows)
    assert (summary.parameters, summary.trainable) == (67, 40)
    assert [one.trainable for one in summary.modules] == [40, 40, 0]
    with pytest.warns(UserWarning, match=told):
        trainer.train(rows, 1)
    model[1].requires_grad_(False)
    trainer.train(rows, 1)  # as it was meant


def test_a_batch_does_as_well_as_a_dataset() -> None:
    for kind in ("dicts", "cnn"):
        trainer, data = make(kind)
        batch = {name: rows[:8] for name, rows in data.items()} if kind == "dicts" else (data[0][:8], data[1][:8])
        of_batch = trainer.summary(batch=batch, gradient_accumulation_steps=2)
        of_data = trainer.summary(data, per_device_batch_size=8, gradient_accumulation_steps=2)
        assert of_batch.modules == of_data.modules
        assert of_batch.operations == of_data.operations
        assert of_batch.batches == 2


def test_it_fits_into_80_columns_and_lists_as_many_levels_as_asked_for() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 8))
    for _ in range(30):
        model = nn.Sequential(model)
    model[0][0] = nn.Sequential(nn.Linear(4, 8), model[0][0][0])
    model[0][0][1] = nn.Identity()
    trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.1), callbacks=())
    data = (torch.randn(8, 4), torch.randn(8, 8))
    summary = trainer.summary(data, depth=40)
    assert max(map(len, str(summary).splitlines())) <= 80
    assert len(trainer.summary(data, depth=0).modules) == 1


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({}, ConfigurationError, "got neither"),
        ({"train_dataset": [1], "batch": [1]}, ConfigurationError, "got both"),
        ({"batch": [1], "num_epochs": 2}, ArgumentTypeError, "`num_epochs`"),
    ],
)
def test_bad_input_is_an_error(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make("cnn")[0].summary(**arguments)
