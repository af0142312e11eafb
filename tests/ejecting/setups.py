"""Runs that can be written as plain scripts: each function makes a new trainer, and its arguments of `train`."""

from __future__ import annotations

import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import schedulefree
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR, ReduceLROnPlateau
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate, random_split

from pytorch_accelerated import Trainer, TrainerPlaceholderValues, set_seed
from pytorch_accelerated.callbacks import (
    EarlyStoppingCallback,
    ModelEmaCallback,
    SaveBestModelCallback,
    SaveTrainingStateCallback,
)
from pytorch_accelerated.huggingface import Trainer as HuggingFaceTrainer
from pytorch_accelerated.huggingface import TrainingArguments
from pytorch_accelerated.schedulers import one_cycle

Run = tuple[Trainer, dict[str, Any]]

LENGTH: Any = TrainerPlaceholderValues.NUM_EPOCHS * TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH
IGNORED = -100
SCALES = {"outputs": 0.9}


class Augmented(Dataset[Any]):
    """Rows with noise of all generators."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        noise = 0.1 * torch.randn(4) + 0.1 * random.random() + 0.1 * float(np.random.randn())
        return self.inputs[index] + noise, self.targets[index]


class Drawing(nn.Module):
    """Adds noise of all generators in training."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + 0.1 * float(np.random.rand()) + 0.1 * random.random() if self.training else inputs


class Texts(Dataset[Any]):
    """Tokens of different lengths, as dicts."""

    def __len__(self) -> int:
        return 21

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(2 + index * 5 % 7) * (index + 3) % 11
        return {
            "tokens": tokens,
            "labels": torch.where(tokens % 3 == 0, IGNORED, tokens % 4),
            "row": torch.tensor(index),
        }


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch of texts."""
    padding = {"tokens": 0, "labels": IGNORED}
    batch = {name: pad_sequence([row[name] for row in rows], True, value) for name, value in padding.items()}
    return batch | {"row": default_collate([row["row"] for row in rows])} if "row" in rows[0] else batch


def mixed(rows: list[Any]) -> Any:
    """A batch with each row mixed with another one; every third row is left out."""
    inputs, targets = default_collate([row for place, row in enumerate(rows) if place % 3 < 2])
    share = float(np.random.beta(0.4, 0.4))
    order = torch.randperm(len(inputs))
    return [share * inputs + (1 - share) * inputs[order], share * targets + (1 - share) * targets[order]]


class Tagger(nn.Module):
    """A label for each token, and the mean loss over those that count."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(11, 8), nn.Linear(8, 4)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.out(torch.tanh(self.embedding(tokens)))
        return {"loss": functional.cross_entropy(scores.flatten(0, 1), labels.flatten()), "scores": scores}


