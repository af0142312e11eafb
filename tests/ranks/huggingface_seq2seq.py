"""Runs on any number of ranks: a Hugging Face trainer generates the same as on one process.

Writes the results of each rank to ``<folder>/<ranks>-<rank>.pt``.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers.trainer  # noqa: F401  # once, before the ranks part

from pytorch_accelerated.huggingface import Seq2SeqTrainer, Seq2SeqTrainingArguments
from tests.huggingface.translations import sentences, share_of_right_tokens, tiny_translator

RANKS = int(os.environ.get("WORLD_SIZE", "1"))
folder = Path(sys.argv[1])
seen: list[int] = []


def by_batch(prediction: Any, compute_result: bool) -> dict[str, Any]:
    """Sums over batches of rows that several processes had together."""
    assert prediction.predictions.shape[0] == prediction.label_ids.shape[0]
    seen.extend((prediction.predictions * (prediction.predictions > 1)).sum(1).tolist())
    if not compute_result:
        return {}
    sums, seen[:] = sorted(seen), []
    return {"sums": sums}


def ragged(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch in which shorter labels end with -100."""
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        name: pad([row[name] for row in rows], batch_first=True, padding_value=-100 if name == "labels" else 0)
        for name in rows[0]
    }


def run(name: str, *, size: int, metrics: Any = share_of_right_tokens, trains: bool = False, **arguments: Any) -> None:
    rows = sentences(size)
    if metrics is by_batch:
        rows[0]["labels"] = torch.full((3,), -100)
    args = Seq2SeqTrainingArguments(
        str(folder / f"{name}-{RANKS}"),
        per_device_train_batch_size=4 // RANKS,
        train_sampling_strategy="sequential",
        save_strategy="no",
        optim="sgd",
        num_train_epochs=1,
        disable_tqdm=True,
        use_cpu=True,
        predict_with_generate=True,
        **{"generation_max_length": 12, **arguments},
    )
    trainer = Seq2SeqTrainer(
        tiny_translator(),
        args,
        ragged,
        train_dataset=sentences(8),
        eval_dataset=rows,
        compute_metrics=metrics,
    )
    assert args.world_size == RANKS
    if trains:
        trainer.train()
    values = trainer.evaluate()
    results[name] = {name: value for name, value in values.items() if name.endswith(("right", "length", "sums"))}
    results[name]["loss"] = values["eval_loss"]
    output = trainer.predict(rows)
    assert len(output.predictions) == size
    results[name] |= {"tokens": torch.from_numpy(output.predictions), "labels": torch.from_numpy(output.label_ids)}


results: dict[str, dict[str, Any]] = {}
for size, beams in ((1, 2), (5, 1), (5, 2)):
    run(f"{size} {beams}", size=size, generation_num_beams=beams, per_device_eval_batch_size=3)
run("trained", size=7, trains=True, generation_max_length=9, per_device_eval_batch_size=2)
run("batches", size=7, metrics=by_batch, batch_eval_metrics=True, per_device_eval_batch_size=2)
sharded: dict[str, Any] = {"fsdp": "full_shard", "fsdp_config": {"transformer_layer_cls_to_wrap": ["T5Block"]}}
run("sharded", size=5, trains=True, per_device_eval_batch_size=2, **(sharded if RANKS > 1 else {}))
torch.save(results, folder / f"{RANKS}-{os.environ.get('RANK', '0')}.pt")
print("done")
