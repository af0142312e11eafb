"""What the default hooks make of a batch."""

import functools
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pytorch_accelerated import Trainer
from pytorch_accelerated.errors import DataError
from pytorch_accelerated.loop.batches import batch_loss, batch_predictions
from tests.support.reference import assert_same_parameters, sgd

ROWS = torch.arange(12.0).view(4, 3)
LABELS = torch.tensor([0, 1, 1, 0])


class Named(nn.Module):
    """Takes its inputs by name, as models of the transformers library do, and returns its own loss with labels."""

    def __init__(self, returns: Any = dict) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 2)
        self.returns = returns

    def forward(self, inputs: torch.Tensor, mask: torch.Tensor | None = None, labels: Any = None) -> Any:
        logits = self.linear(inputs if mask is None else inputs * mask)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        if self.returns is tuple:
            return (logits,) if loss is None else (loss, logits)
        return self.returns(loss=loss, logits=logits, states=None)


def loss_of(model: Any, loss_func: Any, batch: Any) -> dict[str, Any]:
    return batch_loss(model, loss_func, batch, None, hook="calculate_train_batch_loss")


def predictions_of(model: Any, batch: Any) -> Any:
    return batch_predictions(model, batch, hook="calculate_predict_batch_outputs")


def train_and_evaluate(loss_func: Any, targets: torch.Tensor, model: nn.Module, *, evaluates: bool) -> Trainer:
    trainer = Trainer(model, loss_func, torch.optim.SGD(model.parameters(), lr=0.1), callbacks=())
    if evaluates:
        trainer.evaluate((ROWS, targets), 4)
    else:
        trainer.train((ROWS, targets), 2, per_device_batch_size=4)
    return trainer


@pytest.mark.parametrize(
    "loss_func",
    [
        *(nn.MSELoss(), nn.L1Loss(), nn.HuberLoss(), nn.PoissonNLLLoss(), nn.BCEWithLogitsLoss(), F.mse_loss),
        *(F.smooth_l1_loss, functools.partial(F.huber_loss, delta=0.5), functools.partial(nn.SmoothL1Loss(beta=0.5))),
    ],
)
@pytest.mark.parametrize("evaluates", [False, True])
def test_a_column_and_a_row_of_numbers_are_refused_by_the_first_batch_of_a_loss_of_torch(
    loss_func: Any, evaluates: bool
):
    column, row = nn.Linear(3, 1), nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))
    numbers = LABELS.float()
    shapes = r"outputs \[4, 1\] and the targets \[4\].* 4 x 4 .*`outputs.squeeze\(-1\)`.*`targets.unsqueeze\(1\)`"
    with pytest.raises(DataError, match=shapes):
        train_and_evaluate(loss_func, numbers, column, evaluates=evaluates)
    with pytest.raises(DataError, match=r"outputs \[4\] and the targets \[4, 1\]"):
        train_and_evaluate(loss_func, numbers[:, None], row, evaluates=evaluates)
    for model, targets in ((column, numbers[:, None]), (row, numbers)):
        train_and_evaluate(loss_func, targets, model, evaluates=evaluates)


