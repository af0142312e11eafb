"""Runs on any number of ranks: losses per item are those of whole updates, however these are split."""

import math
import os
from typing import Any

import pytest
import torch

from pytorch_accelerated.callbacks import TrainerCallback
from pytorch_accelerated.errors import DataError, HookOutputError
from tests.chaos.size import some
from tests.steps.test_items import (
    BEFOREHAND,
    LATE,
    TokenTrainer,
    counts_late,
    make,
    plain_sgd,
    token_data,
    token_errors,
)
from tests.support.reference import TOLERANCE, assert_same_parameters, tiny_model

RANKS = int(os.environ["WORLD_SIZE"])
IN_ORDER = {"shuffle": False}

assert make(TokenTrainer)._ranks.count == RANKS


def reference(data: tuple[torch.Tensor, ...], per_update: int) -> tuple[torch.nn.Module, float]:
    """A model trained on one batch per update, and the mean loss of all tokens."""
    model = tiny_model()
    optimizer = plain_sgd(model)
    total, tokens = 0.0, 0
    for rows in torch.arange(len(data[0])).split(per_update):
        errors = token_errors(model, tuple(part[rows] for part in data))
        errors.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        total, tokens = total + errors.sum().item(), tokens + len(errors)
    return model, total / tokens


# ------------------------------------------------------------- weights and recorded losses are those of whole updates

SHAPES = [(2, 3, 26), (3, 2, 17), (1, 1, 7), (1, 3, 13), (2, 1, 14), (4, 4, 16)]
for name, kind in {**BEFOREHAND, **LATE}.items():
    # Counts of other types take the same way as integers.
    for batch_size, steps, size in some(SHAPES[:3] if name.startswith("int") else SHAPES[1:2], SHAPES):
        # What is in a tensor shows too late to keep the 0 / 0 of one batch without items out of the gradients.
        has_batches_without_items = name in ("int", *BEFOREHAND) and batch_size * steps * RANKS > 1
        data = token_data(size, shortest=int(not has_batches_without_items))
        held_out = token_data(2 * RANKS + 3)
        trainer = make(kind)
        history = trainer.train(data, 1, held_out, batch_size, None, steps, train_dataloader_kwargs=IN_ORDER)
        expected, mean = reference(data, batch_size * steps * RANKS)
        case = f"{name}: N={size} B={batch_size} K={steps} W={RANKS}"
        assert_same_parameters(trainer.model, expected)
        assert math.isclose(history.get_latest_metric("train_loss_epoch"), mean, rel_tol=TOLERANCE), case
        with torch.no_grad():
            loss = token_errors(expected, held_out).mean().item()
        assert math.isclose(history.get_latest_metric("eval_loss_epoch"), loss, rel_tol=TOLERANCE), case
        for other in (1, 2, 5) if steps == batch_size == 1 else ():
            found = make(kind)
            found.model.load_state_dict(expected.state_dict())
            assert math.isclose(found.evaluate(held_out, other)["evaluation_loss"], loss, rel_tol=TOLERANCE), case

# ------------------------------------------------------------------------------------------- an update without any item

nothing = token_data(12 * RANKS)
per_update = 2 * RANKS
nothing[2].fill_(True)
nothing[2][per_update : 2 * per_update] = False


class Updates(TrainerCallback):
    """Keeps the weights after each update."""

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []

    def on_optimizer_step_end(self, trainer: Any, **kwargs: Any) -> None:
        self.weights.append(torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()]))


for kind in (*BEFOREHAND.values(), *LATE.values()):
    for batch_size, steps in ((2, 1), (1, 2)):
        trainer = make(kind, seen := Updates())
        trainer.optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=0.1)  # moves where the gradient is 0
        with pytest.raises(DataError, match="An update has no items at all"):
            trainer.train(nothing, 1, None, batch_size, None, steps, train_dataloader_kwargs=IN_ORDER)
        assert len(seen.weights) == trainer.run_state.updates == 1
        after = torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])
        assert torch.equal(after, seen.weights[0])
        assert after.isfinite().all()
    with pytest.raises(DataError, match=r"None of the \d batches has any items"):
        make(kind).evaluate(tuple(part[per_update : 2 * per_update] for part in nothing), 2)

# ------------------------------------------------------------------------------------ hooks that count in part of cases

data = token_data(8 * RANKS)


class CountsSometimes(TokenTrainer):
    batches = 0

    def counted(self, mask: torch.Tensor) -> dict[str, Any]:
        self.batches += 1
        return {"num_items_in_batch": 3} if self.batches == 2 else {}


if RANKS == 1:  # on several, the others would wait for this one
    with pytest.raises(HookOutputError, match="returned 'num_items_in_batch' for some batches only"):
        make(CountsSometimes).train(data, 1, None, 4)
else:
    last = counts_late(lambda mask: int(mask.sum()) if make(TokenTrainer)._ranks.index == RANKS - 1 else None)
    with pytest.raises(HookOutputError, match=f"returned 'num_items_in_batch' on rank {RANKS - 1} only"):
        make(last).train(data, 1, None, 4)

print("done")
