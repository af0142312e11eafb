"""What a run shows on the screen, with real runs."""

import functools
import io
import itertools
import math
import pickle
import re
import sys
import textwrap
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import tqdm
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from pytorch_accelerated.callbacks import (
    CSVLoggerCallback,
    LogMetricsCallback,
    PrintProgressCallback,
    ProgressBarCallback,
    SaveBestModelCallback,
    SaveTrainingStateCallback,
    TrainerCallback,
)
from pytorch_accelerated.errors import StopTrainingError
from pytorch_accelerated.record.bars import BarDisplay
from pytorch_accelerated.record.text import format_number
from pytorch_accelerated.trainer import Trainer
from pytorch_accelerated.utils import read_run_history
from tests.support.processes import run_forked
from tests.support.terminal import Terminal, in_a_terminal

SCREEN = (PrintProgressCallback, ProgressBarCallback, LogMetricsCallback)


def rows(count: int) -> TensorDataset:
    inputs = torch.arange(count * 2, dtype=torch.float32).reshape(count, 2) / count
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def make_trainer(*callbacks: Any, trainer_class: type[Trainer] = Trainer, **kwargs: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    return trainer_class(
        model,
        nn.functional.mse_loss,
        torch.optim.SGD(model.parameters(), lr=0.01),
        callbacks=callbacks or SCREEN,
        **{"seed": 7, "mixed_precision": "no", **kwargs},
    )


def without_times(text: str) -> list[str]:
    text = re.sub(
        r"[\d.e+]+ samples/s of wall time(, waited for data \d+% of the time)?$", "SPEED", text, flags=re.MULTILINE
    )
    return re.sub(r" +(\d+ms|\d+\.\ds)$", " TIME", text, flags=re.MULTILINE).splitlines()


@pytest.fixture(autouse=True)
def _no_bar_is_left() -> Iterator[None]:
    yield
    assert not tqdm.tqdm._instances


@pytest.fixture
def every_refresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bars are drawn after every batch, so that short runs have some."""
    monkeypatch.setattr(BarDisplay, "seconds_between_refreshes", 0)
    monkeypatch.setenv("TERM", "xterm")


class Watch(TrainerCallback):
    """Notes what is on the screen at an event."""

    def __init__(self, terminal: Terminal, event: str) -> None:
        self.screens: list[list[str]] = []
        self.event = event
        setattr(self, event, lambda *args, **kwargs: self.screens.append(terminal.screen))

    @property
    def state_key(self) -> str:
        return f"watch {self.event}"


# The table


def test_a_run_is_announced_shown_as_a_table_and_summed_up(capsys):
    trainer = make_trainer()
    history = trainer.train(rows(12), num_epochs=2, eval_dataset=rows(6), per_device_batch_size=4)
    train, evaluation = (
        [format_number(value) for value in history.get_metric_values(name)]
        for name in ("train_loss_epoch", "eval_loss_epoch")
    )
    assert without_times(capsys.readouterr().out) == [
        "Training 2 epochs of 3 updates, 4 samples each, on cpu, seed 7",
        "epoch  train_loss_epoch  eval_loss_epoch        lr   time",
        "-----  ----------------  ---------------  --------  -----",
        f"    1  {train[0]:>16}  {evaluation[0] + '*':>15}  1.00e-02 TIME",
        f"    2  {train[1]:>16}  {evaluation[1] + '*':>15}  1.00e-02 TIME",
        "Finished 2 epochs, 6 updates in TIME",
        f"Best eval_loss_epoch {evaluation[1]} (epoch 2), SPEED",
    ]


def test_a_summary_has_the_best_value_that_is_watched_and_what_was_saved_where(capsys, tmp_path):
    class Scoring(TrainerCallback):
        def on_eval_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
            epoch = trainer.run_history.current_epoch
            trainer.run_history.update_metric("score", {1: math.nan, 2: 0.75}.get(epoch, 0.5))

    model, log, states = tmp_path / "best.pt", tmp_path / "log.csv", tmp_path / "states"
    saving = (
        SaveBestModelCallback(model, watch_metric="score", greater_is_better=True),
        SaveTrainingStateCallback(states),
        CSVLoggerCallback(log),
    )
    screen = (PrintProgressCallback, LogMetricsCallback, Scoring)  # what is recorded later is in the row, too
    make_trainer(*screen, *saving).train(rows(5), num_epochs=3, eval_dataset=rows(3))
    lines = without_times(capsys.readouterr().out)
    assert [line.split()[2] for line in lines[3:6]] == ["nan", "0.7500*", "0.5000"]
    assert lines[-4:] == [
        "Finished 3 epochs, 3 updates in TIME",
        "Best score 0.7500 (epoch 2), SPEED",
        f"Saved: best model {model}, training states {states}, log {log}",
        f"Loaded the weights of epoch 2 (score 0.7500) from {model}",
    ]


class Scores(TrainerCallback):
    """Records metrics as a `MetricsCallback` would, and the norm of each weight for trackers alone."""

    def __init__(self, names: str) -> None:
        self.names = names.split()

    def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        for name in self.names:
            trainer.run_history.update_metric(f"train_{name}", 0.25)
        for number in range(100):
            trainer.run_history.update_metric(f"norm/{number}", 1.0, shown=False)

    def on_eval_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        for name in self.names:
            trainer.run_history.update_metric(f"eval_{name}", 0.5)


@pytest.mark.parametrize("evaluation_set", [rows(4), {"clean": rows(4), "noisy": rows(4)}])
def test_where_evaluations_have_a_metric_its_value_in_training_is_shown_on_request(capsys, evaluation_set):
    headers = []
    for table in (LogMetricsCallback, LogMetricsCallback(train_metrics=True)):
        trainer = make_trainer(..., Scores("f1 r2"), table)
        trainer.train(rows(8), 2, evaluation_set)
        printed = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert [line[0] for line in printed].count("1") == 1  # one table, although two were given
        headers.append(" ".join(itertools.chain(*printed[: printed.index(next(r for r in printed if "-----" in r))])))
    shown, asked = headers
    assert ("train_f1" in shown, "train_f1" in asked) == (False, True)
    assert all("eval_" in each and each.count("f1") >= 1 for each in headers)
    assert asked.index("f1") < asked.index("train_f1")  # evaluations first


def test_multiple_evaluation_sets_fill_one_column_each_and_files_have_every_name(capsys, tmp_path):
    trainer = make_trainer(..., CSVLoggerCallback(tmp_path / "log.csv"))
    trainer.train(rows(8), 1, {"clean": rows(4), "noisy": rows(6)})
    header = next(line for line in capsys.readouterr().out.splitlines() if " lr " in line)
    assert header.split() == ["epoch", "train_loss_epoch", "eval_loss_epoch", "eval_noisy_loss_epoch", "lr", "time"]
    assert "eval_clean_loss_epoch" in (tmp_path / "log.csv").read_text().splitlines()[0].split(",")


def test_a_table_begins_with_the_epoch_and_the_loss_of_training_whatever_is_watched(capsys, tmp_path):
    make_trainer(..., SaveBestModelCallback(tmp_path / "best.pt")).train(rows(8), 2, rows(4))
    header = next(line for line in capsys.readouterr().out.splitlines() if "lr" in line)
    assert header.split() == ["epoch", "train_loss_epoch", "eval_loss_epoch", "lr", "time"]


def test_a_table_that_is_too_wide_for_a_terminal_says_what_it_leaves_out_and_a_file_has_all(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    many = Scores(" ".join(f"precision_{letter}" for letter in "abcdefgh"))
    with in_a_terminal(80) as terminal:
        make_trainer(PrintProgressCallback, LogMetricsCallback, many).train(rows(8), 2, rows(4))
        screen = terminal.screen
    assert all(len(line) <= 80 for line in screen)
    assert screen[1].startswith("No room here for 6 columns: eval_precision_e, ")
    assert [line.count("0.5000") for line in screen if line.split()[0] in ("1", "2")] == [4, 4]
    make_trainer(LogMetricsCallback, many).train(rows(8), 2, rows(4))
    assert all(line.count("0.5000") == 8 for line in capsys.readouterr().out.splitlines()[-2:])


def test_a_metric_for_trackers_alone_is_in_files_and_not_on_the_screen_also_after_a_resume(capsys, tmp_path):
    def train(epochs: int, **kwargs: Any) -> str:
        writers = CSVLoggerCallback(tmp_path / "log.csv"), SaveTrainingStateCallback(tmp_path)
        trainer = make_trainer(..., Scores("f1"), *writers)
        history = trainer.train(rows(8), epochs, rows(4), **kwargs)
        assert "norm" not in repr(history)
        assert len(history.get_metric_values("norm/99")) == epochs
        assert {axes.get_title(loc="left") for axes in history.plot().axes} == {"loss", "f1"}
        assert len(history.plot("norm/3").axes) == 1
        return capsys.readouterr().out

    assert "norm" not in train(1) + train(2, resume_from=tmp_path)
    assert "norm/99" in (tmp_path / "log.csv").read_text().splitlines()[0]
    assert read_run_history(tmp_path).names_not_shown == {f"norm/{number}" for number in range(100)}


@pytest.mark.parametrize(
    "event", ["on_training_run_start", "on_train_epoch_start", "on_training_run_epoch_end", "on_training_run_end"]
)
def test_a_subclass_may_override_any_event_without_losing_a_row(capsys, event):
    silent = type("Silent", (LogMetricsCallback,), {event: lambda self, trainer, **kwargs: None})
    make_trainer(silent).train(rows(8), num_epochs=3, eval_dataset=rows(4))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["1", "2", "3"]


def test_an_evaluation_inside_an_epoch_has_a_row_marked_with_its_update(capsys):
    class EverySecondUpdate(TrainerCallback):
        def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
            if trainer.run_state.updates % 2 == 0:
                trainer.request_evaluation()

    trainer = make_trainer(LogMetricsCallback, EverySecondUpdate)
    trainer.train(rows(12), num_epochs=2, eval_dataset=rows(4), per_device_batch_size=4)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    # Names of columns may be spread over several lines, of which the upper ones have nothing above "epoch".
    titles = [line[:6].strip() for line in lines if "epoch" not in line and not line.startswith(("-", "      "))]
    assert titles == ["1 @2", "1", "2 @4", "2 @6", "2"]


def test_a_row_shows_the_learning_rate_of_its_epoch_not_of_the_next(capsys):
    decay = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.1)
    trainer = make_trainer(LogMetricsCallback)
    trainer.train(rows(8), num_epochs=2, create_scheduler_fn=decay, step_scheduler="epoch")
    assert [line.split()[-2] for line in capsys.readouterr().out.splitlines()[2:]] == ["1.00e-02", "1.00e-03"]


def test_a_row_in_a_log_survives_a_kill():
    script = """
    import os, torch
    from pytorch_accelerated import Trainer

    class Killed(Trainer):
        def training_run_end(self):
            os._exit(0)

    model = torch.nn.Linear(1, 1)
    trainer = Killed(model, torch.nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.01))
    trainer.train((torch.ones(4, 1), torch.ones(4, 1)), num_epochs=1)
    """
    lines = run_forked(textwrap.dedent(script)).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["Training", "epoch", "-----", "1"]


# Announcements


class Stream(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return iter(rows(12))


@pytest.mark.parametrize(
    ("arguments", "announced"),
    [
        ({"num_epochs": 1}, "1 epoch of 3 updates, 4 samples each"),
        ({"num_epochs": 1, "max_num_train_steps": 4}, "4 updates (2 epochs of 3 updates), 4 samples each"),
        (
            {"num_epochs": 2, "gradient_accumulation_steps": 3},
            "2 epochs of 1 update, 12 samples each (4 x 3 accumulated)",
        ),
        ({"num_epochs": None, "max_num_train_steps": 2, "train_dataset": Stream()}, "2 updates, 4 samples each"),
    ],
)
def test_a_run_says_what_it_is_going_to_do(capsys, arguments, announced):
    make_trainer(PrintProgressCallback).train(**{"train_dataset": rows(12), "per_device_batch_size": 4, **arguments})
    assert capsys.readouterr().out.splitlines()[0] == f"Training {announced}, on cpu, seed 7"


def test_an_early_stop_is_reported_and_forgotten_in_the_next_run(capsys):
    class StopInSecondEpoch(TrainerCallback):
        def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
            if trainer.run_history.current_epoch == 2:
                raise StopTrainingError

    trainer = make_trainer(*SCREEN, StopInSecondEpoch)
    trainer.train(rows(8), num_epochs=5)
    lines = without_times(capsys.readouterr().out)
    assert lines[-2:] == ["Stopped early after 1 epoch, 2 updates in TIME", "SPEED"]
    assert lines[-3].split()[0] == "2"  # the metrics of the epoch that was stopped are shown
    trainer.train(rows(8), num_epochs=1)
    assert without_times(capsys.readouterr().out)[-2] == "Finished 1 epoch, 1 update in TIME"


# Bars


@pytest.mark.usefixtures("every_refresh")
def test_in_a_terminal_bars_come_and_go_and_the_table_stays(monkeypatch):
    monkeypatch.setattr(tqdm.tqdm, "monitor", None)
    threads = threading.enumerate()
    with in_a_terminal(100) as terminal:
        in_training, in_evaluation = Watch(terminal, "on_optimizer_step_end"), Watch(terminal, "on_eval_step_end")
        trainer = make_trainer(*SCREEN, in_training, in_evaluation)
        trainer.train(rows(8), num_epochs=2, eval_dataset=rows(8), per_device_batch_size=4)
        left = terminal.screen
    assert re.fullmatch(
        r"epoch 2/2 100%\|█+\| 2/2 \[00:00<00:00, \d\S* samples/s, loss=\S+, lr=1.00e-02\]", in_training.screens[-1][-1]
    )
    assert re.fullmatch(r"evaluation  50%\|█+\S* +\| 1/2 \[.*, loss=\S+\]", in_evaluation.screens[0][-1])
    # On a busy machine, the summary may go on: how long the run waited for data.
    assert [line.split()[0] for line in left][:7] == ["Training", "epoch", "-----", "1", "2", "Finished", "Best"]
    assert not [each for each in threading.enumerate() if isinstance(each, tqdm.TMonitor) and each not in threads]


@pytest.mark.usefixtures("every_refresh")
@pytest.mark.parametrize("event", ["on_train_step_end", "on_eval_step_end"])
def test_after_an_exception_no_bar_is_left(event):
    class Fails(TrainerCallback):
        pass

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a mistake")

    setattr(Fails, event, fail)
    with in_a_terminal(100) as terminal:
        trainer = make_trainer(ProgressBarCallback, LogMetricsCallback, Fails)
        with pytest.raises(RuntimeError, match="a mistake"):
            trainer.train(rows(8), num_epochs=1, eval_dataset=rows(8))
        left = terminal.screen
    # The metrics of a training epoch whose evaluation failed are not lost.
    assert [line.split()[0] for line in left] == ([] if event == "on_train_step_end" else ["epoch", "-----", "1"])
    assert not tqdm.tqdm._instances


@pytest.mark.usefixtures("every_refresh")
def test_a_resumed_run_continues_its_bar_and_its_table(tmp_path):
    class SaveInSecondEpoch(TrainerCallback):
        def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
            if trainer.run_state.updates == 6:  # two of the four of the second epoch
                trainer.save_training_state(tmp_path / "state")
                raise StopTrainingError

    make_trainer(LogMetricsCallback, SaveInSecondEpoch).train(rows(8), num_epochs=3, per_device_batch_size=2)
    with in_a_terminal(100) as terminal:
        trainer = make_trainer(ProgressBarCallback, LogMetricsCallback)
        trainer.train(rows(8), num_epochs=3, per_device_batch_size=2, resume_from=tmp_path / "state")
        drawn = re.findall(r"(epoch \d/\d).*?(\d/4) \[", terminal.received)
        left = terminal.screen
    seen = [step for step, _ in itertools.groupby(drawn)]
    assert seen == [("epoch 2/3", "3/4"), ("epoch 2/3", "4/4"), *[("epoch 3/3", f"{n}/4") for n in (1, 2, 3, 4)]]
    assert [line.split()[0] for line in left] == ["Resuming", "epoch", "-----", "2", "3"]


def test_warnings_of_this_library_stand_above_the_bars(every_refresh: None) -> None:
    with in_a_terminal(100) as terminal, warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *args, **kwargs: print(message, file=sys.stderr)
        make_trainer(CSVLoggerCallback("/dev/null/log"), *SCREEN).train(rows(8), 1, per_device_batch_size=2)
        assert terminal.screen[1].startswith("CSVLoggerCallback failed in `on_step_records`")


class Named(TrainerCallback):
    """Records metrics with names that not every screen can show, and stops for such a reason."""

    def on_eval_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        trainer.run_history.update_metric("точность", 0.5 * trainer.run_history.current_epoch)
        trainer.run_history.update_metric("clear\x1b[2J", 1.0)

    def on_training_run_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.run_history.current_epoch == 2:
            raise StopTrainingError("достаточно\x1b[31m\rso")


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_a_screen_that_lacks_characters_shows_escapes_and_nobody_else_controls_it(
    encoding: str, every_refresh: None, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    screens = [io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2)]
    for name, screen in zip(("stdout", "stderr"), screens, strict=True):
        monkeypatch.setattr(sys, name, screen)
        monkeypatch.setattr(screen, "isatty", lambda: True, raising=False)
    best = SaveBestModelCallback("模型/best.pt", watch_metric="other_точность", greater_is_better=True)
    trainer = make_trainer(*SCREEN, best, Named())
    trainer.train(rows(8), 5, {"тихо\x07": rows(8), "other": rows(8)}, per_device_batch_size=2)
    print("my own é" if encoding != "ascii" else "my own")
    printed, bars = (screen.buffer.getvalue().decode(encoding) for screen in screens)  # type: ignore[attr-defined]
    assert trainer.run_history.get_latest_metric("other_точность") == 1.0
    for text in ("точность", "模型/best.pt", "достаточно"):
        shown = text if encoding == "utf-8" else text.encode("ascii", "backslashreplace").decode()
        assert shown in printed
    assert r"clear\x1b[2J" in printed
    assert r"\x1b[31m\rso" in printed
    assert r"\x07" in bars
    assert not re.search(r"[^\n -~\u0080-\uffff]", printed)
    assert "\x07" not in bars


def test_a_screen_that_is_gone_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        """Like a class that scripts write to copy their output, on a disk that is full."""

        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

        def flush(self) -> None:
            pass

    closed = io.StringIO()
    closed.close()
    for screen in (Gone(), closed, None):
        monkeypatch.setattr(sys, "stdout", screen)
        monkeypatch.setattr(sys, "stderr", screen)
        assert make_trainer().train(rows(8), 2).get_metric_names() == {"train_loss_epoch"}


def test_a_trainer_can_be_pickled_after_a_run_even_while_accelerate_knows_a_loader() -> None:
    trainer = make_trainer()
    trainer.train(rows(8), 1)
    loader = Accelerator(cpu=True).prepare(DataLoader(rows(8)))
    next(iter(loader))
    try:
        again = pickle.loads(pickle.dumps(trainer))
    finally:
        loader.end()
    assert again.train(rows(8), 1, reset_run_history=False).get_metric_values("train_loss_epoch")[1] == pytest.approx(
        trainer.train(rows(8), 1, reset_run_history=False).get_metric_values("train_loss_epoch")[1]
    )