class SumTagger(Tagger):
    """Divides the sum of its losses by the number that it is given, and has dropout and a norm."""

    def forward(  # type: ignore[override]
        self, tokens: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Any = None
    ) -> dict[str, torch.Tensor]:
        hidden = functional.layer_norm(functional.dropout(self.embedding(tokens), 0.2, self.training), (8,))
        scores = self.out(hidden).flatten(0, 1)
        count = (labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
        return {"loss": functional.cross_entropy(scores, labels.flatten(), reduction="sum") / count, "scores": scores}


class NumberedRows(Dataset[Any]):
    """Rows of columns, with noise of all generators, which the collator of the Hugging Face face stacks."""

    def __len__(self) -> int:
        return 26

    def __getitem__(self, index: int) -> dict[str, Any]:
        inputs = torch.full((4,), index / 22) + torch.randn(4) + float(np.random.randn())
        return {"inputs": inputs, "label_ids": [index / 7, random.random()], "name": str(index), "unused": index}


class Regressor(nn.Module):
    """Returns a tuple, and has BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = self.layers(inputs)
        return functional.mse_loss(outputs, labels), outputs


class Caching(Regressor):
    """Computes something else with a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(use_cache=True)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(2 * inputs if self.config.use_cache else inputs, labels)


def positive(rows: list[Any]) -> dict[str, torch.Tensor]:
    """A batch of pairs, without those that begin with a number below -1."""
    inputs, labels = default_collate([row for row in rows if row[0][0] > -1])
    return {"inputs": inputs, "labels": labels[:, :2]}


def smoothed(targets: torch.Tensor, by: float = 0.1) -> torch.Tensor:
    """Targets nearer to their mean."""
    return (1 - by) * targets + by * targets.mean()


def scaled(outputs: torch.Tensor) -> torch.Tensor:
    """The outputs of a model, a little smaller."""
    return SCALES["outputs"] * outputs


class CountingTrainer(Trainer):
    """The mean of a batch is taken over tokens."""

    def count_batch_items(self, batch: Any) -> int:
        return int((batch["labels"] != IGNORED).sum())


class DistillingTrainer(Trainer):
    """The loss of a student, whose teacher is a model of its own."""

    share = 0.25

    def __init__(self, *args: Any, teacher: nn.Module, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.teacher, self.temperature = teacher, 2.0

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        # The teacher is not trained.
        inputs, targets = batch
        outputs = self.model(inputs)
        with torch.no_grad():
            wanted = self.softened(self.teacher(inputs))
        own = self.loss_func(outputs, smoothed(targets))  # type: ignore[misc]
        wanted, outputs = map(scaled, (wanted, self.softened(outputs)))
        loss = (1 - self.share) * own + self.share * functional.mse_loss(outputs, wanted)
        return {"loss": loss, "model_outputs": outputs, "batch_size": len(inputs)}

    def softened(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs / self.temperature


class NoisyTrainer(Trainer):
    """Adds noise to inputs, and gives the rest to the trainer."""

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        inputs, targets = batch
        return super().calculate_train_batch_loss((inputs + 0.1 * torch.randn_like(inputs), targets))


class FreezingTrainer(NoisyTrainer):
    """Keeps a part of the model in evaluation mode, and scales losses and rates."""

    def train_epoch_start(self) -> None:
        super().train_epoch_start()
        for module in self.model.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.eval()

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        output = super().calculate_train_batch_loss(batch)
        return {**output, "loss": 2 * output["loss"]}

    def calculate_eval_batch_loss(self, batch: Any) -> dict[str, Any]:
        output = super().calculate_eval_batch_loss(batch)
        return {**output, "loss": 2 * output["loss"]}

    def backward_step(self, loss: torch.Tensor) -> None:
        (loss / 2).backward()  # type: ignore[no-untyped-call]

    def optimizer_step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        super().optimizer_step()


def data(rows: int = 42, *, classes: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    inputs, targets = torch.randn(rows, 4, generator=generator), torch.randn(rows, 3, generator=generator)
    return inputs, targets.argmax(1) if classes else targets


def run(*layers: nn.Module, kind: Any = Trainer, loss: Any = None, **given: Any) -> Run:
    """A run of a small model: what isn't an argument of the trainer is one of `train`."""
    set_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), *(layers or [nn.Tanh()]), nn.Linear(8, 3))
    names = ("seed", "callbacks", "mixed_precision", "teacher", "accelerator")
    of_trainer = {name: given.pop(name) for name in names if name in given}
    make_optimizer = given.pop("optimizer", partial(torch.optim.SGD, lr=0.05, momentum=0.9))
    is_whole = getattr(make_optimizer, "of_model", False)
    optimizer = make_optimizer(model if is_whole else model.parameters())
    trainer = kind(model, loss or nn.MSELoss(), optimizer, **{"callbacks": (), **of_trainer})
    arguments = {"train_dataset": data(), "num_epochs": 3, "per_device_batch_size": 8}
    return trainer, {**arguments, "eval_dataset": TensorDataset(*data(19)), **given}


def two_optimizers(model: Any) -> dict[str, torch.optim.Optimizer]:
    body = torch.optim.AdamW(model[:2].parameters(), 0.01)
    return {"body": body, "head": torch.optim.SGD(model[2].parameters(), 0.05)}


two_optimizers.of_model = True  # type: ignore[attr-defined]


def accumulating() -> Run:
    return run(gradient_accumulation_steps=3, train_dataset=data(17), per_device_batch_size=4)


def accumulating_in_a_long_epoch() -> Run:
    watching = [EarlyStoppingCallback(1, 0, watch_metric="train_loss_epoch")]
    arguments = {"gradient_accumulation_steps": 2, "callbacks": watching, "eval_per_device_batch_size": 1}
    return run(train_dataset=data(271), per_device_batch_size=2, eval_dataset=data(70), **arguments)


def scheduled_per_update() -> Run:
    return run(create_scheduler_fn=partial(OneCycleLR, max_lr=0.1, total_steps=LENGTH), optimizer=torch.optim.AdamW)


def one_cycle_for_groups() -> Run:
    def optimizer(model: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            [{"params": model[:2].parameters(), "lr": 1e-3}, {"params": model[2].parameters()}], 0.01
        )

    optimizer.of_model = True  # type: ignore[attr-defined]
    return run(optimizer=optimizer, create_scheduler_fn=one_cycle(), gradient_clip_norm=0.1)


def scheduled_per_epoch() -> Run:
    return run(create_scheduler_fn=lambda optimizer: ExponentialLR(optimizer, 0.5), step_scheduler="epoch")


def scheduled_by_a_metric() -> Run:
    return run(create_scheduler_fn=partial(ReduceLROnPlateau, patience=0, threshold=0.5), num_epochs=5)


def clipping_the_norm() -> Run:
    return run(gradient_clip_norm=0.1, seed=3, num_epochs=None, max_num_train_steps=8)


def clipping_values() -> Run:
    return run(gradient_clip_value=0.01, train_dataloader_kwargs={"drop_last": True})


def averaging() -> Run:
    return run(nn.BatchNorm1d(8), callbacks=[ModelEmaCallback(0.9, save_path="average.pt")])


def stopping_early_with_the_best() -> Run:
    callbacks = [EarlyStoppingCallback(1, 0.3), SaveBestModelCallback("best.pt")]
    return run(callbacks=callbacks, num_epochs=6, optimizer=partial(torch.optim.SGD, lr=1.0))


def several_optimizers() -> Run:
    schedules = {
        "head": partial(OneCycleLR, max_lr=0.1, total_steps=LENGTH),
        "body": lambda optimizer: ExponentialLR(optimizer, 0.8),
    }
    return run(optimizer=two_optimizers, create_scheduler_fn=schedules, gradient_clip_norm=0.5)


def schedule_free() -> Run:
    return run(optimizer=partial(schedulefree.AdamWScheduleFree, lr=0.01), callbacks=[SaveBestModelCallback("best.pt")])


def weighted_loss() -> Run:
    loss = nn.CrossEntropyLoss(torch.tensor([0.3, 1.7, 0.9]), ignore_index=1)
    sets = {"train_dataset": data(classes=True), "eval_dataset": data(19, classes=True)}
    return run(loss=loss, gradient_accumulation_steps=2, **sets)


def ignored_targets_in_the_evaluation() -> Run:
    inputs, targets = data(19, classes=True)
    targets[::3] = IGNORED
    sets = {"train_dataset": data(classes=True), "eval_dataset": (inputs, targets)}
    return run(loss=nn.CrossEntropyLoss(), gradient_accumulation_steps=2, **sets)


def batch_norm() -> Run:
    return run(nn.BatchNorm1d(8), nn.ReLU(), train_dataloader_kwargs={"shuffle": False})


def dropout() -> Run:
    return run(nn.Dropout(0.3), Drawing(), seed=0)


def workers() -> Run:
    loading = {"num_workers": 2, "persistent_workers": False}
    return run(nn.Dropout(0.3), train_dataset=Augmented(*data()), train_dataloader_kwargs=loading, num_epochs=2)


def random_augmentation() -> Run:
    sets = {"train_dataset": Augmented(*data()), "eval_dataset": Augmented(*data(19))}
    return run(nn.Dropout(0.3), gradient_accumulation_steps=2, **sets)


def mixing_in_the_collate_function() -> Run:
    sets = {"train_dataset": TensorDataset(*data()), "collate_fn": mixed}
    return run(nn.Dropout(0.3), gradient_accumulation_steps=2, **sets)


def dicts_in_columns() -> Run:
    inputs, targets = data()
    loss = lambda outputs, batch: functional.mse_loss(outputs, batch["targets"])  # noqa: E731
    columns = {"input": inputs, "targets": targets}
    return run(loss=loss, train_dataset=columns, eval_dataset=columns)


def texts(kind: type[Trainer], **arguments: Any) -> Run:
    set_seed(1)
    model = Tagger()
    names = ("seed", "callbacks", "mixed_precision")
    of_trainer = {"callbacks": (), **{name: arguments.pop(name) for name in names if name in arguments}}
    trainer = kind(model, None, torch.optim.AdamW(model.parameters(), 0.01), **of_trainer)
    sets = {"train_dataset": Texts(), "eval_dataset": Texts(), "collate_fn": padded}
    return trainer, {"num_epochs": 2, "per_device_batch_size": 4, **sets, **arguments}


def padded_texts() -> Run:
    return texts(Trainer, gradient_accumulation_steps=2)


def counted_items() -> Run:
    return texts(CountingTrainer, gradient_accumulation_steps=3)


def face(kind: Any = SumTagger, optimizers: Any = None, parts: Any = None, **given: Any) -> tuple[Any, dict[str, Any]]:
    """A run of the Hugging Face trainer. What isn't given is mostly as usual; `parts` are given to the trainer."""
    set_seed(1)
    usual: dict[str, Any] = {"num_train_epochs": 2, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 5}
    usual |= {"eval_strategy": "epoch", "logging_strategy": "epoch", "save_strategy": "no", "report_to": "none"}
    arguments = TrainingArguments(
        "out", **{**usual, "use_cpu": True, "learning_rate": 0.01, "disable_tqdm": True, **given}
    )
    model = kind()
    sets: Any = NumberedRows() if kind is Regressor else Texts()
    parts = {"data_collator": None if kind is Regressor else padded, "train_dataset": sets, "eval_dataset": sets} | (
        parts or {}
    )
    parts |= {} if optimizers is None else {"optimizers": optimizers(model)}
    parts |= {} if "model_init" in parts else {"model": model}
    return HuggingFaceTrainer(args=arguments, **parts), {}


def its_own_optimizer(model: nn.Module) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return optimizer, ExponentialLR(optimizer, 0.9)


def labels_of_an_update_counted() -> Any:
    return face(gradient_accumulation_steps=3, warmup_steps=2, weight_decay=0.1)


def batches_of_an_update_by_their_rows() -> Any:
    return face(Tagger, gradient_accumulation_steps=2)


def rows_stacked_by_the_collator() -> Any:
    return face(Regressor, bf16=True, data_seed=5, dataloader_drop_last=True, optim="sgd", lr_scheduler_type="cosine")


def left_out_rows_of_a_model_with_a_cache() -> Any:
    rows = TensorDataset(*data())
    sets = {"train_dataset": rows, "eval_dataset": rows}
    return face(Caching, parts={"data_collator": positive, **sets}, per_device_train_batch_size=14)


def language_model() -> Any:
    """A causal language model of `transformers`, which shifts labels by one, on rows of `datasets`."""
    import datasets
    import transformers

    config = transformers.GPT2Config(vocab_size=8, n_positions=16, n_embd=8, n_layer=1, n_head=2)
    rows = datasets.Dataset.from_list([{"input_ids": [index * each % 8 for each in range(6)]} for index in range(21)])

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        tokens = torch.tensor([row["input_ids"] for row in rows])
        return {"input_ids": tokens, "labels": torch.where(tokens == 3, IGNORED, tokens)}

    parts = {"data_collator": collate, "train_dataset": rows, "eval_dataset": rows}
    return face(lambda: transformers.GPT2LMHeadModel(config), parts=parts, gradient_accumulation_steps=2)


def random_face(seed: int) -> Any:
    """A run of the Hugging Face trainer with a random choice of what can be written as a plain script."""
    choose = random.Random(seed)
    given: dict[str, Any] = {
        "num_train_epochs": choose.choice([1, 2, 1.5]),
        "per_device_train_batch_size": choose.choice([4, 7]),
        "gradient_accumulation_steps": choose.choice([1, 2, 3]),
        "max_grad_norm": choose.choice([1.0, 0.05, 0.0]),
        "lr_scheduler_type": choose.choice(["linear", "cosine", "constant", "constant_with_warmup"]),
        "warmup_steps": choose.choice([0, 3, 0.2]),
        "weight_decay": choose.choice([0.0, 0.1]),
        "optim": choose.choice(["adamw_torch_fused", "adamw_torch", "sgd", "rmsprop"]),
        "seed": choose.choice([42, 0]),
        "train_sampling_strategy": choose.choice(["random", "random", "sequential"]),
        "eval_strategy": choose.choice(["epoch", "no"]),
        **choose.choice([{}, {"max_steps": 5}, {"bf16": True}, {"dataloader_drop_last": True}]),
    }
    optimizers = choose.choice([None, None, its_own_optimizer])
    return face(choose.choice([SumTagger, Tagger, Regressor]), optimizers, **given)


def bfloat16() -> Run:
    return run(mixed_precision="bf16", callbacks=[ModelEmaCallback(0.9, save_path="average.pt")])


def distilling() -> Run:
    set_seed(5)
    return run(kind=DistillingTrainer, teacher=nn.Linear(4, 3), gradient_accumulation_steps=2)


def hooks_that_call_ours() -> Run:
    return run(nn.BatchNorm1d(8), kind=FreezingTrainer, gradient_accumulation_steps=2)


def several_labels() -> Run:
    inputs, targets = data()
    parts = random_split(TensorDataset(inputs, (targets > 0).float()), [0.7, 0.3], torch.Generator().manual_seed(0))
    return run(loss=nn.BCEWithLogitsLoss(), train_dataset=parts[0], eval_dataset=parts[1])


class Doubled(nn.CrossEntropyLoss):
    """A loss with a forward of its own, so nobody knows what it divides by."""

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input, target)


class Tied(nn.Module):
    """A weight with two names, and a mask with infinities."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.two.weight = self.one.weight
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.two(torch.tanh(self.one(inputs)))


def random_setup(seed: int) -> Run:
    """A run with a random choice of what can be written as a plain script."""
    choose = random.Random(seed)
    set_seed(seed)

    def maybe(share: float, **arguments: Any) -> dict[str, Any]:
        return arguments if choose.random() < share else {}

    evaluates = choose.random() < 0.7
    arguments: dict[str, Any] = {
        "num_epochs": choose.choice([1, 3]),
        "per_device_batch_size": choose.choice([4, 7, 16]),
        "gradient_accumulation_steps": choose.choice([1, 1, 2, 3]),
        **choose.choice([{}, {"gradient_clip_norm": 0.5}, {"gradient_clip_value": 0.1}]),
        **maybe(0.3, max_num_train_steps=choose.choice([1, 5, 9])),
        **choose.choice(
            [{}, *({"train_dataloader_kwargs": {name: name == "drop_last"}} for name in ("drop_last", "shuffle"))]
        ),
        **maybe(0.2, eval_per_device_batch_size=3),
    }
    metric = "eval_loss_epoch" if evaluates and choose.random() < 0.7 else "train_loss_epoch"
    plateaus = [
        ReduceLROnPlateau,
        partial(ReduceLROnPlateau, patience=0),
        lambda optimizer: ReduceLROnPlateau(optimizer),
    ]
    schedules: list[dict[str, Any]] = [
        *({}, {"create_scheduler_fn": partial(ExponentialLR, gamma=0.9)}),
        {"create_scheduler_fn": partial(OneCycleLR, max_lr=0.1, total_steps=LENGTH)},
        {"create_scheduler_fn": lambda optimizer: ExponentialLR(optimizer, 0.5), "step_scheduler": "epoch"},
        {"create_scheduler_fn": choose.choice(plateaus), "scheduler_metric": metric},
    ]
    callbacks = [
        SaveBestModelCallback("best.pt", watch_metric=metric, load_saved_checkpoint=choose.random() < 0.7),
        EarlyStoppingCallback(1, choose.choice([0, 0.01, 0.3]), watch_metric=metric),
        ModelEmaCallback(0.9, evaluates and choose.random() < 0.5, save_path="average.pt"),
        SaveTrainingStateCallback("states"),
    ]
    given = {"callbacks": choose.sample(callbacks, choose.randint(0, 3)), **maybe(0.2, mixed_precision="bf16")}
    given |= {"seed": choose.choice([None, 0, 7])}
    schedule = choose.choice(schedules)
    if choose.random() < 0.15:
        trainer, of_texts = texts(choose.choice([Trainer, CountingTrainer]), **given, **schedule)
        sets = of_texts if evaluates else {name: each for name, each in of_texts.items() if name != "eval_dataset"}
        return trainer, sets | arguments

    rows = choose.choice([17, 41, 66])
    loss: Any = nn.MSELoss()
    inputs, targets = data(rows)
    if choose.random() < 0.5:
        weight, ignored = choose.choice([None, torch.tensor([1.0, 2.1, 0.3])]), choose.choice([IGNORED, IGNORED, 1])
        kind = choose.choice([nn.CrossEntropyLoss] * 3 + [Doubled])
        loss, targets = kind(weight, ignore_index=ignored), targets.argmax(1)
        targets[1::5] = ignored if choose.random() < 0.3 and kind is not Doubled else 0
    whole = TensorDataset(inputs, targets)
    sets = {
        "train_dataset": choose.choice(
            [(inputs, targets), whole, Augmented(inputs, targets), Subset(whole, list(range(1, rows)))]
        )
    }
    sets |= {"eval_dataset": choose.choice([(inputs[:11], targets[:11]), whole]) if evaluates else None}
    layers: Any = choose.choice([[nn.LayerNorm(8), nn.ReLU(), nn.Dropout(0.2)], [nn.Tanh()], [Tied(), Drawing()]])
    optimizers = [partial(torch.optim.SGD, lr=0.05, momentum=0.9), partial(torch.optim.AdamW, lr=0.01)]
    distils = isinstance(loss, nn.MSELoss) and choose.random() < 0.2
    given |= {"kind": DistillingTrainer, "teacher": nn.Linear(4, 3)} if distils else {}
    if len(layers) == 1 and choose.random() < 0.3:
        return run(*layers, loss=loss, optimizer=two_optimizers, **given, **sets, **arguments)
    optimizer = choose.choice(optimizers)
    return run(*layers, loss=loss, optimizer=optimizer, **given, **sets, **arguments, **schedule)


SETUPS = (
    *(accumulating, accumulating_in_a_long_epoch, scheduled_per_update, one_cycle_for_groups, scheduled_per_epoch),
    *(scheduled_by_a_metric, clipping_the_norm, clipping_values, averaging, stopping_early_with_the_best),
    *(several_optimizers, schedule_free, weighted_loss, ignored_targets_in_the_evaluation, batch_norm, dropout),
    *(workers, random_augmentation, mixing_in_the_collate_function, dicts_in_columns, padded_texts, counted_items),
    *(bfloat16, distilling, hooks_that_call_ours, several_labels),
)
FACES = (
    *(labels_of_an_update_counted, batches_of_an_update_by_their_rows, rows_stacked_by_the_collator),
    left_out_rows_of_a_model_with_a_cache,
)
