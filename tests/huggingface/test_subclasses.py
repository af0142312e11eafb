"""Trainers as people write them: the same subclass of transformers' Trainer and of ours trains the same."""

# mypy: disable-error-code="misc, has-type"
# For each class is made twice, of another base.

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, SequentialSampler

from pytorch_accelerated.huggingface import Trainer, TrainerCallback
from tests.huggingface.runs import everything
from tests.huggingface.test_against_transformers import TRAINED, assert_same_history, run
from tests.support.reference import assert_same_numbers
from tests.support.resuming import assert_same
from tests.test_subclass_names import WORDS

transformers = pytest.importorskip("transformers")

CLASSES = 3


class Classifier(nn.Module):
    """Takes numbers, returns logits and, with labels, a loss; as a dict, which can be read as a tuple too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        hidden = self.body(x)
        logits = self.head(hidden)
        outputs = {"logits": logits, "hidden_states": hidden}
        if labels is not None:
            outputs = {"loss": functional.cross_entropy(logits, labels), **outputs}
        return transformers.utils.ModelOutput(**outputs)


def rows(size: int, **columns: Any) -> list[dict[str, torch.Tensor]]:
    """Rows with four numbers and a class; `columns` are made of a generator."""
    draw = torch.Generator().manual_seed(size)
    return [
        {
            "x": torch.randn(4, generator=draw),
            "labels": torch.randint(CLASSES, (), generator=draw),
            **{name: make(draw) for name, make in columns.items()},
        }
        for _ in range(size)
    ]


def weighted_classes(base: Any) -> Any:
    class WeightedLoss(base):
        def __init__(self, *args: Any, class_weights: Any = None, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.class_weights = torch.tensor(class_weights or [1.0, 2.0, 4.0])

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            logits = outputs.get("logits")
            loss = nn.CrossEntropyLoss(weight=self.class_weights.to(logits.device))(logits.view(-1, CLASSES), labels)
            return (loss, outputs) if return_outputs else loss

    return WeightedLoss


def contrastive(base: Any) -> Any:
    class Contrastive(base):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            anchors = functional.normalize(model(x=inputs["x"]).hidden_states, dim=-1)
            others = functional.normalize(model(x=inputs["other"]).hidden_states, dim=-1)
            similarities = anchors @ others.T / 0.1
            loss = functional.cross_entropy(similarities, torch.arange(len(anchors), device=similarities.device))
            return (loss, {"similarities": similarities}) if return_outputs else loss

        def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
            inputs = self._prepare_inputs(inputs)
            with torch.no_grad():
                loss = self.compute_loss(model, inputs)
            return loss, None, None

    return Contrastive


def without_labels(base: Any) -> Any:
    class WithoutLabels(base):
        """Says that there is a loss without labels, and has a dict of loaders of its own."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.can_return_loss = True
            self._eval_dataloaders: dict[str, Any] = {}

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            outputs = model(x=inputs["x"])
            loss = outputs.logits.var(dim=0).mean()
            return (loss, {"loss": loss, **outputs}) if return_outputs else loss

        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            if "own" not in self._eval_dataloaders:
                self._eval_dataloaders["own"] = super().get_eval_dataloader(eval_dataset)
            return self._eval_dataloaders["own"]

    return WithoutLabels


def prepared_loaders(base: Any) -> Any:
    class PreparedLoaders(base):
        """Has accelerate prepare its loaders, as transformers does."""

        def get_train_dataloader(self) -> Any:
            options = {"collate_fn": self.data_collator, "sampler": SequentialSampler(self.train_dataset)}
            return self.accelerator.prepare(DataLoader(self.train_dataset, self._train_batch_size, **options))

        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            return self.accelerator.prepare(DataLoader(self.eval_dataset, 3, collate_fn=self.data_collator))

    return PreparedLoaders


