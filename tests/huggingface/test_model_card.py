"""The page that `create_model_card` writes, as the hub's own package reads it."""

from pathlib import Path
from typing import Any

import pytest

from pytorch_accelerated.huggingface import Trainer
from tests.huggingface.runs import make_trainer

LABELS = {"language": "en", "license": "mit", "tags": ["tiny", "test: yes"]}
ON_A_DATASET = {"tasks": "tabular-regression", "dataset_tags": "our/rows", "dataset": "Rows", "dataset_args": "plain"}


def card_of(trainer: Trainer, **about: Any) -> Any:
    from huggingface_hub import ModelCard

    trainer.create_model_card(**about)
    return ModelCard.load(Path(str(trainer.args.output_dir)) / "README.md")


@pytest.mark.fact("Scripts: create_model_card writes README.md, with the metadata for the hub at its top")
def test_the_hub_reads_what_a_card_says(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "linear", eval_strategy="epoch")
    trainer.train()
    card = card_of(trainer, model_name="Linear", finetuned_from="our/base", **LABELS, **ON_A_DATASET)
    assert {name: card.data[name] for name in LABELS} == LABELS
    assert (card.data.base_model, card.data.datasets, card.data.model_name) == ("our/base", ["our/rows"], "Linear")
    (result,) = card.data.eval_results
    assert (result.task_type, result.dataset_name, result.dataset_type) == ("tabular-regression", "Rows", "our/rows")
    assert (result.dataset_args, result.metric_type) == ("plain", "loss")
    assert card.data.pipeline_tag == "tabular-regression"
    assert '`datasets`: ["Rows"]' in card.text
    assert result.metric_value == trainer.evaluate()["eval_loss"]


@pytest.mark.fact("Scripts: A model card lists the given arguments, the last logged values and the versions")
def test_people_read_what_a_run_was_and_came_to(tmp_path: Path) -> None:
    import torch

    trainer = make_trainer(tmp_path / "linear", eval_strategy="epoch", max_steps=3)
    trainer.train()
    text = card_of(trainer).text
    assert "\n# linear\n" in text
    assert "`Regression` with 3 parameters" in text
    loss = next(entry["eval_loss"] for entry in reversed(trainer.state.log_history) if "eval_loss" in entry)
    for line in ("learning_rate`: 0.1", "max_steps`: 3", f"torch`: {str(torch.__version__)!r}", f"loss`: {loss:.4f}"):
        assert line.replace("'", '"') in text
    assert "weight_decay" not in text, "it has its default"
    assert str(tmp_path) not in text, "where it was trained is nobody else's business"


@pytest.mark.parametrize("about", [{}, {"dataset": "Rows"}, {"tasks": "regression"}, {"tags": "eine Größe \U0001f600"}])
def test_a_card_is_readable_before_a_training_too(about: dict[str, Any], tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.state.log_history.append({"eval_loss": float("nan"), "step": 0})
    card = card_of(trainer, **about)
    assert card.data.eval_results in (None, [])
    assert "NaN" in card.text
    assert card.data.tags == ([about["tags"]] if "tags" in about else None)


def test_only_the_first_process_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path)
    monkeypatch.setattr(trainer, "is_world_process_zero", lambda: False)
    trainer.create_model_card()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fact("Trainer: Unsupported methods of transformers raise errors that say what to do, and hasattr is False")
@pytest.mark.parametrize(
    ("method", "remedy"),
    [
        ("push_to_hub", r"trainer\.model\.push_to_hub"),
        ("hyperparameter_search", "in a loop"),
        ("init_hf_repo", "create_repo"),
        ("_wrap_model", "accelerate's configuration"),
        ("_get_num_items_in_batch", "Override `count_items`"),
    ],
)
def test_a_method_that_is_not_there_says_what_to_do(method: str, remedy: str, tmp_path: Path) -> None:
    import transformers

    trainer = make_trainer(tmp_path)
    assert hasattr(transformers.Trainer, method)
    assert not hasattr(trainer, method)
    assert getattr(trainer, method, None) is None
    with pytest.raises(AttributeError, match=f"Trainer has no `{method}`.*{remedy}"):
        getattr(trainer, method)()


def test_errors_inside_of_a_property_are_seen_as_they_are(tmp_path: Path) -> None:
    class Mistaken(Trainer):
        @property
        def half(self) -> Any:
            return self.args.learning_rat / 2  # type: ignore[attr-defined]

    with pytest.raises(AttributeError, match="no attribute 'learning_rat'"):
        make_trainer(tmp_path, kind=Mistaken).half  # type: ignore[attr-defined]  # noqa: B018  # it is the reading


def test_a_subclass_may_have_such_a_method(tmp_path: Path) -> None:
    class Pushing(Trainer):
        def push_to_hub(self) -> str:
            return "done"

    trainer = make_trainer(tmp_path, kind=Pushing)
    assert isinstance(trainer, Pushing)
    assert trainer.push_to_hub() == "done"
