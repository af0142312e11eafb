"""Cross-validation, compared with folds by hand; fine-tuning part by part."""

from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.model_selection import KFold, ShuffleSplit
from torch import nn
from torch.utils.data import TensorDataset

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import SaveTrainingStateCallback, TrainerCallback, UnfreezeCallback
from pytorch_accelerated.errors import ConfigurationError, DataError
from pytorch_accelerated.extras.recipes import cross_validate, fine_tune
from tests.support.processes import REPOSITORY, run_on_ranks
from tests.support.stages import trained_in_stages

INPUTS = torch.randn(23, 3, generator=torch.Generator().manual_seed(0))
TARGETS = INPUTS.sum(1, keepdim=True)


def make_trainer(fold: int) -> Trainer:
    torch.manual_seed(fold)
    model = nn.Linear(3, 1)
    return Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.1), callbacks=(), seed=fold)


@pytest.mark.parametrize("dataset", [(INPUTS, TARGETS), TensorDataset(INPUTS, TARGETS)], ids=["arrays", "dataset"])
def test_each_row_is_predicted_by_the_model_that_has_not_seen_it(dataset: Any) -> None:
    folds = list(KFold(4, shuffle=True, random_state=1).split(INPUTS))
    result = cross_validate(make_trainer, dataset, folds, 2, per_device_batch_size=5)
    assert result.predictions.shape == (23, 1)
    for number, (train, held_out) in enumerate(folds):
        trainer = make_trainer(number)
        history = trainer.train((INPUTS[train], TARGETS[train]), 2, (INPUTS[held_out], TARGETS[held_out]), 5)
        torch.testing.assert_close(result.predictions[held_out], trainer.predict(INPUTS[held_out]))
        losses = result.histories[number].get_metric_values("eval_loss_epoch")
        assert losses == pytest.approx(history.get_metric_values("eval_loss_epoch"), rel=1e-6)


def test_predictions_keep_their_structure() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 1)

        def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"rows": inputs[:, 0], "outputs": self.linear(inputs)}

    def make(fold: int) -> Trainer:
        model = Both()
        loss = lambda outputs, targets: nn.functional.mse_loss(outputs["outputs"], targets)  # noqa: E731
        return Trainer(model, loss, torch.optim.SGD(model.parameters(), 0.1), callbacks=())

    result = cross_validate(make, (INPUTS, TARGETS), KFold(3, shuffle=True, random_state=0).split(INPUTS), 1)
    assert torch.equal(result.predictions["rows"], INPUTS[:, 0])


def test_a_fold_resumes_from_a_folder_of_its_own(tmp_path: Path) -> None:
    def make(fold: int) -> Trainer:
        trainer = make_trainer(fold)
        trainer.callback_handler.add_callback(SaveTrainingStateCallback(tmp_path / str(fold), save_every_n_epochs=1))
        return trainer

    folds = list(KFold(4, shuffle=True, random_state=1).split(INPUTS))
    whole = cross_validate(make_trainer, (INPUTS, TARGETS), folds, 3)
    cross_validate(make, (INPUTS, TARGETS), folds, 2)
    resumed = cross_validate(make, (INPUTS, TARGETS), folds, 3, resume_from=tmp_path / "{fold}")
    assert torch.equal(resumed.predictions, whole.predictions)
    with pytest.raises(ConfigurationError, match="know the rows that they hold out"):
        cross_validate(make, (INPUTS, TARGETS), folds, 3, resume_from=tmp_path)


def test_a_splitter_or_another_evaluation_set_is_refused() -> None:
    with pytest.raises(TypeError, match=r"KFold.*pass what a splitter returns, `KFold\(5\)\.split\(inputs\)`"):
        cross_validate(make_trainer, (INPUTS, TARGETS), KFold(3), 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="multiple values for argument 'eval_dataset'"):
        cross_validate(make_trainer, (INPUTS, TARGETS), KFold(3).split(INPUTS), 1, eval_dataset=(INPUTS, TARGETS))


