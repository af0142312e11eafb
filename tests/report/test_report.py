"""The page of a run: what it shows is what the run did, whatever ends it, and the run is as without it."""

import base64
import io
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_diabetes
from sklearn.metrics import accuracy_score, confusion_matrix, f1_score, precision_recall_fscore_support
from torch import nn
from torch.nn.functional import binary_cross_entropy, cross_entropy, mse_loss
from torch.utils.data import TensorDataset

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import (
    MetricsCallback,
    PrintProgressCallback,
    ReportCallback,
    ResultCallback,
    SaveBestModelCallback,
    SaveTrainingStateCallback,
    TrainerCallback,
)
from pytorch_accelerated.errors import StopTrainingError
from pytorch_accelerated.extras.report.contents import environment_facts
from pytorch_accelerated.extras.report.predictions import as_data_uri
from tests.huggingface import texts
from tests.report.digits import EVAL, TRAIN, At, Broken, outputs_of, run_on_page, train, trainer_with
from tests.support.processes import run_on_ranks


def test_the_page_shows_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    report = ReportCallback(tmp_path / "run.html", notes={"size": 3, "kind": Path})
    trainer = train(trainer_with(report, PrintProgressCallback), 3)
    run = run_on_page(tmp_path / "run.html")
    history = trainer.run_history
    shown = {metric["name"]: metric["value"] for metric in run["metrics"]}
    assert shown == {name: history.get_metric_values(name) for name in history.get_metric_names()}
    assert run["name"] == "run"
    assert run["state"]["status"] == "finished"
    assert (run["state"]["epoch"], run["state"]["updates"]) == (3, 30)
    assert run["model"]["class"] == "Sequential"
    assert run["model"]["parameters"] == 650
    assert run["model"]["optimizer"] == "SGD"
    assert run["model"]["optimizer.lr"] == 0.5
    assert run["config"] == json.loads(json.dumps(trainer.run_config.to_dict()))
    assert run["environment"]["torch"] == torch.__version__
    assert run["notes"] == {"size": 3, "kind": repr(Path)}
    assert [epoch["epoch"] for epoch in run["epochs"]] == [1, 2, 3]
    assert all(epoch["wall_seconds"] >= epoch["seconds"] > 0 for epoch in run["epochs"])
    best = {each["name"]: each for each in run["best"]}["eval_loss_epoch"]
    assert best["value"] == min(history.get_metric_values("eval_loss_epoch"))
    assert best["is_main"]
    last = history.step_records[-1]
    assert run["state"]["samples_per_second"] == last.samples / last.seconds
    assert f"{last.samples / last.seconds:.0f} samples/s of wall time" in capsys.readouterr().out


def test_classes_and_worst_samples_are_those_of_the_last_evaluation(tmp_path: Path):
    names = [f"digit {label}" for label in range(10)]
    trainer = train(trainer_with(ReportCallback(tmp_path / "run.html", class_names=names, num_samples=5)))
    run = run_on_page(tmp_path / "run.html")
    images, labels = EVAL.tensors
    outputs = outputs_of(trainer)
    predictions = outputs.argmax(dim=1)
    assert (
        run["predictions"][""]["classes"]["matrix"] == confusion_matrix(labels, predictions, labels=range(10)).tolist()
    )
    scores = precision_recall_fscore_support(labels, predictions, labels=range(10), zero_division=np.nan)
    for label, row in enumerate(run["predictions"][""]["classes"]["table"]):
        assert row["name"] == names[label]
        found = [row[name] for name in ("precision", "recall", "f1", "support")]
        assert found == pytest.approx([score[label] for score in scores])
    losses = cross_entropy(outputs, labels, reduction="none")
    worst = losses.topk(5).indices
    rows = run["predictions"][""]["samples"]["rows"]
    assert [row["loss"] for row in rows] == pytest.approx(losses[worst].tolist(), rel=1e-4)
    assert [row["target"] for row in rows] == [names[label] for label in labels[worst].tolist()]
    assert [row["prediction"] for row in rows] == [names[label] for label in predictions[worst].tolist()]
    assert [row["image"] for row in rows] == [as_data_uri(image) for image in images[worst]]


