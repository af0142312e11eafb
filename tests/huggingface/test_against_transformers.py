"""The same script with transformers' Trainer and with ours: the same losses, logs, events, checkpoints, step by step.

Both sum the same float32 losses, theirs in float32 and ours in float64, so numbers agree to a few units in the last
place of float32; weights, whose updates are the same operations, agree to the bit.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pytorch_accelerated.huggingface import Trainer, TrainerCallback
from tests.huggingface.runs import NoisyRows, Recorder, Regression, Rows, StopAt, Stream, make_arguments, without_speed
from tests.huggingface.texts import WORDS, tiny_language_model

transformers = pytest.importorskip("transformers")

ROUNDING = 5e-7
# Networks that are not linear carry the rounding of each update into the next ones, and how it rounds depends on the
# processor. A schedule, a weight or an order that is another one changes numbers a hundred times as much.
TRAINED = 1e-4


def run(
    library: str,
    folder: Path,
    *callbacks: Any,
    parts: dict[str, Any] | None = None,
    kind: Any = None,
    resume: Any = None,
    trains: bool = True,
    **arguments: Any,
) -> Any:
    """A trainer of `library` ("theirs" or "ours") that has run."""
    if library == "theirs":
        quiet = make_arguments(folder).to_dict()
        names = ("learning_rate", "num_train_epochs", "train_sampling_strategy", "logging_steps", "save_strategy")
        given = {name: quiet[name] for name in (*names, "per_device_train_batch_size", "disable_tqdm", "use_cpu")}
        args = transformers.TrainingArguments(str(folder), report_to=[], **{**given, **arguments})
        make = kind or transformers.Trainer
    else:
        args, make = make_arguments(folder, **arguments), kind or Trainer
    defaults: dict[str, Any] = {"model": Regression(), "train_dataset": Rows(10), "eval_dataset": Rows(5)}
    trainer = make(args=args, callbacks=list(callbacks), **{**defaults, **(parts or {})})
    trainer.callback_handler.callbacks.pop()  # which prints the logs
    if trains:
        trainer.train(resume_from_checkpoint=resume)
    return trainer


def assert_same_history(
    ours: list[dict[str, Any]], theirs: list[dict[str, Any]], *, tolerance: float = ROUNDING
) -> None:
    """The same entries with the same keys, and numbers that are the same up to `tolerance`, relative."""
    assert [sorted(entry) for entry in ours] == [sorted(entry) for entry in theirs]
    for our_entry, their_entry in zip(without_speed(ours), without_speed(theirs), strict=True):
        assert_same(our_entry, their_entry, tolerance=tolerance)


def assert_same(ours: dict[str, Any], theirs: dict[str, Any], *, tolerance: float = ROUNDING) -> None:
    """Values of the same kind, floats the same up to `tolerance`, relative."""
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name] == (pytest.approx(value, rel=tolerance) if isinstance(value, float) else value), name


SCRIPTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "fractional epochs, logged seldom": {"num_train_epochs": 1.5, "logging_steps": 3, "logging_first_step": True},
    "max_steps": {"max_steps": 7, "logging_steps": 0.3},
    "logged by epoch": {"logging_strategy": "epoch", "warmup_steps": 3, "lr_scheduler_type": "cosine"},
    "evaluated by epoch": {"eval_strategy": "epoch", "per_device_eval_batch_size": 5},
    "evaluated by steps": {"eval_strategy": "steps", "eval_steps": 3, "logging_steps": 2, "eval_delay": 4},
    "saved": {"save_strategy": "steps", "save_steps": 3, "save_total_limit": 2},
    "best at the end": {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "load_best_model_at_end": True,
        "learning_rate": 0.5,
        "save_total_limit": 1,
    },
    "saved when best": {"eval_strategy": "epoch", "save_strategy": "best", "metric_for_best_model": "loss"},
    "sgd without clipping": {"optim": "sgd", "max_grad_norm": 0.0, "weight_decay": 0.1},
    "plateau": {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5},
        "eval_strategy": "steps",
        "eval_steps": 2,
        "metric_for_best_model": "loss",
        "save_strategy": "epoch",
    },
    "everything by epoch": {"logging_strategy": "epoch", "eval_strategy": "epoch", "save_strategy": "epoch"},
    "evaluated before": {"eval_on_start": True, "num_train_epochs": 1},
    "nothing logged": {"logging_strategy": "no", "logging_steps": 10, "num_train_epochs": 1},
}


@pytest.mark.fact(
    "Compared with transformers: Losses, log history, events, state, weights and checkpoints are the same"
)
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_same_script_gives_the_same(name: str, tmp_path: Path) -> None:
    ours, theirs = (run(library, tmp_path / library, Recorder(), **SCRIPTS[name]) for library in ("ours", "theirs"))
    assert_same_history(ours.state.log_history, theirs.state.log_history)
    our_calls, their_calls = (
        next(each for each in trainer.callback_handler.callbacks if isinstance(each, Recorder)).calls
        for trainer in (ours, theirs)
    )
    assert our_calls == their_calls
    torch.testing.assert_close(ours.model.state_dict(), theirs.model.state_dict(), rtol=0, atol=0)
    our_state, their_state = ({**vars(each.state)} for each in (ours, theirs))
    for state, library in ((our_state, "ours"), (their_state, "theirs")):
        del state["log_history"], state["stateful_callbacks"]
        if state["best_model_checkpoint"] is not None:
            state["best_model_checkpoint"] = str(Path(state["best_model_checkpoint"]).relative_to(tmp_path / library))
    assert_same(our_state, their_state)
    our_files, their_files = (
        sorted(path.name for path in (tmp_path / library).glob("checkpoint-*")) for library in ("ours", "theirs")
    )
    assert our_files == their_files


@pytest.mark.fact(
    "Compared with transformers: Iterable datasets, and flags that stop the epoch and the run, work the same"
)
def test_streams_and_stops_are_the_same(tmp_path: Path) -> None:
    class Stops(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_epoch_stop |= state.global_step == 2
            control.should_training_stop |= state.global_step == 6

    for dataset in (Rows(10), Stream(6)):
        runs = [
            run(
                library,
                tmp_path / library,
                Stops(),
                recorder := Recorder(),
                parts={"train_dataset": dataset},
                max_steps=9,
            )
            for library in ("ours", "theirs")
        ]
        assert_same_history(runs[0].state.log_history, runs[1].state.log_history)
        assert recorder.calls


@pytest.mark.fact(
    "Compared with transformers: A run resumed inside an epoch has the same log history as an uninterrupted one"
)
def test_a_resumed_run_is_the_same(tmp_path: Path) -> None:
    every_two: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    arguments = {"gradient_accumulation_steps": 2, **every_two}
    histories = {}
    for library in ("ours", "theirs"):
        run(library, tmp_path / library, StopAt(4), **arguments)
        resumed = run(library, tmp_path / library, resume=True, **arguments)
        histories[library] = resumed.state.log_history
        assert resumed.state.global_step == 6
    ours, theirs = histories["ours"], histories["theirs"]
    assert_same_history(ours[:-1], theirs[:-1])
    assert list(ours[-1]) == list(theirs[-1])
    whole = run("theirs", tmp_path / "whole", **arguments)
    assert_same_history(ours[:-1], whole.state.log_history[:-1])


@pytest.mark.fact("Compared with transformers: Evaluation and prediction are the same")
def test_evaluation_and_prediction_are_the_same(tmp_path: Path) -> None:
    def metrics(prediction: Any) -> dict[str, Any]:
        return {"mae": np.abs(prediction.predictions - prediction.label_ids).mean()}

    parts = {"compute_metrics": metrics, "eval_dataset": {"few": Rows(4), "many": Rows(8)}}
    ours, theirs = (
        run(library, tmp_path / library, recorder, parts=parts, trains=False, per_device_eval_batch_size=2)
        for library, recorder in (("ours", Recorder()), ("theirs", Recorder()))
    )
    (our_metrics,) = without_speed([ours.evaluate()])
    (their_metrics,) = without_speed([theirs.evaluate()])
    assert sorted(our_metrics) == sorted(their_metrics)
    assert_same(our_metrics, their_metrics)
    assert_same_history(ours.state.log_history, theirs.state.log_history)
    our_output, their_output = ours.predict(Rows(7)), theirs.predict(Rows(7))
    np.testing.assert_array_equal(our_output.predictions, their_output.predictions)
    np.testing.assert_array_equal(our_output.label_ids, their_output.label_ids)
    assert sorted(our_output.metrics) == sorted(their_output.metrics)


@pytest.mark.fact("Evaluation: The loss is the mean over rows, even if the last batch is shorter")
@pytest.mark.fact("Differences: In a short last group of unequal batches, every row has the same weight")
def test_where_sizes_do_not_divide_ours_is_exact_and_theirs_is_not(tmp_path: Path) -> None:
    rows = Rows(7)
    with torch.no_grad():
        exact = Regression()(rows.x, rows.labels)[0].item()
    values = {
        library: run(
            library, tmp_path / library, parts={"eval_dataset": rows}, trains=False, per_device_eval_batch_size=5
        ).evaluate()["eval_loss"]
        for library in ("ours", "theirs")
    }
    assert values["ours"] == pytest.approx(exact, rel=ROUNDING)
    group = [6, 7, 8, 9]  # the last update: batches of 3 and 1 rows
    losses = {}
    for library in ("ours", "theirs"):
        trainer = run(
            library,
            tmp_path / library,
            per_device_train_batch_size=3,
            gradient_accumulation_steps=2,
            learning_rate=0.0,
            num_train_epochs=1,
        )
        losses[library] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    with torch.no_grad():
        exact = Regression()(Rows(10).x[group], Rows(10).labels[group])[0].item()
    assert losses["ours"][1] == pytest.approx(exact, rel=ROUNDING)
    assert losses["theirs"][1] != pytest.approx(exact, rel=1e-3)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.fact("Differences: A resumed run draws the same random numbers as an uninterrupted one")
def test_with_rows_that_are_drawn_at_random_our_resumed_run_is_exact_and_theirs_is_not(
    workers: int, tmp_path: Path
) -> None:
    arguments: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3, "dataloader_num_workers": workers}
    are_equal = {}
    for library in ("ours", "theirs"):
        parts = {"train_dataset": NoisyRows(10), "model": Regression(dropout=0.5)}
        whole = run(library, tmp_path / f"{library} whole", parts=parts, **arguments)
        for callbacks, resume in (([StopAt(8)], None), ([], str(tmp_path / library / "checkpoint-6"))):
            parts = {"train_dataset": NoisyRows(10), "model": Regression(dropout=0.5)}
            trainer = run(library, tmp_path / library, *callbacks, parts=parts, resume=resume, **arguments)
        weights = zip(whole.model.parameters(), trainer.model.parameters(), strict=True)
        are_equal[library] = all(one.equal(other) for one, other in weights)
    assert are_equal == {"ours": True, "theirs": False}


def sentences(size: int) -> list[dict[str, torch.Tensor]]:
    """Rows of eight words; of some, a few labels do not count."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for index in range(size):
        words = torch.randint(len(WORDS), (8,), generator=generator)
        labels = words.clone()
        labels[: index % 5] = -100
        rows.append({"input_ids": words, "labels": labels})
    return rows


@pytest.mark.fact(
    "Compared with transformers: A small language model whose loss is the mean over the tokens of the update trains "
    "the same"
)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_language_model_trains_the_same(accumulation: int, tmp_path: Path) -> None:
    ours, theirs = (
        run(
            library,
            tmp_path / library,
            parts={"model": tiny_language_model(), "train_dataset": sentences(10), "eval_dataset": sentences(4)},
            gradient_accumulation_steps=accumulation,
            eval_strategy="epoch",
            per_device_eval_batch_size=4,
            optim="sgd",  # AdamW makes steps of one size of gradients that are nothing but rounding
        )
        for library in ("ours", "theirs")
    )
    assert_same_history(ours.state.log_history, theirs.state.log_history)
    torch.testing.assert_close(ours.model.state_dict(), theirs.model.state_dict(), rtol=1e-5, atol=1e-7)
