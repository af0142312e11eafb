"""What cannot work is refused with an error that says what it got, why that cannot work, and what to do."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pytorch_accelerated.errors import (
    ArgumentTypeError,
    CheckpointError,
    ConfigurationError,
    DataError,
    HookOutputError,
)
from pytorch_accelerated.huggingface import Trainer, TrainerCallback
from tests.huggingface.runs import Regression, Rows, make_trainer


def rows_with(**columns: Any) -> list[dict[str, Any]]:
    return [{**Rows(4)[index], **{name: values[index] for name, values in columns.items()}} for index in range(4)]


@pytest.mark.parametrize(
    ("labels", "advice"),
    [
        ([1.0, None, 1.0, 1.0], "'labels' cannot be stacked.*1 of these 2 rows have None there: give them a value"),
        ([2**70, 1, 2, 3], f"'labels' cannot be stacked.*{2**70} is beyond what 64 bits can hold"),
        ([[1.0], [1.0, 2.0], [1.0], [1.0]], "'labels' cannot be stacked.*Give them one length"),
    ],
)
def test_the_advice_fits_the_labels_that_cannot_be_stacked(labels: list[Any], advice: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=advice):
        make_trainer(tmp_path, parts={"train_dataset": rows_with(labels=labels)}).train()


def test_a_collator_that_returns_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="A batch is None.*`data_collator`"):
        make_trainer(tmp_path, parts={"data_collator": lambda rows: None}).train()


def test_an_output_dir_that_cannot_be_created_is_an_error_before_the_training(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(CheckpointError, match="taken.*failed while making the folder"):
        make_trainer(tmp_path / "taken" / "results")


def test_an_object_that_is_not_a_dataset_is_rejected(tmp_path: Path) -> None:
    def generator() -> Iterator[Any]:
        yield Rows(1)[0]

    with pytest.raises(ConfigurationError, match="no dataset to predict.*`test_dataset`"):
        make_trainer(tmp_path).predict(None)
    with pytest.raises(DataError, match="`eval_dataset` is a dict of nothing"):
        make_trainer(tmp_path, parts={"eval_dataset": {}}).evaluate()
    with pytest.raises(DataError, match="a generator, which has no rows by number.*`IterableDataset`"):
        make_trainer(tmp_path, parts={"train_dataset": generator()}, max_steps=1).train()
    with pytest.raises(DataError, match="a generator, which has no rows by number"):
        make_trainer(tmp_path, parts={"eval_dataset": generator()}).evaluate()


def test_a_forward_that_takes_anything_names_no_column(tmp_path: Path) -> None:
    class Anything(Regression):
        def forward(self, **kw: Any) -> Any:  # type: ignore[override]
            return super().forward(**kw)

    with pytest.raises(DataError, match="none of which.*takes: 'label', 'label_ids'.*remove_unused_columns=False"):
        make_trainer(tmp_path, parts={"model": Anything()}).train()


def test_a_loss_of_older_scripts_gets_an_error_that_names_what_it_lacks(tmp_path: Path) -> None:
    class WithoutItems(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:  # type: ignore[override]
            return model(**inputs)[0]

    class WithoutAnything(Trainer):
        def compute_loss(self, model: Any, inputs: Any) -> Any:  # type: ignore[override]
            return model(**inputs)[0]

    class Failing(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            raise TypeError("of the user's")

    with pytest.raises(ConfigurationError, match="no parameter `num_items_in_batch`.*Add num_items_in_batch=None"):
        make_trainer(tmp_path, kind=WithoutItems).train()
    with pytest.raises(ConfigurationError, match="Add return_outputs=False, num_items_in_batch=None"):
        make_trainer(tmp_path, kind=WithoutAnything).evaluate()
    with pytest.raises(TypeError) as caught:
        make_trainer(tmp_path, kind=Failing).train()
    assert str(caught.value) == "of the user's"


def test_a_training_step_that_returns_nothing_is_refused(tmp_path: Path) -> None:
    class Forgetful(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            super().training_step(*args, **kwargs)

    with pytest.raises(HookOutputError, match=r"Forgetful\.training_step returned None"):
        make_trainer(tmp_path, kind=Forgetful).train()


@pytest.mark.parametrize("optimizer", ["a", torch.optim.SGD])
def test_an_object_that_is_not_an_optimizer_is_rejected(optimizer: Any, tmp_path: Path) -> None:
    with pytest.raises(ArgumentTypeError, match="`optimizer` is .*, which is not an optimizer"):
        make_trainer(tmp_path, parts={"optimizers": (optimizer, None)})


@pytest.mark.parametrize("source", [5, "", 1.0, ["checkpoint-1"]])
def test_an_invalid_checkpoint_path_is_rejected(source: Any, tmp_path: Path) -> None:
    with pytest.raises(ArgumentTypeError, match="`resume_from_checkpoint` is .*, which is no path"):
        make_trainer(tmp_path).train(resume_from_checkpoint=source)


def test_metrics_need_a_function_and_names(tmp_path: Path) -> None:
    with pytest.raises(ArgumentTypeError, match="`compute_metrics` is 'accuracy', which cannot be called"):
        make_trainer(tmp_path, parts={"compute_metrics": "accuracy"})
    with pytest.raises(HookOutputError, match="a dict with 1 as the name of a metric.*Use strings"):
        make_trainer(tmp_path, parts={"compute_metrics": lambda prediction: {1: 2.0}}).evaluate()


@pytest.mark.parametrize("value", ["good", None, [1.0]])
def test_a_value_that_is_not_a_number_cannot_be_the_best(value: Any, tmp_path: Path) -> None:
    parts = {"compute_metrics": lambda prediction: {"a": value}}
    trainer = make_trainer(tmp_path, parts=parts, eval_strategy="epoch", metric_for_best_model="a")
    with pytest.raises(
        HookOutputError, match="`metric_for_best_model` is 'eval_a', but the evaluation has .* no number"
    ):
        trainer.train()


def test_values_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    class Adds(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            state.log_history[-1]["extra"] = {"weights": torch.ones(1)}

    trainer = make_trainer(tmp_path, Adds(), save_strategy="steps", save_steps=1)
    with pytest.raises(ArgumentTypeError, match=r"at \['log_history'\]\[0\]\['extra'\]\['weights'\]\. Log plain"):
        trainer.train()