def test_the_page_shows_the_model_that_is_kept(tmp_path: Path):
    class Worse(TrainerCallback):
        """After the second epoch, each evaluation is of weights that are nothing."""

        def on_eval_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
            if trainer.run_history.current_epoch > 2:
                with torch.no_grad():
                    trainer.get_model()[1].weight.zero_()

    def run(order: int, **kwargs: Any) -> tuple[dict[str, Any], Trainer]:
        report = ReportCallback(tmp_path / "run.html", num_samples=5)
        best = SaveBestModelCallback(tmp_path / "best.pt")
        saving = SaveTrainingStateCallback(tmp_path / "states", save_every_n_epochs=1)
        trainer = trainer_with(Worse(), *[best, report][::order], saving)
        train(trainer, 4, **kwargs)
        return run_on_page(tmp_path / "run.html")["predictions"][""], trainer

    for found, trainer in (run(1), run(-1), run(1, resume_from=tmp_path / "states" / "epoch_3")):
        assert found["of"] == "epoch 2, the weights loaded at the end"
        predictions = outputs_of(trainer).argmax(dim=1)
        labels = EVAL.tensors[1]
        assert found["classes"]["matrix"] == confusion_matrix(labels, predictions, labels=range(10)).tolist()
        assert found["classes"]["correct"] > 50


def test_a_seed_that_nobody_chose_is_not_what_runs_differ_in(tmp_path: Path):
    runs = []
    for seed in (None, 7):
        trainer = trainer_with(ReportCallback(tmp_path / "run.html"))
        trainer.seed = seed
        runs.append(run_on_page(train(trainer, 1).callback_handler.callbacks[-1].path))
    assert "seed" not in runs[0]["config"]
    assert {"torch_seed", "derived_seed"} <= set(runs[0]["environment"])
    assert runs[1]["config"]["seed"] == 7
    assert not {"torch_seed", "derived_seed"} & set(runs[1]["environment"])


ON_RANKS = """
import os
import torch.distributed as dist

from pytorch_accelerated.callbacks import ReportCallback, ResultCallback, SaveTrainingStateCallback
from tests.report.digits import EVAL, train, trainer_with
from tests.report.test_report import FailsOnTheLastRank, with_own_weights

for batch_size in (7, 80):  # 80: the second rank has fewer rows, and then none
    trainer = with_own_weights(trainer_with(ReportCallback(f"{batch_size}.html")))
    trainer.evaluate(EVAL, per_device_batch_size=batch_size)
assert dist.get_world_size() == 2
for num_epochs in (2, 3):
    callbacks = [ReportCallback("trained.html"), ResultCallback("result.json"), SaveTrainingStateCallback("states")]
    trainer = trainer_with(*callbacks)
    train(trainer, num_epochs, resume_from="states" if num_epochs == 3 else None)
    assert trainer.run_context.parts.ranks.count == 2
if dist.get_rank() == 0:
    print(os.getpid(), trainer.run_history.get_latest_metric("train_loss_epoch"))
FailsOnTheLastRank.is_last = dist.get_rank() == 1
report = FailsOnTheLastRank("failed.html")
assert 0 < trainer_with(report).evaluate(EVAL, per_device_batch_size=10)["evaluation_loss"] < 9
dist.destroy_process_group()
"""


