"""Stochastic weight averaging, compared with averages by hand; and the mean of training states."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.__main__ import main
from pytorch_accelerated.callbacks import SaveTrainingStateCallback, StopTrainingError, SWACallback, TrainerCallback
from pytorch_accelerated.errors import ConfigurationError
from tests.support.resuming import SaveAndStop

INPUTS = torch.randn(40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
ROWS = (INPUTS, INPUTS.sum(1, keepdim=True))


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.2), nn.Linear(4, 1)).double()


class Ends(TrainerCallback):
    """The weights at the end of each epoch."""

    def __init__(self) -> None:
        self.weights: list[dict[str, torch.Tensor]] = []

    def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        state = trainer.get_model().state_dict()
        self.weights.append({name: value.clone() for name, value in state.items()})


def run(*callbacks: Any, **arguments: Any) -> Trainer:
    model = new_model()
    trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.05), callbacks=callbacks, seed=1)
    trainer.train(ROWS, 4, **{"eval_dataset": ROWS, "per_device_batch_size": 8, **arguments})
    return trainer


def test_the_average_is_that_of_the_last_epochs_with_statistics_of_its_own(tmp_path: Path) -> None:
    ends, swa = Ends(), SWACallback(0.5, save_path=tmp_path / "swa.pt")
    trainer = run(ends, swa)
    assert swa.averaged_epochs == 2
    saved = torch.load(tmp_path / "swa.pt")["model_state_dict"]
    for name in ("0.weight", "1.bias", "4.weight"):
        mean = (ends.weights[2][name] + ends.weights[3][name]) / 2
        torch.testing.assert_close(saved[name], mean, rtol=1e-12, atol=0)
    with torch.no_grad():
        hidden = INPUTS @ saved["0.weight"].T + saved["0.bias"]
    torch.testing.assert_close(saved["1.running_mean"], hidden.mean(0), rtol=1e-12, atol=1e-12)
    model = new_model()
    model.load_state_dict(saved)
    loss = Trainer(model, nn.MSELoss(), None, callbacks=()).evaluate(ROWS)["evaluation_loss"]
    assert trainer.run_history.get_metric_values("swa_model_eval_loss_epoch") == pytest.approx([loss], rel=1e-9)
    plain = run()
    for name, value in plain.model.state_dict().items():
        assert torch.equal(trainer.model.state_dict()[name], value), name


@pytest.mark.parametrize("first_path", ["again.pt", "other.pt"])  # each job may have a folder of its own
def test_a_resumed_run_has_the_same_average(first_path: str, tmp_path: Path) -> None:
    run(SWACallback(0.25, save_path=tmp_path / "whole.pt"))
    run(SWACallback(0.25, save_path=tmp_path / first_path), SaveAndStop(tmp_path / "state", 13))
    run(SWACallback(0.25, save_path=tmp_path / "again.pt"), resume_from=tmp_path / "state")
    whole, again = (torch.load(tmp_path / name)["model_state_dict"] for name in ("whole.pt", "again.pt"))
    for name, value in whole.items():
        assert torch.equal(again[name], value), name


def test_two_averages_in_another_folder_and_order_are_told_apart_by_their_files(tmp_path: Path) -> None:
    def averages(folder: str) -> list[SWACallback]:
        (tmp_path / folder).mkdir(exist_ok=True)
        return [SWACallback(start, save_path=tmp_path / folder / f"from_{start}.pt") for start in (0.25, 0.5)]

    run(*averages("whole"))
    run(*averages("before"), SaveAndStop(tmp_path / "state", 13))
    run(*reversed(averages("after")), resume_from=tmp_path / "state")
    for name in ("from_0.25.pt", "from_0.5.pt"):
        whole, after = (torch.load(tmp_path / folder / name)["model_state_dict"] for folder in ("whole", "after"))
        assert all(torch.equal(after[key], value) for key, value in whole.items()), name


class Stop(TrainerCallback):
    """Stops at an event of the second epoch."""

    def __init__(self, event: str) -> None:
        setattr(self, event, self.stop)

    def stop(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.run_history.current_epoch == 2 and trainer.run_state.updates_in_epoch:
            raise StopTrainingError("enough")


@pytest.mark.parametrize("end", ["on_training_run_epoch_end", "on_optimizer_step_end", "limit", "no evaluation set"])
def test_a_run_that_ends_early_has_its_average(end: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ends, swa = Ends(), SWACallback(0, save_path=tmp_path / "swa.pt")
    arguments: dict[str, Any] = {"max_num_train_steps": 8} if end == "limit" else {}
    arguments |= {"eval_dataset": None} if end == "no evaluation set" else {}
    stoppers = [Stop(end)] if end.startswith("on_") else []
    trainer = run(ends, swa, *stoppers, **arguments)
    saved = torch.load(tmp_path / "swa.pt")["model_state_dict"]
    assert swa.averaged_epochs == len(ends.weights) == {"no evaluation set": 4, "on_optimizer_step_end": 1}.get(end, 2)
    mean = torch.stack([weights["0.weight"] for weights in ends.weights]).mean(0)
    torch.testing.assert_close(saved["0.weight"], mean, rtol=1e-12, atol=0)
    with torch.no_grad():
        hidden = INPUTS @ saved["0.weight"].T + saved["0.bias"]
    torch.testing.assert_close(saved["1.running_mean"], hidden.mean(0), rtol=1e-12, atol=1e-12)
    found = [name for name in trainer.run_history.get_metric_names() if name.startswith("swa_model")]
    assert found == ([] if end == "no evaluation set" else ["swa_model_eval_loss_epoch"])
    if found:
        model = new_model()
        model.load_state_dict(saved)
        loss = Trainer(model, nn.MSELoss(), None, callbacks=()).evaluate(ROWS)["evaluation_loss"]
        assert trainer.run_history.get_latest_metric(found[0]) == pytest.approx(loss, rel=1e-9)
    assert ("The run ended early" in capsys.readouterr().out) == end.startswith("on_")


def test_without_an_evaluation_the_average_is_saved_at_the_end(tmp_path: Path) -> None:
    run(SWACallback(0, evaluate_during_training=False, save_path=tmp_path / "swa.pt"), eval_dataset=None)
    assert torch.load(tmp_path / "swa.pt")["model_state_dict"].keys() == new_model().state_dict().keys()
    with pytest.raises(ConfigurationError, match="a share of the epochs"):
        SWACallback(1.5)


def test_the_newest_training_states_are_averaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ends = Ends()
    run(ends, SaveTrainingStateCallback(tmp_path / "states", save_every_n_epochs=1))
    place, output = str(tmp_path / "states"), tmp_path / "average.pt"
    assert main(["checkpoints", "average", place, "--last", "3", "--output", str(output)]) == 0
    assert "Wrote the mean of" in capsys.readouterr().out
    trainer = run()
    trainer.load_checkpoint(output)
    mean = sum(each["0.weight"] for each in ends.weights[1:]) / 3  # type: ignore[arg-type]
    torch.testing.assert_close(trainer.model.state_dict()["0.weight"], mean, rtol=1e-12, atol=1e-15)
    assert trainer.model.state_dict()["1.num_batches_tracked"] == 20
    assert main(["checkpoints", "average", place, "--last", "1"]) == 2