def test_a_loss_of_ones_own_and_losses_of_class_numbers_may_take_any_shapes():
    def compares_all(outputs: torch.Tensor, targets: torch.Tensor) -> Any:
        return ((outputs - targets) ** 2).mean()

    class Own(nn.MSELoss):
        def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> Any:
            return super().forward(outputs, targets[:, None])

    for loss_func in (compares_all, Own()):
        assert train_and_evaluate(loss_func, LABELS.float(), nn.Linear(3, 1), evaluates=False).run_state.updates == 2
    train_and_evaluate(nn.CrossEntropyLoss(), torch.zeros(4).long(), nn.Linear(3, 1), evaluates=False)
    single = Trainer(model := nn.Linear(3, 1), nn.HingeEmbeddingLoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    single.train((ROWS, LABELS.float()), 1, per_device_batch_size=1)  # one row is compared with itself


class Triple(NamedTuple):
    inputs: torch.Tensor
    targets: torch.Tensor
    names: list[str]


@pytest.mark.parametrize("batch", [(ROWS, LABELS, LABELS), [ROWS, LABELS, "a", None], Triple(ROWS, LABELS, ["a"])])
def test_items_after_inputs_and_targets_are_left_to_the_user(batch: Any):
    model = nn.Linear(3, 2)
    output = loss_of(model, F.cross_entropy, batch)
    assert torch.equal(output["loss"], F.cross_entropy(model(ROWS), LABELS))
    assert output["batch_size"] == 4
    assert torch.equal(predictions_of(model, batch), model(ROWS))


@pytest.mark.parametrize("returns", [dict, OrderedDict, tuple])
def test_a_dict_goes_in_by_name_and_the_model_returns_its_loss(returns: Any):
    model = Named(returns)
    output = loss_of(model, None, {"inputs": ROWS, "labels": LABELS, "note": ["not for the model"] * 4})
    assert torch.equal(output["loss"], F.cross_entropy(model.linear(ROWS), LABELS))
    assert output["batch_size"] == 4


def test_a_loss_function_gets_the_outputs_and_the_whole_dict():
    model = Named()
    batch = {"inputs": ROWS, "weights": LABELS}
    output = loss_of(model, lambda outputs, given: outputs["logits"].sum() + given["weights"].sum(), batch)
    assert torch.equal(output["loss"], model.linear(ROWS).sum() + 2)


@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: torch.compile(model, backend="eager")])
def test_the_model_within_a_compiled_one_says_what_it_takes(wrap: Any):
    # The wrapper's own forward takes anything.
    output = loss_of(wrap(Named()), None, {"inputs": ROWS, "labels": LABELS, "note": "not for the model"})
    assert output["loss"] > 0


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (ROWS, "float32 "),
        ((ROWS,), "tuple of 1 with "),
        ([], "list of 0 with "),
        (None, "NoneType"),
        ("text", "str"),
    ],
)
def test_any_other_batch_is_refused_with_the_hook_to_override(batch: Any, words: str):
    with pytest.raises(DataError, match=f"The batch is {words}.*Override `calculate_train_batch_loss`"):
        loss_of(nn.Linear(3, 2), F.cross_entropy, batch)


@pytest.mark.parametrize(
    ("model", "loss_func", "batch", "words"),
    [
        (nn.Linear(3, 2), None, (ROWS, LABELS), "`loss_func` is None"),
        (Named(), None, {"inputs": ROWS}, "returned dict with .'loss': NoneType; 'logits': "),
        (lambda inputs: inputs, F.mse_loss, {}, "the model takes inputs: none of the names match"),
        (nn.Linear(3, 2), None, {"x": ROWS}, "'x', but the model takes input: none of the names match"),
        (nn.Identity(), None, {"input": ROWS}, "returned float32 "),
    ],
)
def test_a_batch_without_a_loss_or_a_fitting_name_is_refused(model: Any, loss_func: Any, batch: Any, words: str):
    with pytest.raises(DataError, match=words):
        loss_of(model, loss_func, batch)


@pytest.mark.parametrize("loss_func", [nn.CrossEntropyLoss(), nn.MSELoss(), lambda outputs, targets, weights: 0])
def test_a_loss_function_that_takes_no_dict_is_refused_with_how_it_is_called(loss_func: Any):
    batch = {"inputs": ROWS, "labels": LABELS}
    with pytest.raises(DataError, match=r"loss_func\(outputs, batch\).*'inputs'.*'labels'.*lambda outputs") as caught:
        loss_of(lambda inputs: inputs, loss_func, batch)
    assert isinstance(caught.value.__cause__, (TypeError, AttributeError))
    assert str(caught.value.__cause__) in str(caught.value)


@pytest.mark.parametrize(
    "batch", [ROWS, (ROWS, LABELS), [ROWS], {"input": ROWS, "label": LABELS}, {"input": ROWS, "note": "mine"}]
)
def test_predictions_come_from_the_inputs_alone(batch: Any):
    model = nn.Linear(3, 2)
    assert torch.equal(predictions_of(model, batch), model(ROWS))


def test_predictions_leave_out_labels_and_what_is_none():
    predictions = predictions_of(Named(), {"inputs": ROWS, "labels": LABELS})
    assert predictions.keys() == {"logits"}


def test_a_model_with_its_own_loss_trains_as_one_with_a_loss_function():
    ours, theirs = Named(), Named()
    data = {"inputs": ROWS, "labels": LABELS}
    Trainer(ours, None, sgd(ours), callbacks=(), seed=1).train(data, 3, data, per_device_batch_size=3)
    trainer = Trainer(theirs.linear, nn.CrossEntropyLoss(), sgd(theirs), callbacks=(), seed=1)
    trainer.train((ROWS, LABELS), 3, per_device_batch_size=3)
    assert_same_parameters(ours, theirs, tolerance=0)