@pytest.mark.processes
def test_two_ranks_show_what_one_process_shows_continue_their_page_and_write_one_result(tmp_path: Path):
    alone = with_own_weights(trainer_with(ReportCallback(tmp_path / "alone.html")))
    alone.evaluate(EVAL, per_device_batch_size=10)
    images, labels = EVAL.tensors
    losses_of_samples = cross_entropy(outputs_of(alone), labels, reduction="none").tolist()
    first, second = run_on_ranks(ON_RANKS, 2, cwd=tmp_path).stdout_of_ranks
    for batch_size in (7, 80):
        one, two = run_on_page(tmp_path / "alone.html"), run_on_page(tmp_path / f"{batch_size}.html")
        assert two["environment"]["processes"] == 2
        assert two["predictions"][""]["classes"] == one["predictions"][""]["classes"]
        losses = [[row["loss"] for row in run["predictions"][""]["samples"]["rows"]] for run in (one, two)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
        rows = two["predictions"][""]["samples"]["rows"]
        assert len({row["image"] for row in rows}) > 6
        for row in rows:  # is the sample that it says it is
            sample = row["index"]
            assert row["loss"] == pytest.approx(losses_of_samples[sample], rel=1e-4)
            assert row["target"] == str(labels[sample].item())
            assert row["image"] == as_data_uri(images[sample])
    run = run_on_page(tmp_path / "trained.html")
    assert [epoch["epoch"] for epoch in run["epochs"]] == [1, 2, 3]
    assert run["steps"]["update"] == list(range(1, 16))  # 30 samples on each of two ranks
    assert run["predictions"][""]["classes"]["total"] == 137
    result = json.loads((tmp_path / "result.json").read_text())
    assert second == ""
    assert [result["pid"], result["metrics"]["train_loss_epoch"]] == [float(word) for word in first.split()[-2:]]
    assert (result["status"], result["updates"], result["config"]["num_processes"]) == ("finished", 15, 2)


def with_own_weights(trainer: Trainer) -> Trainer:
    """The same weights in every process, which predict different classes."""
    linear = trainer.model[1]  # type: ignore[index]
    nn.init.zeros_(linear.weight)
    linear.weight.data[:, ::7] = torch.linspace(-1, 1, 100).reshape(10, 10)
    return trainer


def test_the_page_is_complete_whenever_it_is_read(tmp_path: Path):
    seen = []

    class Reader(TrainerCallback):
        def on_train_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
            run = run_on_page(tmp_path / "run.html")
            seen.append((run["state"]["status"], run["state"]["updates"]))

    train(trainer_with(ReportCallback(tmp_path / "run.html", seconds_between_writes=0), Reader()), 2)
    assert {status for status, _ in seen} == {"running"}
    assert [updates for _, updates in seen] == sorted(updates for _, updates in seen)
    assert seen[-1][1] >= 0
    assert [path.name for path in tmp_path.iterdir()] == ["run.html"]


def test_a_resumed_run_continues_its_page(tmp_path: Path):
    def trainer(*others: TrainerCallback) -> Trainer:
        report = ReportCallback(tmp_path / "run.html")
        saving = SaveTrainingStateCallback(tmp_path / "states", save_every_n_steps=7)
        return trainer_with(SaveBestModelCallback(tmp_path / "best.pt"), saving, report, *others)

    with pytest.raises(RuntimeError, match="power cut"):
        train(trainer(At(25, RuntimeError("power cut"))), 4)
    failed = run_on_page(tmp_path / "run.html")
    assert failed["state"]["status"] == "failed"
    assert failed["state"]["detail"] == "RuntimeError: power cut"
    assert [epoch["epoch"] for epoch in failed["epochs"]] == [1, 2]

    resumed = train(trainer(), 4, resume_from=tmp_path / "states")
    run = run_on_page(tmp_path / "run.html")
    assert run["state"]["status"] == "finished"
    assert run["state"]["started"] == failed["state"]["started"]
    assert run["state"]["seconds"] > sum(epoch["wall_seconds"] for epoch in run["epochs"][:2])
    assert [epoch["epoch"] for epoch in run["epochs"]] == [1, 2, 3, 4]
    updates = next(metric["update"] for metric in run["metrics"] if metric["name"] == "eval_loss_epoch")
    assert updates == [10, 20, 30, 40] == [r.update for r in resumed.run_history.records if r.name == "eval_loss_epoch"]
    assert run["steps"]["update"] == list(range(1, 41))  # no gap, no double
    what = [event["what"] for event in run["events"]]
    assert what.count("resumed") == 1
    assert "saved" in what
    assert "best model" in what
    assert "failed" not in what  # it was after the state from which the run was resumed


def test_events_stand_where_they_happened(tmp_path: Path):
    class EndAfterEpoch(TrainerCallback):
        def on_training_run_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
            if trainer.run_history.current_epoch == 3:
                raise StopTrainingError("three are enough")

    saver = SaveTrainingStateCallback(tmp_path / "states", save_every_n_steps=4, max_checkpoints=1)
    trainer = trainer_with(saver, EndAfterEpoch(), ReportCallback(tmp_path / "run.html"))
    train(trainer, 5)
    trainer.evaluate(EVAL)
    events = run_on_page(tmp_path / "run.html")["events"]
    found = [(event["what"], event["epoch"], event["update"], Path(event["text"]).name) for event in events]
    assert [event for event in found if event[0] == "saved"] == [
        *[("saved", (step + 9) // 10, step, f"step_{step}") for step in range(4, 31, 4)],
        ("saved", 3, 30, "final"),
    ]
    assert ("stopped", 3, 30, "three are enough") in found
    assert found[-1][:3] == ("evaluate()", 3, 30)
    assert [event["time"] for event in events] == sorted(event["time"] for event in events)


def test_a_stopped_run_says_why(tmp_path: Path):
    train(trainer_with(At(13, StopTrainingError("enough </script> seen")), ReportCallback(tmp_path / "run.html")))
    run = run_on_page(tmp_path / "run.html")
    assert (run["state"]["status"], run["state"]["detail"]) == ("stopped", "enough </script> seen")
    assert (tmp_path / "run.html").read_text().count("</script>") == 3  # text of a run cannot end one


def test_skipped_updates_and_values_that_are_no_numbers_are_shown(tmp_path: Path):
    class Records(TrainerCallback):
        def on_eval_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
            trainer.run_history.update_metric("eval_ratio", float("inf"))
            trainer.run_history.update_metric("eval_matrix", torch.eye(2))

    report = ReportCallback(tmp_path / "run.html")
    with pytest.warns(UserWarning, match="cannot be applied"):
        train(trainer_with(Records(), report, trainer_class=Broken), 1, nonfinite_policy="skip")
    run = run_on_page(tmp_path / "run.html")
    assert run["state"]["skipped_updates"] == 2
    assert [event["text"] for event in run["events"] if event["what"] == "skipped"] == [
        "2 updates, gradients not finite"
    ]
    assert {metric["name"]: metric["value"] for metric in run["metrics"]}["eval_ratio"] == ["inf"]
    assert "eval_matrix" not in {metric["name"] for metric in run["metrics"]}


def test_a_run_that_went_back_to_a_state_completes_its_page(tmp_path: Path):
    class Broken(Trainer):
        has_failed = False

        def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
            output = super().calculate_train_batch_loss(batch)
            if self.run_state.updates == 13 and not self.has_failed:
                self.has_failed = True
                output["loss"] = output["loss"] * torch.nan
            return output

    ends: list[str] = []
    states = SaveTrainingStateCallback(tmp_path / "states", save_every_n_steps=4)
    callbacks = (states, ReportCallback(tmp_path / "run.html"), AtEnd(ends))
    trainer = trainer_with(*callbacks, trainer_class=Broken)
    with pytest.warns(UserWarning, match="goes back to"):
        train(trainer, nonfinite_policy="rollback")
    assert ends == ["end"]
    run = run_on_page(tmp_path / "run.html")
    assert run["state"]["status"] == "finished"
    assert run["steps"]["update"][-1] == run["state"]["updates"] == trainer.run_state.updates
    train(trainer, 1)
    assert [epoch["epoch"] for epoch in run_on_page(tmp_path / "run.html")["epochs"]] == [1]


class AtEnd(TrainerCallback):
    def __init__(self, seen: list[str]) -> None:
        self.seen = seen

    def on_training_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.seen.append("end")


class FailsOnTheLastRank(ReportCallback):
    def get_inputs(self, batch: Any) -> Any:
        raise ValueError("no inputs for a page") if self.is_last else super().get_inputs(batch)

    is_last = True


def test_a_report_that_fails_costs_one_warning_and_the_run_is_the_same_to_the_bit(tmp_path: Path):
    ends: list[str] = []
    failing, result = FailsOnTheLastRank(tmp_path / "run.html"), ResultCallback(tmp_path / "result.json")
    plain, shown = trainer_with(), trainer_with(failing, result, AtEnd(ends))
    train(plain)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(shown)
    (message,) = [str(warning.message) for warning in caught]
    assert "FailsOnTheLastRank failed in `on_eval_step_end` (ValueError: no inputs for a page)" in message
    assert ends == ["end"]
    torch.testing.assert_close(shown.model.state_dict(), plain.model.state_dict(), rtol=0, atol=0)
    run = run_on_page(tmp_path / "run.html")
    assert (run["state"]["status"], run["state"]["updates"]) == ("finished", 20)
    assert run["predictions"][""]["samples"] is None


def test_an_evaluation_after_training_keeps_the_curves(tmp_path: Path):
    trainer = train(trainer_with(ReportCallback(tmp_path / "run.html")))
    curves = run_on_page(tmp_path / "run.html")["metrics"]
    trainer.evaluate(TRAIN, per_device_batch_size=50)
    run = run_on_page(tmp_path / "run.html")
    assert run["metrics"] == curves
    assert run["state"]["status"] == "finished"
    predictions = run["predictions"][""]
    assert (predictions["of"], predictions["classes"]["total"]) == ("evaluate()", 300)
    assert run["events"][-1]["text"].startswith("evaluation_loss ")


def one_by_one(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.binary_cross_entropy_with_logits(outputs, targets)


@pytest.mark.parametrize("kind", ["labels", "one logit", "own loss", "maps"])
def test_predictions_are_those_of_the_loss_and_of_scikit_learn(kind: str, tmp_path: Path):
    generator = torch.Generator().manual_seed(0)
    width = {"labels": 5, "maps": 3}.get(kind, 1)
    inputs = torch.randn(60, width, *((4, 4) if kind == "maps" else ()), generator=generator)
    noise = torch.randn(inputs.shape, generator=generator)
    targets = (inputs + noise).argmax(1) if kind == "maps" else (inputs + noise > 0).float()
    model = nn.Conv2d(3, 3, 1) if kind == "maps" else nn.Linear(width, width)
    nn.init.dirac_(model.weight) if kind == "maps" else nn.init.eye_(model.weight)
    loss: Any = {"maps": nn.CrossEntropyLoss(), "own loss": one_by_one}.get(kind, nn.BCEWithLogitsLoss())
    trainer = Trainer(model, loss, None, callbacks=[ReportCallback(tmp_path / "run.html", num_samples=8)])
    trainer.evaluate((inputs, targets), per_device_batch_size=7)
    found = run_on_page(tmp_path / "run.html")["predictions"][""]
    with torch.no_grad():
        outputs = model(inputs)
    losses = [loss(outputs[[row]], targets[[row]]).item() for row in range(60)]
    predicted = outputs.argmax(1) if kind == "maps" else (outputs > 0).float()
    assert found["classes"]["correct"] == int((predicted == targets).sum())
    support = targets.sum(0).tolist() if kind == "labels" else None
    if kind == "maps":
        assert found["classes"]["matrix"] == confusion_matrix(targets.flatten(), predicted.flatten()).tolist()
        return
    worst = sorted(range(60), key=lambda row: -losses[row])[:8]
    assert [row["index"] for row in found["samples"]["rows"]] == worst
    assert [row["loss"] for row in found["samples"]["rows"]] == pytest.approx([losses[row] for row in worst], rel=1e-5)
    assert [row["is_right"] for row in found["samples"]["rows"]] == [
        bool((predicted[row] == targets[row]).all()) for row in worst
    ]
    if support:
        table = found["classes"]["table"]
        expected = f1_score(targets.numpy(), predicted.numpy(), average=None)
        assert [row["f1"] for row in table] == pytest.approx(expected.tolist())
        assert [row["support"] for row in table] == support
        assert found["scatter"] is None


def test_regression_shows_what_is_predicted_over_what_is_true(tmp_path: Path):
    inputs, targets = load_diabetes(return_X_y=True)
    data = TensorDataset(torch.tensor(inputs).float(), torch.tensor(targets).float()[:, None] / 100)
    model = nn.Linear(10, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, nn.MSELoss(), optimizer, callbacks=[ReportCallback(tmp_path / "run.html")])
    trainer.train(data, 1, data, per_device_batch_size=64)
    run = run_on_page(tmp_path / "run.html")
    assert run["predictions"][""]["classes"] is None
    assert run["predictions"][""]["scatter"]["truth"] == pytest.approx(data.tensors[1][:, 0].tolist())
    with torch.no_grad():
        outputs = model(data.tensors[0])
    assert run["predictions"][""]["scatter"]["prediction"] == pytest.approx(outputs[:, 0].tolist(), rel=1e-4)
    errors = (outputs - data.tensors[1]).square()[:, 0]
    worst = errors.topk(12)
    assert [row["loss"] for row in run["predictions"][""]["samples"]["rows"]] == pytest.approx(
        worst.values.tolist(), rel=1e-4
    )
    assert run["predictions"][""]["samples"]["rows"][0]["values"].startswith(f"{inputs[worst.indices[0], 0]:.4g}, ")


def test_two_classes_from_one_logit_are_classes(tmp_path: Path):
    images, labels = TRAIN.tensors
    data = TensorDataset(images.flatten(1), (labels > 4).float()[:, None])
    model = nn.Linear(64, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, nn.BCEWithLogitsLoss(), optimizer, callbacks=[ReportCallback(tmp_path / "run.html")])
    trainer.train(data, 1, data, per_device_batch_size=64)
    with torch.no_grad():
        predicted = model(data.tensors[0]) > 0
    matrix = confusion_matrix(data.tensors[1][:, 0], predicted[:, 0].float()).tolist()
    assert run_on_page(tmp_path / "run.html")["predictions"][""]["classes"]["matrix"] == matrix


@pytest.mark.parametrize("leaves_out", [False, True])
def test_targets_that_a_hook_has_changed_are_those_of_the_page_as_they_are_of_the_loss(
    leaves_out: bool, tmp_path: Path
):
    def changed(batch: Any) -> Any:
        images, labels = batch
        counts = labels < 5 if leaves_out else labels >= 0
        return images[counts], 9 - labels[counts]

    class Changing(Trainer):
        def calculate_eval_batch_loss(self, batch: Any) -> dict[str, Any]:
            return super().calculate_eval_batch_loss(changed(batch))

    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    callbacks = [ReportCallback(tmp_path / "run.html", num_samples=3)]
    Changing(model, nn.CrossEntropyLoss(), None, callbacks=callbacks).evaluate(EVAL, per_device_batch_size=7)
    images, targets = changed(EVAL.tensors)
    with torch.no_grad():
        outputs = model(images)
    found = run_on_page(tmp_path / "run.html")["predictions"][""]
    classes = sorted({*targets.tolist(), *outputs.argmax(1).tolist()})
    matrix = np.array(found["classes"]["matrix"])[np.ix_(classes, classes)]
    assert matrix.tolist() == confusion_matrix(targets, outputs.argmax(1), labels=classes).tolist()
    losses, places = cross_entropy(outputs, targets, reduction="none").topk(3)
    rows = found["samples"]["rows"]
    assert [row["loss"] for row in rows] == pytest.approx(losses.tolist(), rel=1e-5)
    assert [row["index"] for row in rows] == (3 * [None] if leaves_out else places.tolist())


def evaluated(path: Path, model: nn.Module, loss: Any, data: Any, *others: TrainerCallback, **kwargs: Any) -> Any:
    """What the page shows of an evaluation of a model."""
    trainer = Trainer(model, loss, None, callbacks=[*others, ReportCallback(path, **kwargs)])
    trainer.evaluate(data, per_device_batch_size=7)
    return run_on_page(path)["predictions"][""]


def own(loss: Any) -> Any:
    """A loss function that tells nothing of what it takes."""
    return lambda outputs, targets: loss(outputs, targets)


@pytest.mark.parametrize("whole", [False, True])
def test_probabilities_with_a_loss_of_ones_own_are_left_out_until_somebody_says_that_they_are(
    whole: bool, tmp_path: Path
):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(60, 1, generator=generator)
    truth = inputs[:, 0] + torch.randn(60, generator=generator) > 0.5
    model = nn.Sequential(nn.Linear(1, 1), nn.Sigmoid(), nn.Flatten(0))
    loss = own(lambda outputs, targets: binary_cross_entropy(outputs, targets.float()))
    data = inputs, truth.long() if whole else truth.float()
    found = evaluated(tmp_path / "run.html", model, loss, data)
    assert (found["classes"], found["scatter"], found["samples"]) == (None, None, None)
    assert "`scores='probabilities'`" in found["notes"][0]

    said = MetricsCallback(["accuracy"], scores="probabilities", average="macro")
    found = evaluated(tmp_path / "run.html", model, loss, data, said)
    with torch.no_grad():
        probabilities = model(inputs)
    assert found["classes"]["matrix"] == confusion_matrix(truth, probabilities > 0.5).tolist()
    losses = binary_cross_entropy(probabilities, truth.float(), reduction="none").sort(descending=True)
    assert [row["index"] for row in found["samples"]["rows"]] == losses.indices[:12].tolist()
    confidence = torch.maximum(probabilities, 1 - probabilities)[losses.indices[:12]]
    assert [row["confidence"] for row in found["samples"]["rows"]] == pytest.approx(confidence.tolist())
    assert found["notes"] == []


def test_the_confidence_of_probabilities_is_theirs_or_left_out(tmp_path: Path):
    images, labels = EVAL.tensors
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Softmax(1))
    loss = own(lambda outputs, targets: cross_entropy(outputs.log(), targets))
    with torch.no_grad():
        probabilities = model(images)
    found = evaluated(tmp_path / "run.html", model, loss, EVAL)
    assert found["classes"]["matrix"] == confusion_matrix(labels, probabilities.argmax(1)).tolist()
    assert {row["confidence"] for row in found["samples"]["rows"]} == {None}
    assert "`scores='probabilities'`" in found["notes"][0]

    said = MetricsCallback(["accuracy"], scores="probabilities")
    found = evaluated(tmp_path / "run.html", model, loss, EVAL, said)
    rows = [row["index"] for row in found["samples"]["rows"]]
    confidence = [row["confidence"] for row in found["samples"]["rows"]]
    assert confidence == pytest.approx(probabilities.max(1).values[rows].tolist())
    assert found["notes"] == []


def test_whole_numbers_with_a_loss_of_ones_own_are_numbers_unless_they_are_all_0_or_1(tmp_path: Path):
    inputs, targets = (torch.tensor(part) for part in load_diabetes(return_X_y=True))
    data = inputs.float()[:100], targets.long()[:100]
    model = nn.Sequential(nn.Linear(10, 1), nn.Flatten(0))
    loss = own(lambda outputs, targets: mse_loss(outputs, targets.float()))
    found = evaluated(tmp_path / "run.html", model, loss, data)
    assert (found["classes"], found["notes"]) == (None, [])
    assert found["scatter"]["truth"] == data[1].tolist()
    with torch.no_grad():
        errors = (model(data[0]) - data[1]).square().sort(descending=True)
    assert [row["index"] for row in found["samples"]["rows"]] == errors.indices[:12].tolist()
    assert [row["loss"] for row in found["samples"]["rows"]] == pytest.approx(errors.values[:12].tolist(), rel=1e-5)


def test_labels_or_one_hot_classes_with_a_loss_of_ones_own_are_left_out_until_somebody_says_which(tmp_path: Path):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(60, 3, generator=generator)
    truth = (inputs + torch.randn(60, 3, generator=generator)).argmax(1)
    data = inputs, nn.functional.one_hot(truth, 3).float()
    model = nn.Linear(3, 3)
    nn.init.eye_(model.weight)
    found = evaluated(tmp_path / "run.html", model, own(cross_entropy), data)
    assert (found["classes"], found["scatter"], found["samples"]) == (None, None, None)
    assert "`task`" in found["notes"][0]
    said = MetricsCallback(["accuracy"], task="multiclass")
    found = evaluated(tmp_path / "run.html", model, own(cross_entropy), data, said)
    with torch.no_grad():
        assert found["classes"]["matrix"] == confusion_matrix(truth, model(inputs).argmax(1)).tolist()
    assert found["notes"] == []


class OfTokens(nn.Module):
    """A model of tokens that computes its own loss, and does not say of which tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Embedding(12, 12)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.scores(input_ids)
        return {"loss": cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def of_tokens(kind: str) -> Any:
    if kind == "own":
        return OfTokens()
    import transformers

    if kind == "BartForCausalLM":
        bart: Any = transformers.BartConfig
        sizes = {"d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 1, "decoder_ffn_dim": 16}
        return transformers.BartForCausalLM(bart(vocab_size=12, **sizes))
    if kind.startswith("Bert"):
        bert: Any = transformers.BertConfig
        sizes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 1}
        labels = {"num_labels": 12} if kind == "BertForTokenClassification" else {}
        return getattr(transformers, kind)(bert(vocab_size=12, **labels, **sizes))
    return texts.tiny_llama() if kind == "Llama" else texts.tiny_language_model()


@pytest.mark.parametrize(
    "kind", ["GPT2", "Llama", "BertForMaskedLM", "BertForTokenClassification", "BartForCausalLM", "own"]
)
def test_tokens_of_a_model_with_its_own_loss_are_compared_with_those_of_the_loss(kind: str, tmp_path: Path):
    torch.manual_seed(0)
    model = of_tokens(kind)
    tokens = torch.randint(4, 9, (20, 9))
    labels = tokens.clone()
    labels[::2, 5:] = -100
    data = {"input_ids": tokens, "labels": labels}
    found = evaluated(tmp_path / "run.html", model, None, data)
    if kind in ("BartForCausalLM", "own"):
        assert found["classes"] is None
        assert "`targets='labels'`" in found["notes"][0]
        said = MetricsCallback(["accuracy"], targets="labels")
        found = evaluated(tmp_path / "run.html", model, None, data, said)
    with torch.no_grad():
        predicted = model.eval()(input_ids=tokens, labels=tokens)["logits"].argmax(-1)
    if kind in ("GPT2", "Llama"):
        predicted, labels = predicted[:, :-1], labels[:, 1:]
    counts = labels >= 0
    assert found["classes"]["total"] == counts.sum()
    assert found["classes"]["correct"] == accuracy_score(labels[counts], predicted[counts], normalize=False)
    are_named = all(row["name"].startswith("LABEL_") for row in found["classes"]["table"])
    assert are_named == (kind == "BertForTokenClassification")
    assert found["notes"] == [
        "Worst predictions are left out: a sample has many targets, such as of its pixels or tokens."
    ]


@pytest.mark.parametrize("number", [2, 3, 5])
def test_names_of_another_number_of_classes_are_not_used_and_a_line_says_so(number: int, tmp_path: Path):
    torch.manual_seed(0)
    data = torch.randn(20, 4), torch.arange(20) % 3
    names = ["a", "b", "c", "d", "e"][:number]
    found = evaluated(tmp_path / "run.html", nn.Linear(4, 3), nn.CrossEntropyLoss(), data, class_names=names)
    assert found["classes"]["names"] == (names if number == 3 else ["0", "1", "2"])
    line = f"`class_names` has {number} names, and there are 3 classes, so they have numbers here."
    assert found["notes"] == ([] if number == 3 else [line])


def test_more_classes_than_a_page_can_show_have_a_line(tmp_path: Path):
    data = torch.randn(20, 4), torch.arange(20)
    found = evaluated(tmp_path / "run.html", nn.Linear(4, 2000), nn.CrossEntropyLoss(), data)
    assert found["classes"] is None
    assert found["notes"] == ["Classes are left out: there are 2000, and a page shows at most 1000."]


def test_targets_to_be_ignored_and_outputs_of_other_shapes_are_left_out(tmp_path: Path):
    images, labels = EVAL.tensors
    some = labels.clone()
    some[::3] = -100
    trainer = trainer_with(ReportCallback(tmp_path / "run.html"))
    trainer.train(TRAIN, 1, TensorDataset(images, some), per_device_batch_size=50)
    run = run_on_page(tmp_path / "run.html")
    assert run["predictions"][""]["classes"]["total"] == (some >= 0).sum()
    assert "-100" not in {row["target"] for row in run["predictions"][""]["samples"]["rows"]}

    class Sequences(Trainer):
        def calculate_eval_batch_loss(self, batch: Any) -> dict[str, Any]:
            output = super().calculate_eval_batch_loss(batch)
            return {**output, "model_outputs": output["model_outputs"][:, None].expand(-1, 3, -1)}

    train(trainer_with(ReportCallback(tmp_path / "run.html"), trainer_class=Sequences))
    run = run_on_page(tmp_path / "run.html")
    nothing = {"of": "epoch 2", "epoch": 2, "classes": None, "scatter": None, "samples": None}
    notes = run["predictions"][""].pop("notes")
    assert run["predictions"] == {"": nothing}
    assert "`get_predictions_and_targets`" in notes[0]


def test_secrets_on_the_command_line_are_not_shown(monkeypatch: pytest.MonkeyPatch):
    arguments = ["train.py", "--lr", "0.1", "--hub-token", "hf_abc", "--api_key=abc", "--password", "--name", "x"]
    monkeypatch.setattr("sys.argv", arguments)
    command = environment_facts(torch.device("cpu"), 1)["command"]
    assert command == "train.py --lr 0.1 --hub-token '***' '--api_key=***' --password --name x"


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 20, 30), (4, 9, 9), (300, 200), (3, 500, 250)])
def test_a_picture_has_the_pixels_of_the_input(shape: tuple[int, ...]):
    row = torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 7 - 3
    png = base64.b64decode(as_data_uri(row).removeprefix("data:image/png;base64,"))
    picture = Image.open(io.BytesIO(png))
    kept = row.reshape(-1, *row.shape[-2:])[:3]
    assert picture.mode == ("L" if len(kept) == 1 else "RGB")
    assert max(picture.size) <= 128
    if max(row.shape) <= 128:
        low, high = kept.min(), kept.max()
        expected = ((kept - low) / (high - low) * 255).round().permute(1, 2, 0)
        assert np.abs(np.array(picture, dtype=int).reshape(expected.shape) - expected.numpy()).max() <= 1


def test_the_state_of_the_page_is_plain(tmp_path: Path):
    report = ReportCallback(tmp_path / "run.html")
    train(trainer_with(report))
    state = report.state_dict()
    text = state["page"].numpy().tobytes().decode()
    for page in (state["page"], text):  # version 1.0 kept the text
        other = ReportCallback(tmp_path / "run.html")
        other.load_state_dict({"page": page})
        saved, loaded = (json.loads(each.state_dict()["page"].numpy().tobytes()) for each in (report, other))
        assert {**loaded, "seconds": 0} == {**saved, "seconds": 0}


def test_evaluation_sets_share_the_panels_of_their_quantities_and_worst_samples_have_their_indices(tmp_path):
    page = tmp_path / "run.html"
    accuracy = MetricsCallback({"accuracy": lambda outputs, targets: (outputs.argmax(1) == targets).float().mean()})
    trainer = trainer_with(accuracy, ReportCallback(page, num_samples=4))
    trainer.train(TRAIN, 1, {"clean": EVAL, "other_one": TRAIN}, per_device_batch_size=30)
    run = run_on_page(page)
    roles = {metric["name"]: (metric["role"], metric["quantity"]) for metric in run["metrics"]}
    assert roles["eval_clean_accuracy"] == ("eval clean", "accuracy")
    assert roles["eval_other_one_loss_epoch"] == ("eval other_one", "loss")
    inputs, targets = EVAL.tensors
    losses = nn.functional.cross_entropy(trainer.get_model()(inputs), targets, reduction="none")
    worst = [row["index"] for row in run["predictions"]["clean"]["samples"]["rows"]]
    assert worst == losses.topk(4).indices.tolist()


def test_spikes_and_what_is_left_out_are_among_the_events(tmp_path):
    class Strange(TrainerCallback):
        def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
            spike = {"loss": 9.0, "median": 2.0, "epoch": 1, "first_update": 7, "last_update": 7, "samples": [3, 5]}
            trainer.run_context.control.emitter.emit("on_loss_spike", **spike)

    trainer = trainer_with(Strange(), ReportCallback(tmp_path / "run.html"))
    trainer.train(TRAIN, 1, per_device_batch_size=30, leave_out={"rows": [4, 2], "updates": [3]})
    found = run_on_page(tmp_path / "run.html")["events"]
    events = [(event["update"], event["what"], event["text"]) for event in found]
    assert (0, "left out", "update 3; rows 2, 4 from update 1 on") in events
    assert (7, "loss spike", "9, where the median was 2") in events
    (spike,) = [event for event in found if event["what"] == "loss spike"]
    assert (spike["rows"], spike["number_of_rows"]) == ([3, 5], 2)