def own_optimizer(base: Any) -> Any:
    class OwnOptimizer(base):
        def create_optimizer(self, model: Any = None) -> Any:
            if self.optimizer is None:
                groups = [
                    {"params": self.model.body.parameters(), "lr": self.args.learning_rate * 0.1},
                    {"params": self.model.head.parameters(), "lr": self.args.learning_rate},
                ]
                self.optimizer = torch.optim.SGD(groups, lr=self.args.learning_rate, momentum=0.9)
            return self.optimizer

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                self.optimizer if optimizer is None else optimizer, lambda step: 1 - 0.5 * step / num_training_steps
            )
            return self.lr_scheduler

    return OwnOptimizer


def own_groups(base: Any) -> Any:
    class OwnGroups(base):
        """Has the groups of parameters among the optimizer's arguments."""

        def get_optimizer_cls_and_kwargs(self, args: Any, model: Any = None) -> Any:
            kind, arguments = super().get_optimizer_cls_and_kwargs(args, model)
            groups = [{"params": list(model.head.parameters()), "lr": 0.1}, {"params": list(model.body.parameters())}]
            return kind, {**arguments, "optimizer_dict": groups}

    return OwnGroups


def adversarial(base: Any) -> Any:
    class Adversarial(base):
        """Two backward passes in a step, the second on weights that are moved along the gradient."""

        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            loss = super().training_step(model, dict(inputs), num_items_in_batch)
            weight = self.model.body[0].weight
            kept = weight.data.clone()
            weight.data.add_(0.1 * weight.grad / weight.grad.norm())
            super().training_step(model, dict(inputs), num_items_in_batch)
            weight.data.copy_(kept)
            return loss

    return Adversarial


def own_evaluation(base: Any) -> Any:
    class OwnEvaluation(base):
        """Adds a metric to an evaluation, and evaluates the training set too."""

        def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
            metrics = super().evaluate(eval_dataset, ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix)
            if metric_key_prefix == "eval":
                extra = super().evaluate(self.train_dataset, metric_key_prefix="train")
                metrics["eval_gap"] = metrics["eval_loss"] - extra["train_loss"]
            return metrics

        def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
            output = super().evaluation_loop(*args, **kwargs)
            output.metrics["eval_rows"] = output.num_samples
            return output

    return OwnEvaluation


