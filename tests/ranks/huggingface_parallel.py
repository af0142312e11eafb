"""Runs on two ranks: the Hugging Face arguments for several processes, their effects, and who writes."""

import logging
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.huggingface import Trainer, TrainerCallback, TrainingArguments
from tests.huggingface.runs import Regression, Rows, StopAt, Tokens, losses, make_trainer
from tests.support.resuming import assert_same
from tests.support.states import verify

folder = Path(sys.argv[1])
rank = int(os.environ["RANK"])


class Partial(Regression):
    """Has a parameter that its loss does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(3, 3)


def train(**arguments: Any) -> tuple[Trainer, Any]:
    """SGD on batches of 1 on each rank. Returns the trainer, and what its model was wrapped in."""

    class KeepWrapped(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            wrapped.append(trainer.model_wrapped)

    wrapped: list[Any] = []
    parts = {"model": arguments.pop("model", Regression()), **arguments.pop("parts", {})}
    arguments = {"per_device_train_batch_size": 1, "optim": "sgd", "max_steps": 3, **arguments}
    trainer = make_trainer(folder, KeepWrapped(), parts=parts, **arguments)
    trainer.train()
    assert isinstance(wrapped[0], DistributedDataParallel)
    return trainer, wrapped[0]


# The group of the processes, and how long they wait for each other.
usual, wrapped = train(ddp_timeout=77, ddp_backend="gloo")
assert dist.get_world_size() == 2
own_group = usual._engine._ranks.group
for group in (dist.group.WORLD, own_group):
    backend: Any = group._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    assert backend.options._timeout == timedelta(seconds=77), backend.options._timeout
with pytest.raises(ConfigurationError, match="`ddp_backend` is 'nccl', but the processes use gloo"):
    make_trainer(folder, ddp_backend="nccl")

# DistributedDataParallel is told what the arguments say, and the numbers are the same.
assert (wrapped.find_unused_parameters, wrapped.broadcast_buffers, wrapped.static_graph) == (True, True, False)
other, wrapped = train(
    ddp_find_unused_parameters=False, ddp_broadcast_buffers=False, ddp_static_graph=True, ddp_bucket_cap_mb=7
)
assert (wrapped.find_unused_parameters, wrapped.broadcast_buffers, wrapped.static_graph) == (False, False, True)
assert wrapped.bucket_bytes_cap == 7 * 2**20
assert losses(usual) == losses(other)

# A parameter that no loss depends on does not stop a run, unless nobody looks for it.
partial, _ = train(model=Partial())
assert losses(partial) == losses(usual)
with pytest.raises(RuntimeError, match="parameters that were not used in producing loss"):
    train(model=Partial(), ddp_find_unused_parameters=False)


# Nobody looks for it in a model that computes its activations twice.
class Checkpointed(Regression):
    def gradient_checkpointing_enable(self, kwargs: Any = None) -> None:
        """It has nothing worth it."""


_, wrapped = train(model=Checkpointed(), gradient_checkpointing=True)
assert not wrapped.find_unused_parameters


# Tokens of all devices weigh the same, or those of a device as much together as those of another.
rows = Rows(4)
rows.labels[0] = -100  # so the first rank has one label in its batch, the second one two
errors = ((Tokens().linear(rows.x) - rows.labels) ** 2).detach().flatten()
expected = {True: errors[1:].mean(), False: (errors[1] + errors[2:].mean()) / 2}
for averages, value in expected.items():
    arguments = {"per_device_train_batch_size": 2, "max_steps": 1, "average_tokens_across_devices": averages}
    averaged, _ = train(model=Tokens(), parts={"train_dataset": rows}, **arguments)
    assert losses(averaged) == pytest.approx([value.item()]), (averages, losses(averaged), value)

# Each process knows its place.
args = TrainingArguments(use_cpu=True, log_level="info", log_level_replica="error", ddp_timeout=77)
assert (args.world_size, args.process_index, args.local_process_index) == (2, rank, rank)
assert (args.device.type, args.n_gpu, args.parallel_mode.value) == ("cpu", 0, "distributed")
assert args.should_save == args.should_log == (rank == 0)
assert args.get_process_log_level() == (logging.INFO if rank == 0 else logging.ERROR)
assert dist.get_backend() == "gloo"
# Whoever comes second finds what the first one has made.
for local in (True, False):
    made = folder / f"made {local}"
    with args.main_process_first(local=local, desc="making a file"):
        assert made.exists() == (rank > 0)
        made.touch()

# What one process alone can do.
for setting in ("split_batches", "dispatch_batches"):
    with pytest.raises(ConfigurationError, match=f"`accelerator_config` has {setting}: True"):
        make_trainer(folder, accelerator_config={setting: True})
with pytest.raises(ConfigurationError, match="`auto_find_batch_size` is for one process"):
    make_trainer(folder, auto_find_batch_size=True)

# Of two ranks the first one writes: each passes a different name and looks for both.
trainer = make_trainer(folder / "run", per_device_train_batch_size=1, save_strategy="steps", save_steps=5)
assert trainer.args.world_size == 2
trainer.train()
trainer.save_model(str(folder / f"model-{rank}"))
trainer.save_metrics(f"rank-{rank}", {"rank": rank})
trainer.log_metrics(f"rank-{rank}", {"rank": rank})
if rank == 1:
    trainer.args.output_dir = str(folder / "nowhere")
trainer.save_state()
trainer._engine._ranks.wait()
assert [path.name for path in folder.glob("model-*")] == ["model-0"]
assert {path.name for path in (folder / "model-0").iterdir()} >= {"model.safetensors", "training_args.bin"}
written = ["all_results.json", "rank-0_results.json", "trainer_state.json"]
assert sorted(path.name for path in (folder / "run").glob("*.json")) == written
assert not (folder / "nowhere").exists()

# Nothing in a checkpoint of several ranks needs to be executed either.
checkpoint = folder / "run" / "checkpoint-5"
states = sorted(path.name for path in checkpoint.glob("*.pt*"))
assert states == ["optimizer.pt", "rng_state_0.pth", "rng_state_1.pth", "scheduler.pt"]
for name in (*states, "training_args.bin"):
    assert torch.load(checkpoint / name, weights_only=True)


class Notes(TrainerCallback):
    """Each rank writes into the checkpoint, the first one over its model."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        saved = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        (saved / f"note_{rank}.txt").write_text("mine")
        if rank == 0:
            save_file({"half": kwargs["model"].linear.weight.detach().half()}, saved / "model.safetensors")


whole, first = (
    make_trainer(folder / name, *callbacks, per_device_train_batch_size=1)
    for name, callbacks in (("whole", []), ("noted", [Notes(), StopAt(3)]))
)
whole.train()
first.train()
manifest = verify(folder / "noted" / "checkpoint-3")
assert {"note_0.txt", "note_1.txt", "training_weights.safetensors"} <= {entry.name for entry in manifest.files}
resumed = make_trainer(folder / "noted", per_device_train_batch_size=1)
resumed.train(resume_from_checkpoint=True)
assert_same(dict(resumed.model.state_dict()), dict(whole.model.state_dict()))
print("done")
