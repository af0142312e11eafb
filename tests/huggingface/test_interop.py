"""With the real packages: models, callbacks and collators of transformers, rows of datasets."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pytorch_accelerated.huggingface import (
    EvalPrediction,
    TensorBoardCallback,
    Trainer,
    TrainerCallback,
)
from tests.huggingface.runs import Regression, StopAt, make_trainer
from tests.huggingface.test_against_transformers import assert_same_history, run
from tests.huggingface.test_reporting import scalars_in, texts_in
from tests.huggingface.texts import WORDS, tiny_classifier, tiny_language_model, tiny_llama, tiny_tokenizer
from tests.huggingface.translations import tiny_translator
from tests.support.states import verify

transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")

TEXTS = ["the cat sat", "a dog ran far away", "the dog", "a cat", "the cat ran away", "a dog sat"] * 3
LABELS = [int("dog" in text) for text in TEXTS]


def text_rows() -> Any:
    """Rows as people make them: tokenized, with columns that the model has no use for."""
    tokenizer = tiny_tokenizer()
    rows = datasets.Dataset.from_dict({"text": TEXTS, "label": LABELS})
    return rows.map(lambda batch: tokenizer(batch["text"]), batched=True)


def accuracy(prediction: EvalPrediction) -> dict[str, Any]:
    return {"accuracy": (prediction.predictions.argmax(-1) == prediction.label_ids).mean()}


def classify(folder: Path, *callbacks: Any, **arguments: Any) -> Trainer:
    parts = {
        "model": tiny_classifier(),
        "processing_class": tiny_tokenizer(),
        "train_dataset": text_rows(),
        "eval_dataset": text_rows(),
        "compute_metrics": accuracy,
    }
    return make_trainer(
        folder,
        *callbacks,
        parts={**parts, **arguments.pop("parts", {})},
        **{"learning_rate": 0.05, "num_train_epochs": 12, "per_device_train_batch_size": 6, **arguments},
    )


def test_a_text_classifier_learns(tmp_path: Path) -> None:
    trainer = classify(tmp_path, train_sampling_strategy="random")
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_loss"] < before["eval_loss"] / 2, (before, after)
    assert after["eval_accuracy"] == 1.0
    assert trainer.state.total_flos > 0
    assert trainer.train_dataset.column_names[0] == "text"  # the user's rows are as they were


@pytest.mark.parametrize("kind", ["classifier", "tied weights"])
def test_saved_models_load_with_from_pretrained(kind: str, tmp_path: Path) -> None:
    if kind == "classifier":
        trainer = classify(tmp_path, save_strategy="epoch", num_train_epochs=1)
    else:
        words = torch.arange(8) % len(WORDS)
        rows = [{"input_ids": words.roll(shift), "labels": words.roll(shift)} for shift in range(4)]
        trainer = make_trainer(
            tmp_path,
            parts={"model": tiny_language_model(), "train_dataset": rows, "eval_dataset": None},
            save_strategy="epoch",
            num_train_epochs=1,
        )
    trainer.train()
    trainer.save_model(str(tmp_path / "mine"))
    checkpoint = next(tmp_path.glob("checkpoint-*"))
    verify(checkpoint)
    for folder in (checkpoint, tmp_path / "mine"):
        loaded = type(trainer.model).from_pretrained(folder)
        torch.testing.assert_close(loaded.state_dict(), trainer.model.state_dict(), rtol=0, atol=0)
        if kind == "classifier":
            assert transformers.AutoTokenizer.from_pretrained(folder)("the cat")["input_ids"]
    other = make_trainer(tmp_path, parts={"model": type(trainer.model)(trainer.model.config)})
    for folder in (checkpoint, tmp_path / "mine"):
        other._load_from_checkpoint(str(folder))
        torch.testing.assert_close(other.model.state_dict(), trainer.model.state_dict(), rtol=0, atol=0)


def test_the_tokenizer_of_the_collator_is_saved(tmp_path: Path) -> None:
    collator = transformers.DataCollatorWithPadding(tiny_tokenizer())
    parts = {"processing_class": None, "data_collator": collator}
    trainer = classify(tmp_path, parts=parts, save_strategy="epoch", num_train_epochs=1)
    trainer.train()
    trainer.save_model(str(tmp_path / "mine"))
    for folder in (next(tmp_path.glob("checkpoint-*")), tmp_path / "mine"):
        assert transformers.AutoTokenizer.from_pretrained(folder)("the cat") == tiny_tokenizer()("the cat")


@pytest.mark.filterwarnings("ignore:A second TensorBoardCallback was added")  # which is what is wanted here
def test_a_genuine_tensorboard_callback_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "theirs"))
    writers = TensorBoardCallback(), transformers.integrations.TensorBoardCallback()
    parts = {"compute_metrics": lambda prediction: {"точность": 0.5}}
    arguments = {"logging_dir": str(tmp_path / "ours"), "report_to": "none", "eval_strategy": "epoch"}
    classify(tmp_path, *writers, parts=parts, num_train_epochs=2, **arguments).train()
    ours, theirs = scalars_in(tmp_path / "ours"), scalars_in(tmp_path / "theirs")
    assert ours == theirs
    assert [step for step, _ in theirs["eval/loss"]] == [3, 6]
    assert ours["eval/точность"] == [(3, 0.5), (6, 0.5)]
    texts = {"args/text_summary", "model_config/text_summary"}
    assert texts_in(tmp_path / "ours") == texts_in(tmp_path / "theirs") == texts


@pytest.mark.parametrize(("writer", "reader"), [("theirs", "ours"), ("ours", "theirs")])
@pytest.mark.parametrize(
    ("step", "epochs", "dropout"),
    # At the beginning of an epoch their loader draws a random number and ours does not, so dropout is the same up to
    # there only.
    [(3, 1, 0.5), (8, 2, 0.5), (3, 2, 0.0)],
)
def test_one_resumes_from_a_checkpoint_of_the_other(
    writer: str, reader: str, step: int, epochs: int, dropout: float, tmp_path: Path
) -> None:
    def go(library: str, name: str, *callbacks: Any, resume: Path | None = None) -> Any:
        return run(
            library,
            tmp_path / name,
            *callbacks,
            resume=None if resume is None else str(resume),
            parts={"model": Regression(dropout=dropout)},
            num_train_epochs=epochs,
        )

    whole = go(writer, "whole")
    go(writer, "parts", StopAt(step))
    folder = tmp_path / "parts" / f"checkpoint-{step}"
    resumed = {library: go(library, library, resume=folder) for library in (writer, reader)}
    for library in (writer, reader):
        assert_same_history(resumed[library].state.log_history[:-1], whole.state.log_history[:-1])
        torch.testing.assert_close(resumed[library].model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)


def test_generators_of_transformers_are_restored(tmp_path: Path) -> None:
    class Draws(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            drawn.append((random.random(), np.random.rand(), torch.rand(1).item()))

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.on_train_begin(args, state, control)

    drawn: list[Any] = []
    run("theirs", tmp_path / "theirs", Draws(), StopAt(3))
    run("ours", tmp_path / "ours", Draws(), resume=str(tmp_path / "theirs" / "checkpoint-3"))
    assert len(drawn) == 3
    assert drawn[2] == drawn[1]


@pytest.mark.parametrize("tells", ["column", "inputs"])
def test_rows_of_like_length_come_together(tells: str, tmp_path: Path) -> None:
    class Lengths(Regression):
        main_input_name = "x"

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            assert labels is not None
            seen.append([int((row != 0).sum()) for row in x])
            return {"loss": (x.sum() * 0 + self.linear.weight.sum() + labels.sum() * 0)}

    lengths = np.random.default_rng(0).permutation(40) + 1
    rows = [{"x": torch.ones(int(length)), "labels": torch.ones(1)} for length in lengths]
    if tells == "column":
        rows = [{**row, "length": len(row["x"])} for row in rows]  # type: ignore[dict-item]  # numbers and tensors
    seen: list[list[int]] = []
    trainer = make_trainer(
        tmp_path,
        parts={
            "model": Lengths(),
            "train_dataset": rows,
            "data_collator": lambda rows: {
                "x": torch.nn.utils.rnn.pad_sequence([row["x"] for row in rows], batch_first=True),
                "labels": torch.stack([row["labels"] for row in rows]),
            },
        },
        train_sampling_strategy="group_by_length",
        per_device_train_batch_size=4,
        num_train_epochs=1,
    )
    trainer.train()
    assert seen[0] == [40, 39, 38, 37]
    assert sorted(length for batch in seen for length in batch) == list(range(1, 41))
    assert all(max(batch) - min(batch) == 3 for batch in seen)


def test_rebalanced_batches_are_those_of_a_random_update_by_length(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).permutation(40) + 1
    seen: list[list[int]] = []

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        seen.append([row["length"] for row in rows])
        return {"x": torch.ones(len(rows), 2), "labels": torch.ones(len(rows), 1)}

    make_trainer(
        tmp_path,
        parts={"train_dataset": [{"length": int(length)} for length in lengths], "data_collator": collate},
        train_sampling_strategy="batch_rebalance",
        remove_unused_columns=False,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=3,
        num_train_epochs=1,
    ).train()
    updates = [sum(seen[start : start + 3], []) for start in range(0, len(seen), 3)]
    assert [len(update) for update in updates] == [12, 12, 12, 4]
    assert all(update == sorted(update, reverse=True) for update in updates)
    assert updates[0][0] == 40
    assert sorted(sum(updates, [])) == list(range(1, 41))
    assert max(updates[1]) - min(updates[1]) > 12  # which rows are in an update is random


@pytest.mark.parametrize("make_model", [tiny_language_model, tiny_llama, tiny_translator])
@pytest.mark.parametrize("use_cache", [False, True])
def test_predictions_have_no_caches(make_model: Any, use_cache: bool, tmp_path: Path) -> None:
    rows = [{"input_ids": torch.arange(4) + size, "labels": torch.arange(4) + size} for size in range(5)]

    def predicted(library: str, **given: Any) -> Any:
        parts = {"model": make_model(), "eval_dataset": rows}
        trainer = run(library, tmp_path / library, parts=parts, trains=False, use_cache=use_cache)
        assert trainer.model.config.use_cache == use_cache
        return trainer, trainer.predict(rows, **given).predictions

    trainer, ours = predicted("ours")
    torch.testing.assert_close(ours, predicted("theirs")[1])
    torch.testing.assert_close(trainer.predict(rows, ignore_keys=["unknown"]).predictions, ours)
    trainer.model.register_forward_hook(lambda model, inputs, outputs: outputs.to_tuple())
    torch.testing.assert_close(trainer.predict(rows).predictions, ours)


def special_tokens_of(config: Any) -> tuple[Any, Any, Any]:
    return config.pad_token_id, config.bos_token_id, config.eos_token_id


def test_a_model_that_needs_to_know_the_padding_learns_of_it_from_the_tokenizer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_language_model().config
    config.bos_token_id, config.eos_token_id = 7, 9
    model = transformers.GPT2ForSequenceClassification(config)
    trainer = classify(tmp_path, parts={"model": model}, max_steps=1)
    assert special_tokens_of(model.config) == (None, 7, 9)
    with caplog.at_level("WARNING", "pytorch_accelerated.huggingface"):
        trainer.train()  # of several rows in a batch
        assert special_tokens_of(model.config) == (0, 7, 9)
        assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
            "config.pad_token_id from None to 0"
        ]
        trainer.train()
        assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("eos", "generation_eos", "expected"),
    [(9, 9, (3, [3, 9])), ([9, 3], [9, 3], ([9, 3], [9, 3])), (3, [9, 8], (3, [3, 9, 8])), (3, None, (3, 3))],
)
def test_of_several_tokens_that_end_a_text_none_is_lost(
    eos: Any, generation_eos: Any, expected: Any, tmp_path: Path
) -> None:
    model, tokenizer = tiny_language_model(), tiny_tokenizer()
    tokenizer.eos_token = WORDS[3]
    model.config.eos_token_id, model.generation_config.eos_token_id = eos, generation_eos
    rows = [{"input_ids": [2, 3, 4], "labels": [2, 3, 4]}] * 2
    parts = {"model": model, "train_dataset": rows, "processing_class": tokenizer}
    trainer = make_trainer(tmp_path, parts=parts, max_steps=1)
    trainer.train()
    assert (model.config.eos_token_id, model.generation_config.eos_token_id) == expected
    assert model.config.bos_token_id == 0  # the tokenizer has none
