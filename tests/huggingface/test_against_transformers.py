"""The same script with transformers' Trainer and with ours: the same losses, logs, events, checkpoints, step by step.

Both sum the same float32 losses, theirs in float32 and ours in float64, so numbers agree to a few units in the last
place of float32; weights, whose updates are the same operations, agree to the bit.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pytorch_accelerated.huggingface import Trainer
from tests.huggingface.runs import Recorder, Regression, Rows, Stream, make_arguments, without_speed
from tests.huggingface.texts import WORDS, tiny_classifier, tiny_language_model, tiny_llama

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
    "evaluated by epoch, not at first": {"eval_strategy": "epoch", "eval_delay": 2, "logging_strategy": "no"},
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
    "saved at some of the evaluations": {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 4,
        "metric_for_best_model": "loss",
    },
    "the best is not saved": {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "epoch",
        "metric_for_best_model": "loss",
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
    "in bfloat16": {"bf16": True, "eval_strategy": "epoch", "optim": "sgd"},
    "nothing logged": {"logging_strategy": "no", "logging_steps": 10, "num_train_epochs": 1},
}


@pytest.mark.usefixtures("_process_without_a_trainer")  # in which theirs keeps the precision
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


class Stops(transformers.TrainerCallback):  # type: ignore[name-defined, misc]
    """Ends epochs and the run after these steps, and is a callback of theirs, as `Recorder` is one of ours."""

    def __init__(self, epochs: Any, training: int | None = None) -> None:
        self.epochs, self.training = epochs, training

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control = dataclasses.replace(control)  # which takes the place of the other
        control.should_epoch_stop |= state.global_step in self.epochs
        control.should_training_stop |= state.global_step == self.training
        return control

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_log = True  # though the last step was logged

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_log = control.should_evaluate = control.should_save = True  # which a step forgets


# Five steps are an epoch of the rows; epochs that a callback ends count.
STOPPED: dict[str, tuple[Any, Stops, dict[str, Any], int]] = {
    "rows": (Rows(10), Stops([2], 6), {"max_steps": 9}, 6),
    "stream": (Stream(6), Stops([2], 6), {"max_steps": 9}, 6),
    "one of two epochs": (Rows(10), Stops([2]), {"num_train_epochs": 2}, 7),
    "all of seven epochs": (Rows(10), Stops(range(3, 99, 3)), {"num_train_epochs": 7}, 21),
    "a part of an epoch": (Rows(10), Stops([1]), {"num_train_epochs": 1.5}, 6),
    "as many steps as two epochs and more have": (Rows(10), Stops(range(99)), {"max_steps": 12}, 3),
}


@pytest.mark.parametrize("name", STOPPED)
def test_streams_and_stops_are_the_same(name: str, tmp_path: Path) -> None:
    dataset, stops, arguments, steps = STOPPED[name]
    parts = {"train_dataset": dataset}
    runs = [
        run(library, tmp_path / library, stops, Recorder(), parts=parts, eval_strategy="epoch", **arguments)
        for library in ("ours", "theirs")
    ]
    assert_same_history(runs[0].state.log_history, runs[1].state.log_history)
    ours, theirs = (each.callback_handler.callbacks[-1].calls for each in runs)
    assert ours == theirs
    assert [each.state.global_step for each in runs] == [steps, steps]
    torch.testing.assert_close(runs[0].model.state_dict(), runs[1].model.state_dict(), rtol=0, atol=0)


def test_evaluations_of_several_datasets_are_the_same(tmp_path: Path) -> None:
    def metrics(prediction: Any) -> dict[str, Any]:
        return {"mae": np.abs(prediction.predictions - prediction.label_ids).mean()}

    parts = {"compute_metrics": metrics, "eval_dataset": {"few": Rows(4), "many": Rows(8)}}
    ours, theirs = (
        run(library, tmp_path / library, parts=parts, trains=False, per_device_eval_batch_size=2)
        for library in ("ours", "theirs")
    )
    assert_same_history([ours.evaluate()], [theirs.evaluate()])
    assert_same_history(ours.state.log_history, theirs.state.log_history)


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


def llama_with_adapters() -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(tiny_llama(), peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))


def without_task_type() -> Any:
    """An adapter whose wrapper does not know the kind of model inside."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    return peft.get_peft_model(
        tiny_language_model(), peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    )


def tiny_decoder() -> Any:
    """A language model whose class has another name than most."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertGenerationConfig(
        vocab_size=len(WORDS), max_position_embeddings=16, is_decoder=True, **sizes
    )
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    return transformers.BertGenerationDecoder(config)


SMOOTHED = {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # which PEFT asks for
@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        (tiny_language_model, {"gradient_accumulation_steps": 3}),
        (tiny_llama, {}),
        (llama_with_adapters, {"gradient_accumulation_steps": 3}),
        *(
            (llama_with_adapters, {"activation_checkpointing": True, "activation_checkpointing_kwargs": kwargs})
            for kwargs in ({"use_reentrant": False}, {"use_reentrant": True})
        ),
        *((model, SMOOTHED) for model in (tiny_language_model, without_task_type, tiny_decoder)),
    ],
)
def test_a_language_model_trains_the_same(model: Any, arguments: dict[str, Any], tmp_path: Path) -> None:
    """Labels that are smoothed are shifted before."""
    ours, theirs = (
        run(
            library,
            tmp_path / library,
            parts={"model": model(), "train_dataset": sentences(10), "eval_dataset": sentences(4)},
            eval_strategy="epoch",
            per_device_eval_batch_size=4,
            optim="sgd",  # AdamW makes steps of one size of gradients that are nothing but rounding
            **arguments,
        )
        for library in ("ours", "theirs")
    )
    tolerance = TRAINED if arguments is SMOOTHED else ROUNDING
    assert_same_history(ours.state.log_history, theirs.state.log_history, tolerance=tolerance)
    torch.testing.assert_close(ours.model.state_dict(), theirs.model.state_dict(), rtol=1e-5, atol=1e-7)


def test_labels_of_several_classes_are_not_smoothed(tmp_path: Path) -> None:
    def model() -> Any:
        classifier = tiny_classifier()
        classifier.config.problem_type = "multi_label_classification"
        return classifier

    rows = [{"input_ids": torch.arange(4) + index, "labels": torch.tensor([1.0, index % 2])} for index in range(6)]
    for library in ("ours", "theirs"):
        parts = {"model": model(), "train_dataset": rows, "eval_dataset": rows}
        with pytest.warns(UserWarning, match="(?i)label.smoothing.*multi-label"):
            trainer = run(library, tmp_path / library, parts=parts, label_smoothing_factor=0.1)
        assert trainer.label_smoother is None
        plain = run(library, tmp_path / library, parts={**parts, "model": model()})
        torch.testing.assert_close(trainer.model.state_dict(), plain.model.state_dict(), rtol=0, atol=0)
