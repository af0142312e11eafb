"""A model that the user has put into `DataParallel`: all parts of the trainer treat it as the model inside.

Here the replicas share a processor; `make gpu` runs the same with replicas that share a GPU.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from torch import nn
from torch.nn.parallel import DataParallel
from torch.utils.data import Dataset

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import ModelEmaCallback, SaveBestModelCallback, SaveTrainingStateCallback
from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.finetuning import ModelFreezer
from tests.support.processes import run_on_ranks
from tests.support.replicas import CpuParallel, replicated
from tests.support.resuming import assert_same

INPUTS = torch.randn(23, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TARGETS = INPUTS.sum(1, keepdim=True).sin()
DATA = (INPUTS, TARGETS)


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """What the process has used would otherwise decide on the device, and what this test uses, for later ones."""
    shared = [AcceleratorState._shared_state, PartialState._shared_state]
    before = [dict(state) for state in shared]
    for state in shared:
        state.clear()
    PartialState(cpu=request.param == "cpu")
    yield request.param
    for state, content in zip(shared, before, strict=True):
        state.clear()
        state.update(content)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def trained(model: nn.Module, *callbacks: Any, epochs: int = 3, resume: Any = None, **arguments: Any) -> Trainer:
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    trainer = Trainer(model, nn.functional.mse_loss, optimizer, callbacks=callbacks, seed=1, **arguments)
    trainer.train(
        DATA,
        eval_dataset=DATA,
        num_epochs=epochs,
        per_device_batch_size=5,
        gradient_accumulation_steps=2,
        resume_from=resume,
    )
    return trainer


def values(model: nn.Module) -> list[torch.Tensor]:
    return [each.detach().cpu() for each in model.parameters()]


def test_losses_weights_and_predictions_are_those_of_the_model_alone(device: str) -> None:
    model = replicated(net(), device)
    inside, alone = trained(model), trained(net())
    torch.testing.assert_close(values(inside.model), values(alone.model), rtol=1e-12, atol=1e-13)
    for name in ("train_loss_epoch", "eval_loss_epoch"):
        found = [trainer.run_history.get_metric_values(name) for trainer in (inside, alone)]
        assert found[0] == pytest.approx(found[1], rel=1e-12)
    predictions = [trainer.predict(INPUTS).cpu() for trainer in (inside, alone)]
    torch.testing.assert_close(predictions[0], predictions[1], rtol=1e-12, atol=1e-13)
    assert inside.model is model
    assert inside.get_model() is model.module
    if device == "cpu":
        assert set(model.sizes) == {3}
        assert len(model.sizes) > 3 * (5 + 3)  # in training, evaluation and prediction


def test_states_resume_with_and_without_a_wrapper(device: str, tmp_path: Path) -> None:
    folders = {wraps: tmp_path / str(wraps) for wraps in (True, False)}

    def model(wraps: bool) -> nn.Module:
        return replicated(net(), device) if wraps else net()

    for wraps, folder in folders.items():
        trained(model(wraps), SaveTrainingStateCallback(folder), epochs=2)
    whole = trained(model(True))
    for saved, folder in folders.items():
        for wraps in (True, False):
            resumed = trained(model(wraps), resume=folder)
            torch.testing.assert_close(values(resumed.model), values(whole.model), rtol=1e-12, atol=1e-13)
            if saved and wraps:
                assert_same(values(resumed.model), values(whole.model))


def test_files_have_plain_names(device: str, tmp_path: Path) -> None:
    model = replicated(net(), device)
    best, average = tmp_path / "best.pt", tmp_path / "average.pt"
    trainer = trained(model, SaveBestModelCallback(best), ModelEmaCallback(save_path=average, decay=0.5))
    trainer.save_checkpoint(tmp_path / "mine.pt")
    for path in (best, average, tmp_path / "mine.pt"):
        weights = torch.load(path)["model_state_dict"]
        assert list(weights) == list(net().state_dict())
        net().load_state_dict(weights)
    other = Trainer(replicated(net(), device), nn.functional.mse_loss, None)
    other.load_checkpoint(tmp_path / "mine.pt", load_optimizer=False)
    assert_same(values(other.model), values(trainer.model))


@pytest.mark.parametrize("ending", [".pt2", ".safetensors"])
def test_it_is_exported_as_the_model_inside(
    ending: str, device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = replicated(net(), device)
    trainer = trained(model)
    path = trainer.export(tmp_path / f"model{ending}", INPUTS)
    assert "times" not in capsys.readouterr().out
    assert trainer.model is model
    if ending == ".pt2":
        found = torch.export.load(path).module()(INPUTS[:7])
        torch.testing.assert_close(found, trainer.predict(INPUTS[:7]).cpu())


def test_its_summary_is_that_of_the_model_inside(device: str) -> None:
    lines = [
        str(trained(model).summary(batch=(INPUTS[:5], TARGETS[:5]))) for model in (replicated(net(), device), net())
    ]
    assert lines[0] == lines[1]


def test_layers_are_frozen_by_their_numbers_inside(device: str) -> None:
    model = replicated(net(), device)
    ModelFreezer(model).freeze(to_index=1)
    assert [each.requires_grad for each in model.parameters()] == [False, False, True, True]


class Named(Dataset[Any]):
    """Rows by name, one of which the model does not take."""

    def __len__(self) -> int:
        return len(INPUTS)

    def __getitem__(self, index: int) -> Any:
        return {"inputs": INPUTS[index], "labels": TARGETS[index], "id": index}


class ByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, inputs: torch.Tensor) -> Any:
        return {"logits": self.net(inputs), "none": None}


def test_rows_by_name_go_to_the_model_inside(device: str) -> None:
    def loss(outputs: Any, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(outputs["logits"], batch["labels"])

    def run(model: nn.Module) -> Trainer:
        trainer = Trainer(model, loss, torch.optim.SGD(model.parameters(), 0.1), callbacks=(), seed=1)
        trainer.train(Named(), eval_dataset=Named(), num_epochs=2, per_device_batch_size=4)
        return trainer

    inside, alone = run(replicated(ByName(), device)), run(ByName())
    torch.testing.assert_close(values(inside.model), values(alone.model), rtol=1e-12, atol=1e-13)
    assert inside.predict(Named())["logits"].shape == (23, 1)


class OwnLoss(ByName):
    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        outputs = self.net(inputs)
        return {"loss": None if labels is None else nn.functional.mse_loss(outputs, labels), "logits": outputs}


def test_losses_of_replicas_are_weighted_by_rows(device: str) -> None:
    def run(model: nn.Module) -> Trainer:
        trainer = Trainer(model, None, torch.optim.SGD(model.parameters(), 0.1), callbacks=(), seed=1)
        trainer.train(Named(), eval_dataset=Named(), num_epochs=2, per_device_batch_size=7)
        return trainer

    inside, alone = run(replicated(OwnLoss(), device)), run(OwnLoss())
    torch.testing.assert_close(values(inside.model), values(alone.model), rtol=1e-12, atol=1e-13)
    found = [trainer.run_history.get_metric_values("eval_loss_epoch") for trainer in (inside, alone)]
    assert found[0] == pytest.approx(found[1], rel=1e-12)


def test_replicas_compute_in_bfloat16(device: str) -> None:
    class Telling(nn.Sequential):
        types: list[torch.dtype] = []

        def forward(self, inputs: torch.Tensor) -> Any:
            outputs = super().forward(inputs)
            self.types.append(outputs.dtype)
            return outputs

    model = replicated(Telling(nn.Linear(4, 1)), device)
    trainer = Trainer(
        model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), 0.1), callbacks=(), mixed_precision="bf16"
    )
    trainer.train((INPUTS.float(), TARGETS.float()), num_epochs=2, per_device_batch_size=6)
    assert set(Telling.types) == {torch.bfloat16}
    assert not model.module._forward_pre_hooks


def test_compiled_replicas_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="DataParallel, but its replicas would all call the one"):
        trained(CpuParallel(net()), compile_model=True)


SCRIPT = """
import torch
from torch import nn
from torch.nn.parallel import DataParallel
from pytorch_accelerated import Trainer
from pytorch_accelerated.errors import ConfigurationError
from tests.support.replicas import CpuParallel

for kind in (CpuParallel, DataParallel):
    model = kind(nn.Linear(2, 1))
    trainer = Trainer(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), 0.1), callbacks=())
    try:
        trainer.train((torch.ones(9, 2), torch.ones(9, 1)), num_epochs=1, per_device_batch_size=2)
        print("trained")
    except ConfigurationError as error:
        assert "each of the 2 processes would use all of its devices" in str(error), error
        print("refused")
"""


@pytest.mark.processes
def test_several_processes_with_several_devices_each_are_refused() -> None:
    output = run_on_ranks(SCRIPT, 2).stdout
    assert output.count("refused") == 2
    assert output.count("trained") == 2 or torch.cuda.is_available()


def test_without_a_device_for_replicas_it_is_the_model(tmp_path: Path) -> None:
    model = DataParallel(net(), device_ids=[0])
    trainer = trained(model, SaveTrainingStateCallback(tmp_path))
    assert_same(values(trainer.model), values(trained(net()).model))
