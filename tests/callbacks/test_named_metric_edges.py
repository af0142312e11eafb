"""Metrics by name at the edges: missing classes, ignored targets, far numbers, heads, and what asks."""

import math
import sys
from typing import Any

import numpy as np
import pytest
import sklearn.metrics
import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import MetricsCallback
from pytorch_accelerated.errors import ArgumentTypeError, HookOutputError
from tests.support.named import Same, own


def evaluated(outputs: torch.Tensor, targets: Any, names: Any, loss: Any = own, size: int = 7, **asked: Any) -> Any:
    """The metrics of a model that returns its inputs."""
    trainer = Trainer(Same(), loss, None, callbacks=[MetricsCallback(names, **asked)])
    return trainer.evaluate((outputs, targets), size)


GENERATOR = torch.Generator().manual_seed(3)
SCORES = torch.randn(60, 4, generator=GENERATOR)
CLASSES = torch.arange(60) % 4
CROSS_ENTROPY, LOGITS = nn.CrossEntropyLoss(), nn.BCEWithLogitsLoss()


@pytest.mark.filterwarnings("ignore")  # torchmetrics and scikit-learn warn of what is not defined
@pytest.mark.parametrize("average", ["macro", "weighted", "micro"])
@pytest.mark.parametrize("name", ["auc", "average_precision"])
def test_averages_over_classes_are_those_of_scikit_learn_also_where_one_is_missing(name: str, average: str) -> None:
    theirs = sklearn.metrics.roc_auc_score if name == "auc" else sklearn.metrics.average_precision_score
    one = SCORES[:, 0]
    of_two = torch.stack([-one, one], 1)
    for there in (CLASSES >= 0, CLASSES != 3):
        truth, scores = CLASSES[there], SCORES[there]
        expected = theirs(np.eye(4)[truth], scores.softmax(1), average=average)
        found = evaluated(scores, truth, [name], CROSS_ENTROPY, average=average)[f"eval_{name}"]
        assert found == pytest.approx(expected, rel=1e-6, nan_ok=True), (average, found, expected)
        binary = (truth > 1).long()
        expected = theirs(np.eye(2)[binary], of_two[there], average=average)
        for outputs, targets, loss in ((one[there], binary.float(), LOGITS), (of_two[there], binary, CROSS_ENTROPY)):
            found = evaluated(outputs, targets, [name], loss, average=average)[f"eval_{name}"]
            assert found == pytest.approx(expected, rel=1e-6), (average, outputs.shape)
        labels = torch.stack([truth == 0, truth == 3], 1).float()
        expected = theirs(labels, scores[:, :2], average=average)
        found = evaluated(scores[:, :2], labels, [name], LOGITS, average=average)[f"eval_{name}"]
        assert found == pytest.approx(expected, rel=1e-6, nan_ok=True), (average, found, expected)


