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
    Lengths,
    Rows,
    StopAt,
    Stream,
    Tokens,
    everything,
    make_trainer,
    noisy_trainer,
    padded,
    without_speed,
)
from tests.support.resuming import assert_same

RANKS = int(os.environ.get("WORLD_SIZE", "1"))
folder = Path(sys.argv[1])


def metrics(prediction: EvalPrediction) -> dict[str, float]:
    errors = np.abs(np.asarray(prediction.predictions) - np.asarray(prediction.label_ids))
    return {"mae": errors.mean(), "rows": len(errors)}


exact: dict[str, Any] = {}
rounded: dict[str, Any] = {}
for size in (1, 5, 12):
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
    folder / "ragged", parts={"model": Lengths(), "data_collator": padded}, per_device_eval_batch_size=2
)
exact["ragged"] = torch.from_numpy(trainer.predict(ragged).predictions[0])

# Runs of the same updates: the batches of two ranks are as large as that of one together.
with_gaps = Rows(10)
with_gaps.labels[[0, 1, 2, 6]] = -100
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "evaluated": (4, {}, {"eval_strategy": "epoch"}),
    # Its loss is told the number of labels in the update, and is a mean of the batch all the same.
    "any keyword": (4, {"model": AnyKeyword()}, {}),
    # In the last update of an epoch two ranks have three rows in batches of one, so one of them only keeps in step.
    "a short update": (2, {"train_dataset": Rows(11)}, {"gradient_accumulation_steps": 2}),
    "tokens": (2, {"model": Tokens(), "train_dataset": with_gaps}, {"gradient_accumulation_steps": 2}),
    # Here some updates have no rows for one of two ranks.
    "17 rows": (8, {"train_dataset": Rows(17)}, {}),
    "17 rows, accumulated": (8, {"train_dataset": Rows(17)}, {"gradient_accumulation_steps": 2}),
    "17 rows, logged now and then": (8, {"train_dataset": Rows(17)}, {"logging_steps": 2}),
    "17 rows of tokens": (8, {"model": Tokens(), "train_dataset": Rows(17)}, {}),
    "one row": (8, {"train_dataset": Rows(1)}, {}),
    "a stream": (8, {"train_dataset": Stream(11)}, {"max_steps": 5}),
}
for name, (batch_size, parts, arguments) in CASES.items():
    arguments = {"per_device_train_batch_size": batch_size // RANKS, "optim": "sgd", **arguments}
    trainer = make_trainer(folder / name, parts=parts, **arguments)
    loss = trainer.train().training_loss
    history = without_speed(trainer.state.log_history)
    rounded[name] = {"model": trainer.model.state_dict(), "history": history, "loss": loss}


# Resumed, to the bit.
def run(name: str, *callbacks: TrainerCallback, resume: Any = None) -> Trainer:
    trainer = noisy_trainer(folder / f"resumed{RANKS}" / name, *callbacks)
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
