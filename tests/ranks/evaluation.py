"""Runs on any number of ranks: evaluation and prediction equal the plain sums, for every size and remainder."""

import itertools
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import TrainerCallback
from tests.chaos.size import some
from tests.support import batch_shapes
from tests.support.reference import ROUNDING, TOLERANCE, assert_same_numbers, regression_data, sgd, tiny_model

RANKS = int(os.environ.get("WORLD_SIZE", "1"))
folder = Path(sys.argv[1])


class Gathering(TrainerCallback):
    """Collects what it gathers in every event of a batch, and what events are fired with."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.starts = 0
        self.sizes: list[int] = []
        self.counts: list[torch.Tensor] = []
        self.losses: list[torch.Tensor] = []
        self.targets: list[torch.Tensor] = []
        self.predicted: list[torch.Tensor] = []

    def on_eval_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        # A number of its own from each rank, before it has seen the batch.
        self.starts += len(trainer.gather(torch.tensor(trainer._ranks.index)))

    def on_eval_step_end(self, trainer: Trainer, batch: Any, batch_output: Any, **kwargs: Any) -> None:
        self.sizes.append(len(batch[0]))
        loss, count = trainer.gather((batch_output["loss"], torch.tensor(batch_output["batch_size"])))
        self.losses.append(loss)
        self.counts.append(count)
        self.targets.append(trainer.gather({"targets": batch[1]})["targets"])

    def on_prediction_step_end(self, trainer: Trainer, batch: Any, predictions: Any, **kwargs: Any) -> None:
        self.sizes.append(len(predictions))
        self.predicted.append(trainer.gather(predictions))


class GathersInHooks(Trainer):
    """Gathers before and after the model, too, as users who override a hook do."""

    def calculate_eval_batch_loss(self, batch: Any) -> dict[str, Any]:
        inputs = self.gather(batch[0])
        output = super().calculate_eval_batch_loss(batch)
        outputs = self.gather(output["model_outputs"])
        assert_same_numbers(self.model(inputs), outputs)
        return output


model = tiny_model()
loss_func = nn.MSELoss()
trainer = GathersInHooks(model, loss_func, sgd(model), callbacks=[seen := Gathering()])
assert trainer._ranks.count == RANKS

for batch_size in some((1, 3), (1, 3, 4)):
    edges = sorted({1, RANKS - 1, RANKS, RANKS + 1, 3 * RANKS, 4 * RANKS + 1, 4 * RANKS + 3} - {0})
    for size in some(edges, range(1, 4 * RANKS + 4)):
        case = f"N={size} B={batch_size} W={RANKS}"
        data = regression_data(size)
        with torch.no_grad():
            expected = model(data[0])
            expected_loss = loss_func(expected, data[1]).item()

        rounds = -(-size // (batch_size * RANKS))
        # A rank without a batch in the last round fires no event there, so it does not hear what the others gather.
        # The first rank always has one.
        hears_all = (batch_size >= 2 and size >= RANKS) or trainer._ranks.index <= (size - 1) % RANKS
        heard = size if hears_all else (rounds - 1) * batch_size * RANKS

        seen.reset()
        metrics = trainer.evaluate(data, batch_size)
        assert math.isclose(metrics["evaluation_loss"], expected_loss, rel_tol=ROUNDING), case
        assert torch.equal(torch.cat([data[1][:0], *seen.targets]), data[1][:heard]), case
        assert all(0 < count <= batch_size for count in seen.sizes), case
        assert len(seen.sizes) == (rounds if hears_all else rounds - 1), case
        everyones = trainer._ranks.exchange(seen.sizes)
        assert sum(itertools.chain(*everyones)) == size, case
        if hears_all:
            # A 0-dim tensor of each batch that exists on any rank.
            assert seen.starts == sum(map(len, seen.losses)) == sum(map(len, everyones)), case
            losses, counts = torch.cat(seen.losses), torch.cat(seen.counts)
            mean = ((losses * counts).sum() / counts.sum()).item()
            assert math.isclose(mean, expected_loss, rel_tol=ROUNDING), case

        seen.reset()
        assert_same_numbers(trainer.predict(data, batch_size), expected)
        assert_same_numbers(torch.cat([expected[:0], *seen.predicted]), expected[:heard])
        assert sum(trainer._ranks.sum([sum(seen.sizes)])) == size, case

# Batches whose tensors do not have a row for each sample.
for kind, shape in batch_shapes.SHAPES.items():
    shaped = batch_shapes.trainer_of(kind)
    for batch_size in some((4,), (1, 4)):
        found = shaped.evaluate(batch_shapes.Samples(), batch_size, collate_fn=shape.collate)["evaluation_loss"]
        assert math.isclose(found, batch_shapes.mean_loss(shaped, kind), rel_tol=TOLERANCE), kind
        predictions = shaped.predict(batch_shapes.Samples(), batch_size, collate_fn=shape.collate)
        for prediction, expected in zip(predictions, batch_shapes.predictions(shaped, kind), strict=True):
            for found, value in zip(tree_leaves(prediction), tree_leaves(expected), strict=True):
                assert_same_numbers(found, value)

# Inputs without targets, and nothing at all.
data = regression_data(2 * RANKS + 1)
inputs_only = Trainer(model, loss_func, None, callbacks=())  # type: ignore[arg-type]
with torch.no_grad():
    assert_same_numbers(inputs_only.predict(data[0], 2), model(data[0]))
    assert_same_numbers(inputs_only.predict({"input": data[0]}, 2), model(data[0]))
assert inputs_only.predict(data[0][:0], 2).numel() == 0
assert inputs_only.predict([], 2).numel() == 0

print("done")
