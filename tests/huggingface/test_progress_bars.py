"""Progress bars of a run, what is logged above them, and what a log history becomes: curves, reports."""

import ast
import io
import sys
from pathlib import Path
from typing import Any

import pytest

from pytorch_accelerated.__main__ import main
from pytorch_accelerated.huggingface import (
    EarlyStoppingCallback,
    LoggedHistory,
    Trainer,
    TrainerCallback,
)
from pytorch_accelerated.huggingface.events import TrainerState
from pytorch_accelerated.record import bars
from pytorch_accelerated.record.bars import BarDisplay
from tests.huggingface.runs import Regression, Rows, make_arguments
from tests.support.terminal import in_a_terminal


@pytest.fixture(autouse=True)
def _bars_appear_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BarDisplay, "seconds_between_refreshes", 0.0)
    monkeypatch.setattr(bars, "_SECONDS_BETWEEN_FACTS", 0.0)


def scored_trainer(folder: Path, *scores: float, **arguments: Any) -> Trainer:
    """A trainer that shows its run, with epochs of five updates; its evaluations have these scores."""
    left = iter(scores)
    return Trainer(
        Regression(),
        make_arguments(folder, **{"disable_tqdm": False, **arguments}),
        train_dataset=Rows(10),
        eval_dataset=Rows(5),
        compute_metrics=lambda prediction: {"score": next(left)},
    )


def test_bars_show_training_and_evaluation_and_vanish(tmp_path: Path) -> None:
    with in_a_terminal() as terminal:
        trainer = scored_trainer(tmp_path, 0.5, max_steps=4, eval_strategy="steps", eval_steps=2, logging_steps=9)
        trainer.args.per_device_eval_batch_size = 2
        trainer.compute_metrics = None
        trainer.train()
        for share in ("training  25%", "evaluation  33%", "evaluation 100%", "training 100%"):
            assert share in terminal.received
        assert " steps/s" in terminal.received
        assert " batches/s" in terminal.received  # of the evaluation
        assert terminal.screen[-2].startswith("Finished 0.80 epochs, 4 steps in ")


def lines_of(text: str) -> list[list[str]]:
    """The words of each row, with the last one, a time, left out."""
    return [line.split()[:-1] for line in text.splitlines() if line and line.split()[0].replace(".", "").isdigit()]


def test_a_run_is_a_table_with_its_best_values_and_a_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = scored_trainer(
        tmp_path,
        0.25,
        0.75,
        0.5,
        num_train_epochs=3,
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_steps=5,
        load_best_model_at_end=True,
        metric_for_best_model="score",
    )
    trainer.train()
    output = capsys.readouterr().out
    rows = lines_of(output)
    assert [row[:2] for row in rows] == [["1", "5"], ["2", "10"], ["3", "15"]]  # losses and evaluations share rows
    assert ["0.2500*" in rows[0], "0.7500*" in rows[1], "0.5000" in rows[2]] == [True] * 3
    assert "eval_runtime" not in output
    summary, _, saved = output[output.index("Finished") :].partition("Saved:")
    finished, best = summary.splitlines()
    assert finished.startswith("Finished 3 epochs, 15 steps in ")
    assert best.startswith("Best eval_score 0.7500 (epoch 2, step 10), ")
    assert best.endswith(" samples/s of wall time")
    assert "best model" in saved
    assert str(tmp_path / "checkpoint-10") in saved


def test_the_summary_has_line_breaks_where_the_terminal_is_narrow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    with in_a_terminal(50) as terminal:
        scored_trainer(tmp_path, 0.5, 0.5, max_steps=4, eval_strategy="steps", eval_steps=2).train()
        summary = terminal.screen[[line[:8] for line in terminal.screen].index("Finished") :]
    assert not any("\\n" in line for line in summary)
    assert " ".join(" ".join(summary).split()).count("samples/s of wall time") == 1


def test_a_resumed_run_compares_with_the_values_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def train(epochs: int, score: float) -> str:
        strategies = {"eval_strategy": "epoch", "save_strategy": "epoch"}
        arguments = {**strategies, "num_train_epochs": epochs, "metric_for_best_model": "score"}
        scored_trainer(tmp_path, score, **arguments).train(resume_from_checkpoint=epochs > 1)
        return capsys.readouterr().out

    assert "0.7500*" in train(1, 0.75)
    resumed = train(2, 0.25)
    assert "*" not in resumed
    assert "Best eval_score 0.7500 (epoch 1, step 5)" in resumed


