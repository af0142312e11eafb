"""A detector's evaluation: boxes of all images go below each other, and an image without any is a row of padding."""

import os
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import TrainerCallback

NOTHING = -1.0
IMAGES = 11


def boxes_of(image: int) -> torch.Tensor:
    """Image, class, score and corners of each box; images have none, one or several."""
    count = image % 4
    return torch.stack([torch.tensor([image, box, 0.5, 0, 0, 1, 1]) for box in range(count)]) if count else _no_box()


def _no_box() -> torch.Tensor:
    return torch.full((1, 7), NOTHING)


class Images(Dataset[Any]):
    def __len__(self) -> int:
        return IMAGES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return torch.full((3,), float(index)), boxes_of(index), index


def collate(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    images, boxes, numbers = zip(*samples, strict=True)
    return torch.stack(images), torch.cat(boxes), torch.tensor(numbers)


class Detector(Trainer):
    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        images, _, _ = batch
        return {"loss": self.model(images).square().mean(), "model_outputs": None, "batch_size": len(images)}

    def calculate_eval_batch_loss(self, batch: Any) -> dict[str, Any]:
        images, boxes, numbers = batch
        gathered = self.gather({"boxes": boxes, "numbers": numbers}, padding_value=NOTHING)
        loss = self.model(images).square().mean()
        return {"loss": loss, "model_outputs": gathered, "batch_size": len(images)}


class BoxCounter(TrainerCallback):
    def on_eval_epoch_start(self, trainer: Any, **kwargs: Any) -> None:
        self.boxes: list[torch.Tensor] = []
        self.numbers: list[int] = []

    def on_eval_step_end(self, trainer: Any, batch_output: Any, **kwargs: Any) -> None:
        self.boxes.append(batch_output["model_outputs"]["boxes"])
        self.numbers += batch_output["model_outputs"]["numbers"].tolist()

    def on_eval_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        trainer.run_history.update_metric("boxes", sum(map(len, self.boxes)))


world = int(os.environ["WORLD_SIZE"])
model = nn.Linear(3, 1)
counter = BoxCounter()
trainer = Detector(model, None, torch.optim.SGD(model.parameters(), lr=1e-4), callbacks=(counter,), seed=1)
assert trainer._ranks.count == world
trainer.train(Images(), num_epochs=1, eval_dataset=Images(), per_device_batch_size=2, collate_fn=collate)

expected = torch.cat([boxes_of(image) for image in range(IMAGES) if image % 4])
found = torch.cat(counter.boxes)
assert torch.equal(found[found[:, 0].argsort(stable=True)], expected)
assert sorted(counter.numbers) == list(range(IMAGES))
assert trainer.run_history.get_latest_metric("boxes") == len(expected)
# An evaluation in which no image has a box.
nothing = torch.utils.data.Subset(Images(), [0, 4, 8])
assert trainer.evaluate(nothing, per_device_batch_size=1, collate_fn=collate)["boxes"] == 0
print(f"world {world}: all boxes found")
