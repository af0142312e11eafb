"""Runs that end before their time: broken ones with an error, others as a success."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accelerated.callbacks.defaults import DEFAULT_CALLBACKS
from pytorch_accelerated.callbacks.evaluation import StepBasedEvaluationCallback
from pytorch_accelerated.callbacks.saving import SaveTrainingStateCallback
from pytorch_accelerated.callbacks.stopping import EarlyStoppingCallback, StopAtCallback, TerminateOnNaNCallback
from pytorch_accelerated.errors import ConfigurationError, NonFiniteLossError
from pytorch_accelerated.loop.callback import TrainerCallback
from pytorch_accelerated.trainer import Trainer
from tests.support.reference import regression_data, sgd, tiny_model

NAN, INF = math.nan, math.inf


class ScoreTrainer(Trainer):
    """Evaluations measure a score that was laid down before: one for each evaluation of the run."""

    scores: Sequence[float] = ()

    def training_run_start(self) -> None:
        self.remaining = iter(self.scores[self.run_state.epochs :])

    def eval_epoch_end(self) -> None:
        self.run_history.update_metric("score", next(self.remaining, 0.0))


def score_trainer(scores: Sequence[float], *callbacks: Any, run_history: Any = None) -> ScoreTrainer:
    model = tiny_model()
    trainer = ScoreTrainer(model, nn.MSELoss(), sgd(model), callbacks=callbacks, run_history=run_history, seed=5)
    trainer.scores = scores
    return trainer


def epochs_run(trainer: Trainer, num_epochs: int, *, evaluate: bool = True, **kwargs: Any) -> int:
    trainer.train(regression_data(4), num_epochs, regression_data(2) if evaluate else None, **kwargs)
    return trainer.run_state.epochs


# Early stopping


@pytest.mark.parametrize(
    ("scores", "patience", "threshold", "greater", "epochs"),
    [
        ([5, 4, 3, 2], 1, 0.5, False, 4),
        ([5, 4, 4, 1], 1, 0.5, False, 3),
        ([5, 4, 4, 1], 2, 0.5, False, 4),
        ([5, 4.6, 4.3, 4.1], 2, 0.5, False, 4),  # 4.3 is 0.7 better than 5, the last one that counted
        ([5, 4.5, 4, 3.5], 1, 0.5, False, 4),  # exactly the threshold counts
        ([5, 4.51, 4, 3], 1, 0.5, False, 2),
        ([1, 2, 3, 2.9], 1, 0.5, True, 4),
        ([1, 2, 1.5, 9], 1, 0.5, True, 3),
        ([3, 3, 3, 3], 2, 0, False, 3),  # no change is no improvement, whatever the threshold
        ([NAN, NAN, 1, 0], 2, 0, False, 2),
        ([NAN, 3, NAN, 2], 2, 0, False, 4),
        ([INF, 3, 2, 1], 1, 0, False, 1),
        ([-INF, 1, 2, 3], 1, 0, True, 1),
    ],
)
def test_a_run_stops_after_that_many_evaluations_in_a_row_without_improvement(
    scores, patience, threshold, greater, epochs
):
    stopping = EarlyStoppingCallback(patience, threshold, watch_metric="score", greater_is_better=greater)
    assert epochs_run(score_trainer(scores, stopping), 4) == epochs


class RecordsLater(TrainerCallback):
    """Records a score after the other callbacks have heard that the evaluation is over, as averaged weights do."""

    def on_eval_epoch_end(self, trainer: Trainer, is_intermediate: bool = False, **kwargs: Any) -> None:
        trainer.run_history.set_metric_name_prefix("ema_model_")
        trainer.run_history.update_metric("score", trainer.run_history.current_epoch)
        trainer.run_history.set_metric_name_prefix("")


def test_metrics_of_later_callbacks_count_in_the_same_epoch():
    stopping = EarlyStoppingCallback(watch_metric="ema_model_score")
    assert epochs_run(score_trainer([], stopping, RecordsLater()), 5) == 2


def test_evaluations_within_an_epoch_can_stop_the_run_at_once():
    model = tiny_model()
    trainer = Trainer(
        model,
        nn.MSELoss(),
        torch.optim.SGD(model.parameters(), lr=0),
        callbacks=[
            StepBasedEvaluationCallback(3),
            EarlyStoppingCallback(early_stopping_patience=2, watch_metric="intermediate_eval_loss"),
        ],
    )
    trainer.train(regression_data(20), 5, regression_data(4), per_device_batch_size=1)
    assert trainer.run_state.updates == 9


def test_evaluate_is_not_judged():
    stopping = EarlyStoppingCallback(early_stopping_patience=1, watch_metric="score")
    trainer = score_trainer([3, 2, 1], stopping)
    epochs_run(trainer, 2)
    trainer.remaining = iter([100.0])
    trainer.evaluate(regression_data(2))
    assert (stopping.best_metric, stopping.evaluations_without_improvement) == (2, 0)


@pytest.mark.parametrize("reset_run_history", [True, False])
@pytest.mark.parametrize(("arguments", "epochs"), [({}, 2), ({"reset_on_train": False}, 1)])
def test_by_default_each_run_is_judged_by_itself(arguments, epochs, reset_run_history):
    trainer = score_trainer([1, 0], EarlyStoppingCallback(watch_metric="score", **arguments))
    epochs_run(trainer, 2)
    trainer.scores = [5, 4]
    assert epochs_run(trainer, 2, reset_run_history=reset_run_history) == epochs


@pytest.mark.parametrize("resume_after", [1, 2, 3, 4, 5])
def test_a_resumed_run_stops_where_the_uninterrupted_one_does(resume_after, tmp_path):
    scores = [5, 4, 6, 6, 6, 6, 6, 1]
    saver = SaveTrainingStateCallback(tmp_path, save_every_n_epochs=1)
    whole = EarlyStoppingCallback(3, watch_metric="score")
    assert epochs_run(score_trainer(scores, whole, saver), 8) == 5
    resumed = EarlyStoppingCallback(3, watch_metric="score")
    trainer = score_trainer(scores, resumed)
    assert epochs_run(trainer, 8, resume_from=tmp_path / f"epoch_{resume_after}") == 5
    assert resumed.state_dict() == whole.state_dict()


# Which names can be watched


@pytest.mark.parametrize("name", ["eval_loss_epoch", "intermediate_eval_loss", "ema_model_eval_loss_epoch"])
def test_a_metric_of_evaluations_without_an_evaluation_set_is_refused_before_the_run(name):
    trainer = score_trainer([], EarlyStoppingCallback(watch_metric=name))
    with pytest.raises(ConfigurationError, match=f"'{name}', but there is no evaluation set"):
        epochs_run(trainer, 1, evaluate=False)
    assert trainer.run_state.updates == 0


# Losses that are not finite


class BadLoss(Trainer):
    """The loss of one training batch, or of the first evaluation batch, is made bad."""

    bad_step: int | None = None
    bad_value = NAN

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        output = super().calculate_train_batch_loss(batch)
        if self.run_state.epochs == 1 and self.run_state.batches_in_epoch == self.bad_step:
            output["loss"] = output["loss"] * self.bad_value
        return output

    def calculate_eval_batch_loss(self, batch: Any) -> dict[str, Any]:
        output = super().calculate_eval_batch_loss(batch)
        return output if self.bad_step is not None else {**output, "loss": output["loss"] * self.bad_value}


class Endings(TrainerCallback):
    seen: tuple[str, ...] = ()

    def on_stop_training_error(self, trainer: Trainer, **kwargs: Any) -> None:
        self.seen += ("stop",)

    def on_training_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.seen += ("training end",)

    def on_evaluation_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.seen += ("evaluation end",)


def bad_loss_trainer(bad_step: int | None, bad_value: float) -> tuple[BadLoss, Endings]:
    endings = Endings()
    model = tiny_model()
    trainer = BadLoss(model, nn.MSELoss(), sgd(model), callbacks=[TerminateOnNaNCallback, endings])
    trainer.bad_step, trainer.bad_value = bad_step, bad_value
    return trainer, endings


@pytest.mark.parametrize("bad_value", [NAN, INF, -INF])
@pytest.mark.parametrize("bad_step", [0, 3, 70, 79])
def test_a_bad_training_loss_ends_the_run_with_an_error_that_names_the_batch(bad_step, bad_value):
    trainer, endings = bad_loss_trainer(bad_step, bad_value)
    with pytest.raises(NonFiniteLossError, match=f"In epoch 2, the loss of batch {bad_step} .*'train_loss_epoch'.*try"):
        trainer.train(regression_data(80), 5, per_device_batch_size=1)
    assert endings.seen == ("stop", "training end")
    assert trainer.run_history.get_metric_values("train_loss_epoch") == [
        trainer.run_history.get_latest_metric("train_loss_epoch")
    ]


@pytest.mark.parametrize(
    ("run", "said", "endings"),
    [
        (
            lambda trainer, data: trainer.train(data, 3, data),
            "In the evaluation of epoch 1, .* batch 0 .*, so 'eval_loss_epoch' would be",
            ("stop", "training end"),
        ),
        (
            lambda trainer, data: trainer.evaluate(data),
            "In the evaluation, .* batch 0 .*, so 'evaluation_loss' would be",
            ("stop", "evaluation end"),
        ),
    ],
)
def test_a_bad_evaluation_loss_ends_the_run_with_an_error(
    run: Callable[[Trainer, Any], Any], said: str, endings: tuple[str, ...]
):
    trainer, seen = bad_loss_trainer(None, NAN)
    with pytest.raises(NonFiniteLossError, match=said) as caught:
        run(trainer, regression_data(8))
    assert "learning rate" not in str(caught.value)  # no update has anything to do with it
    assert seen.seen == endings


# Values at which a run ends


@pytest.mark.parametrize(
    ("scores", "limits", "epochs"),
    [
        ([0.1, 0.5, 0.9, 0.95], {"at_least": 0.9}, 3),
        ([5, 4, 3, 2], {"at_most": 3.5}, 3),
        ([5, NAN, 40, 2], {"at_least": 30, "at_most": 1}, 3),
        ([5, 4, 3, 2], {"at_least": 9}, 4),
    ],
)
def test_a_run_ends_when_its_metric_reaches_a_value(
    scores: list[float], limits: dict[str, float], epochs: int, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = score_trainer(scores, StopAtCallback("score", **limits), *DEFAULT_CALLBACKS)
    assert epochs_run(trainer, 4) == epochs
    assert ("score has reached" in capsys.readouterr().out) is (epochs < 4)


def test_a_resumed_run_that_had_reached_its_value_stops_again_unless_the_limit_has_changed(tmp_path: Path) -> None:
    def resume(limit: float) -> int:
        stop = StopAtCallback("score", at_least=limit)
        trainer = score_trainer([1, 2, 3, 4], stop, SaveTrainingStateCallback(tmp_path))
        return epochs_run(trainer, 4, resume_from=tmp_path)

    assert [resume(2), resume(2), resume(9)] == [2, 2, 4]


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: EarlyStoppingCallback(0), "early_stopping_patience` is 0"),
        (lambda: EarlyStoppingCallback(early_stopping_threshold=-0.1), "early_stopping_threshold` is -0.1"),
        (lambda: EarlyStoppingCallback(early_stopping_threshold=NAN), "early_stopping_threshold` is nan"),
        (lambda: StopAtCallback("score"), "StopAtCallback"),
        (lambda: StopAtCallback("score", at_least=NAN), "StopAtCallback"),
        (lambda: StopAtCallback("score", at_most="low"), "StopAtCallback"),  # type: ignore[arg-type]
        (lambda: StopAtCallback("score", at_least=1, at_most=1), "StopAtCallback"),
        (lambda: StopAtCallback("score", at_least=0, at_most=5), "StopAtCallback"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make: Callable[[], Any], complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        make()