def test_a_row_is_printed_when_the_run_breaks_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Fails(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise ValueError("an evaluation of the user's")

    trainer = scored_trainer(tmp_path, 0.5, eval_strategy="epoch", logging_steps=5)
    trainer.add_callback(Fails())
    with pytest.raises(ValueError, match="an evaluation of the user's"):
        trainer.train()
    output = capsys.readouterr().out
    assert [row[:2] for row in lines_of(output)] == [["1", "5"]]
    assert "eval_loss" in output
    assert "Finished" not in output


def test_the_summary_says_why_a_run_stopped_early(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = {"eval_strategy": "epoch", "metric_for_best_model": "score", "num_train_epochs": 9}
    trainer = scored_trainer(tmp_path, 0.25, 0.5, 0.5, 0.52, 0.75, **arguments)
    stopping = EarlyStoppingCallback(2, 0.1)
    trainer.add_callback(stopping)
    trainer.train()
    stopped = capsys.readouterr().out.splitlines()
    trainer.compute_metrics = lambda prediction: {"score": 1.0}
    trainer.args.num_train_epochs = stopping.early_stopping_patience_counter = 1
    stopping.early_stopping_patience = 9
    trainer.train()
    finished = capsys.readouterr().out
    line = next(line for line in stopped if line.startswith("Stopped early after 4 epochs, 20 steps in "))
    assert line.endswith(": eval_score had no improvement by more than 0.1 in 2 evaluations")
    assert any(line.startswith("Best eval_score 0.5200 (epoch 4") for line in stopped)
    assert "Finished 1 epoch, 5 steps in" in finished
    assert stopping.reason_to_stop == ""


def test_without_bars_logs_are_dicts_and_there_is_no_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = scored_trainer(
        tmp_path, 0.5, disable_tqdm=True, num_train_epochs=1, logging_steps=5, eval_strategy="epoch"
    )
    trainer.train()
    printed = [ast.literal_eval(line) for line in capsys.readouterr().out.splitlines()]
    logged = [
        {name: value for name, value in entry.items() if name not in ("step", "total_flos")}
        for entry in trainer.state.log_history
    ]
    assert printed == logged
    trainer.state.is_local_process_zero = False
    trainer.log({"loss": 0.5})
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("disable_tqdm", [True, False])
def test_a_screen_that_lacks_characters_shows_escapes(
    disable_tqdm: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", screen)
    arguments = {"eval_strategy": "epoch", "save_strategy": "epoch", "disable_tqdm": disable_tqdm}
    trainer = scored_trainer(tmp_path / "模型", **arguments)
    trainer.compute_metrics = lambda prediction: {"точность": 0.5, "clear\x1b[2J": 1.0}
    trainer.train()
    trainer.log_metrics("eval", trainer.evaluate())
    printed = screen.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]
    assert printed.count("точность".encode("ascii", "backslashreplace").decode()) >= 3
    assert r"clear\x1b[2J" in printed
    assert disable_tqdm or r"\u6a21\u578b" in printed
    assert "\x1b" not in printed


EACH_EPOCH: dict[str, Any] = {
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "num_train_epochs": 3,
    "disable_tqdm": True,
}


def test_a_log_history_is_a_run_history(tmp_path: Path) -> None:
    trainer = scored_trainer(tmp_path, 0.5, 0.5, 0.5, **EACH_EPOCH)
    trainer.train()
    history = LoggedHistory(trainer.state.log_history)
    assert set(history.get_metric_names()) == {"loss", "eval_loss", "eval_score"}
    assert history.get_metric_values("loss") == [
        entry["loss"] for entry in trainer.state.log_history if "loss" in entry
    ]
    losses = [record for record in history.records if record.name == "eval_loss"]
    assert [(record.epoch, record.update) for record in losses] == [(1, 5), (2, 10), (3, 15)]

    reread = TrainerState.load_from_json(str(tmp_path / "checkpoint-15" / "trainer_state.json")).log_history
    assert LoggedHistory(reread).records == history.records


def test_a_page_shows_a_run_from_its_folder_or_a_checkpoint(tmp_path: Path) -> None:
    folder, page = tmp_path / "results", tmp_path / "page.html"
    trainer = scored_trainer(folder, 0.5, 0.5, 0.5, **EACH_EPOCH)
    trainer.train()
    for saves_state in (False, True):
        if saves_state:
            trainer.save_state()
        assert main(["compare", str(folder), str(folder / "checkpoint-5"), "--output", str(page)]) == 0
        text = page.read_text(encoding="utf-8")
        assert all(word in text for word in ("results", "checkpoint-5", "eval_loss", "logging_steps"))
