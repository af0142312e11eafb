"""What a summary says of more processes is what so many processes do."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from pytorch_accelerated import Trainer, TrainerPlaceholderValues
from pytorch_accelerated.errors import ArgumentTypeError
from pytorch_accelerated.schedulers import scheduled_values
from tests.chaos.size import some
from tests.support.processes import run_on_ranks

ARGUMENTS: dict[str, Any] = {"per_device_batch_size": 4, "gradient_accumulation_steps": 2}
UPDATES: Any = TrainerPlaceholderValues.NUM_EPOCHS * TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH
SCHEDULE = partial(
    torch.optim.lr_scheduler.OneCycleLR,
    max_lr=0.1,
    total_steps=UPDATES,
)


class Rows(Dataset[Any]):
    """139 rows, which are counted when they are read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 139

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return torch.full((10,), float(index)), index % 3


def new_trainer() -> Trainer:
    model = nn.Sequential(nn.Linear(10, 33), nn.BatchNorm1d(33), nn.ReLU(), nn.Linear(33, 3))
    model[0].bias.requires_grad_(False)
    return Trainer(model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters()), callbacks=())


ON_RANKS = """
import json

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from pytorch_accelerated.callbacks import TrainerCallback
from tests.looking.test_scale import ARGUMENTS, SCHEDULE, Rows, new_trainer

sent = []

class Sent(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if str(function) in ("c10d.allreduce_.default", "c10d.broadcast_.default"):
            sent.append(sum(each.nbytes for each in args[0]))
        return function(*args, **(kwargs or {}))

class Notes(TrainerCallback):
    rates, sent_by_update = [], []

    def on_train_step_start(self, trainer, **kwargs):
        if not hasattr(self, "mode"):
            self.mode = Sent()
            self.mode.__enter__()

    def on_optimizer_step_start(self, trainer, **kwargs):
        self.rates.append([group["lr"] for group in trainer.optimizer.param_groups])

    def on_optimizer_step_end(self, trainer, **kwargs):
        self.mode.__exit__(None, None, None)
        del self.mode
        self.sent_by_update.append(sum(sent))
        sent.clear()

trainer, data, notes = new_trainer(), Rows(), Notes()
trainer.callback_handler.add_callback(notes)
trainer.train(data, 1, train_dataloader_kwargs={"num_workers": 0}, create_scheduler_fn=SCHEDULE, **ARGUMENTS)
ranks = trainer.run_context.parts.ranks
rows = ranks.exchange(len(data.read))
model = new_trainer().model
fully_shard(model)
parts = sum(each.to_local().nbytes for each in model.parameters())
if ranks.is_first:
    print(json.dumps({"rows": rows, "rates": notes.rates, "sent": notes.sent_by_update, "parts": parts}))
dist.destroy_process_group()
"""


@pytest.mark.processes
@pytest.mark.parametrize("processes", some([3], [2, 3, 4]))
def test_so_many_processes_read_send_and_keep_what_the_summary_says(processes: int, tmp_path: Path) -> None:
    trainer = new_trainer()
    scale = trainer.summary(Rows(), processes=processes, **ARGUMENTS).scale
    found = json.loads(run_on_ranks(ON_RANKS, processes, cwd=tmp_path).stdout_of_ranks[0])
    assert scale is not None
    assert scale.rows is not None
    borrowed = sum(found["rows"]) - 139  # a rank without a row reads one that does not count
    assert sum(scale.rows) == 139
    assert all(0 <= read - own <= borrowed for read, own in zip(found["rows"], scale.rows, strict=True))
    assert scale.updates_per_epoch == len(found["sent"])
    rates = scheduled_values(SCHEDULE, 1, len(found["sent"]), optimizer=trainer.optimizer)
    assert [list(each) for each in rates] == found["rates"]
    # In the second update DDP also tells the ranks how it has divided the gradients.
    assert found["sent"][2:] == [scale.sent_bytes] * (len(found["sent"]) - 2)
    model = trainer.model
    assert isinstance(model, nn.Module)
    assert found["parts"] == sum(-(-len(each) // processes) * each[0].nbytes for each in model.parameters())
    assert scale.sharded_memory_bytes < scale.memory_bytes


def test_one_process_sends_nothing_and_keeps_all() -> None:
    summary = new_trainer().summary(Rows(), processes=1, **ARGUMENTS)
    assert summary.scale is not None
    assert (summary.scale.rows, summary.scale.sent_bytes) == ((139,), 0)
    assert summary.scale.memory_bytes == summary.scale.sharded_memory_bytes == summary.memory_bytes
    assert "on 1:" in str(summary)
    stream = new_trainer().summary(batch=(torch.ones(4, 10), torch.zeros(4, dtype=torch.int64)), processes=64)
    assert stream.scale is not None
    assert (stream.scale.rows, stream.scale.updates_per_epoch) == (None, None)
    with pytest.raises(ArgumentTypeError, match="`processes` is 'all'"):
        new_trainer().summary(Rows(), processes="all")  # type: ignore[arg-type]  # on purpose
