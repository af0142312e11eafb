"""Runs on any number of ranks: a Hugging Face trainer evaluates and predicts as one process does, and resumes exactly.

Writes the results of each rank to ``<folder>/<ranks>-<rank>.pt``: "exact" values are the same bit for bit on any number
of ranks, "rounded" ones are sums in a different order.
"""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pytorch_accelerated.huggingface import EvalPrediction, Trainer, TrainerCallback
from tests.huggingface.runs import (
    AnyKeyword,
    NoisyRows,
    Regression,
    Rows,
    StopAt,
    Stream,
    Tokens,
    everything,
    losses,
    make_trainer,
    without_speed,
)
from tests.support.resuming import assert_same

RANKS = int(os.environ.get("WORLD_SIZE", "1"))
folder = Path(sys.argv[1])


def metrics(prediction: EvalPrediction) -> dict[str, float]:
    errors = np.abs(np.asarray(prediction.predictions) - np.asarray(prediction.label_ids))
    return {"mae": errors.mean(), "rows": len(errors)}


def padded_model() -> Any:
    class Lengths(Regression):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            assert labels is not None
            return {"loss": (x - labels).abs().mean() + 0 * self.linear.bias.sum(), "logits": x.clone(), "text": None}

    return Lengths()


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {
        name: torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True, padding_value=-100)
        for name in rows[0]
    }


exact: dict[str, Any] = {}
rounded: dict[str, Any] = {}
for size in (1, 2, 5, 8, 12):
    for batch_size in (1, 3):
        trainer = make_trainer(
            folder / "evaluated", parts={"compute_metrics": metrics}, per_device_eval_batch_size=batch_size
        )
        assert trainer.args.world_size == RANKS
        output = trainer.predict(Rows(size))
        (values,) = without_speed([trainer.evaluate(Rows(size))])
        stream = trainer.predict(Stream(size))
        loss = values.pop("eval_loss")
        # Two ranks share the rows of a last, shorter round evenly: the model takes its means over other batches there.
        is_cut_alike = batch_size == 1 or size % (2 * batch_size) == 0
        (exact if is_cut_alike else rounded)[f"loss {size} {batch_size}"] = loss
        exact[f"{size} {batch_size}"] = {
            "predictions": torch.from_numpy(output.predictions),
            "streamed": torch.from_numpy(stream.predictions),
            "labels": torch.from_numpy(output.label_ids),
            "metrics": {name: float(value) for name, value in values.items()},
        }

lengths = [3, 1, 2, 6, 4, 2, 5]
ragged = [
    {"x": torch.full((length,), float(index)), "labels": torch.ones(length)} for index, length in enumerate(lengths)
]
trainer = make_trainer(
    folder / "ragged", parts={"model": padded_model(), "data_collator": collate}, per_device_eval_batch_size=2
)
exact["ragged"] = torch.from_numpy(trainer.predict(ragged).predictions)

# A run of the same updates: the batches of two ranks are as large as that of one together.
trainer = make_trainer(folder / "trained", per_device_train_batch_size=4 // RANKS, optim="sgd", eval_strategy="epoch")
trainer.train()
rounded["trained"] = {
    "model": trainer.model.state_dict(),
    "losses": losses(trainer),
    "evaluations": [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry],
}

# Its loss is told the number of labels in the update, and is a mean of the batch all the same.
trainer = make_trainer(
    folder / "keywords", parts={"model": AnyKeyword()}, per_device_train_batch_size=4 // RANKS, optim="sgd"
)
trainer.train()
rounded["keywords"] = {"model": trainer.model.state_dict(), "losses": losses(trainer)}

# In the last update of an epoch two ranks have three rows in batches of one, so one of them only keeps in step.
trainer = make_trainer(
    folder / "short",
    parts={"train_dataset": Rows(11)},
    per_device_train_batch_size=2 // RANKS,
    gradient_accumulation_steps=2,
    optim="sgd",
)
trainer.train()
rounded["short"] = {"model": trainer.model.state_dict(), "losses": losses(trainer)}


rows = Rows(10)
rows.labels[[0, 1, 2, 6]] = -100
trainer = make_trainer(
    folder / "tokens",
    parts={"model": Tokens(), "train_dataset": rows},
    per_device_train_batch_size=2 // RANKS,
    gradient_accumulation_steps=2,
    optim="sgd",
)
trainer.train()
rounded["tokens"] = {"model": trainer.model.state_dict(), "losses": losses(trainer)}


# Resumed, to the bit.
def run(name: str, *callbacks: TrainerCallback, resume: Any = None) -> Trainer:
    trainer = make_trainer(
        folder / f"resumed{RANKS}" / name,
        *callbacks,
        parts={"train_dataset": NoisyRows(11), "model": Regression(dropout=0.4)},
        train_sampling_strategy="random",
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=2,
    )
    torch.manual_seed(7 if resume else 0)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


whole = run("whole")
expected = everything(whole)
last = whole.state.global_step
for step in (1, last - 1):
    run(f"parts{step}", StopAt(step))
    files = {path.name for path in (folder / f"resumed{RANKS}" / f"parts{step}" / f"checkpoint-{step}").iterdir()}
    names = {"rng_state.pth"} if RANKS == 1 else {f"rng_state_{rank}.pth" for rank in range(RANKS)}
    assert names <= files, files
    assert_same(everything(run(f"parts{step}", resume=True)), expected, str(step))

torch.save({"exact": exact, "rounded": rounded}, folder / f"{RANKS}-{trainer.args.process_index}.pt")
print("done")
