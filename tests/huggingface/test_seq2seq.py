"""Evaluations that generate, as those of transformers' Seq2SeqTrainer, which is run beside ours."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pytorch_accelerated.huggingface import (
    EvalPrediction,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)
from tests.huggingface.runs import without_speed
from tests.huggingface.test_against_transformers import TRAINED, assert_same_history
from tests.huggingface.texts import tiny_language_model, tiny_tokenizer
from tests.huggingface.translations import sentences, share_of_right_tokens, tiny_translator
from tests.support.processes import REPOSITORY, run_forked, run_on_ranks
from tests.support.resuming import assert_same

transformers = pytest.importorskip("transformers")

LIBRARIES = {
    "ours": (Seq2SeqTrainer, Seq2SeqTrainingArguments),
    "theirs": (transformers.Seq2SeqTrainer, transformers.Seq2SeqTrainingArguments),
}


def make(folder: Path, library: str = "ours", *, parts: dict[str, Any] | None = None, **arguments: Any) -> Any:
    """A trainer of `library` that generates; quiet, on the CPU, in batches of three in the order of the rows."""
    kind, kind_of_arguments = LIBRARIES[library]
    quiet: dict[str, Any] = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}
    sizes = {"per_device_train_batch_size": 3, "per_device_eval_batch_size": 3, "logging_steps": 1}
    given = {"predict_with_generate": True, "train_sampling_strategy": "sequential", **quiet, **sizes, **arguments}
    defaults = {"model": tiny_translator(), "train_dataset": sentences(6), "eval_dataset": sentences(9)}
    data = {**defaults, "compute_metrics": share_of_right_tokens, **(parts or {})}
    if "model_init" in data:
        del data["model"]
    return kind(args=kind_of_arguments(str(folder), **given), **data)


def up_to_end(rows: Any) -> list[list[int]]:
    """Rows of tokens up to the one that ends each, the first one aside, and without padding."""
    texts = []
    for row in np.where(rows == -100, 0, rows).tolist():
        end = row.index(1, 1) + 1 if 1 in row[1:] else len(row)
        tokens = row[:end]
        while tokens and tokens[-1] == 0:
            tokens.pop()
        texts.append(tokens)
    return texts


@pytest.mark.parametrize(("kind", "beams"), [("T5", 1), ("Bart", 2), ("Marian", 2)])
def test_generated_tokens_are_the_same(kind: str, beams: int, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"generation_num_beams": beams, "generation_max_length": 12}
    trainers = [make(tmp_path, library, parts={"model": tiny_translator(kind)}, **arguments) for library in LIBRARIES]
    ours, theirs = (trainer.predict(sentences(9)) for trainer in trainers)
    assert up_to_end(ours.predictions) == up_to_end(theirs.predictions)
    assert len(set(map(tuple, up_to_end(ours.predictions)))) > 1
    np.testing.assert_array_equal(ours.label_ids, theirs.label_ids[:, :5])
    (our_metrics, their_metrics) = without_speed([ours.metrics, theirs.metrics])
    assert our_metrics == pytest.approx(their_metrics, rel=1e-6)
    (our_metrics, their_metrics) = without_speed([trainer.evaluate(max_new_tokens=4) for trainer in trainers])
    assert our_metrics == pytest.approx(their_metrics, rel=1e-6)


def test_a_run_that_generates_is_the_same(tmp_path: Path) -> None:
    ours, theirs = (
        make(
            tmp_path / library,
            library,
            eval_strategy="epoch",
            save_strategy="epoch",
            load_best_model_at_end=True,
            metric_for_best_model="loss",
            generation_max_length=6,
            learning_rate=0.001,  # with larger ones the loss grows, and so does what was rounded
            num_train_epochs=3,
        )
        for library in LIBRARIES
    )
    for trainer in (ours, theirs):
        trainer.train()
    assert_same_history(ours.state.log_history, theirs.state.log_history, tolerance=TRAINED)
    assert ours.state.best_global_step == theirs.state.best_global_step
    assert {"eval_right", "eval_length", "eval_loss"} <= ours.state.log_history[2].keys()


@pytest.mark.parametrize("beams", [1, 2])
def test_a_row_is_generated_as_if_it_was_alone(beams: int, tmp_path: Path) -> None:
    rows = sentences(9, ragged=True)
    lists = [{name: value.tolist() for name, value in row.items()} for row in rows]
    outputs = [
        make(
            tmp_path,
            parts={"data_collator": transformers.DataCollatorForSeq2Seq(tiny_tokenizer())},
            generation_num_beams=beams,
            generation_max_length=12,
            per_device_eval_batch_size=size,
        ).predict(lists)
        for size in (1, 4)
    ]
    for tokens in ("predictions", "label_ids"):
        np.testing.assert_array_equal(*[getattr(output, tokens) for output in outputs])
    model = tiny_translator()
    for row, tokens, labels in zip(rows, outputs[0].predictions, outputs[0].label_ids, strict=True):
        alone = model.generate(row["input_ids"][None], num_beams=beams, max_length=12)[0].tolist()
        assert tokens.tolist() == alone + [0] * (len(tokens) - len(alone))
        assert labels.tolist() == row["labels"].tolist() + [-100] * (5 - len(row["labels"]))
    assert {len(text) for text in up_to_end(outputs[0].predictions)} != {outputs[0].predictions.shape[1]}


def test_inputs_derived_from_labels_do_not_reach_generate(tmp_path: Path) -> None:
    trainer = make(tmp_path, generation_max_length=6)
    expected = trainer.predict(sentences(9)).predictions
    unlabelled = trainer.predict(
        [{name: row[name] for name in ("input_ids", "attention_mask")} for row in sentences(9)]
    )
    np.testing.assert_array_equal(unlabelled.predictions, expected)
    assert unlabelled.label_ids is None
    assert "test_loss" not in unlabelled.metrics
    collator = transformers.DataCollatorForSeq2Seq(tiny_tokenizer(), model=trainer.model)
    lists = [{name: value.tolist() for name, value in row.items()} for row in sentences(9)]
    assert "decoder_input_ids" in collator(lists[:2])
    given = make(tmp_path, parts={"data_collator": collator}, generation_max_length=6).predict(lists)
    np.testing.assert_array_equal(given.predictions, expected)
    begun = [{"input_ids": row["input_ids"], "decoder_input_ids": torch.tensor([0, 5])} for row in sentences(9)]
    continued = trainer.predict(begun)
    assert (continued.predictions[:, :2] == [0, 5]).all()


def test_arguments_of_generate_are_those_of_the_call_then_those_of_the_run(tmp_path: Path) -> None:
    lengths = []

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        lengths.append(prediction.predictions.shape[1])
        return {}

    trainer = make(tmp_path, parts={"compute_metrics": compute_metrics}, generation_max_length=6)
    trainer.evaluate()
    trainer.evaluate(max_length=4)
    trainer.evaluate(max_new_tokens=7)
    trainer.evaluate({"a": sentences(3), "b": sentences(4)}, max_length=5)
    trainer.evaluate()
    assert lengths == [6, 4, 8, 5, 5, 6]
    assert trainer.predict(sentences(2), max_length=3).predictions.shape == (2, 3)
    _, tokens, _ = trainer.prediction_step(trainer.model, trainer.data_collator(sentences(2)), False, max_new_tokens=2)
    assert tokens.shape == (2, 3)
    trainer.compute_metrics = None
    assert "eval_loss" in trainer.evaluate()  # and nothing generated


def test_a_generation_config_comes_from_many_places(tmp_path: Path) -> None:
    config = transformers.GenerationConfig(max_length=7, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)
    config.save_pretrained(tmp_path)
    file = tmp_path / "generation_config.json"
    for source in (config, config.to_dict(), file, str(file), tmp_path, json.loads(file.read_text())):
        trainer = make(tmp_path / "run", generation_config=source)
        assert trainer.predict(sentences(4)).predictions.shape == (4, 7)
        assert trainer.model.generation_config is not config
    trainer = make(
        tmp_path / "run",
        parts={"model_init": tiny_translator},
        generation_config=config,
        eval_strategy="epoch",
        save_strategy="epoch",
        num_train_epochs=1,
    )
    trainer.train()
    assert trainer.model.generation_config.max_length == 7
    stored = torch.load(tmp_path / "run" / "checkpoint-2" / "training_args.bin", weights_only=True)
    assert stored["generation_config"]["max_length"] == 7


def test_a_language_model_continues_its_input(tmp_path: Path) -> None:
    rows = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in sentences(4)]
    output = make(tmp_path, parts={"model": tiny_language_model()}).predict(rows, max_new_tokens=3)
    assert output.predictions.shape == (4, 8)
    assert output.predictions[:, :5].tolist() == [row["input_ids"].tolist() for row in rows]
    alone = tiny_language_model().eval().generate(rows[0]["input_ids"][None], max_new_tokens=3)
    assert up_to_end(output.predictions[:1]) == up_to_end(alone.numpy())


def test_a_custom_evaluation_generates_with_its_own_settings(tmp_path: Path) -> None:
    class OwnEvaluation(Seq2SeqTrainer):
        def evaluate(self, eval_dataset: Any = None, *args: Any, **gen_kwargs: Any) -> Any:
            gen_kwargs.pop("ignore_keys", None)
            self._gen_kwargs = gen_kwargs
            wanted, self.compute_metrics = self.compute_metrics, None
            output = self.evaluation_loop(
                self.get_eval_dataloader(eval_dataset), "Evaluation", metric_key_prefix="eval"
            )
            self.compute_metrics = wanted
            metrics = {**(output.metrics or {}), "eval_width": output.predictions.shape[1]}
            self.log(metrics)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
            return metrics

    args = make(tmp_path, num_train_epochs=1, eval_strategy="epoch", generation_max_length=9).args
    trainer = OwnEvaluation(tiny_translator(), args, train_dataset=sentences(3), eval_dataset=sentences(4))
    assert trainer.evaluate(max_length=4)["eval_width"] == 4
    trainer.train()
    assert [entry["eval_width"] for entry in trainer.state.log_history if "eval_width" in entry] == [9]


@pytest.mark.processes
def test_two_processes_generate_as_one(tmp_path: Path) -> None:
    script = REPOSITORY / "tests" / "ranks" / "huggingface_seq2seq.py"
    run_forked(script, tmp_path)
    assert run_on_ranks(script, 2, tmp_path).stdout.count("done") == 2
    one, first, second = (torch.load(tmp_path / f"{name}.pt") for name in ("1-0", "2-0", "2-1"))
    assert_same(first, second)
    losses = [{name: values.pop("loss", 0.0) for name, values in each.items()} for each in (one, first)]
    assert_same(first, one)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert len(one) == 6