@pytest.mark.filterwarnings("ignore")
def test_a_single_class_and_nothing_at_all_have_no_area() -> None:
    one = SCORES[:, 0]
    assert math.isnan(evaluated(one, torch.ones(60), ["auc"], LOGITS)["eval_auc"])
    assert evaluated(one, torch.zeros(60), ["average_precision"], LOGITS)["eval_average_precision"] == 0.0
    nothing = evaluated(SCORES, torch.full((60,), -100), ["auc", "f1", "accuracy"], own)
    assert all(math.isnan(nothing[f"eval_{name}"]) for name in ("auc", "f1", "accuracy"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("average", ["macro", "weighted", "micro"])
@pytest.mark.parametrize("ignored", [255, 0])
def test_a_class_may_be_missing_or_ignored_as_a_target_and_still_be_predicted(ignored: int, average: str) -> None:
    for missing in (None, 1):
        targets, scores = CLASSES.clone(), SCORES.clone()
        targets[3:20:2] = ignored
        if missing is not None:  # neither a target nor predicted
            targets[targets == missing], scores[:, missing] = 3, -9.0
        counts = targets != ignored
        truth, left = targets[counts], scores[counts]
        averaged: dict[str, Any] = {"average": average, "zero_division": 0}
        expected = {
            "iou": sklearn.metrics.jaccard_score(truth, left.argmax(1), **averaged),
            "f1": sklearn.metrics.f1_score(truth, left.argmax(1), **averaged),
            "mcc": sklearn.metrics.matthews_corrcoef(truth, left.argmax(1)),
            "auc": sklearn.metrics.roc_auc_score(np.eye(4)[truth], left.softmax(1), average=average),
        }
        loss = nn.CrossEntropyLoss(ignore_index=ignored)
        values = evaluated(scores, targets, list(expected), loss, average=average)
        found = {name: values[f"eval_{name}"] for name in expected}
        assert found == pytest.approx(expected, rel=1e-6, nan_ok=True), missing
    mask, one = CLASSES % 2, SCORES[:, 0]
    expected_of_mask = sklearn.metrics.jaccard_score(mask, one > 0, average=average)
    assert evaluated(one, mask, ["iou"], average=average)["eval_iou"] == pytest.approx(expected_of_mask, rel=1e-6)


@pytest.mark.parametrize("ignored", [-100, 255])
@pytest.mark.parametrize("kind", [torch.float32, torch.int64])
def test_an_ignored_target_does_not_count_whatever_its_dtype(ignored: int, kind: torch.dtype) -> None:
    masks = (torch.rand(20, 1, 4, 4, generator=GENERATOR) < 0.4).to(kind)
    outputs = torch.randn(20, 1, 4, 4, generator=GENERATOR)
    counts = torch.rand(20, 1, 4, 4, generator=GENERATOR) < 0.7
    targets = masks.masked_fill(~counts, ignored)
    truth, found = masks[counts], outputs[counts] > 0
    of_task: dict[str, Any] = {"task": "binary"}
    for asked in ({}, of_task):
        values = evaluated(outputs, targets, ["accuracy", "f1"], own, ignore_index=ignored, **asked)
        assert values["eval_accuracy"] == pytest.approx(sklearn.metrics.accuracy_score(truth, found))
        assert values["eval_f1"] == pytest.approx(sklearn.metrics.f1_score(truth, found))


@pytest.mark.parametrize(
    ("outputs", "targets", "words"),
    [
        (SCORES[:, 0], (CLASSES % 2 * 255).byte(), "0 and 1"),
        (SCORES[:, 0], CLASSES % 2 * 2 - 1, "0 and 1"),
        (SCORES[:, :3], CLASSES, "0 to 2"),
    ],
)
def test_targets_that_are_no_class_are_an_error(outputs: torch.Tensor, targets: torch.Tensor, words: str) -> None:
    with pytest.raises(
        HookOutputError, match=f"whose targets are {words}, or -100, which does not count; but there were"
    ):
        evaluated(outputs, targets, ["accuracy", "f1"])


def test_numbers_far_from_zero_keep_their_digits_and_need_no_torchmetrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    truth = 2e6 + torch.randn(61, 3, generator=GENERATOR).double() * torch.tensor([0.1, 1, 10])
    found = truth + 0.3 * torch.randn(61, 3, generator=GENERATOR).double()
    values = evaluated(found, truth, ["r2", "rmse"], nn.MSELoss())
    assert values["eval_r2"] == pytest.approx(sklearn.metrics.r2_score(truth, found), rel=1e-8)
    assert values["eval_rmse"] == pytest.approx(sklearn.metrics.root_mean_squared_error(truth, found), rel=1e-8)


def test_labels_of_tokens_may_be_in_the_last_dimension() -> None:
    outputs = torch.randn(20, 6, 4, generator=GENERATOR)
    targets = (torch.rand(20, 6, 4, generator=GENERATOR) < 0.3).float()
    with pytest.raises(HookOutputError, match=r"classes_dim=1.*classes_dim=2"):
        evaluated(outputs, targets, ["f1"], LOGITS, task="labels")
    truth, found = targets.reshape(-1, 4), outputs.reshape(-1, 4) > 0
    expected = sklearn.metrics.f1_score(truth, found, average="macro")
    assert evaluated(outputs, targets, ["f1"], LOGITS, task="labels", classes_dim=-1)["eval_f1"] == pytest.approx(
        expected
    )


class Heads(Same):
    def forward(self, inputs: torch.Tensor) -> Any:
        return {"loss": 0 * self.nothing, "digit": inputs, "parity": inputs[:, :2]}


def test_a_name_may_be_recorded_under_another_one_so_a_model_may_have_heads() -> None:
    heads = [
        MetricsCallback({"digit_accuracy": "accuracy"}, predictions="digit", targets="digits"),
        MetricsCallback({"parity_accuracy": "accuracy"}, predictions="parity", targets="parities"),
    ]
    rows = {"inputs": SCORES, "digits": CLASSES, "parities": CLASSES % 2}
    found = Trainer(Heads(), None, None, callbacks=heads).evaluate(rows, 7)
    assert found["eval_digit_accuracy"] == pytest.approx((SCORES.argmax(1) == CLASSES).double().mean().item())
    assert found["eval_parity_accuracy"] == pytest.approx(
        (SCORES[:, :2].argmax(1) == CLASSES % 2).double().mean().item()
    )


def test_a_callback_may_be_used_again_for_other_classes() -> None:
    callback = MetricsCallback(["accuracy"])
    for scores in (SCORES, SCORES[:, :2], torch.randn(60, 7, generator=GENERATOR)):
        targets = CLASSES % scores.shape[1]
        found = Trainer(Same(), CROSS_ENTROPY, None, callbacks=[callback]).evaluate((scores, targets), 7)
        assert found["eval_accuracy"] == pytest.approx((scores.argmax(1) == targets).double().mean().item())


class Language(nn.Module):
    """Scores for each place, and a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Embedding(11, 11)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        return {"loss": self.scores.weight.sum() * 0, "logits": self.scores(input_ids)}


class ForTokens(Language):
    loss_type = "ForTokenClassification"


def ForCausalLMLoss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # noqa: N802  # its name tells
    return logits.mean()


class Causal(Language):
    """As a model of transformers, whose forward calls its loss function."""

    loss_function = staticmethod(ForCausalLMLoss)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        outputs = super().forward(input_ids, labels)
        return {**outputs, "loss": self.loss_function(outputs["logits"], labels)}


class CausalInName(Language):
    """As BartForCausalLM, which compares each token with itself."""

    loss_type = "ForCausalLM"


def test_a_causal_model_is_measured_at_the_next_token_and_an_unknown_one_asks() -> None:
    tokens = torch.randint(0, 11, (30, 9), generator=GENERATOR)
    rows = {"input_ids": tokens, "labels": tokens.clone()}

    def measured(kind: type[Language], **asked: Any) -> float:
        torch.manual_seed(1)
        trainer = Trainer(kind(), None, None, callbacks=[MetricsCallback(["accuracy"], **asked)])
        return float(trainer.evaluate(rows, 8)["eval_accuracy"])

    torch.manual_seed(1)
    found = Language().scores(tokens).argmax(-1)
    same, following = (found == tokens).double().mean().item(), (found[:, :-1] == tokens[:, 1:]).double().mean().item()
    assert same != following
    assert measured(Causal) == pytest.approx(following)
    assert measured(ForTokens) == measured(Language, targets="labels") == pytest.approx(same)
    for unknown in (Language, CausalInName):
        with pytest.raises(HookOutputError, match="at the same place, or at the next one, cannot be told"):
            measured(unknown)


def test_a_metric_may_be_recorded_under_two_names() -> None:
    found = evaluated(SCORES, CLASSES, {"first": "accuracy", "second": "accuracy"}, CROSS_ENTROPY)
    assert found["eval_first"] == found["eval_second"] == (SCORES.argmax(1) == CLASSES).double().mean().item()


def test_a_callback_among_the_names_of_metrics_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="A callback is among the metrics"):
        Trainer(Same(), own, None, metrics=["accuracy", MetricsCallback(["f1"])])
