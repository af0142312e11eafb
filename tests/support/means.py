"""Runs whose mean losses are taken over something else than the loader's samples, and the same by hand in float64."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from pytorch_accelerated import Trainer

SIZE = 23
WEIGHT = torch.tensor([1.0, 5.0, 0.2], dtype=torch.float64)
TOLERANCE = 1e-10


def data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, classes, and a map of classes for each row."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(SIZE, 4, 6, dtype=torch.float64, generator=generator)
    maps = torch.randint(0, 3, (SIZE, 6), generator=generator)
    return inputs, inputs[:, 0, :3].argmax(1), maps


class Net(nn.Module):
    """Scores of three classes for each row, or for each of its six places."""

    def __init__(self, *, has_maps: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Conv1d(4, 3, 3, padding=1).double()
        self.has_maps = has_maps

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layer(inputs)
        return scores if self.has_maps else scores.mean(-1)


class Rows(Dataset[Any]):
    """Rows of which every fourth cannot be read."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        return None if index % 4 == 1 else (self.inputs[index], self.targets[index])


def without_broken(rows: list[Any]) -> Any:
    """A batch of the rows that could be read."""
    kept = [row for row in rows if row is not None]
    return tuple(map(torch.stack, zip(*kept, strict=True)))


def some_ignored(targets: torch.Tensor, ignored: int) -> torch.Tensor:
    """Targets of which some do not count: unevenly, so that batches have different numbers of them."""
    targets = targets.clone()
    targets[::3] = ignored
    targets[:5] = ignored
    targets[2:3] = 1
    return targets


def cases() -> Iterator[tuple[str, Callable[..., Any], Any, Callable[..., Any] | None]]:
    """Name, loss function, dataset and collate function of each."""
    inputs, classes, maps = data()
    probabilities = F.one_hot(classes, 3).double() * 0.7 + 0.1
    yield "weights", nn.CrossEntropyLoss(weight=WEIGHT), (inputs, classes), None
    yield "weights, smoothed", nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1), (inputs, classes), None
    yield "weights of a function", functools.partial(F.cross_entropy, weight=WEIGHT), (inputs, classes), None
    yield "weights and maps", nn.CrossEntropyLoss(weight=WEIGHT), (inputs, maps), None
    yield "ignored", nn.CrossEntropyLoss(ignore_index=7), (inputs, some_ignored(classes, 7)), None
    yield "ignored without being told", nn.CrossEntropyLoss(), (inputs, some_ignored(classes, -100)), None
    ignored = some_ignored(maps, 255)
    yield "both, maps", nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=255), (inputs, ignored), None
    yield "probabilities", nn.CrossEntropyLoss(weight=WEIGHT), (inputs, probabilities), None
    rows = Rows(inputs, classes)
    yield "rows left out", nn.CrossEntropyLoss(), rows, without_broken
    yield "rows left out, weights", nn.CrossEntropyLoss(weight=WEIGHT), rows, without_broken


def net_for(targets: Any) -> Net:
    return Net(has_maps=targets.ndim == 2 and not targets.is_floating_point())


def by_hand(loss_func: Callable[..., Any], dataset: Any, per_update: int) -> tuple[Net, float, float]:
    """The model after one pass in order, the mean loss of that pass, and that of the model afterwards over all rows."""
    broken = isinstance(dataset, Rows)
    inputs, targets = (dataset.inputs, dataset.targets) if broken else dataset
    model = net_for(targets)
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    total = count = 0.0
    for update in torch.arange(SIZE).split(per_update):
        rows = update[update % 4 != 1] if broken else update
        loss = loss_func(model(inputs[rows]), targets[rows])
        share = divisor(loss_func, targets[rows])
        total, count = total + loss.item() * share, count + share
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    kept = torch.tensor([row for row in range(SIZE) if not broken or row % 4 != 1])
    with torch.no_grad():
        return model, total / count, loss_func(model(inputs[kept]), targets[kept]).item()


def divisor(loss_func: Callable[..., Any], targets: torch.Tensor) -> float:
    """What torch documents as the divisor of the mean."""
    arguments = getattr(loss_func, "keywords", None) or vars(loss_func)
    weight = getattr(loss_func, "weight", arguments.get("weight"))
    if targets.is_floating_point():
        return len(targets)
    counting = targets[targets != arguments.get("ignore_index", -100)]
    return float(len(counting) if weight is None else weight[counting].sum())


def check(batch_sizes: Sequence[int], steps: Sequence[int], ranks: int) -> int:
    """Compare each case with the loop by hand. Returns the number of runs."""
    number = 0
    for name, loss_func, dataset, collate_fn in cases():
        for batch_size in batch_sizes:
            for accumulated in steps:
                targets, per_update = dataset.targets if collate_fn else dataset[1], batch_size * accumulated * ranks
                if batch_size == 1 and (
                    collate_fn or not all(divisor(loss_func, t) for t in targets.split(per_update))
                ):
                    continue  # a batch without rows, or an update without a mean
                model, mean, mean_afterwards = by_hand(loss_func, dataset, per_update)
                ours = net_for(targets)
                trainer = Trainer(ours, loss_func, torch.optim.SGD(ours.parameters(), 0.3), callbacks=())
                history = trainer.train(
                    dataset,
                    1,
                    dataset,
                    batch_size,
                    gradient_accumulation_steps=accumulated,
                    collate_fn=collate_fn,
                    train_dataloader_kwargs={"shuffle": False},
                )
                case = f"{name}: batches of {batch_size}, {accumulated} an update, {ranks} ranks"
                found = [history.get_latest_metric(metric) for metric in ("train_loss_epoch", "eval_loss_epoch")]
                wanted = torch.tensor([mean, mean_afterwards], dtype=torch.float64)
                torch.testing.assert_close(
                    torch.tensor(found, dtype=torch.float64), wanted, rtol=TOLERANCE, atol=0, msg=case
                )
                for one, other in zip(ours.parameters(), model.parameters(), strict=True):
                    torch.testing.assert_close(one, other, rtol=TOLERANCE, atol=TOLERANCE, msg=case)
                number += 1
    return number
