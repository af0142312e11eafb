"""The log history: which entries there are, what stands in them, and that it is plain JSON."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from pytorch_accelerated.huggingface import Trainer, TrainerCallback
from tests.huggingface.runs import Regression, Rows, StopAt, losses, make_trainer


@pytest.mark.fact("Logging: A training entry of the log history has loss, grad_norm, learning_rate, epoch, step")
@pytest.mark.fact("Logging: An evaluation entry has eval_loss, eval_<metric>, runtime and speed, epoch, step")
@pytest.mark.fact("Logging: The last entry has train_runtime, speed, total_flos, train_loss, epoch, step")
def test_the_keys_of_the_entries(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path,
        parts={"compute_metrics": lambda prediction: {"own": 1.0}},
        eval_strategy="epoch",
        num_train_epochs=1,
        logging_steps=5,
    )
    trainer.train()
    training, evaluation, summary = trainer.state.log_history
    assert training.keys() == {"loss", "grad_norm", "learning_rate", "epoch", "step"}
    speed = {"runtime", "samples_per_second", "steps_per_second"}
    assert evaluation.keys() == {"epoch", "step", *(f"eval_{name}" for name in {"loss", "own", *speed})}
    assert summary.keys() == {"total_flos", "epoch", "step", *(f"train_{name}" for name in {"loss", *speed})}
    json.dumps(trainer.state.log_history)


@pytest.mark.fact("Logging: The logged loss is the mean over the steps since the last log; without steps there is none")
def test_a_loss_is_the_mean_since_the_last_log(tmp_path: Path) -> None:
    always = make_trainer(tmp_path)
    always.train()
    each = losses(always)
    seldom = make_trainer(tmp_path, logging_steps=4, logging_first_step=True)
    seldom.train()
    assert losses(seldom) == pytest.approx([each[0], sum(each[1:4]) / 3, sum(each[4:8]) / 4])
    summary = seldom.state.log_history[-1]
    assert summary["train_loss"] == pytest.approx(sum(each) / 10)
    by_both = make_trainer(tmp_path, logging_strategy="epoch")
    by_both.train()
    assert losses(by_both) == pytest.approx([sum(each[:5]) / 5, sum(each[5:]) / 5])


def test_nothing_is_logged_twice_after_one_step(tmp_path: Path) -> None:
    class AsksAgain(TrainerCallback):
        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_log = True

    trainer = make_trainer(tmp_path, AsksAgain())
    trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry] == list(range(1, 11))


@pytest.mark.fact("Logging: log(logs, start_time=None) can be overridden and adds epoch")
def test_log_may_be_overridden(tmp_path: Path) -> None:
    class Own(Trainer):
        def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
            super().log({**logs, "mine": 1}, start_time)

    trainer = make_trainer(tmp_path, kind=Own, num_train_epochs=1)
    trainer.train()
    assert all(entry["mine"] == 1 and "epoch" in entry for entry in trainer.state.log_history)


@pytest.mark.fact("Logging: Speed is measured over the rows and steps that were used")
def test_speed_counts_what_was_used(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, num_train_epochs=1.5)
    metrics = trainer.train().metrics
    assert metrics["train_samples_per_second"] / metrics["train_steps_per_second"] == pytest.approx(16 / 8, rel=1e-2)


@pytest.mark.fact("Arguments: include_num_input_tokens_seen counts the input tokens, with or without padding")
@pytest.mark.parametrize(("counts", "expected"), [("all", 20), ("non_padding", 15), ("no", 0)])
def test_tokens_are_counted(counts: str, expected: int, tmp_path: Path) -> None:
    class Masked(Regression):
        main_input_name = "x"

        def forward(self, x: Any, labels: Any = None, attention_mask: Any = None) -> Any:
            return super().forward(x, labels)

    rows = [{**Rows(10)[index], "attention_mask": Rows(10)[index]["x"] * 0 + index % 2} for index in range(10)]
    for row in rows[::2]:
        row["attention_mask"][0] = 1
    trainer = make_trainer(
        tmp_path,
        parts={"model": Masked(), "train_dataset": rows},
        include_num_input_tokens_seen=counts,
        num_train_epochs=1,
    )
    trainer.train()
    assert trainer.state.num_input_tokens_seen == expected
    assert ("num_input_tokens_seen" in trainer.state.log_history[0]) == (counts != "no")


class TwoSecondsAStep(TrainerCallback):
    """Tells the time: no other comes by than these."""

    def __init__(self) -> None:
        self.now = 100.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.now += 2.0


@pytest.mark.fact("Arguments: include_num_input_tokens_seen logs this run's train_tokens_per_second with the losses")
def test_the_speed_in_tokens_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*callbacks: Any, **arguments: Any) -> list[dict[str, Any]]:
        clock, model = TwoSecondsAStep(), Regression()
        model.main_input_name = "x"  # type: ignore[assignment]
        trainer = make_trainer(tmp_path, clock, *callbacks, parts={"model": model}, include_num_input_tokens_seen="all")
        with monkeypatch.context() as patched:
            patched.setattr(time, "time", lambda: clock.now)
            trainer.train(**arguments)
        return trainer.state.log_history

    first, *_, summary = run(StopAt(3))
    keys = "loss grad_norm learning_rate epoch num_input_tokens_seen train_runtime train_tokens_per_second step"
    assert list(first) == keys.split()
    assert (first["num_input_tokens_seen"], first["train_runtime"], first["train_tokens_per_second"]) == (4, 2.0, 2.0)
    assert "train_tokens_per_second" not in summary  # as in transformers
    resumed = run(resume_from_checkpoint=True)[-4]
    assert (resumed["step"], resumed["num_input_tokens_seen"]) == (8, 32)
    assert resumed["train_tokens_per_second"] == 2.0
