"""Writes the golden state of the current format: ``python -m tests.checkpointing.make_golden``.

A released version has to read what every version before it has written. So `golden/` keeps one state of each format,
as the version wrote it that introduced the format, and beside it what it holds as plain JSON. When `layout.FORMAT` goes
up, run this once and commit the new files; those of older formats are never made again.
"""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import EarlyStoppingCallback, TrainerCallback
from pytorch_accelerated.states.layout import FORMAT

GOLDEN = Path(__file__).parent / "golden"
SEED = 11
ROWS = 10
BATCH_SIZE = 4
EPOCHS = 3
UPDATES_AT_SAVE = 5  # inside the second epoch
EXTRA: dict[str, Any] = {
    "note": "golden",
    "odd": [float("inf"), (1, b"2"), {3: 4j}, 2**70],
    "tensors": {
        "bfloat16": torch.tensor([1.5]).bfloat16(),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "every second": torch.arange(8.0).reshape(2, 4)[:, 1::2],
    },
}


class SaveGolden(TrainerCallback):
    """Saves once, and keeps what was saved as plain values."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.contents: dict[str, Any] = {}

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.run_state.updates == UPDATES_AT_SAVE:
            trainer.save_training_state(self.folder, EXTRA)
            self.contents = contents(trainer)


def spread(first: float, last: float, count: int) -> torch.Tensor:
    """`torch.linspace` in single precision, as the processor computed it that made the first golden state.

    Each number is rounded once. torch's plainest kernels round twice, which makes another problem of this one.
    """
    start, end = torch.tensor([first, last])
    step, position = ((end - start) / (count - 1)).double(), torch.arange(count, dtype=torch.float64)
    from_start, from_end = start.double() + step * position, end.double() - step * (count - 1 - position)
    return torch.where(position < count // 2, from_start, from_end).float().double()


def create_trainer(*callbacks: TrainerCallback) -> Trainer:
    """With nothing in it that another version of torch could draw differently."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(spread(-0.5, 0.4, parameter.numel()).reshape(parameter.shape))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    return Trainer(model, nn.MSELoss(), optimizer, callbacks=[EarlyStoppingCallback(9), *callbacks], seed=SEED)


def train(trainer: Trainer, **arguments: Any) -> None:
    inputs = spread(-1, 1, ROWS * 3).reshape(ROWS, 3).sin()
    targets = spread(-2, 2, ROWS * 2).reshape(ROWS, 2).cos()
    trainer.train(
        (inputs, targets),
        EPOCHS,
        eval_dataset=(inputs, targets),
        per_device_batch_size=BATCH_SIZE,
        create_scheduler_fn=functools.partial(torch.optim.lr_scheduler.StepLR, step_size=3, gamma=0.5),
        **arguments,
    )


def plain(value: Any) -> Any:
    """`value` as JSON has it, with lists in place of tensors; exact, since JSON keeps every digit of a float."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def contents(trainer: Trainer) -> dict[str, Any]:
    """The contents of a state of this trainer, for comparison."""
    return {
        "model": plain(trainer.model.state_dict()),
        "optimizer": plain(trainer.optimizer.state_dict()),
        "scheduler": plain(trainer.scheduler.state_dict()),
        "history": plain({**trainer.run_history.state_dict(), "records": trainer.run_history.records}),
        "run_state": plain(trainer.run_state.state_dict()),
    }


def main() -> None:
    folder = GOLDEN / f"format_{FORMAT}"
    shutil.rmtree(folder, ignore_errors=True)
    save = SaveGolden(folder)
    train(create_trainer(save))
    (GOLDEN / f"format_{FORMAT}.json").write_text(json.dumps(save.contents, indent=1) + "\n")


if __name__ == "__main__":
    main()
