"""Fine-tuning a small BERT on texts of different lengths, padded per batch: the Hugging Face trainers as they come."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring import Result, Setting, Target, take_turns
from benchmarks.ways import unseen

VOCABULARY = 1000


def run(setting: Setting) -> list[Result]:
    from tests.support import torchvision_on_cpu

    torchvision_on_cpu.install()  # transformers imports it
    import transformers

    from pytorch_accelerated import huggingface

    rows = _rows(setting.size(1_024, quick=32))
    modules = {"transformers": transformers, "ours, Hugging Face shape": huggingface}
    losses: dict[str, float] = {}
    processor: dict[str, list[float]] = {}

    def seconds(name: str) -> float:
        of_processor = time.process_time()
        start = time.perf_counter()
        losses[name] = _final_loss(modules[name], rows)
        processor.setdefault(name, []).append(time.process_time() - of_processor)
        return time.perf_counter() - start

    measures: dict[str, Callable[[], float]] = {name: partial(seconds, name) for name in modules}
    take_turns(measures, 1)  # warms up
    processor.clear()
    rounds = take_turns(measures, setting.repeats)
    first, second = losses.values()
    if abs(first - second) > 0.05 * abs(first):  # orders and dropout differ
        raise RuntimeError(f"The trainers did not do the same work: their losses are {losses}.")
    return [
        Result(
            title=f"Fine-tuning a BERT of 2 layers of 128 ({len(rows):,} texts of 10 to 60 tokens, padded, batch 16)",
            unit="s",
            rounds=rounds,
            processor_rounds=processor,
            final_losses=losses,
            baseline="transformers",
            targets=[Target("ours, Hugging Face shape", at_most=1.0)],
        )
    ]


def _rows(count: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for index in range(count):
        length = int(torch.randint(10, 61, (), generator=generator))
        tokens = torch.randint(5, VOCABULARY, (length,), generator=generator).tolist()
        rows.append({"input_ids": tokens, "attention_mask": [1] * length, "labels": index % 2})
    return rows


def _collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    length = max(len(row["input_ids"]) for row in rows)
    padded = {
        name: torch.tensor([row[name] + [0] * (length - len(row[name])) for row in rows])
        for name in ("input_ids", "attention_mask")
    }
    return {**padded, "labels": torch.tensor([row["labels"] for row in rows])}


def _final_loss(module: Any, rows: list[dict[str, Any]]) -> float:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512
    )
    model = BertForSequenceClassification(config)
    gc.collect()
    with tempfile.TemporaryDirectory() as folder, unseen():
        arguments = module.TrainingArguments(
            str(Path(folder)), num_train_epochs=1, per_device_train_batch_size=16, report_to="none", use_cpu=True
        )
        trainer = module.Trainer(model, arguments, train_dataset=rows, data_collator=_collate)
        return float(trainer.train().training_loss)
