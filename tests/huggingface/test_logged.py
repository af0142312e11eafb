"""What can be made of a log history: curves, tables, reports, and loss spikes."""

import json
from pathlib import Path
from typing import Any

import pytest

from pytorch_accelerated.__main__ import main
from pytorch_accelerated.errors import ConfigurationError, RunFileError
from pytorch_accelerated.huggingface import LoggedHistory, LossSpikeCallback, Trainer, TrainerCallback, TrainerState
from pytorch_accelerated.report.reading import read_run
from tests.huggingface.runs import Regression, Rows, make_arguments


def trained(folder: Path, *callbacks: TrainerCallback, **arguments: Any) -> Trainer:
    """A trainer after three epochs of five updates, with evaluations."""
    defaults = {"eval_strategy": "epoch", "save_strategy": "epoch", "logging_steps": 2, "num_train_epochs": 3}
    trainer = Trainer(
        Regression(),
        make_arguments(folder, **{**defaults, **arguments}),
        train_dataset=Rows(10),
        eval_dataset=Rows(5),
        callbacks=callbacks,
    )
    trainer.train()
    return trainer


def test_a_log_history_is_a_run_history(tmp_path: Path) -> None:
    trainer = trained(tmp_path)
    history = LoggedHistory(trainer.state.log_history)
    assert set(history.get_metric_names()) == {"loss", "eval_loss"}
    assert history.get_metric_values("loss") == [
        entry["loss"] for entry in trainer.state.log_history if "loss" in entry
    ]
    losses = [record for record in history.records if record.name == "eval_loss"]
    assert [(record.epoch, record.update) for record in losses] == [(1, 5), (2, 10), (3, 15)]

    figure = history.plot(path=tmp_path / "curves.png", compare={"the same": history})
    labels = [line.get_label() for line in figure.axes[0].get_lines()]
    assert {"this run, loss", "this run, eval_loss", "the same, loss"} <= set(labels)
    rings = history.plot().axes[0].texts
    assert [text.get_text() for text in rings] == [f"{min(record.value for record in losses):.4g}"]  # none on "loss"

    reread = TrainerState.load_from_json(str(tmp_path / "checkpoint-15" / "trainer_state.json")).log_history
    assert LoggedHistory(reread).records == history.records


def test_a_page_shows_a_run_from_its_folder_or_a_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    trainer = trained(folder)
    newest = read_run(folder)
    assert (newest.name, newest.state["updates"], newest.state["epoch"]) == ("results", 15, 3)
    older = read_run(folder / "checkpoint-5")
    assert (older.state["updates"], older.config["logging_steps"]) == (5, 2)
    trainer.save_state()
    from_log = read_run(folder)
    assert from_log.name == "results"
    assert {each["name"] for each in from_log.metrics} == {"loss", "eval_loss"}
    page = tmp_path / "page.html"
    assert main(["compare", str(folder), str(folder / "checkpoint-5"), "--output", str(page)]) == 0
    assert "checkpoint-5" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("text", ["{", "[]", "{}", json.dumps({"log_history": [1], "global_step": 1})])
def test_a_damaged_log_history_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "trainer_state.json"
    path.write_text(text)
    with pytest.raises(RunFileError, match=r"trainer_state\.json is not the state of a Hugging Face trainer"):
        read_run(path)


class Spoils(TrainerCallback):
    """Moves the weights far away before step 31, and back after it."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step in (30, 31):
            model.linear.bias.data += 100 if state.global_step == 30 else -100


def test_a_loss_spike_is_told_once_with_its_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Notes(LossSpikeCallback):
        def on_loss_spike(self, args: Any, state: Any, control: Any, **values: Any) -> None:
            super().on_loss_spike(args, state, control, **values)
            seen.append((state.global_step, values))

    seen: list[Any] = []
    arguments = {"num_train_epochs": 12, "logging_steps": 1, "learning_rate": 1e-5, "eval_strategy": "no"}
    trainer = trained(tmp_path, Notes(), Spoils(), **arguments)
    [(step, values)] = seen
    assert step == values["first_step"] == 31
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert values["loss"] == losses[30] > 10 * values["median"]
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Loss spike")]
    assert told == [f"Loss spike at epoch 6.20, step 31: {losses[30]:.4g}, where the median was {values['median']:.4g}"]


def test_a_threshold_that_is_no_number_above_0_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="`threshold` is 0"):
        LossSpikeCallback(0)
