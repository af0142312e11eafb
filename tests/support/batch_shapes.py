"""Batches whose tensors do not have a row for each sample: graphs, sequences, images with any number of boxes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_sequence
from torch.utils.data import Dataset

from pytorch_accelerated import Trainer

SIZES = (3, 1, 6, 2, 2, 5, 1, 4, 7, 3, 2)
_generator = torch.Generator().manual_seed(5)
PARTS = [torch.randn(size, 3, generator=_generator, dtype=torch.float64) for size in SIZES]
TARGETS = torch.randn(len(SIZES), 1, generator=_generator, dtype=torch.float64)


class Samples(Dataset[Any]):
    """A number of parts for each sample, and one target."""

    def __len__(self) -> int:
        return len(SIZES)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return PARTS[index], TARGETS[index]


class Shape(NamedTuple):
    """A kind of batch.

    Attributes:
        collate: makes a batch of samples.
        model: makes the model.
        loss_func: of outputs and targets.
        base: the trainer.
    """

    collate: Callable[[list[Any]], Any]
    model: type[nn.Module]
    loss_func: Callable[[Any, Any], torch.Tensor] = nn.functional.mse_loss
    base: type[Trainer] = Trainer


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.inner = nn.Linear(3, 1)
            self.rnn = nn.RNN(3, 4)
            self.head = nn.Linear(4, 1)
        self.double()


def columns_of(samples: list[Any]) -> tuple[list[torch.Tensor], torch.Tensor]:
    parts, targets = zip(*samples, strict=True)
    return list(parts), torch.stack(targets)


# ------------------------------------------------------------------------------------------------------------- graphs


def graphs(samples: list[Any]) -> dict[str, torch.Tensor]:
    """The nodes of all graphs below each other, and the graph that each belongs to."""
    parts, targets = columns_of(samples)
    sizes = torch.tensor([len(part) for part in parts])
    return {"nodes": torch.cat(parts), "graph": torch.arange(len(parts)).repeat_interleave(sizes), "targets": targets}


class OfGraphs(Small):
    def forward(self, nodes: torch.Tensor, graph: torch.Tensor) -> torch.Tensor:
        sums = torch.zeros(int(graph.max()) + 1, 1, dtype=nodes.dtype)
        return sums.index_add(0, graph, self.inner(nodes).tanh())


class GraphBatch:
    """Several graphs as libraries keep them: an object of their own, which can be moved to a device."""

    def __init__(self, samples: list[Any]) -> None:
        self.__dict__.update(graphs(samples))
        self.num_graphs = len(samples)

    def to(self, device: Any, non_blocking: bool = False) -> GraphBatch:
        return self


class GraphTrainer(Trainer):
    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        outputs = self.model(batch.nodes, batch.graph)
        loss = self.loss_func(outputs, batch.targets)  # type: ignore[misc]
        return {"loss": loss, "model_outputs": outputs, "batch_size": batch.num_graphs}

    calculate_eval_batch_loss = calculate_train_batch_loss

    def calculate_predict_batch_outputs(self, batch: Any) -> Any:
        return self.model(batch.nodes, batch.graph)


class NodeTrainer(Trainer):
    """Predicts a row for each node: as many for a graph as it has nodes."""

    def calculate_predict_batch_outputs(self, batch: Any) -> Any:
        return list(self.model.inner(batch["nodes"]).split(batch["graph"].bincount().tolist()))


# ---------------------------------------------------------------------------------------------------------- sequences


def time_first(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    parts, targets = columns_of(samples)
    return pad_sequence(parts), targets


class OfTimeFirst(Small):
    def forward(self, sequences: torch.Tensor) -> Any:
        is_there = (sequences != 0).any(2, keepdim=True)
        return (self.head(self.rnn(sequences)[0]) * is_there).mean(0) * len(sequences) / is_there.sum(0)


def packed(samples: list[Any]) -> tuple[PackedSequence, torch.Tensor]:
    parts, targets = columns_of(samples)
    return pack_sequence(parts, enforce_sorted=False), targets


class OfPacked(Small):
    def forward(self, sequences: PackedSequence) -> Any:
        return self.head(self.rnn(sequences)[1][0])


# ---------------------------------------------------------------------------------------------------------- detection


def images(samples: list[Any]) -> tuple[list[torch.Tensor], list[dict[str, torch.Tensor]]]:
    parts, targets = columns_of(samples)
    return parts, [{"target": target} for target in targets]


class Detector(Small):
    """Returns losses in training, and for each image a dict with any number of boxes otherwise."""

    def forward(self, images: list[torch.Tensor], targets: Any = None) -> Any:
        boxes = [self.inner(image) for image in images]
        if targets is not None:
            sums = torch.stack([each.sum(0) for each in boxes])
            return {"loss_boxes": (sums - torch.stack([each["target"] for each in targets])).square().mean()}
        return [{"boxes": each, "labels": torch.arange(len(each)), "best": float(each.max())} for each in boxes]


class DetectionTrainer(Trainer):
    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        losses = self.model(*batch)
        return {"loss": sum(losses.values()), "model_outputs": losses, "batch_size": len(batch[0])}

    calculate_eval_batch_loss = calculate_train_batch_loss


SHAPES = {
    "graphs": Shape(graphs, OfGraphs, lambda outputs, batch: nn.functional.mse_loss(outputs, batch["targets"])),
    "graphs of a library": Shape(GraphBatch, OfGraphs, base=GraphTrainer),
    "time first": Shape(time_first, OfTimeFirst),
    "packed": Shape(packed, OfPacked),
    "detection": Shape(images, Detector, base=DetectionTrainer),
    "nodes": Shape(
        graphs, OfGraphs, lambda outputs, batch: nn.functional.mse_loss(outputs, batch["targets"]), NodeTrainer
    ),
}


def trainer_of(name: str, *callbacks: Any, learning_rate: float = 0.02) -> Trainer:
    """A trainer for a kind of batch, always with the same weights."""
    shape = SHAPES[name]
    model = shape.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    return shape.base(model, shape.loss_func, optimizer, callbacks=callbacks, seed=3)


def alone(trainer: Trainer, name: str) -> list[Any]:
    """What a hook of `trainer` makes of each sample in a batch of its own."""
    return [SHAPES[name].collate([Samples()[index]]) for index in range(len(SIZES))]


def mean_loss(trainer: Trainer, name: str) -> float:
    """The mean over samples of the losses that each has alone."""
    with torch.no_grad():
        losses = [float(trainer.calculate_eval_batch_loss(batch)["loss"]) for batch in alone(trainer, name)]
    return sum(losses) / len(losses)


def predictions(trainer: Trainer, name: str) -> list[Any]:
    """The prediction that each sample gets alone."""
    with torch.no_grad():
        return [trainer.calculate_predict_batch_outputs(batch)[0] for batch in alone(trainer, name)]
