"""Trains with other packages' trainers, on transformers' Trainer or on ours, and prints what they logged as JSON.

``python jobs.py {ours|theirs} FOLDER JOB...``; ours takes the place of transformers' before the packages are imported.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
import transformers.trainer  # which would put its own class back
import transformers.training_args
from datasets import Dataset
from torch.utils.data import SequentialSampler

from tests.huggingface.texts import tiny_classifier, tiny_llama, tiny_tokenizer

TEXTS = ["the cat sat", "a dog ran far away", "once more home", "the dog sat home", "a cat ran", "far away the cat ran"]
USUAL: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "learning_rate": 0.01,
    "logging_steps": 1,
    "disable_tqdm": True,
    "report_to": [],
    "use_cpu": True,
    "train_sampling_strategy": "sequential",
    "bf16": False,
}


def tokenizer() -> Any:
    """One that knows where a text ends, as the packages want it."""
    made = tiny_tokenizer()
    made.eos_token = "[UNK]"
    return made


def sft(folder: str) -> Any:
    """Supervised finetuning with trl, with accumulation and evaluations."""
    import trl

    args = trl.SFTConfig(
        folder,
        gradient_accumulation_steps=2,
        max_length=8,
        eval_strategy="epoch",
        save_strategy="epoch",
        gradient_checkpointing=False,
        **{**USUAL, "num_train_epochs": 2},
    )
    rows = Dataset.from_dict({"text": TEXTS})
    return trl.SFTTrainer(tiny_llama(), args, train_dataset=rows, eval_dataset=rows, processing_class=tokenizer())


def dpo(folder: str) -> Any:
    """Preferences with trl, against a frozen copy of the model."""
    import trl

    args = trl.DPOConfig(
        folder, max_length=16, eval_strategy="epoch", gradient_checkpointing=False, **{**USUAL, "num_train_epochs": 2}
    )
    rows = Dataset.from_dict(
        {"prompt": ["the cat", "a dog"] * 3, "chosen": TEXTS, "rejected": [text.upper() for text in reversed(TEXTS)]}
    )
    return trl.DPOTrainer(
        tiny_llama(), tiny_llama(), args, train_dataset=rows, eval_dataset=rows, processing_class=tokenizer()
    )


def with_rewards(folder: str, method: str) -> Any:
    """What a method of trl learns from rewards: completions that have many different words."""
    import trl

    args = getattr(trl, f"{method}Config")(
        folder,
        num_generations=2,
        max_completion_length=6,
        shuffle_dataset=False,
        save_strategy="epoch",
        gradient_checkpointing=False,
        **{**USUAL, "num_train_epochs": 2},
    )
    start = str(Path(folder) / "start")  # from which the reference is read, too
    tiny_llama().double().save_pretrained(start)  # small gradients would be rounding errors of single precision
    rows = Dataset.from_dict({"prompt": TEXTS})
    return getattr(trl, f"{method}Trainer")(
        transformers.LlamaForCausalLM.from_pretrained(start, dtype=torch.float64),
        lambda completions, **columns: [float(len(set(text.split()))) for text in completions],
        args,
        train_dataset=rows,
        processing_class=tokenizer(),
        callbacks=[SameDraws()],
    )


class SameDraws(transformers.TrainerCallback):
    """Has each step draw its completions from the same random numbers: those of the two libraries differ."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        torch.manual_seed(state.global_step)


def grpo(folder: str) -> Any:
    """Group relative policy optimization with trl."""
    return with_rewards(folder, "GRPO")


def rloo(folder: str) -> Any:
    """REINFORCE, leaving one out, with trl."""
    return with_rewards(folder, "RLOO")


def sentence_model(folder: str) -> Any:
    """A model of sentences, made of files."""
    import sentence_transformers
    from sentence_transformers import models

    place = str(Path(folder) / "body")
    tiny_classifier().distilbert.save_pretrained(place)
    tokenizer().save_pretrained(place)
    words = models.Transformer(place, max_seq_length=8)
    return sentence_transformers.SentenceTransformer(modules=[words, models.Pooling(8)], device="cpu")


def sentences(folder: str) -> Any:
    """Pairs of sentences with sentence-transformers, two epochs with checkpoints."""
    import sentence_transformers
    from sentence_transformers import losses

    model = sentence_model(folder)
    args = sentence_transformers.SentenceTransformerTrainingArguments(
        folder, eval_strategy="epoch", save_strategy="epoch", **{**USUAL, "num_train_epochs": 2}
    )
    rows = Dataset.from_dict({"anchor": TEXTS, "positive": TEXTS[1:] + TEXTS[:1]})
    loss = losses.MultipleNegativesRankingLoss(model)
    return in_order(
        sentence_transformers.SentenceTransformerTrainer(model, args, train_dataset=rows, eval_dataset=rows, loss=loss)
    )


def in_order(trainer: Any) -> Any:
    """`trainer` with batches in the order of the rows: which random order follows from a seed differs."""
    usual = trainer.get_batch_sampler

    def get_batch_sampler(dataset: Any, **arguments: Any) -> Any:
        batches = usual(dataset, **arguments)
        batches.sampler = SequentialSampler(dataset)
        return batches

    trainer.get_batch_sampler = get_batch_sampler
    return trainer


def few_shots(folder: str) -> Any:
    """A classifier of few examples with setfit."""
    import setfit
    from sklearn.linear_model import LogisticRegression

    model = setfit.SetFitModel(sentence_model(folder), LogisticRegression(), labels=["far", "home"])
    args = setfit.TrainingArguments(
        folder, batch_size=2, num_epochs=1, num_iterations=2, logging_steps=1, report_to="none", show_progress_bar=False
    )
    rows = Dataset.from_dict({"text": TEXTS, "label": [0, 0, 1, 1, 0, 1]})
    trainer = setfit.Trainer(model, args=args, train_dataset=rows, eval_dataset=rows)
    in_order(trainer.st_trainer)
    return trainer


JOBS = {"trl": [sft, dpo, grpo, rloo], "sentence_transformers": [sentences], "setfit": [few_shots]}


def numbers(history: list[dict[str, Any]]) -> list[dict[str, float]]:
    """A log history without what depends on the clock."""
    words = ("_runtime", "_per_second", "_preparation_time", "step_time")
    return [{name: value for name, value in entry.items() if not name.endswith(words)} for entry in history]


def main() -> None:
    library, folder, *packages = sys.argv[1:]
    if library == "ours":
        from pytorch_accelerated import huggingface

        transformers.Trainer = huggingface.Trainer  # type: ignore[assignment, misc]
        transformers.TrainingArguments = huggingface.TrainingArguments  # type: ignore[assignment, misc]
    results = {}
    for job in (job for package in packages for job in JOBS[package]):
        torch.manual_seed(0)
        trainer = job(str(Path(folder) / job.__name__))
        trainer.train()
        inner = getattr(trainer, "st_trainer", trainer)
        assert isinstance(inner, transformers.Trainer)
        results[job.__name__] = numbers(inner.state.log_history)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
