"""What cannot work is refused by name: a table of calls, the errors, and words in them."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pytorch_accelerated import callbacks as native
from pytorch_accelerated.errors import (
    ArgumentTypeError,
    CallbackSetupError,
    CheckpointError,
    ConfigurationError,
    DataError,
    HookOutputError,
    InvalidCheckpointError,
    MissingDependencyError,
)
from pytorch_accelerated.huggingface import (
    EarlyStoppingCallback,
    ExportableState,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainerState,
)
from pytorch_accelerated.huggingface.knowledge import default_data_collator
from tests.huggingface.runs import Regression, Rows, Stream, make_arguments, make_trainer
from tests.huggingface.translations import sentences, tiny_translator

Mistake = Callable[[Path], Any]


def made(**given: Any) -> Mistake:
    """Making a trainer of these arguments and `parts`."""
    return lambda folder: make_trainer(folder, **given)


def trained(**given: Any) -> Mistake:
    return lambda folder: make_trainer(folder, **given).train()


def evaluated(**given: Any) -> Mistake:
    return lambda folder: make_trainer(folder, **given).evaluate()


def called(name: str, *args: Any, **given: Any) -> Mistake:
    """Calling a method of the trainer."""
    return lambda folder: getattr(make_trainer(folder, **given), name)(*args)


def with_loss(change: Callable[[torch.Tensor], Any]) -> Mistake:
    class Changed(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return change(model(**inputs)[0])

    return trained(kind=Changed)


def with_metrics(value: Any, **arguments: Any) -> Mistake:
    return trained(parts={"compute_metrics": lambda prediction: value}, eval_strategy="epoch", **arguments)


def rows(*labels: Any) -> Mistake:
    return trained(parts={"train_dataset": [{"x": torch.ones(2), "labels": label} for label in labels]})


def generator() -> Iterator[Any]:
    yield Rows(1)[0]


def generating(**arguments: Any) -> Mistake:
    quiet: dict[str, Any] = {"predict_with_generate": True, "use_cpu": True, "disable_tqdm": True, **arguments}
    return lambda folder: Seq2SeqTrainer(tiny_translator(), Seq2SeqTrainingArguments(str(folder), **quiet))


def saved_state(text: str) -> Mistake:
    def load(folder: Path) -> None:
        (folder / "trainer_state.json").write_text(text)
        TrainerState.load_from_json(folder / "trainer_state.json")

    return load


def changed_state(**change: Any) -> Mistake:
    content = {"epoch": 1.0, "global_step": 3, "log_history": [], "max_steps": 8, **change}
    return saved_state(json.dumps(content))


def taken_folder(folder: Path) -> None:
    (folder / "taken").write_text("a file")
    make_trainer(folder / "taken" / "results")


def taken_file(folder: Path) -> None:
    (folder / "trainer_state.json").mkdir()
    make_trainer(folder).save_state()


def run_within_a_run(folder: Path) -> None:
    class TrainsAnother(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            make_trainer(folder, save_strategy="epoch").train()

    make_trainer(folder, TrainsAnother(), save_strategy="epoch").train()


class NoLoss(Regression):
    def forward(self, x: torch.Tensor, labels: Any = None) -> Any:
        return {"logits": self.linear(x), "hidden": x}


class Forgetful(Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        super().training_step(*args, **kwargs)


class WithoutState(ExportableState): ...


MODEL = Regression()
SGD, OTHER = (torch.optim.SGD(MODEL.parameters(), lr=0.1) for _ in range(2))
SCHEDULE = torch.optim.lr_scheduler.StepLR(OTHER, 1)
FROZEN = Regression().requires_grad_(False)
BY_METRIC = {"metric_for_best_model": "a"}

MISTAKES: list[tuple[str, Mistake, type[BaseException], str]] = [
    # What a trainer is made of
    (
        "no model",
        made(parts={"model": None}),
        ConfigurationError,
        "either `model` or `model_init`, but neither is given",
    ),
    ("two models", made(parts={"model": MODEL, "model_init": Regression}), ConfigurationError, "but both are given"),
    ("a class as a model", made(parts={"model": Regression}), ArgumentTypeError, "not an nn.Module"),
    ("no model made", made(parts={"model_init": lambda: None}), ArgumentTypeError, "`model_init` returned None"),
    ("arguments as a dict", called("__init__", MODEL, "results"), TypeError, "`args` is a builtins.str"),
    ("an unknown name", lambda _: Trainer(MODEL, tokenizer=1), TypeError, "Use `processing_class`"),  # type: ignore[call-arg]
    (
        "no optimizer",
        made(parts={"optimizers": ("a", None)}),
        ArgumentTypeError,
        "`optimizer` is .*: pass an optimizer",
    ),
    (
        "an optimizer of one model, but a new one for each training",
        made(parts={"model_init": Regression, "optimizers": (SGD, None)}),
        *(ConfigurationError, "`optimizers` don.t go with `model_init`"),
    ),
    (
        "the schedule of another optimizer",
        trained(parts={"model": MODEL, "optimizers": (SGD, SCHEDULE)}),
        *(ConfigurationError, "The schedule, a StepLR, belongs to another optimizer"),
    ),
    (
        "the schedule of an optimizer that is not given",
        trained(parts={"model": MODEL, "optimizers": (None, SCHEDULE)}),
        *(ConfigurationError, "The schedule, a StepLR, belongs to another optimizer"),
    ),
    ("an argument of an optimizer", called("create_optimizer", optim="sgd", optim_args="speed=3"), TypeError, "speed"),
    (
        "optim_args without a value",
        called("create_optimizer", optim="sgd", optim_args="momentum"),
        *(ConfigurationError, "`optim_args` is 'momentum': write name=value"),
    ),
    ("an argument of a schedule", trained(lr_scheduler_kwargs={"power": 2}), TypeError, "power"),
    ("no length", made(parts={"train_dataset": Stream(10)}), ValueError, "a Stream, has no length.*set `max_steps`"),
    (
        "best without a metric",
        made(save_strategy="best", eval_strategy="epoch"),
        ConfigurationError,
        "must be provided",
    ),
    ("fp16 on the CPU", made(fp16=True), ConfigurationError, "`fp16` is True, but the device is the CPU.*use `bf16`"),
    ("one process to shard", made(fsdp=True), ConfigurationError, "`fsdp` is True, but there is one process.*torchrun"),
    ("a folder that cannot be made", taken_folder, CheckpointError, "taken.*failed while making the folder"),
    ("a second run in a folder", run_within_a_run, CheckpointError, "another run of this process"),
    ("a file that cannot be written", taken_file, CheckpointError, "Saving .*trainer_state.json failed"),
    (
        "a hook that does not exist",
        made(kind=type("Custom", (Trainer,), {"_wrap_model": lambda self: None})),
        *(
            ConfigurationError,
            "Custom defines `_wrap_model`, which would never be called. Use accelerate's configuration",
        ),
    ),
    *(
        (f"a method that is not there: {name}", called(name), AttributeError, f"Trainer has no `{name}`.*{remedy}")
        for name, remedy in (
            ("push_to_hub", r"trainer\.model\.push_to_hub"),
            ("_get_num_items_in_batch", "Override `count_items`"),
        )
    ),
    # Data
    ("no training set", trained(parts={"train_dataset": None}), ConfigurationError, "no dataset to train on"),
    (
        "an empty training set",
        trained(parts={"train_dataset": []}),
        DataError,
        "is empty, so there is nothing to train",
    ),
    ("several training sets", trained(parts={"train_dataset": {"a": Rows(2)}}), DataError, "`train_dataset` is a dict"),
    (
        "a generator",
        trained(parts={"train_dataset": generator()}, max_steps=1),
        *(DataError, "A generator has no rows by number.*`IterableDataset`"),
    ),
    (
        "no evaluation set",
        evaluated(parts={"eval_dataset": None}),
        ValueError,
        "no dataset to evaluate.*`eval_dataset`",
    ),
    (
        "a list of evaluation sets",
        evaluated(parts={"eval_dataset": [Rows(2), Rows(3)]}),
        *(ArgumentTypeError, "A list of 2 datasets could be several.*a dict with a name for each"),
    ),
    ("no evaluation sets", evaluated(parts={"eval_dataset": {}}), DataError, "`eval_dataset` is a dict"),
    (
        "evaluations of nothing",
        made(parts={"eval_dataset": None}, eval_strategy="epoch"),
        *(ValueError, "`eval_strategy` is 'epoch', but there is no `eval_dataset`"),
    ),
    ("no test set", called("predict", None), ConfigurationError, "no dataset to predict.*`test_dataset`"),
    ("rows of unequal length", rows([1.0], [1.0, 2.0]), DataError, "'labels' cannot be stacked.*Give them one length"),
    ("rows without a value", rows(None, 1), DataError, "'labels' cannot be stacked"),
    (
        "rows with other columns",
        lambda _: default_data_collator([{"x": 1, "y": 1}, {"x": 1}]),
        *(DataError, "different columns: 'x', 'y' and 'x'"),
    ),
    (
        "no lengths",
        called("get_train_dataloader", train_sampling_strategy="group_by_length"),
        *(ConfigurationError, "neither 'length' nor 'input_ids': name the column with `length_column_name`"),
    ),
    *(
        (
            f"a stream and {strategy}",
            trained(parts={"train_dataset": Stream(10)}, max_steps=2, train_sampling_strategy=strategy),
            *(ConfigurationError, f"'{strategy}', but the rows of the training set, a Stream, come in an order of its"),
        )
        for strategy in ("group_by_length", "batch_rebalance")
    ),
    (
        "metrics of batches that are never told the last one",
        made(parts={"compute_metrics": lambda prediction: {}}, batch_eval_metrics=True),
        *(ConfigurationError, "`compute_metrics` after each batch, but yours has no parameter `compute_result`"),
    ),
    # Training
    ("nothing to train", trained(num_train_epochs=0), ConfigurationError, "`num_train_epochs` is 0.*`max_steps`"),
    ("a frozen model", trained(parts={"model": FROZEN}), DataError, "The loss has no gradient"),
    *(
        (f"resuming from {source!r}", called("train", source), TypeError, "PathLike")
        for source in (5, 1.0, ["checkpoint-1"])
    ),
    ("resuming from nothing", called("train", True), ValueError, "No valid checkpoint found in output directory"),
    ("resuming from nowhere", called("train", "nowhere"), ValueError, "Can't find a valid checkpoint at nowhere"),
    ("no loss", trained(parts={"model": NoLoss()}), DataError, "no loss, only 'logits', 'hidden'.*were 'x', 'labels'"),
    ("a loss for each row", with_loss(lambda loss: loss.expand(3)), DataError, r"The loss has the shape \(3,\)"),
    ("a detached loss", with_loss(lambda loss: loss.detach()), DataError, "The loss has no gradient"),
    ("a number as a loss", with_loss(lambda loss: loss.item()), DataError, "The loss is a float"),
    ("nothing as a loss", with_loss(lambda loss: None), DataError, "The loss is a NoneType"),
    (
        "a step that returns nothing",
        trained(kind=Forgetful),
        HookOutputError,
        r"Forgetful\.training_step returned None",
    ),
    (
        "no gradient checkpointing",
        made(gradient_checkpointing=True),
        ConfigurationError,
        "gradient_checkpointing_enable",
    ),
    # Evaluation
    ("metrics without names", with_metrics(0.5), HookOutputError, "`compute_metrics` returned 0.5. Return a dict"),
    ("the best of words", with_metrics({"a": "good"}, **BY_METRIC), TypeError, "must be real number, not str"),
    ("the best of another metric", with_metrics({"b": 1}, **BY_METRIC), KeyError, "is 'eval_a', which .* There is: "),
    ("metrics that JSON cannot hold", called("save_metrics", "eval", {"a": torch.ones(1)}), TypeError, "Tensor"),
    ("a state that JSON cannot hold", lambda _: TrainerState(log_history=[{"a": 1j}]).to_json(), TypeError, "complex"),
    # Generation
    ("a config from nowhere", generating(generation_config="nowhere/at all"), OSError, "nowhere/at all"),
    ("a number as a config", generating(generation_config=3), ArgumentTypeError, "a GenerationConfig, a dict of its v"),
    ("no beams", generating(generation_num_beams=0), ConfigurationError, "`generation_num_beams` is 0"),
    (
        "a config that cannot work",
        generating(generation_config={"num_beams": 2, "num_return_sequences": 5}),
        *(ValueError, "num_return_sequences"),
    ),
    (
        "a model that cannot generate",
        lambda folder: Seq2SeqTrainer(MODEL, Seq2SeqTrainingArguments(str(folder), predict_with_generate=True)),
        *(ConfigurationError, "Regression has no method `generate`"),
    ),
    (
        "another trainer",
        lambda folder: Trainer(tiny_translator(), Seq2SeqTrainingArguments(str(folder), predict_with_generate=True)),
        *(ConfigurationError, r"`predict_with_generate` needs a Seq2SeqTrainer"),
    ),
    (
        "several texts for a row",
        lambda folder: generating()(folder).predict(sentences(3), max_length=9, num_beams=2, num_return_sequences=2),
        *(DataError, r"6 rows of tokens for a batch of 3.*num_return_sequences"),
    ),
    # Callbacks
    (
        "a word as a callback",
        lambda folder: make_trainer(folder, "tensorboard"),
        ArgumentTypeError,
        "'tensorboard' is not a callback",
    ),
    (
        "a callback of the native trainer",
        lambda folder: make_trainer(folder, native.LossSpikeCallback()),
        *(ArgumentTypeError, "LossSpikeCallback is a callback of pytorch_accelerated.Trainer"),
    ),
    (
        "no patience",
        lambda _: EarlyStoppingCallback(0),
        CallbackSetupError,
        "EarlyStoppingCallback has a patience of 0",
    ),
    ("a negative threshold", lambda _: EarlyStoppingCallback(1, -0.5), CallbackSetupError, "a threshold of -0.5"),
    (
        "early stopping without evaluations",
        lambda folder: make_trainer(folder, EarlyStoppingCallback()).train(),
        *(AssertionError, "`metric_for_best_model` is None and `eval_strategy` is 'no'"),
    ),
    ("a state that is not written", lambda _: WithoutState().state(), NotImplementedError, "has no method `state`"),
    # Files
    *(
        (f"a damaged state: {text[:9]}", saved_state(text), InvalidCheckpointError, r"trainer_state\.json is not a tr")
        for text in ("", "[]", "{", '{"epoch": 1}', "\x00", "[" * 100_000)
    ),
    ("a state of another kind", changed_state(colour="blue"), InvalidCheckpointError, "is not a trainer state"),
]


@pytest.mark.parametrize(
    ("mistake", "error", "words"), [case[1:] for case in MISTAKES], ids=[case[0] for case in MISTAKES]
)
def test_a_mistake_is_refused_by_name(mistake: Mistake, error: type[BaseException], words: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=words) as caught:
        mistake(tmp_path)
    assert len(str(caught.value)) < 2000


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(MissingDependencyError, match="optim='adamw_8bit' needs .*pip install bitsandbytes$"):
        Trainer.get_optimizer_cls_and_kwargs(make_arguments(tmp_path, optim="adamw_8bit"))


def test_errors_of_the_user_go_up_as_they_are(tmp_path: Path) -> None:
    class Mistaken(Trainer):
        @property
        def half(self) -> Any:
            return self.args.learning_rat / 2  # type: ignore[attr-defined]

        def push_to_hub(self) -> str:  # which this trainer lacks
            return "done"

    class Failing(Regression):
        def forward(self, x: torch.Tensor, labels: Any = None) -> Any:
            return self.linear()

    trainer = make_trainer(tmp_path, kind=Mistaken, parts={"model": Failing()})
    with pytest.raises(AttributeError, match="no attribute 'learning_rat'"):
        trainer.half  # type: ignore[attr-defined]  # noqa: B018  # it is the reading that fails
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'input'"):
        trainer.train()
    assert trainer.push_to_hub() == "done"  # type: ignore[attr-defined]
    assert not hasattr(make_trainer(tmp_path), "push_to_hub")


def test_an_error_of_the_model_tells_where_it_happened(tmp_path: Path) -> None:
    class FailsAt(Regression):
        def forward(self, x: torch.Tensor, labels: Any = None) -> Any:
            return super().forward(x.double() if torch.equal(x[0], Rows(12).x[6]) else x, labels)

    parts = {"model": FailsAt(), "train_dataset": Rows(12)}
    trainer = make_trainer(tmp_path, parts=parts, gradient_accumulation_steps=2, per_device_eval_batch_size=2)
    places = ("the training step: epoch 1, update 2 of the run, batch 4 of the epoch", "evaluation: epoch 1, after ")
    runs: list[Callable[[], Any]] = [trainer.train, lambda: trainer.evaluate(Rows(12))]
    for run, place in zip(runs, places, strict=True):
        with pytest.raises(RuntimeError, match="must have the same dtype, but got Double and Float") as caught:
            run()
        (note,) = caught.value.__notes__  # type: ignore[attr-defined]
        assert place in note
        assert "The batch: dict with ('x': float32 [2, 2] on cpu; 'labels': float32 [2, 1] on cpu)." in note
