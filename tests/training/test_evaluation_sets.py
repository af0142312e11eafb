"""Several evaluation sets by name: each is measured as if it were alone, under names of its own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytorch_accelerated.callbacks import (
    EarlyStoppingCallback,
    MetricsCallback,
    ModelEmaCallback,
    SaveBestModelCallback,
    SaveTrainingStateCallback,
    StepBasedEvaluationCallback,
    TrainerCallback,
)
from pytorch_accelerated.errors import ArgumentTypeError, StopTrainingError
from pytorch_accelerated.trainer import Trainer

Rows = tuple[torch.Tensor, torch.Tensor]


def digits() -> tuple[Rows, dict[str, Rows]]:
    """Training digits, and evaluation digits of odd numbers: clean, and with noise."""
    data = load_digits()
    inputs, targets = torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)
    noise = torch.randn(51, 64, generator=torch.Generator().manual_seed(1))
    sets = {"clean": (inputs[500:533], targets[500:533]), "noisy": (inputs[600:651] + noise, targets[600:651])}
    return (inputs[:203], targets[:203]), sets


def make_trainer(*callbacks: Any, trainer_class: type[Trainer] = Trainer, **arguments: Any) -> Trainer:
    torch.manual_seed(1)
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return trainer_class(model, nn.CrossEntropyLoss(), optimizer, callbacks=callbacks, seed=2, **arguments)


def train(trainer: Trainer, eval_dataset: Any, **arguments: Any) -> Trainer:
    trainer.train(digits()[0], eval_dataset=eval_dataset, **{"num_epochs": 2, "per_device_batch_size": 16, **arguments})
    return trainer


def values(trainer: Trainer, name: str) -> list[float]:
    found = trainer.run_history.get_metric_values(name)
    assert found, f"{name} was not recorded"
    return list(found)


def accuracy(predictions: torch.Tensor, targets: torch.Tensor) -> float:
    return float((predictions == targets).float().mean())


def measuring() -> MetricsCallback:
    return MetricsCallback({"accuracy": accuracy}, predictions="argmax")


def check_each_set_is_measured_as_if_it_were_alone(folder: Path) -> None:
    _, sets = digits()
    callbacks = [measuring(), StepBasedEvaluationCallback(5)]
    ema = ModelEmaCallback(0.5, save_path=folder / "ema.pt", callbacks=[measuring()])
    together = train(make_trainer(ema, *callbacks), sets)
    assert together.eval_dataset is sets
    history = together.run_history.copy()
    for name, rows in sets.items():
        ema = ModelEmaCallback(0.5, save_path=folder / f"{name}.pt", callbacks=[measuring()])
        alone = train(make_trainer(ema, measuring(), StepBasedEvaluationCallback(5)), rows)
        for prefix in ("", "ema_model_"):
            for metric in ("loss_epoch", "accuracy"):
                expected = values(alone, f"{prefix}eval_{metric}")
                assert history.get_metric_values(f"{prefix}eval_{name}_{metric}") == pytest.approx(expected)
        for metric in ("loss", "accuracy"):
            expected = values(alone, f"intermediate_eval_{metric}")
            assert history.get_metric_values(f"intermediate_eval_{name}_{metric}") == pytest.approx(expected)
        for key, weights in alone.model.state_dict().items():
            assert torch.equal(weights, together.model.state_dict()[key])
        expected_metrics = alone.evaluate(rows)
        found = together.evaluate({name: rows})
        assert found[f"evaluation_{name}_loss"] == pytest.approx(expected_metrics["evaluation_loss"])
        assert found[f"eval_{name}_accuracy"] == pytest.approx(expected_metrics["eval_accuracy"])


def test_each_set_is_measured_as_if_it_were_alone(tmp_path):
    check_each_set_is_measured_as_if_it_were_alone(tmp_path)


def test_the_loss_of_the_first_set_is_also_recorded_without_a_name(tmp_path):
    _, sets = digits()
    best = SaveBestModelCallback(tmp_path / "best.pt")
    trainer = train(make_trainer(best, StepBasedEvaluationCallback(5)), sets)
    assert values(trainer, "eval_loss_epoch") == values(trainer, "eval_clean_loss_epoch")
    assert values(trainer, "intermediate_eval_loss") == values(trainer, "intermediate_eval_clean_loss")
    assert best.best_metric == min(values(trainer, "eval_clean_loss_epoch"))
    metrics = trainer.evaluate({name: sets[name] for name in ("noisy", "clean")})
    assert metrics["evaluation_loss"] == metrics["evaluation_noisy_loss"] != metrics["evaluation_clean_loss"]
    assert metrics["eval_loss_epoch"] == metrics["eval_noisy_loss_epoch"] != metrics["eval_clean_loss_epoch"]


def test_any_set_can_drive_best_model_early_stopping_and_schedule(tmp_path):
    _, sets = digits()
    best = SaveBestModelCallback(tmp_path / "best.pt", watch_metric="eval_noisy_accuracy", greater_is_better=True)
    stopping = EarlyStoppingCallback(1, 100.0, watch_metric="eval_noisy_loss_epoch")  # nothing is an improvement
    watched: list[float] = []

    class Plateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
        def step(self, metrics: Any, epoch: Any = None) -> None:  # type: ignore[override]
            watched.append(metrics)
            super().step(metrics)

    trainer = train(
        make_trainer(measuring(), best, stopping),
        sets,
        num_epochs=5,
        create_scheduler_fn=Plateau,
        scheduler_metric="eval_noisy_loss_epoch",
    )
    assert best.best_metric == max(values(trainer, "eval_noisy_accuracy"))
    assert watched == values(trainer, "eval_noisy_loss_epoch")
    assert len(watched) == 2, "early stopping has judged another set"


class Events(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def on_eval_epoch_end(self, trainer: Trainer, is_intermediate: bool = False, **kwargs: Any) -> None:
        self.seen.append((trainer.run_history.evaluation_set, len(trainer.eval_dataset[0])))


def test_hooks_and_events_see_the_set_that_is_being_evaluated():
    class Own(Trainer):
        def eval_epoch_end(self) -> None:
            self.run_history.update_metric("eval_rows", len(self.eval_dataset[0]))
            self.run_history.update_metric("rows", len(self.eval_dataset[0]))

    events = Events()
    trainer = train(make_trainer(events, trainer_class=Own), digits()[1], num_epochs=1)
    assert events.seen == [("clean", 33), ("noisy", 51)]
    assert values(trainer, "eval_clean_rows") == values(trainer, "clean_rows") == [33]
    assert values(trainer, "eval_noisy_rows") == values(trainer, "noisy_rows") == [51]
    assert trainer.run_history.evaluation_set == ""


def test_sets_can_be_of_any_kind_and_loader_arguments_apply_to_all():
    _, sets = digits()
    batches: list[int] = []

    class Count(TrainerCallback):
        def on_eval_step_end(self, trainer: Trainer, batch: Any, batch_output: Any, **kwargs: Any) -> None:
            batches.append(len(batch[0]))

    kinds = {"tensors": sets["clean"], "data set": TensorDataset(*sets["clean"])}
    kinds["loader"] = DataLoader(TensorDataset(*sets["clean"]), batch_size=20)
    kinds["list"] = list(zip(*sets["clean"], strict=True))
    trainer = train(make_trainer(Count()), kinds, num_epochs=1, eval_dataloader_kwargs={"batch_size": 30})
    assert batches == [30, 3, 30, 3, 20, 13, 30, 3]
    losses = [values(trainer, f"eval_{name}_loss_epoch")[0] for name in kinds]
    assert losses == pytest.approx(losses[:1] * len(kinds), rel=1e-5)


@pytest.mark.parametrize(
    ("sets", "told"),
    [
        ({1: digits()[1]["clean"]}, "set is called 1"),
        ({"": digits()[1]["clean"]}, "set is called ''"),
        ({"clean": digits()[1]["clean"], "noisy": 3}, "3 is not a dataset"),
    ],
)
def test_bad_sets_are_an_error(sets, told):
    with pytest.raises(ArgumentTypeError, match=told):
        train(make_trainer(), sets)
    with pytest.raises(ArgumentTypeError, match=told):
        make_trainer().evaluate(sets)


class StopAt(TrainerCallback):
    """Asks to stop at the end of the evaluation of a set, as a time limit or a signal may."""

    def __init__(self, set_name: str, *, intermediate: bool) -> None:
        self.set_name = set_name
        self.intermediate = intermediate

    def on_eval_epoch_end(self, trainer: Trainer, is_intermediate: bool = False, **kwargs: Any) -> None:
        if (trainer.run_history.evaluation_set, is_intermediate) == (self.set_name, self.intermediate):
            raise StopTrainingError("enough")


def check_a_resumed_run_has_no_gap_and_no_double(set_name: str, folder: Path, *, intermediate: bool) -> None:
    _, sets = digits()

    def callbacks() -> list[Any]:
        return [measuring(), StepBasedEvaluationCallback(4), SaveTrainingStateCallback(folder)]

    whole = train(make_trainer(*callbacks()[:2]), sets)
    train(make_trainer(*callbacks(), StopAt(set_name, intermediate=intermediate)), sets)
    resumed = train(make_trainer(*callbacks()), sets, resume_from=folder)
    assert resumed.run_history.records == whole.run_history.records


@pytest.mark.parametrize("intermediate", [False, True], ids=["after an epoch", "within an epoch"])
@pytest.mark.parametrize("set_name", ["clean", "noisy"])
def test_a_run_that_resumes_between_two_sets_has_no_gap_and_no_double(set_name, intermediate, tmp_path):
    check_a_resumed_run_has_no_gap_and_no_double(set_name, tmp_path, intermediate=intermediate)


def test_an_evaluation_that_fails_leaves_the_sets_to_the_next_one():
    _, sets = digits()

    class FailsOnce(TrainerCallback):
        failed = False

        def on_eval_epoch_end(self, trainer: Trainer, is_intermediate: bool = False, **kwargs: Any) -> None:
            if trainer.run_history.evaluation_set == "noisy" and not self.failed:
                self.failed = True
                raise ValueError("this set")

    trainer = make_trainer(FailsOnce())
    with pytest.raises(ValueError, match="this set"):
        trainer.evaluate(sets)
    assert trainer.eval_dataset is sets
    metrics = trainer.evaluate()
    names = {f"evaluation_{of}loss" for of in ("", "clean_", "noisy_")}
    assert metrics.keys() == names | {f"eval_{of}loss_epoch" for of in ("", "clean_", "noisy_")}
    assert trainer.evaluate(sets["clean"]).keys() == {"evaluation_loss", "eval_loss_epoch"}