def test_folds_that_do_not_hold_out_each_row_once_are_refused() -> None:
    with pytest.raises(DataError, match="each must be held out once"):
        cross_validate(make_trainer, (INPUTS, TARGETS), ShuffleSplit(3, random_state=0).split(INPUTS), 1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(3, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(self.body(self.stem(inputs).relu()).relu())
        return outputs


def test_folds_that_share_parameters_are_refused() -> None:
    shared = Net()

    def make(fold: int) -> Trainer:
        return Trainer(shared, nn.MSELoss(), torch.optim.SGD(shared.parameters(), 0.1), callbacks=())

    with pytest.raises(ConfigurationError, match=r"share the parameters 'stem.weight'.*within `make_trainer`"):
        cross_validate(make, (INPUTS, TARGETS), KFold(3).split(INPUTS), 1)


def of_parts(**parts: nn.Module) -> nn.Module:
    class OfParts(nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            for name in ("body", "fc") if "fc" in parts else ("net",):
                inputs = self.get_submodule(name)(inputs)
            return inputs

    model = OfParts()
    for name, part in parts.items():
        model.add_module(name, part)
    return model


class Declared(Net):
    def get_classifier(self) -> nn.Module:
        return self.body


HEADS: dict[str, Any] = {
    "defined first": (lambda: of_parts(fc=nn.Linear(4, 1), body=nn.Linear(3, 4)), "fc.weight, fc.bias"),
    "no parameters last": (
        lambda: of_parts(body=nn.Linear(3, 4), fc=nn.Linear(4, 1), drop=nn.Dropout()),
        "fc.weight, fc",
    ),
    "in order": (lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1), nn.Identity()), "2.weight, 2.bias"),
    "declared": (Declared, "body.weight, body.bias"),
}


@pytest.mark.parametrize("kind", HEADS)
def test_the_head_is_what_the_model_says_and_is_told(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    make, words = HEADS[kind]
    fine_tune(make(), nn.MSELoss(), (INPUTS, TARGETS), 1)
    assert f"The head is {words}" in capsys.readouterr().out.replace("'", "")


@pytest.mark.parametrize("model", [of_parts(net=nn.Linear(3, 1)), of_parts(net=nn.Linear(3, 1), other=nn.Linear(1, 1))])
def test_a_model_that_does_not_say_what_its_head_is_asks(model: nn.Module) -> None:
    with pytest.raises(ConfigurationError, match=r"children with parameters are 'net'.* head='net'"):
        fine_tune(model, nn.MSELoss(), (INPUTS, TARGETS), 1)


def test_what_was_frozen_before_stays_frozen() -> None:
    model, watching = Net(), Watching()
    model.stem.requires_grad_(False)
    trainer = fine_tune(model, nn.MSELoss(), (INPUTS, TARGETS), 1, callbacks=[watching])
    assert watching.changed == [{"head"}, {"body", "head"}]
    trainer.train((INPUTS, TARGETS), 2)  # what the callback itself froze is not the user's
    assert watching.changed[2:] == [{"head"}, {"body", "head"}]


class Watching(TrainerCallback):
    """Notes, at the end of each epoch, which parts have changed in it."""

    def __init__(self) -> None:
        self.changed: list[set[str]] = []
        self.before: dict[str, torch.Tensor] = {}

    def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        self.before = {name: each.detach().clone() for name, each in trainer.get_model().named_parameters()}

    def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        new = trainer.get_model().named_parameters()
        self.changed.append({name.partition(".")[0] for name, each in new if not torch.equal(each, self.before[name])})


def test_the_head_is_trained_first_and_then_everything_with_lower_rates_below() -> None:
    watching = Watching()
    trainer = fine_tune(
        Net(), nn.MSELoss(), (INPUTS, TARGETS), 2, (INPUTS, TARGETS), layer_decay=0.5, callbacks=[watching], seed=1
    )
    assert watching.changed == [{"head"}, {"stem", "body", "head"}, {"stem", "body", "head"}]
    highest = {group["name"].removesuffix(", no decay"): group["max_lr"] for group in trainer.optimizer.param_groups}
    assert highest == pytest.approx(
        {"others, layer 0": 2e-3 * 0.25, "others, layer 1": 2e-3 * 0.5, "others, layer 2": 2e-3}, rel=1e-12
    )


def test_parts_that_join_later_resume_at_every_update_to_the_bit(tmp_path: Path) -> None:
    def run(folder: Path, resume_from: Path | None = None) -> torch.Tensor:
        model = Net()
        saving = SaveTrainingStateCallback(folder, save_every_n_steps=1)
        stages = UnfreezeCallback({1: "^head", 2: ["^body", "^stem.weight"]})
        trainer = Trainer(model, nn.MSELoss(), torch.optim.AdamW(model.parameters()), [stages, saving], seed=1)
        trainer.train((INPUTS, TARGETS), 2, per_device_batch_size=8, resume_from=resume_from)
        assert torch.equal(model.stem.bias, Net().stem.bias)
        return torch.cat([each.detach().flatten() for each in model.parameters()])

    whole = run(tmp_path / "whole")
    for state in sorted((tmp_path / "whole").glob("step_*")):
        assert torch.equal(run(tmp_path / f"from {state.name}", state), whole), state


def test_a_part_that_the_model_lacks_is_an_error() -> None:
    model = Net()
    trainer = Trainer(model, nn.MSELoss(), torch.optim.AdamW(model.parameters()), [UnfreezeCallback({1: "neck"})])
    with pytest.raises(ConfigurationError, match="'neck' is not in the name of any"):
        trainer.train((INPUTS, TARGETS), 1)


@pytest.mark.processes
def test_parts_that_join_later_and_a_pruned_trial_on_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    torch.save(trained_in_stages(1).get_model().state_dict(), tmp_path / "alone.pt")
    run_on_ranks(REPOSITORY / "tests" / "ranks" / "jobs.py", 2, tmp_path, cwd=REPOSITORY)