def averaged(base: Any) -> Any:
    class Averaged(base):
        """Evaluates averaged weights, in the run and when it is over."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.average = copy.deepcopy(self.model)
            self.last: dict[str, float] = {}
            trainer = self

            class AtEnd(TrainerCallback):
                def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                    trainer.last = trainer.evaluate(metric_key_prefix="last")

            self.add_callback(AtEnd())

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            with torch.no_grad():
                for mean, parameter in zip(self.average.parameters(), self.model.parameters(), strict=True):
                    mean.lerp_(parameter, 0.1)
            return loss

        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            trained, self.model = self.model, self.average
            try:
                return super().evaluate(*args, **kwargs)
            finally:
                self.model = trained

    return Averaged


SUBCLASSES: dict[Callable[[Any], Any], dict[str, Any]] = {
    weighted_classes: {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1},
    contrastive: {"remove_unused_columns": False, "columns": {"other": lambda draw: torch.randn(4, generator=draw)}},
    without_labels: {
        "label_names": [],
        "dataloader_num_workers": 1,
        "dataloader_persistent_workers": True,
        "remove_unused_columns": False,
    },
    prepared_loaders: {"save_strategy": "steps", "save_steps": 2},
    own_optimizer: {},
    own_groups: {},
    adversarial: {},
    own_evaluation: {},
    averaged: {},
}


WITHOUT_METRICS = (contrastive, without_labels)


def accuracy(prediction: Any) -> dict[str, float]:
    """Of the first of the outputs."""
    outputs = prediction.predictions
    logits = outputs[0] if isinstance(outputs, tuple) else outputs
    return {"accuracy": float((logits.argmax(-1) == prediction.label_ids).mean())}


def trained(library: str, subclass: Callable[[Any], Any], folder: Path, **arguments: Any) -> Any:
    """A trainer of that subclass that has run, with the metrics of its evaluations."""
    given: dict[str, Any] = {"eval_strategy": "epoch", "per_device_eval_batch_size": 3, "learning_rate": 0.05}
    given = {**given, **SUBCLASSES.get(subclass, {}), **arguments}
    columns = given.pop("columns", {})
    parts: dict[str, Any] = {"train_dataset": rows(12, **columns), "eval_dataset": rows(6, **columns)}
    parts |= {"model": Classifier(), "compute_metrics": None if subclass in WITHOUT_METRICS else accuracy}
    kind = subclass(transformers.Trainer if library == "theirs" else Trainer)
    return run(library, folder, parts=parts, kind=kind, **given)


@pytest.mark.parametrize("subclass", SUBCLASSES, ids=lambda each: each.__name__)
def test_a_subclass_trains_the_same(subclass: Callable[[Any], Any], tmp_path: Path) -> None:
    ours, theirs = (trained(library, subclass, tmp_path / library) for library in ("ours", "theirs"))
    assert_same_history(ours.state.log_history, theirs.state.log_history, tolerance=TRAINED)
    weights, expected = ours.model.state_dict(), theirs.model.state_dict()
    assert weights.keys() == expected.keys()
    for name, weight in expected.items():
        assert_same_numbers(weights[name], weight, tolerance=TRAINED)
    assert any("eval_loss" in entry for entry in ours.state.log_history)
    if subclass in WITHOUT_METRICS:
        return
    predicted, known = (each.predict(each.eval_dataset) for each in (ours, theirs))
    for output, expected_output in zip(predicted.predictions, known.predictions, strict=True):
        assert_same_numbers(output, expected_output, tolerance=TRAINED)
    np.testing.assert_array_equal(predicted.label_ids, known.label_ids)


def names_of(trainer: Any) -> set[str]:
    return {*dir(type(trainer)), *vars(trainer)}


def test_private_names_are_those_that_subclasses_expect(tmp_path: Path) -> None:
    ours, theirs = (names_of(run(library, tmp_path / library)) for library in ("ours", "theirs"))
    elsewhere = {"_nested_gather", "_eval_dataloaders"}  # in older versions; where it is needed
    found = {name for name in ours - theirs - elsewhere if name.startswith("_") and not name.startswith("__")}
    assert found == {"_engine", "_make_model_ready", "_staged"}


FORMS = ("{}", "_{}", "_make_{}", "_compute_{}", "{}_loss", "_{}_dir", "_has_{}")


def test_a_subclass_may_use_any_likely_name(tmp_path: Path) -> None:
    """As methods that nobody but the user calls, and as attributes set before and after the trainer's constructor."""
    usual, theirs = (run(library, tmp_path / library, trains=False) for library in ("ours", "theirs"))
    public = {name for name in names_of(usual) if not name.startswith("_")}
    names = sorted({form.format(word) for form in FORMS for word in WORDS} - names_of(theirs) - public)
    assert len(names) >= 1400

    def own(self: Any, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("the trainer called a method of the user's")

    class Keeps(Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            vars(self).update((name, object()) for name in names[::2])
            super().__init__(*args, **kwargs)
            vars(self).update((name, object()) for name in names[1::2])

    arguments: dict[str, Any] = {"eval_strategy": "epoch", "save_strategy": "epoch", "gradient_accumulation_steps": 2}
    usual, calls, keeps = (
        run("ours", tmp_path / kind.__name__, kind=kind, **arguments)
        for kind in (Trainer, type("Own", (Trainer,), dict.fromkeys(names, own)), Keeps)
    )
    for trainer in (usual, calls, keeps):
        trainer.evaluate()
        trainer.predict(trainer.eval_dataset)
        trainer.save_model(str(tmp_path / "saved"))
        assert_same(everything(trainer), everything(usual))
    assert all(type(vars(keeps)[name]) is object for name in names)
