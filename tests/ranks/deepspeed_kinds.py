"""Runs under torchrun: a run of each kind of config is saved and resumed, with what its users look at.

``deepspeed_kinds.py FOLDER KINDS``. The kind "plain" is a run without DeepSpeed. On CPUs or GPUs, as torch finds them.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DummyOptim

from tests.support.resuming import assert_same
from tests.support.zero import (
    allow_float16_on_the_cpu,
    config,
    everything,
    make_model,
    make_trainer,
    saver,
    train,
)

folder = Path(sys.argv[1])
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 7, "hysteresis": 1}}
ADAM = {"type": "AdamW", "params": {"lr": 0.02, "torch_adam": True, "weight_decay": 0.1}}
KINDS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "zero_2": config(2),
    "zero_3": config(3),
    "offload_1": config(1, zero_optimization=OFFLOAD),
    "offload_2": config(2, zero_optimization=OFFLOAD),
    "offload_3": config(3, zero_optimization={**OFFLOAD, "offload_param": {"device": "cpu"}}, **BF16),
    "bf16_0": config(0, **BF16),
    "bf16_1": config(1, data_types={"grad_accum_dtype": "fp32"}, **BF16),
    "bf16_2": config(2, **BF16),
    "bf16_3": config(3, **BF16),
    "fp16_0": config(0, **FP16),
    "fp16_2": config(2, **FP16),
    "fp16_3": config(3, **FP16),
    "optimizer_0": config(0, optimizer=ADAM),
    "optimizer_2": config(2, optimizer=ADAM),
    "optimizer_3": config(3, optimizer=ADAM, **BF16),
}
RANKS = int(os.environ["WORLD_SIZE"])
allow_float16_on_the_cpu()


def trainer_of(kind: str, *callbacks: Any) -> Any:
    model = make_model(dropout=0.0)  # whose masks would depend on the type of numbers
    optimizer = DummyOptim(list(model.parameters())) if kind.startswith("optimizer") else None
    return make_trainer(KINDS[kind], *callbacks, model=model, optimizer=optimizer)


for kind in sys.argv[2].split(","):
    whole_run = train(trainer_of(kind, saver(folder / kind)), ranks=RANKS)
    expected = everything(whole_run)
    for step in (6, 36):
        resumed = train(trainer_of(kind), ranks=RANKS, resume_from=folder / kind / f"step_{step}")
        assert_same(everything(resumed), expected, f"{kind} {step}")
        assert resumed.run_state.skipped_updates == whole_run.run_state.skipped_updates
    if kind.startswith("optimizer"):  # another run of the same trainer goes on with its state
        train(whole_run, epochs=1, ranks=RANKS)
        assert whole_run.optimizer.state_dict()["state"][0]["step"] == 80
    if whole_run._ranks.is_first:
        results = {"history": expected["history"], "skipped": whole_run.run_state.skipped_updates}
        torch.save(results, folder / f"{kind}.pt")
print("all is well", flush=True)
