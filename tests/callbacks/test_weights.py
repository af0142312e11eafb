"""The average moves once per applied update, is evaluated beside the model, saved, and resumed."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks.evaluation import StepBasedEvaluationCallback
from pytorch_accelerated.callbacks.saving import SaveBestModelCallback, SaveTrainingStateCallback
from pytorch_accelerated.callbacks.stopping import TerminateOnNaNCallback
from pytorch_accelerated.callbacks.weights import ModelEmaCallback, SWACallback
from pytorch_accelerated.errors import DuplicateCallbackError, NonFiniteLossError
from pytorch_accelerated.loop.callback import TrainerCallback
from tests.callbacks.runs import (
    DATA,
    Die,
    DieAfter,
    Record,
    SpoilAfter,
    a_trainer,
    assert_same_weights,
    fit,
    noisy_model,
    values_of,
    weights_of,
)
from tests.support import sharding
from tests.support.processes import REPOSITORY, run_on_ranks
from tests.support.reference import TOLERANCE


def average_of(callback: ModelEmaCallback) -> dict[str, torch.Tensor]:
    assert callback.ema_model is not None
    return weights_of(callback.ema_model.module)


def saved_average() -> dict[str, torch.Tensor]:
    saved: dict[str, torch.Tensor] = torch.load("ema_model.pt", weights_only=True)["model_state_dict"]
    return saved


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_averages_in_one_run_have_metrics_files_best_values_and_states_of_their_own(order: tuple[int, ...]) -> None:
    def averages() -> list[ModelEmaCallback]:
        return [ModelEmaCallback(0.5), ModelEmaCallback(0.95, name="slow_model"), SWACallback(0.3)]

    alone = []
    for callback in averages():
        trainer = a_trainer(callback)
        fit(trainer, num_epochs=3)
        saved = torch.load(callback.save_path, weights_only=True)
        metric = callback.watch_metric
        alone.append((values_of(trainer.run_history)[metric], callback.best_metric, callback.best_metric_epoch, saved))
        Path(callback.save_path).unlink()
    for resumed in (False, True):
        together = averages()
        states = SaveTrainingStateCallback(save_every_n_epochs=1)
        trainer = a_trainer(*[together[place] for place in order], states)
        fit(trainer, num_epochs=3, resume_from="training_states/epoch_2" if resumed else None)
        for callback, (values, best, epoch, saved) in zip(together, alone, strict=True):
            assert values_of(trainer.run_history)[callback.watch_metric] == values
            assert (callback.best_metric, callback.best_metric_epoch) == (best, epoch)
            found = torch.load(callback.save_path, weights_only=True)
            assert_same_weights(found["model_state_dict"], saved["model_state_dict"])
            assert found[callback.watch_metric] == best
    unnamed = [ModelEmaCallback(0.95, save_path="slow.pt"), ModelEmaCallback(0.5)]  # as in version 1.0
    fit(trainer := a_trainer(*unnamed if order[0] else reversed(unnamed)), num_epochs=3)
    assert values_of(trainer.run_history)["slow_eval_loss_epoch"] == alone[1][0]
    assert values_of(trainer.run_history)["ema_model_eval_loss_epoch"] == alone[0][0]
    assert [each.best_metric for each in unnamed] == [alone[1][1], alone[0][1]]
    Path("folder").mkdir()
    with pytest.raises(DuplicateCallbackError, match="Multiple averages are called 'ema_model'. Give each its own"):
        fit(a_trainer(ModelEmaCallback(), ModelEmaCallback(save_path="folder/ema_model.pt")))


@pytest.mark.parametrize(("accumulation", "decay"), [(1, 0.7), (2, 0.7), (1, 0.0), (1, 0.9999)])
def test_the_average_is_the_closed_form_over_all_updates(accumulation: int, decay: float) -> None:
    record, callback = Record(), ModelEmaCallback(decay=decay)
    trainer = a_trainer(record, callback)
    fit(trainer, gradient_accumulation_steps=accumulation)
    first, *others = record.weights
    assert len(others) == trainer.run_state.updates == {1: 15, 2: 9}[accumulation]
    for name, average in average_of(callback).items():
        if average.is_floating_point():
            expected = decay ** len(others) * first[name]
            for age, weights in enumerate(reversed(others)):
                expected += (1 - decay) * decay**age * weights[name]
            torch.testing.assert_close(average, expected, rtol=TOLERANCE, atol=TOLERANCE)
        else:
            assert average == others[-1][name] == 15, "batches are counted, not averaged"


def test_skipped_updates_leave_the_average() -> None:
    class Skips(Trainer):
        def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
            output = super().calculate_train_batch_loss(batch)
            return {**output, "loss": output["loss"] * torch.nan} if self.run_state.updates % 2 else output

    record, callback = Record(), ModelEmaCallback(decay=0.5)
    model = nn.Linear(3, 2).double()
    trainer = Skips(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), callbacks=[record, callback])
    with pytest.warns(UserWarning, match="cannot be applied"):
        fit(trainer, num_epochs=1, nonfinite_policy="skip")
    assert trainer.run_state.skipped_updates == 2
    for name, average in average_of(callback).items():
        start, applied = record.weights[0][name], [record.weights[update][name] for update in (1, 3, 5)]
        expected = start / 8 + applied[0] / 8 + applied[1] / 4 + applied[2] / 2
        torch.testing.assert_close(average, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_training_is_the_same_with_and_without_the_average() -> None:
    plain, averaged = a_trainer(), a_trainer(ModelEmaCallback())
    expected = values_of(fit(plain))
    found = values_of(fit(averaged))
    assert len(found.pop("ema_model_eval_loss_epoch")) == 3
    assert found == expected
    assert_same_weights(weights_of(averaged.model), weights_of(plain.model))
    assert all(parameter.requires_grad for parameter in averaged.model.parameters())


@pytest.mark.filterwarnings("ignore:ModelEmaCallback watches")  # on purpose
def test_the_file_has_the_best_average_and_not_the_last_and_its_recorded_metric() -> None:
    callback = ModelEmaCallback(decay=0.1, greater_is_better=True)
    # Of a model that learns, the first average is the worst one.
    values = fit(a_trainer(callback, lr=0.1)).get_metric_values("ema_model_eval_loss_epoch")
    assert (callback.best_metric, callback.best_metric_epoch) == (max(values), 1)
    other = a_trainer(model=noisy_model(seed=1))
    loaded = other.load_checkpoint("ema_model.pt")
    assert loaded.keys() == {"model_state_dict", "ema_model_eval_loss_epoch", "epoch"}
    assert other.evaluate(DATA)["evaluation_loss"] == callback.best_metric == loaded["ema_model_eval_loss_epoch"]
    assert_same_weights(weights_of(other.model), saved_average())


def test_callbacks_of_the_average_see_its_evaluation_only() -> None:
    made = []

    class Error(TrainerCallback):
        """The mean absolute error, recorded as a metric."""

        def __init__(self) -> None:
            made.append(self)
            self.errors: list[torch.Tensor] = []

        def on_eval_step_end(
            self, trainer: Trainer, *, batch: Any, batch_output: dict[str, Any], **kwargs: Any
        ) -> None:
            self.errors.append((batch_output["model_outputs"] - batch[1]).abs())

        def on_eval_epoch_end(self, trainer: Trainer, *, is_intermediate: bool = False, **kwargs: Any) -> None:
            trainer.run_history.update_metric("error", torch.cat(self.errors).mean().item())
            self.errors = []

    callback = ModelEmaCallback(watch_metric="ema_model_error", callbacks=[Error])
    history = fit(a_trainer(StepBasedEvaluationCallback(2), callback))
    assert len(made) == 1
    values = values_of(history)
    assert "error" not in values
    assert len(values["ema_model_error"]) == len(values["ema_model_eval_loss_epoch"]) == 3
    assert callback.best_metric == min(values["ema_model_error"])
    average = a_trainer().get_model()
    average.load_state_dict(saved_average())
    with torch.no_grad():
        error = (average.eval()(DATA[0]) - DATA[1]).abs().mean().item()
    assert error == pytest.approx(callback.best_metric, rel=TOLERANCE)


def test_without_evaluation_the_average_is_saved_at_the_end_of_the_run() -> None:
    callback = ModelEmaCallback(decay=0.5, evaluate_during_training=False)
    history = fit(a_trainer(callback), eval_dataset=None)
    assert history.get_metric_names() == {"train_loss_epoch"}
    assert_same_weights(saved_average(), average_of(callback))
    evaluated = ModelEmaCallback(decay=0.5, save_path="evaluated.pt")
    fit(a_trainer(evaluated))
    assert_same_weights(average_of(callback), average_of(evaluated))


@pytest.mark.parametrize("updates", [3, 5, 7])
@pytest.mark.parametrize("evaluate_during_training", [True, False])
def test_a_resumed_run_ends_with_the_same_average(updates: int, evaluate_during_training: bool) -> None:
    def callback(save_path: str = "ema_model.pt") -> ModelEmaCallback:
        return ModelEmaCallback(0.7, evaluate_during_training, save_path)

    whole = callback("whole.pt")
    expected = fit(a_trainer(whole)).get_metric_names()
    states = SaveTrainingStateCallback(save_every_n_steps=updates)
    with pytest.raises(Die):
        fit(a_trainer(callback(), states, DieAfter(updates)))
    resumed = callback()
    history = fit(a_trainer(resumed), resume_from="training_states")
    assert history.get_metric_names() == expected
    assert_same_weights(average_of(resumed), average_of(whole))
    assert_same_weights(saved_average(), torch.load("whole.pt")["model_state_dict"])
    assert (resumed.best_metric, resumed.best_metric_epoch) == (whole.best_metric, whole.best_metric_epoch)


class OwnAverage(nn.Module):
    """An average that is no `ModelEma`: a mean of all weights so far, with a count in a buffer."""

    count: torch.Tensor

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__()
        self.module = copy.deepcopy(model)
        self.register_buffer("count", torch.tensor(1.0, dtype=torch.float64))

    def update(self, model: nn.Module) -> None:
        self.count.add_(1)
        with torch.no_grad():
            for mean, value in zip(self.module.parameters(), model.parameters(), strict=True):
                mean.add_((value - mean) / self.count)


def test_an_average_of_a_users_own_kind_is_resumed() -> None:
    def callback() -> ModelEmaCallback:
        return ModelEmaCallback(model_ema=OwnAverage)  # type: ignore[arg-type]

    whole, resumed, record = callback(), callback(), Record()
    fit(a_trainer(whole, record))
    with pytest.raises(Die):
        fit(a_trainer(callback(), SaveTrainingStateCallback(save_every_n_steps=5), DieAfter(5)))
    fit(a_trainer(resumed), resume_from="training_states")
    assert_same_weights(average_of(resumed), average_of(whole))
    for name, _ in noisy_model().named_parameters():
        mean = torch.stack([weights[name] for weights in record.weights]).mean(0)
        torch.testing.assert_close(average_of(whole)[name], mean, rtol=1e-12, atol=1e-14)


def test_a_second_run_starts_a_new_average() -> None:
    record, callback = Record(), ModelEmaCallback(decay=0.9)
    trainer = a_trainer(record, callback)
    fit(trainer, num_epochs=1)
    fit(trainer, num_epochs=1, max_num_train_steps=1)
    start, after = record.weights
    expected = 0.9 * start["0.weight"] + 0.1 * after["0.weight"]
    torch.testing.assert_close(average_of(callback)["0.weight"], expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_an_average_that_is_not_finite_is_not_saved_at_the_end() -> None:
    callback = ModelEmaCallback(evaluate_during_training=False)
    # The best model is loaded first, so that the model itself is finite when the average is saved.
    trainer = a_trainer(SaveBestModelCallback(), callback, TerminateOnNaNCallback, SpoilAfter(7))
    with (
        pytest.warns(UserWarning, match="not saved to ema_model.pt"),
        pytest.raises(NonFiniteLossError, match="epoch 2"),
    ):
        fit(trainer)
    assert all(torch.isfinite(parameter).all() for parameter in trainer.model.parameters())
    assert not Path("ema_model.pt").exists()


@pytest.mark.processes
def test_the_average_of_a_sharded_model_is_that_of_one_process(tmp_path: Path) -> None:
    average = ModelEmaCallback(0.7, save_path=tmp_path / "alone_average.pt")
    trainer = sharding.train(sharding.make_trainer(shards=False, callbacks=[average]), ranks=1)
    losses = list(trainer.run_history.get_metric_values("ema_model_eval_loss_epoch"))
    saved = dict(torch.load(tmp_path / "alone_average.pt")["model_state_dict"])
    torch.save({"losses": losses, "average": saved}, tmp_path / "alone.pt")
    run_on_ranks(REPOSITORY / "tests" / "ranks" / "sharded_average.py", 2, tmp_path, cwd=REPOSITORY)
