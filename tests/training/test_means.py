"""A mean loss is taken over what torch says it is over: rows that are there, and the weights of targets that count."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.errors import DataError
from tests.chaos.size import some
from tests.support.means import SIZE, WEIGHT, Net, Rows, check, data, without_broken
from tests.support.processes import run_on_ranks
from tests.support.resuming import SaveAndStop, assert_same

RANKS = Path(__file__).parents[1] / "ranks"
IN_ORDER = {"shuffle": False}


def test_updates_and_recorded_losses_are_those_of_a_loop_by_hand() -> None:
    assert check((1, 7, SIZE), (1, 3), 1) == 53


@pytest.mark.processes
@pytest.mark.parametrize("ranks", some((3,), (2, 3, 4)))
def test_the_same_on_several_ranks(ranks: int) -> None:
    run_on_ranks(RANKS / "means.py", ranks)


def test_a_run_resumed_within_an_epoch_is_the_same(tmp_path: Path) -> None:
    inputs, classes, _ = data()
    weights = []
    for stop in (None, 2):
        for stopper in [] if stop is None else [SaveAndStop(tmp_path / "state", stop)], []:
            model = Net(has_maps=False)
            trainer = Trainer(
                model,
                nn.CrossEntropyLoss(weight=WEIGHT),
                torch.optim.SGD(model.parameters(), 0.3),
                callbacks=stopper,
                seed=1,
            )
            resume: dict[str, Any] = {} if stopper or stop is None else {"resume_from": tmp_path / "state"}
            trainer.train((inputs, classes), 2, None, 3, gradient_accumulation_steps=2, **resume)
        weights.append({**model.state_dict(), "loss": trainer.run_history.get_latest_metric("train_loss_epoch")})
    assert_same(weights[1], weights[0])


def test_rows_that_are_left_out_have_no_prediction() -> None:
    inputs, classes, _ = data()
    model = Net(has_maps=False)
    trainer = Trainer(model, nn.CrossEntropyLoss(), None, callbacks=())
    predicted = trainer.predict(Rows(inputs, classes), collate_fn=without_broken, per_device_batch_size=6)
    kept = [row for row in range(SIZE) if row % 4 != 1]
    torch.testing.assert_close(predicted, model(inputs[kept]).detach(), rtol=0, atol=0)


def test_what_comes_first_may_be_no_rows() -> None:
    """Sequences of six steps, the steps first: each batch is weighted by its samples, as the loader counts them."""
    inputs, _, maps = data()

    def steps_first(rows: list[Any]) -> Any:
        columns = [torch.stack(column) for column in zip(*rows, strict=True)]
        return [columns[0].permute(2, 0, 1), columns[1].t()]

    class StepsFirst(Net):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs.permute(1, 2, 0)).permute(2, 0, 1)

    losses = []
    for batch_size in (8, SIZE):
        model = StepsFirst(has_maps=True)
        trainer = Trainer(
            model,
            lambda scores, targets: nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten()),
            None,
            callbacks=(),
        )
        rows = list(zip(inputs, maps, strict=True))
        losses.append(trainer.evaluate(rows, batch_size, collate_fn=steps_first)["eval_loss_epoch"])
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-10, atol=0)


def test_an_update_of_which_no_target_counts_is_refused_before_it_spoils_the_weights() -> None:
    inputs, classes, _ = data()
    model = Net(has_maps=False)
    before = model.layer.weight.detach().clone()
    trainer = Trainer(
        model, nn.CrossEntropyLoss(ignore_index=7), torch.optim.SGD(model.parameters(), 0.3), callbacks=()
    )
    with pytest.raises(DataError, match="no target counts in the loss"):
        trainer.train((inputs, torch.full_like(classes, 7)), 1)
    torch.testing.assert_close(model.layer.weight.detach(), before, rtol=0, atol=0)
