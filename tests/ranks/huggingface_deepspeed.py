"""Runs on some ranks with a ZeRO stage, or with "none" for plain DDP: the same work, with its results in a file.

On the CPU, or on the device given after the stage.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accelerated import Trainer as NativeTrainer
from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.huggingface import Trainer
from tests.huggingface.runs import Recorder, Regression, Rows, StopAt, Tokens, make_trainer, without_speed
from tests.support.resuming import assert_same
from tests.support.states import verify

folder, stage = Path(sys.argv[1]), sys.argv[2]
device = sys.argv[3] if len(sys.argv) > 3 else "cpu"
uses_deepspeed = stage != "none"


class Deep(nn.Module):
    """Groups of parameters whose numbers no number of ranks divides, one that is frozen, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(2, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.last = nn.Linear(5, 1)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        outputs = self.last(self.frozen(torch.tanh(self.first(x)))) * self.scale
        return {"loss": None if labels is None else ((outputs - labels) ** 2).mean(), "logits": outputs}


class Looking(Trainer):
    """Looks whether it is really DeepSpeed that is trained with."""

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        assert (type(model).__name__ == "DeepSpeedEngine") == uses_deepspeed
        assert self.args.device.type == device
        return super().training_step(model, *args, **kwargs)


def prepare(name: str, *callbacks: Any, model: nn.Module | None = None, **arguments: Any) -> Trainer:
    """Twenty rows make two full updates and a short one on one rank, and on two."""
    config = {"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": int(stage)}} if uses_deepspeed else None
    return make_trainer(
        folder / name,
        *callbacks,
        kind=Looking,
        parts={"model": Deep() if model is None else model, "train_dataset": Rows(20), **arguments.pop("parts", {})},
        **{
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "num_train_epochs": 3,
            "weight_decay": 0.1,
            "max_grad_norm": 0.5,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "use_cpu": device == "cpu",
            "deepspeed": None if config is None else {**config, **arguments.pop("config", {})},
            **arguments,
        },
    )


def results(trainer: Trainer) -> dict[str, Any]:
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    return {"model": weights, "history": without_speed(trainer.state.log_history[:-1])}


# A whole run, with everything that is looked at on the way.
recorder = Recorder()
trained = prepare("whole", recorder, save_strategy="steps", save_steps=2, load_best_model_at_end=True)
before = trained.evaluate()["eval_loss"]
trained.train()
found = {
    "run": results(trained),
    "events": recorder.calls,
    "before": before,
    "after": trained.evaluate()["eval_loss"],
    "predictions": torch.as_tensor(trained.predict(Rows(3)).predictions),
    "optimizer": torch.load(folder / "whole" / "checkpoint-4" / "optimizer.pt", weights_only=True),
}
verify(folder / "whole" / "checkpoint-4")

# The model is the one it was: nothing of DeepSpeed's is left on it, and it trains again, with a new optimizer.
model = trained.model
assert all(type(module).__module__.startswith(("torch.", "__main__")) for module in model.modules())
assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
assert len({parameter.untyped_storage().data_ptr() for parameter in model.parameters()}) == len(
    list(model.parameters())
)
trained.optimizer = None
trained.train()
found["again"] = results(trained)

# Going on is the same as going on, to the bit; inside an epoch, too.
prepare("interrupted", StopAt(4), save_strategy="steps", save_steps=100).train()
resumed = prepare("interrupted")
resumed.train(resume_from_checkpoint=True)
whole = prepare("uninterrupted")
whole.train()
assert_same(results(resumed), results(whole))

# A checkpoint is one for any run, with DeepSpeed or without.
for checkpoint in sorted(folder.parent.glob("*/interrupted/checkpoint-4")):
    other = prepare("other")
    other.train(resume_from_checkpoint=str(checkpoint))
    torch.testing.assert_close(results(other), results(whole), rtol=1e-5, atol=1e-6)

# From weights alone, the optimizer begins anew with these.
prepare("weights", StopAt(4), save_strategy="steps", save_steps=100, save_only_model=True).train()
weights = prepare("weights")
weights.train(resume_from_checkpoint=True)
found["weights"] = results(weights)

# A loss that is divided by the number of labels in the update, without a limit for the gradient.
tokens = prepare("tokens", model=Tokens(), max_grad_norm=0.0)
tokens.train()
found["tokens"] = results(tokens)

# Mixed precision leaves the weights as they are.
mixed = prepare("mixed", bf16=True)
mixed.train()
assert {parameter.dtype for parameter in mixed.model.parameters()} == {torch.float32}
found["mixed"] = results(mixed)

# Without biases there is one group of parameters that has none.
one_group = Regression()
one_group.linear = nn.Linear(2, 1, bias=False)
alone = prepare("alone", model=one_group)
alone.train()
found["alone"] = results(alone)

if uses_deepspeed:
    settings = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}
    section = {"type": "WarmupDecayLR", "params": {**settings, "warmup_type": "linear"}}
    scheduled = prepare("scheduled", warmup_steps=2, config={"scheduler": section})
    scheduled.train()
    found["rates"] = [entry["learning_rate"] for entry in scheduled.state.log_history if "learning_rate" in entry]

    with pytest.raises(ConfigurationError, match="train_batch_size: 7, but . processes x `per_device_train"):
        prepare("other", config={"train_batch_size": 7})
    with pytest.raises(ConfigurationError, match="section 'scheduler', but the Trainer is given one"):
        prepare("other", config={"scheduler": section}, parts={"optimizers": (None, trained.lr_scheduler)})
    with pytest.raises(ConfigurationError, match="float64"):
        prepare("other", model=Deep().double()).train()
    scalar = Regression()
    scalar.extra = nn.Parameter(torch.zeros(()))
    with pytest.raises(ConfigurationError, match="the 0-dimensional extra"):
        prepare("other", model=scalar).train()
    if stage != "0":
        with pytest.raises(ConfigurationError, match="ZeRO has replaced this Adagrad with another optimizer"):
            prepare("other", optim="adagrad").train()
    with pytest.raises(ConfigurationError, match="is set up for DeepSpeed"):
        NativeTrainer(Deep(), None, torch.optim.SGD(Deep().parameters()))
    with pytest.raises(ConfigurationError, match="`deepspeed` is None, but this process was set up for it"):
        prepare("other", deepspeed=None)
torch.save(found, folder / f"{trained.args.process_index}.pt")
print("done")
