"""`Trainer.gather` and what is around it, on any number of ranks."""

from typing import Any

import torch
from accelerate.utils import gather_object

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import TrainerCallback
from pytorch_accelerated.utils import remove_padding
from tests.differential.scenarios.common import (
    IN_ORDER,
    attempt,
    dataset,
    grid,
    history_of,
    plain,
    train,
    trainer,
    weights_of,
)


def _rank_and_size(made: Any) -> tuple[int, int]:
    accelerator = made._accelerator
    return accelerator.process_index, accelerator.num_processes


def world() -> Any:
    made = trainer()
    rank, size = _rank_and_size(made)
    return {"ranks": size, "gathered": gather_object([rank])}


def gather() -> Any:
    made = trainer()
    rank, _ = _rank_and_size(made)
    same = torch.arange(4.0) + 10 * rank
    uneven = torch.arange(3.0 + rank) + 10 * rank
    rows = torch.tensor([[1.0, 2.0], [-1.0, -1.0], [3.0, -1.0]]) + 0 * rank
    cases = {
        "a vector": (same, {}),
        "ints": (torch.arange(3) + rank, {}),
        "bools": (torch.tensor([True, False]), {}),
        "a matrix": (torch.ones(2, 3) * rank, {}),
        "0-dim": (torch.tensor(5.0 + rank), {}),
        "a list": ([same, torch.ones(2)], {}),
        "a tuple": ((same, torch.ones(2)), {}),
        "a dict": ({"a": same, "b": torch.zeros(1)}, {}),
        "nested": ({"a": [same, (torch.zeros(1),)]}, {}),
        "padding that does not occur": (same, {"padding_value": -1}),
        "uneven with padding": (uneven, {"padding_value": -1}),
        "0-dim with padding": (torch.tensor(5.0), {"padding_value": -1}),
        "a vector with the padding value": (torch.tensor([1.0, -1.0, 2.0]), {"padding_value": -1}),
        "rows of the padding value": (rows, {"padding_value": -1}),
        "nothing but the padding value": (torch.full((7,), -1.0), {"padding_value": -1}),
        "nested with padding": ({"a": rows, "b": [rows.clone()]}, {"padding_value": -1}),
        "zero as padding": (torch.tensor([[0.0, 0.0], [1.0, 0.0]]), {"padding_value": 0}),
    }
    seen = {name: attempt(lambda v=v, k=k: made.gather(v, **k)) for name, (v, k) in cases.items()}
    seen["by position"] = attempt(lambda: made.gather(rows, -1))
    return seen


def removing_padding() -> Any:
    rows = torch.tensor([[1.0, 2.0], [-1.0, -1.0], [3.0, -1.0]])
    return grid(
        remove_padding,
        {
            "rows": {"padded_tensor": rows, "pad_value": -1},
            "vector": {"padded_tensor": rows.flatten(), "pad_value": -1},
            "none": {"padded_tensor": rows, "pad_value": 7},
            "all": {"padded_tensor": torch.zeros(3, 2), "pad_value": 0},
        },
    )


class _Collects(TrainerCallback):
    """Gathers targets in each evaluation, as a metric does."""

    def __init__(self) -> None:
        self.targets: list[Any] = []
        self.batches = 0

    def on_eval_step_end(self, trainer: Any, batch: Any, batch_output: Any, **kwargs: Any) -> None:
        self.batches += 1
        # Without a padding value the reference ends the process where ranks have different numbers of rows.
        self.targets.extend(trainer.gather(batch[1], padding_value=-100).flatten().tolist())


def evaluating() -> Any:
    """Which rows an evaluation sees, and the loss that it gives."""
    seen = {}
    # With 5, say, one of two ranks has no second batch; gathering there ends the reference's process.
    for rows in (8, 7):
        collects = _Collects()
        made = trainer(callbacks=[collects])
        made.evaluate(dataset(rows), 2, {"num_workers": 0})
        seen[f"{rows} rows"] = {
            "number": len(collects.targets),
            "sum": sum(collects.targets),
            "different": len(set(collects.targets)),
            "history": history_of(made),
        }
    return seen


def training() -> Any:
    """Weights and losses, for batches that are even and that are not."""
    cases: dict[str, dict[str, Any]] = {
        "even": {"rows": 16},
        "uneven": {"rows": 13},
        "accumulation": {"rows": 32, "gradient_accumulation_steps": 2},
        "clipped": {"rows": 16, "gradient_clip_value": 0.01},
        "step limit": {"rows": 16, "max_num_train_steps": 2, "num_epochs": 4},
        "drop last": {"rows": 13, "train_dataloader_kwargs": {"drop_last": True}},
    }

    def run(**arguments: Any) -> Any:
        made = train(trainer(), per_device_batch_size=2, eval_rows=8, **arguments)
        config = made.run_config
        return {
            "weights": weights_of(made.get_model()),
            "history": history_of(made),
            "config": {
                name: plain(getattr(config, name))
                for name in """
                    num_epochs train_total_batch_size eval_total_batch_size num_update_steps_per_epoch
                    num_local_update_steps_per_epoch max_num_train_steps is_distributed num_processes
                """.split()
            },
        }

    return grid(run, cases)


class _Losses(Trainer):
    def train_epoch_end(self) -> None:
        tracker = self._loss_tracker
        self.tracked = [float(tracker.average), float(tracker.running_count)]


def tracked_losses() -> Any:
    made: Any = trainer(_Losses)
    train(made, num_epochs=1, rows=13, per_device_batch_size=2, train_dataloader_kwargs=IN_ORDER)
    return {"tracked": made.tracked}
