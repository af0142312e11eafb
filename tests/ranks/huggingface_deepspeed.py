"""Runs of one library, "ours" or "theirs" (transformers), with DeepSpeed on some ranks; log histories are in files.

The same configs, models, rows and arguments for both. Rows divide evenly: with others, transformers divides the last
update by the number of batches that it doesn't have. A run named "a from b" continues a run b of theirs, in another
folder, with the config of a.
"""

import copy
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pytorch_accelerated import huggingface as ours
from tests.huggingface.runs import Rows
from tests.huggingface.test_deepspeed import ADAMW, DECAY, SIZES, WARMUP
from tests.support.zero import allow_float16_on_the_cpu

ARGUMENTS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "num_train_epochs": 3,
    "learning_rate": 0.05,
    "warmup_steps": 3,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "logging_steps": 1,
    "eval_strategy": "epoch",
    "save_strategy": "steps",
    "save_steps": 6,
    "train_sampling_strategy": "sequential",
    "use_cpu": True,
    "report_to": "none",
    "disable_tqdm": True,
}


class Deep(nn.Module):
    """Numbers of parameters that no number of ranks divides, one that is frozen, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(2, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.last = nn.Linear(5, 1)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        outputs = self.last(self.frozen(torch.tanh(self.first(x.to(self.first.weight.dtype))))) * self.scale
        return {"loss": ((outputs - labels) ** 2).mean(), "logits": outputs}


# The first updates are skipped, and the scale grows again after three good ones.
FP16 = {"enabled": "auto", "initial_scale_power": 20, "loss_scale_window": 3, "hysteresis": 1}


def with_stage(stage: int, **sections: Any) -> dict[str, Any]:
    return {**SIZES, "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": stage}, **sections}


CASES: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "stage 0": (with_stage(0), {}),
    "stage 1": (with_stage(1), {}),
    "stage 2": (with_stage(2), {}),
    "stage 3": (with_stage(3), {}),
    "sgd": (with_stage(2), {"optim": "sgd", "lr_scheduler_type": "cosine"}),
    "optimizer of the config": (with_stage(2, optimizer=copy.deepcopy(ADAMW)), {}),
    "schedule of the config": (with_stage(2, scheduler=copy.deepcopy(DECAY)), {}),
    "both of the config": (
        with_stage(1, optimizer=copy.deepcopy(ADAMW), scheduler={"type": "WarmupLR", "params": WARMUP}),
        {},
    ),
    "bf16 at stage 1": (with_stage(1), {"bf16": True}),
    "bf16 at stage 2": (with_stage(2), {"bf16": True}),
    "bf16 at stage 3": (with_stage(3), {"bf16": True}),
    **{f"fp16 at stage {stage}": (with_stage(stage, fp16=FP16), {"fp16": True}) for stage in (1, 2, 3)},
    "no DeepSpeed": (None, {}),
}


class Noting(ours.TrainerCallback):
    """Notes the end of each step: which one it is, the loss scale, and the learning rate of the next one."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.ends: list[tuple[int, float | None, float]] = []
        self.optimizer_steps = 0

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.optimizer_steps += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.optimizer_steps == state.global_step
        scale = getattr(self.trainer.deepspeed.optimizer, "cur_scale", None)
        self.ends.append((state.global_step, scale, self.trainer.optimizer.param_groups[0]["lr"]))


def make(name: str, case: str, folder: Path, library: str) -> Any:
    """The trainer of a case, with a folder of this name."""
    config, given = copy.deepcopy(CASES[case])
    if config is not None and "optimizer" in config:
        config["optimizer"]["params"]["torch_adam"] = True  # its own is compiled at the first use
    given = {**ARGUMENTS, **given, "deepspeed": config}
    rows: dict[str, Any] = {"train_dataset": Rows(32), "eval_dataset": Rows(8)}
    if library == "ours":
        trainer: Any = ours.Trainer(Deep(), ours.TrainingArguments(str(folder / name), **given), **rows)
    else:
        trainer = transformers_trainer(Deep(), folder / name, given, rows)
    trainer.callback_handler.callbacks.pop()  # which prints the logs
    return trainer


def transformers_trainer(model: nn.Module, output_dir: Path, given: dict[str, Any], rows: dict[str, Any]) -> Any:
    """transformers' own, with DeepSpeed on CPUs.

    accelerate connects processes on CPUs only if it is told to use them, and then it leaves DeepSpeed out.
    """
    import transformers
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    AcceleratorState._reset_state()
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.DEEPSPEED
    given = {**given, "accelerator_config": {"use_configured_state": True}}
    return transformers.Trainer(model, transformers.TrainingArguments(str(output_dir), **given), **rows)


def main(folder: Path, library: str, names: str, checkpoints: Path) -> None:
    allow_float16_on_the_cpu()
    for name in names.split(","):
        case, _, source = name.partition(" from ")
        trainer = make(name, case, folder, library)
        assert (trainer.args.world_size, trainer.is_deepspeed_enabled) == (2, case != "no DeepSpeed")
        noting = Noting(trainer)
        if not source:
            trainer.add_callback(noting)
        trainer.train(resume_from_checkpoint=str(checkpoints / source / "checkpoint-6") if source else None)
        if trainer.is_world_process_zero():
            torch.save(trainer.state.log_history, folder / f"{name}.pt")
            torch.save(noting.ends, folder / f"{name}.ends.pt")
    print("done")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4]))
