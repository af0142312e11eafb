"""Where a loss is the mean over items other than samples, nothing depends on how the items came into batches."""

from typing import Any

import pytest
import torch

from pytorch_accelerated.errors import HookOutputError
from pytorch_accelerated.steps.hook_output import adding_nothing
from tests.support.items import CountsBeforehand, TokenTrainer, make, plain_sgd, token_data
from tests.support.reference import TOLERANCE, assert_same_parameters, tiny_model


@pytest.mark.parametrize("count", [-1, "3", True, float("nan"), torch.ones(2)])
def test_an_invalid_number_of_items_is_rejected(count: Any) -> None:
    class CountsWrongly(TokenTrainer):
        def count_batch_items(self, batch: Any) -> Any:
            return count

    with pytest.raises(HookOutputError, match="`count_batch_items` returned"):
        make(CountsWrongly).train(token_data(4), 1)


def test_an_evaluation_of_which_only_some_batches_can_be_counted_is_refused() -> None:
    class CountsSome(CountsBeforehand):
        def count_batch_items(self, batch: Any) -> Any:
            return None if len(batch[0]) == 1 else super().count_batch_items(batch)

    with pytest.raises(HookOutputError, match="a number for some batches of the evaluation, and None for others"):
        make(CountsSome).evaluate(token_data(5), 2)


@pytest.mark.parametrize("policy", [None, "skip"])
def test_a_batch_without_items_does_not_count_as_a_non_finite_loss(policy: Any) -> None:
    data = token_data(8)
    assert not data[2][3].any()

    def train(batch_size: int, steps: int) -> TokenTrainer:
        trainer = CountsBeforehand(model := tiny_model(), None, plain_sgd(model), seed=5)  # type: ignore[arg-type]
        arguments: dict[str, Any] = {"per_device_batch_size": batch_size, "gradient_accumulation_steps": steps}
        arguments |= {"train_dataloader_kwargs": {"shuffle": False}, "nonfinite_policy": policy}
        trainer.train(data, 2, data, eval_per_device_batch_size=1, **arguments)
        return trainer

    whole, parts = train(4, 1), train(1, 4)
    assert_same_parameters(parts.model, whole.model)
    assert parts.run_state.skipped_updates == 0
    for name in ("train_loss_epoch", "eval_loss_epoch"):
        values = [trainer.run_history.get_metric_values(name) for trainer in (parts, whole)]
        assert values[0] == pytest.approx(values[1], rel=TOLERANCE)


def test_a_loss_that_counts_nowhere_reaches_all_parameters_and_adds_nothing() -> None:
    model = tiny_model()
    outputs = model(torch.ones(2, 3).double())
    loss = adding_nothing((outputs * 0).sum() / 0 + outputs.log().sum())
    assert loss.item() == 0
    loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()
