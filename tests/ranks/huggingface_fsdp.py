"""Runs on two ranks: a model sharded by the Hugging Face trainer trains, is saved and resumes like an unsharded one."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.huggingface import Trainer
from tests.huggingface.runs import Rows, StopAt, make_trainer, without_speed
from tests.support.resuming import assert_same
from tests.support.sharding import is_sharded, whole
from tests.support.states import verify

folder = Path(sys.argv[1])


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


class Deep(nn.Module):
    """Names its layers as models of transformers do. In float64."""

    _no_split_modules = ["Layer"]

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(2, 5)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.last = nn.Linear(5, 1)
        self.double()

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        values = self.first(x.double())
        for layer in self.layers:
            values = layer(values)
        outputs = self.last(values)
        return {"loss": None if labels is None else ((outputs - labels) ** 2).mean(), "logits": outputs}


def prepare(name: str, *callbacks: Any, seed: int = 0, **arguments: Any) -> Trainer:
    return make_trainer(
        folder / name,
        *callbacks,
        parts={"model": Deep(seed), **arguments.pop("parts", {})},
        **{
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 2,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "save_strategy": "steps",
            "save_steps": 2,
            "load_best_model_at_end": True,
            **arguments,
        },
    )


def everything(trainer: Trainer) -> dict[str, Any]:
    return {
        "model": dict(whole(trainer.model.state_dict())),
        "optimizer": whole(trainer.optimizer.state_dict()),
        "history": without_speed(trainer.state.log_history[:-1]),
    }


def units(trainer: Trainer) -> list[str]:
    """The modules that are cut by themselves."""
    from torch.distributed.fsdp import FSDPModule

    return [name for name, module in trainer.model.named_modules() if isinstance(module, FSDPModule)]


trained = prepare("whole")
trained.train()
expected = everything(trained)
predictions = trained.predict(Rows(3)).predictions

# The same numbers from a model in pieces; the second rank's own weights count nowhere.
cut = prepare("cut", seed=trained.args.process_index, fsdp=True)
assert cut.args.world_size == 2
assert any(map(is_sharded, cut.model.parameters()))
assert units(cut) == ["", "layers.0", "layers.1"]
cut.train()
assert all(is_sharded(parameter) for parameter in cut.model.parameters())
torch.testing.assert_close(everything(cut), expected, rtol=1e-9, atol=1e-12)
torch.testing.assert_close(cut.predict(Rows(3)).predictions, predictions, rtol=1e-9, atol=1e-12)

# Its checkpoint is one for a whole model, and it resumes to the bit.
checkpoint = folder / "cut" / "checkpoint-2"
verify(checkpoint)
prepare("interrupted", StopAt(4), fsdp="full_shard auto_wrap", load_best_model_at_end=False).train()
resumed = prepare("interrupted", fsdp="full_shard auto_wrap", load_best_model_at_end=False)
resumed.train(resume_from_checkpoint=True)
uninterrupted = prepare("uninterrupted", fsdp=True, load_best_model_at_end=False)
uninterrupted.train()
assert_same(everything(resumed), everything(uninterrupted))


# A part of it that `save_model` writes, as all ranks call it, is the checkpoint's model; a resume is as exact.
class SavesAPart(Trainer):
    def save_model(self, *args: Any, **kwargs: Any) -> None:
        self.model, model = self.model.layers[0], self.model
        super().save_model(*args, **kwargs)
        self.accelerator.wait_for_everyone()
        self.model = model


part: dict[str, Any] = {"kind": SavesAPart, "fsdp": True, "load_best_model_at_end": False}
prepare("part", StopAt(4), **part).train()
saved = set(load_file(folder / "part" / "checkpoint-4" / "model.safetensors"))
assert saved == set(cut.model.layers[0].state_dict())
continued = prepare("part", **part)
continued.train(resume_from_checkpoint=True)
assert_same(everything(continued), everything(uninterrupted))

# Weights alone, and by `save_model`, fit a whole model.
prepare("weights", fsdp=True, save_only_model=True).train()
uninterrupted.save_model(str(folder / "saved"))
uninterrupted._engine._ranks.wait()
for path, state in (
    (folder / "weights" / "checkpoint-2", None),
    (folder / "saved", everything(uninterrupted)["model"]),
):
    bare = prepare("bare")
    bare._load_from_checkpoint(str(path))
    if state is not None:
        assert_same(dict(bare.model.state_dict()), state)

# Other ways to cut it.
assert units(prepare("other", fsdp=True, fsdp_config={"transformer_layer_cls_to_wrap": "Linear"})) == [
    "",
    "first",
    "layers.0.inner",
    "layers.1.inner",
    "last",
]
for arguments, reshards in (
    ({"fsdp": "full_shard"}, True),
    ({"fsdp": "shard_grad_op"}, False),
    ({"fsdp": True, "fsdp_config": {"fsdp_reshard_after_forward": False}}, False),
):
    other = prepare("other", **arguments).model
    other(Rows(2).x, Rows(2).labels)
    # After a forward, which a backward would follow.
    assert is_sharded(other.layers[0].inner.weight) == reshards

with pytest.raises(ConfigurationError, match="`transformer_layer_cls_to_wrap` names 'Block', but the Deep has only"):
    prepare("other", fsdp=True, fsdp_config={"transformer_layer_cls_to_wrap": ["Block"]})
optimizer = torch.optim.SGD(Deep().parameters(), lr=0.1)
with pytest.raises(ConfigurationError, match="`optimizers` don.t go with `model_init` or `fsdp`"):
    prepare("other", fsdp=True, parts={"optimizers": (optimizer, None)})
print("done")
