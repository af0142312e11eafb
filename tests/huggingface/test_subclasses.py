"""Trainers as people write them: the same subclass of transformers' Trainer and of ours trains the same."""

# mypy: disable-error-code="misc, has-type"
# For each class is made twice, of another base.

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, SequentialSampler, WeightedRandomSampler

from pytorch_accelerated.huggingface import Trainer
from tests.huggingface.runs import make_arguments
from tests.huggingface.test_against_transformers import TRAINED, assert_same_history
from tests.support.reference import assert_same_numbers

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


def focal(base: Any) -> Any:
    class Focal(base):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            outputs = model(x=inputs["x"])
            each = functional.cross_entropy(outputs.logits, inputs["labels"], reduction="none")
            loss = ((1 - torch.exp(-each)) ** 2 * each).mean()
            return (loss, {"loss": loss, **outputs}) if return_outputs else loss

    return Focal


def distillation(base: Any) -> Any:
    class Distillation(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.teacher = Classifier().eval()
            with torch.no_grad():
                self.teacher.head.weight.mul_(-3)

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            student = model(**inputs)
            self.teacher.to(student["logits"].device)
            with torch.no_grad():
                teacher = self.teacher(**inputs)
            soft = functional.kl_div(
                functional.log_softmax(student.logits / 2, dim=-1),
                functional.softmax(teacher.logits / 2, dim=-1),
                reduction="batchmean",
            )
            loss = 0.5 * student.loss + 0.5 * 4 * soft
            return (loss, student) if return_outputs else loss

    return Distillation


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


def two_forwards(base: Any) -> Any:
    class TwoForwards(base):
        """R-Drop, with noise that follows from the step."""

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            first = model(**inputs)
            second = model(x=inputs["x"] * 1.1, labels=inputs["labels"])
            apart = functional.mse_loss(first.logits, second.logits)
            loss = (first.loss + second.loss) / 2 + apart
            return (loss, first) if return_outputs else loss

    return TwoForwards


def own_loaders(base: Any) -> Any:
    class OwnLoaders(base):
        def get_train_dataloader(self) -> DataLoader[Any]:
            draw = torch.Generator().manual_seed(3)
            sampler = WeightedRandomSampler([1.0, 3.0] * 6, num_samples=12, generator=draw)
            order = list(sampler)
            picked = torch.utils.data.Subset(self.train_dataset, order)
            return DataLoader(
                picked,
                batch_size=self.args.train_batch_size,
                sampler=SequentialSampler(picked),
                collate_fn=self.data_collator,
            )

        def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
            dataset = self.eval_dataset if eval_dataset is None else eval_dataset
            return DataLoader(dataset, batch_size=3, collate_fn=self.data_collator)

    return OwnLoaders


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


def more_logs(base: Any) -> Any:
    class MoreLogs(base):
        """Logs parts of the loss beside it."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.parts: list[float] = []

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            loss, outputs = super().compute_loss(
                model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
            )
            penalty = outputs["logits"].pow(2).mean()
            if model.training:
                self.parts.append(penalty.item())
            return (loss + 0.1 * penalty, outputs) if return_outputs else loss + 0.1 * penalty

        def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
            if "loss" in logs and self.parts:
                logs["penalty"] = float(np.mean(self.parts))
                self.parts.clear()
            super().log(logs, *args, **kwargs)

    return MoreLogs


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


def several_tasks(base: Any) -> Any:
    class SeveralTasks(base):
        """Chooses the loss by a column that forward does not take."""

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            task = inputs["task"].float()
            outputs = model(x=inputs["x"])
            classes = functional.cross_entropy(outputs.logits, inputs["labels"], reduction="none")
            numbers = (outputs.logits[:, 0] - inputs["labels"]).pow(2)
            loss = (task * classes + (1 - task) * numbers).mean()
            return (loss, outputs) if return_outputs else loss

    return SeveralTasks


SUBCLASSES: dict[Callable[[Any], Any], dict[str, Any]] = {
    weighted_classes: {},
    focal: {"gradient_accumulation_steps": 2},
    distillation: {"max_grad_norm": 0.1},
    contrastive: {"remove_unused_columns": False, "columns": {"other": lambda draw: torch.randn(4, generator=draw)}},
    two_forwards: {},
    own_loaders: {},
    own_optimizer: {},
    adversarial: {},
    more_logs: {"logging_steps": 2},
    own_evaluation: {},
    several_tasks: {
        "remove_unused_columns": False,
        "columns": {"task": lambda draw: torch.randint(2, (), generator=draw)},
    },
}


def accuracy(prediction: Any) -> dict[str, float]:
    """Of the first of the outputs."""
    outputs = prediction.predictions
    logits = outputs[0] if isinstance(outputs, tuple) else outputs
    return {"accuracy": float((logits.argmax(-1) == prediction.label_ids).mean())}


@pytest.mark.fact(
    "Compared with transformers: Subclasses with their own losses, loaders, optimizers, steps and logs work the same"
)
@pytest.mark.parametrize("subclass", SUBCLASSES, ids=lambda each: each.__name__)
def test_a_subclass_trains_the_same(subclass: Callable[[Any], Any], tmp_path: Path) -> None:
    given = {"eval_strategy": "epoch", "per_device_eval_batch_size": 3, "learning_rate": 0.05, **SUBCLASSES[subclass]}
    columns = given.pop("columns", {})
    histories, weights = [], []
    for base in (Trainer, transformers.Trainer):
        args: Any = make_arguments(tmp_path / base.__module__, **given)
        if base is not Trainer:
            names = ("num_train_epochs", "train_sampling_strategy", "logging_steps", "save_strategy", "disable_tqdm")
            quiet = {name: getattr(args, name) for name in (*names, "per_device_train_batch_size", "use_cpu")}
            args = transformers.TrainingArguments(args.output_dir, report_to=[], **{**quiet, **given})
        trainer = subclass(base)(
            model=Classifier(),
            args=args,
            train_dataset=rows(12, **columns),
            eval_dataset=rows(6, **columns),
            compute_metrics=None if subclass is contrastive else accuracy,
        )
        trainer.train()
        histories.append(trainer.state.log_history)
        weights.append(trainer.model.state_dict())
    assert_same_history(*histories, tolerance=TRAINED)
    assert weights[0].keys() == weights[1].keys()
    for name, weight in weights[1].items():
        assert_same_numbers(weights[0][name], weight, tolerance=TRAINED)
    assert any("eval_loss" in entry for entry in histories[0])
