"""The mistakes that everybody makes in the first hour: each is found early, and the words say what to do instead."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import (
    EarlyStoppingCallback,
    MetricsCallback,
    SaveBestModelCallback,
    SaveTrainingStateCallback,
    StopAtCallback,
    TrainerCallback,
)
from pytorch_accelerated.errors import ArgumentTypeError, DataError, UnknownMetricError

INPUTS = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(12) % 2
DATA = (INPUTS, LABELS)
TEXTS = np.array(["cat", "dog"] * 6)


def trainer(callbacks: Any = (), model: nn.Module | None = None, base: type[Trainer] = Trainer, **more: Any) -> Any:
    torch.manual_seed(0)
    model = model or nn.Linear(3, 2)
    return base(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), callbacks, **more)


MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "save": (lambda: trainer().save("model.pt"), AttributeError, "`Trainer` has no `save`. Use `save_checkpoint`."),
    "history": (lambda: trainer().history, AttributeError, "`Trainer` has no `history`. Use `run_history`."),
    "fit": (lambda: trainer().fit(DATA, 1), AttributeError, "`Trainer` has no `fit`. Use `train`."),
    "validate": (lambda: trainer().validate(DATA), AttributeError, "Use `evaluate`."),
    "misspelt method": (lambda: trainer().trian(DATA, 1), AttributeError, "'Trainer' object has no attribute 'trian'"),
    "validation_data": (lambda: trainer().train(DATA, 1, validation_data=DATA), TypeError, "Use `eval_dataset`."),
    "lr": (
        lambda: trainer().train(DATA, 1, lr=0.1),
        TypeError,
        "`Trainer.train` has no argument `lr`. It is an argument of the optimizer.",
    ),
    "nothing near": (
        lambda: trainer().train(DATA, 1, colour="red"),
        TypeError,
        "`Trainer.train` has no argument `colour`.",
    ),
    "one callback": (
        lambda: trainer(EarlyStoppingCallback(3)),
        ArgumentTypeError,
        "`callbacks` is one EarlyStoppingCallback: pass a list of callbacks, such as `[..., callback]`",
    ),
    "one class": (
        lambda: trainer(EarlyStoppingCallback),
        ArgumentTypeError,
        "`callbacks` is one EarlyStoppingCallback:",
    ),
    "inputs and targets": (
        lambda: trainer().train(INPUTS, LABELS),
        ArgumentTypeError,
        "`num_epochs` is int64 [12] on cpu, values from 0 to 1: pass a whole number of at least 1. Inputs and targets "
        "are one dataset: `train((inputs, targets), num_epochs)`.",
    ),
    "labels as a list": (lambda: trainer().train((INPUTS, LABELS.tolist()), 1), DataError, "`torch.tensor(labels)`"),
    "labels as texts": (
        lambda: trainer().train((INPUTS, ["cat", "dog"] * 6), 1),
        DataError,
        "`np.unique(labels, return",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_answered_by_what_to_do(name: str) -> None:
    make, kind, words = MISTAKES[name]
    with pytest.raises(kind) as caught:
        make()
    assert words in str(caught.value)
    assert "tensor(" not in str(caught.value).replace("torch.tensor(labels)", "")  # no printed values
    assert len(str(caught.value)) < 400


IN_A_BATCH: dict[str, tuple[Callable[[], Any], str]] = {
    "images without Flatten": (lambda: trainer().train((torch.zeros(12, 1, 8, 8), LABELS), 1), "`nn.Flatten()`"),
    "one feature": (
        lambda: trainer(model=nn.Linear(1, 2)).train((torch.zeros(12), LABELS), 1),
        "a single feature is [samples, 1]",
    ),
    "an array of texts": (lambda: trainer().train((INPUTS, TEXTS), 1), "`np.unique(labels, return_inverse=True)[1]`"),
    "an array of objects": (lambda: trainer().train((INPUTS, TEXTS.astype(object)), 1), "`np.unique(labels"),
}


@pytest.mark.parametrize("name", IN_A_BATCH)
def test_the_note_of_a_failed_batch_has_the_place_then_the_cause_then_the_batch(name: str) -> None:
    make, cause = IN_A_BATCH[name]
    with pytest.raises((RuntimeError, TypeError)) as caught:
        make()
    (note,) = caught.value.__notes__  # type: ignore[attr-defined]
    place, why, batch = note.splitlines()
    assert place.endswith("epoch 1, update 1 of the run, batch 1 of the epoch.")
    assert why.startswith("The usual cause: ")
    assert cause in why
    assert batch.startswith("The batch: ")


def test_the_history_warns_of_a_misspelt_name_and_of_no_other() -> None:
    done = trainer()
    done.train(DATA, 1)
    with pytest.warns(UserWarning, match="No metric 'train_los_epoch' was recorded.*'train_loss_epoch'"):
        assert done.run_history.get_metric_values("train_los_epoch") == []
    assert done.run_history.get_metric_values("eval_loss_epoch") == []
    assert len(done.run_history.get_metric_values("train_loss_epoch")) == 1


class Recording(TrainerCallback):
    """Records a metric of its own, and counts updates."""

    updates = 0

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.updates += 1

    def on_eval_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        trainer.run_history.update_metric("val_score", 1.0)


def watching(name: str, folder: Path) -> list[TrainerCallback]:
    return [
        EarlyStoppingCallback(3, watch_metric=name),
        StopAtCallback(name, at_least=9.0),
        SaveBestModelCallback(folder / "best.pt", watch_metric=name, greater_is_better=True),
        SaveTrainingStateCallback(folder / "states", keep_best=1, watch_metric=name),
    ]


@pytest.mark.parametrize("index", range(4))
def test_a_watched_metric_that_nothing_records_is_found_before_the_first_update(index: int, tmp_path: Path) -> None:
    run = trainer([watching("eval_acuracy", tmp_path)[index]], metrics=["accuracy"])
    before = run.model.weight.clone()
    with pytest.raises(UnknownMetricError, match="'eval_acuracy', which nothing in this run records. Watch 'eval_acc"):
        run.train(DATA, 1, DATA)
    assert torch.equal(run.model.weight, before)


@pytest.mark.filterwarnings("ignore:.*so the lowest value counts as")
def test_a_watched_metric_that_a_users_class_may_record_is_not_refused(tmp_path: Path) -> None:
    for index in range(4):
        recording = Recording()
        trainer([recording, watching("val_score", tmp_path)[index]], metrics=["accuracy"]).train(DATA, 1, DATA)
        assert recording.updates > 0

    class Records(Trainer):
        def eval_epoch_end(self) -> None:
            self.run_history.update_metric("val_score", 1.0)

    trainer([EarlyStoppingCallback(3, watch_metric="val_score")], base=Records).train(DATA, 1, DATA)
    by_function = MetricsCallback({"score": lambda predictions, targets: 1.0})
    trainer([by_function, EarlyStoppingCallback(3, watch_metric="eval_score")]).train(DATA, 1, DATA)
    several = {"easy": DATA, "hard": DATA}
    trainer([EarlyStoppingCallback(3, watch_metric="eval_hard_loss_epoch")]).train(DATA, 1, several)
