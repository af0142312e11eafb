"""How a script makes the batches of a dataset, and what it does with them, as source."""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, default_collate

from pytorch_accelerated.data import arguments_of_classes, as_array_dataset, has_ignored, objects_within
from pytorch_accelerated.extras.ejecting.own_code import OwnCode, is_ours, refused
from pytorch_accelerated.facts import TrainSettings, trees
from pytorch_accelerated.ranks import kept

if TYPE_CHECKING:
    from pytorch_accelerated import Trainer

# Of loaders; those after the first three change no bit.
_OF_LOADERS = {"batch_size", "shuffle", "drop_last", "num_workers", "pin_memory", "persistent_workers"}
_OF_LOADERS |= {"prefetch_factor"}
_BATCHES_READ_AT_ONCE = 64
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
# What makes a dataset of arrays, by their type, and whether there is a collate function.
_CONVERTS: dict[tuple[type, bool], str] = {
    (tuple, False): "TensorDataset(*map(torch.as_tensor, DATA))",
    (tuple, True): "StackDataset(*DATA)",
    (dict, False): "StackDataset(**{name: torch.as_tensor(column) for name, column in DATA.items()})",
    (dict, True): "StackDataset(**DATA)",
}


class Batches:
    """The batches of the training data, or of an evaluation.

    Attributes:
        size: rows of a batch.
        count: of the batches of an epoch.
        shuffles: whether epochs have an order of their own.
        drops_last: whether rows that don't fill a batch are left out.
        workers: how many fetch the batches; a script does it by itself.
        collate: what makes a batch of rows.
        draws: whether rows may be augmented.
        columns: those of a row that a batch is made of, as source; None if all are.
        converts: makes a dataset of arrays.
        walk: what the batches of an epoch are cut from.
        each: the name of what a batch is made of.
        batch: makes a batch.
        names: of the parts of a batch; `group` has them in brackets.
        result: the name of what `call` returns.
        call: computes the loss.
        loss: the loss.
        items: what the loss is the mean of.
        arguments: what these need besides the model and the dataset.
        is_counted: whether only the batch tells `items`.
        may_lack: whether they may be 0.
        round: rows of a batch on every rank.
        borrows: whether a rank may have no row of the last update.
        rows_per_update: None if an update is one batch.
        called: the name of the model that computes a loss.
        weighted: the loss times its share of the update.
        recorded: what is kept of each loss.
        mean: the mean of what is kept.
        inputs: what the model gets.
        default_loss: the loss of `outputs` in the trainer's own hook.
        first_part: the part of a batch whose length is the number of rows.
    """

    def __init__(
        self, trainer: Trainer, own: OwnCode, arguments: Mapping[str, Any], settings: TrainSettings, kind: str
    ) -> None:
        self._kind, self._dataset = kind, arguments[f"{kind}_dataset"]
        loader = dict(arguments.get(f"{kind}_dataloader_kwargs") or {})
        if unknown := sorted(loader.keys() - _OF_LOADERS):
            raise refused(f"`{kind}_dataloader_kwargs` has {', '.join(map(repr, unknown))}", "Leave it out.")
        if kind == "eval" and (loader.get("shuffle") or loader.get("drop_last")):
            raise refused("`eval_dataloader_kwargs` shuffles or drops rows", "Leave that out.")
        _refuse_dataset(self._dataset)
        self._ranks = ranks = trainer.run_context.parts.ranks.count
        self.called = "parallel" if ranks > 1 and kind == "train" else "model"
        size = settings.per_device_batch_size
        size = size if kind == "train" else settings.eval_per_device_batch_size or size
        self.size, self.workers = loader.get("batch_size", size), loader.get("num_workers")
        self.shuffles, self.drops_last = kind == "train" and loader.get("shuffle", True), loader.get("drop_last")
        self._collate_fn = arguments.get("collate_fn")
        has_collate = self._collate_fn is not None
        self.collate, self.collate_argument = ("collate_fn", ", collate_fn") if has_collate else ("default_collate", "")
        arrays = as_array_dataset(self._dataset)
        source = self._dataset if arrays is None else arrays
        self.draws = arrays is None or has_collate
        self.round, self._rows = self.size * ranks, len(source)
        if not self._rows:
            raise refused(f"`{kind}_dataset` is empty", "Give rows.")
        self.count = self._rows // self.round if self.drops_last else -(-self._rows // self.round)
        with kept() as before:
            before.generators()  # a row may be augmented
            rows = [source[row] for row in range(min(2, len(source)))]
            self._sample = (self._collate_fn or default_collate)(rows)
        self.columns = arguments.get("columns") if isinstance(rows[0], Mapping) else None
        if arguments.get("collator") == "default_data_collator" and not isinstance(rows[0], Mapping):
            raise refused(f"a row is a {type(rows[0]).__name__}", "Let it be a dict, or give a `data_collator`.")
        inner = getattr(self._collate_fn, "data_collator", self._collate_fn)  # of a method or partial, what it holds
        drawing = (self._dataset, inner, getattr(inner, "__self__", None), getattr(inner, "keywords", None))
        if (self.workers or ranks > 1) and any(isinstance(each, _GENERATORS) for each in objects_within(drawing)):
            raise refused("each process draws from its copy of a generator in the data", "Draw from the global ones.")
        self.each = "places" if self.draws and self.shuffles else "rows"
        self.walk = "torch.arange(len(order))" if self.each == "places" else "order"
        if kind == "eval" and ranks > 1:
            self.walk = self._dealt()
        converts = _CONVERTS.get((type(self._dataset), has_collate), "")
        self.converts = converts.replace("DATA", f"{kind}_dataset")
        self.batch = self._source(arrays)
        if trainer.device.type != "cpu":
            self.batch = f"to_device({self.batch})"
        self._records_updates = kind == "train" and "is_face" in arguments
        self._counts_labels = arguments.get("counts_labels", False) and "labels" in self._sample
        self._choose_loss(trainer, own)

    def _source(self, arrays: Any) -> str:
        """What makes a batch."""
        name, epoch = ("train_dataset", "epoch") if self._kind == "train" else ("dataset", "0")
        rows, data = "order[places]" if self.each == "places" else "rows", self._dataset
        if self.draws:
            return f"fetch({name}, {rows}, key_of(seed, {epoch}, {self.each}[0]){self.collate_argument})"
        is_even = all(torch.as_tensor(each).is_contiguous() for each in trees.leaves(arrays.data))
        if is_even and type(data) in (tuple, TensorDataset):
            return f"{name}[{rows}]"
        if is_even and type(data) is Subset and (type(data.dataset), type(data.indices)) == (TensorDataset, list):
            return f"{name}[{rows}.tolist()]"
        return f"default_collate([{name}[row] for row in {rows}.tolist()])"

    def _dealt(self) -> str:
        """The batches of an evaluation: a full one for each rank in turn, and the rest as evenly as possible."""
        rest = self._rows % self.round
        # A rest with fewer rows than ranks is shared with the round before it.
        rest += self.round * (0 < rest < self._ranks and self._rows > self.round and self.size > 1)
        full, rounds = self._rows - rest, "2 * " * (rest > self.round)
        return f"[*order[:{full}].split({self.size}), *order[{full}:].tensor_split({rounds}RANKS)]"

    def _choose_loss(self, trainer: Trainer, own: OwnCode) -> None:
        """Choose what computes the loss, and what it is the mean of."""
        hook, loss_func, sample = f"calculate_{self._kind}_batch_loss", trainer.loss_func, self._sample
        is_own, self.is_dict = getattr(own.has, hook), isinstance(sample, Mapping)
        is_pair = isinstance(sample, (tuple, list)) and len(sample) >= 2
        weighs = not self.is_dict and _weighs_targets(loss_func, self._dataset)
        is_whole = self.is_dict or is_own or self._collate_fn is not None or own.has.count_batch_items
        inputs, targets = ("batch[0]", "batch[1]") if is_whole else ("inputs", "targets")
        self.names = "batch" if is_whole else "inputs, targets" + ", *_" * (len(sample) > 2)
        self.group = self.names if is_whole else f"({self.names})"
        self.result, self.loss = ("output", 'output["loss"]') if is_own else ("loss", "loss")
        self.inputs = _inputs(trainer.model, sample) if self.is_dict else inputs
        self.inputs += ", num_items_in_batch=labels_in(batch)" * self._counts_labels
        if not is_own and not self.is_dict and (loss_func is None or not is_pair):
            raise refused(f"a batch is a {type(sample).__name__}", "Let it be a dict, or inputs and targets.")
        loss = "loss_in({})" if loss_func is None else f"loss_func({{}}, {'batch' if self.is_dict else targets})"
        self.call = f"hooks.{hook}(batch)" if is_own else loss.format(f"{self.called}({self.inputs})")
        self.default_loss = loss.format("outputs").replace("loss_func", "self.loss_func")
        self.first_part = "next(iter(batch.values()))" if self.is_dict else "batch[1]"
        self.is_counted = self.may_lack = False
        if own.has.count_batch_items:
            self.items, self.is_counted, self.may_lack = "float(hooks.count_batch_items(batch))", True, True
        elif self._counts_labels and self._kind == "train":
            self.items, self.is_counted, self.may_lack = "labels_in(batch)", True, True
        elif is_own:
            self.items = 'output["batch_size"]'
            if weighs and getattr(own.ours, hook):
                raise refused(f"`{hook}` calls ours, whose loss weighs targets", "Compute the loss in the hook.")
        elif weighs:
            self.items, self.is_counted, self.may_lack = f"items_in(loss_func, {targets})", True, True
        elif self._collate_fn is not None and not getattr(self._collate_fn, "keeps_rows", False):
            self.items, self.is_counted = f"rows_in(batch, len({self.each}))", True
        else:
            self.items = f"len({self.each})"
        words = set(re.findall(r"\w+", f"{self.batch} {self.call} {self.items}"))
        self.arguments = "".join(f"{name}, " for name in ("loss_func", "hooks", "collate_fn", "seed") if name in words)

    def sum_up(self, steps: int, *, is_cut: bool) -> None:
        """Choose how losses are recorded, and their mean; an update has `steps` batches, and an epoch may be cut."""
        piece, loss = _BATCHES_READ_AT_ONCE * (1 if self._records_updates else steps), f"{self.loss}.item()"
        has_pieces = self.items != f"len({self.each})" or self.count > piece or is_cut or self._ranks > 1
        self.recorded = f"({loss}, {self.items})" if has_pieces else f"{loss} * {self.items}"
        if self._records_updates:  # but for losses that aren't finite
            has_pieces, recorded = True, "loss_of_update" if steps > 1 else self.loss
            self.recorded = f"({recorded}.item(), {recorded}.isfinite().item())"
        rest = 0 if self.drops_last else self._rows % (self.round * steps)
        self.borrows = self._kind == "train" and rest < self._ranks * -(-rest // self.round)
        if self.borrows:  # then rows are counted, too
            if self.loss != "loss" and not self.is_counted:
                raise refused(f"a hook would get none of the last {rest} rows on a rank", "Give `drop_last`.")
            self.is_counted = self.may_lack = True
        whole = "order" if self._kind == "train" else "dataset"
        share = "count / total" if self.is_counted else f"len({self.each}) / len(update)"
        self.weighted = f"{self.loss} * ({'RANKS * ' * (self._ranks > 1)}{share})"
        self.rows_per_update = self.round * steps if steps > 1 or self._ranks > 1 else None
        self.mean = f"mean_of(losses, {piece})" if has_pieces else f"np.sum(losses) / len({whole})"


def _refuse_dataset(dataset: Any) -> None:
    is_sets = isinstance(dataset, Mapping) and not any(hasattr(each, "shape") for each in dataset.values())
    if isinstance(dataset, (DataLoader, IterableDataset)) or is_sets or not hasattr(dataset, "__getitem__"):
        raise refused(f"the data is a {type(dataset).__name__}", "Give a dataset with rows by number.")
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    is_of_hub = type(dataset).__module__ == "datasets.arrow_dataset"
    if is_of_hub and dataset.format["type"] == "custom":
        raise refused("`with_transform` transforms the rows of a batch at once", "Use `map`, or a `data_collator`.")
    if is_ours(dataset) or (hasattr(dataset, "__getitems__") and not is_of_hub):
        raise refused(f"the {type(dataset).__name__} has an order or batches of its own", "Give one of single rows.")


def _inputs(model: Any, batch: Mapping[str, Any]) -> str:
    """The arguments of a model for a dict: what its `forward` takes by name."""
    parameters = inspect.signature(type(model).forward).parameters
    taken = [name for name in batch if name in parameters]
    if len(taken) == len(batch) or any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return "**batch"
    return ", ".join(f'{name}=batch["{name}"]' for name in taken)


def _weighs_targets(loss_func: Any, dataset: Any) -> bool:
    """Whether the loss divides by the weights of targets, and not always by the rows."""
    if getattr(loss_func, "keywords", {}).get("reduction", getattr(loss_func, "reduction", "mean")) != "mean":
        raise refused("the loss function has no mean", "Give one with reduction='mean'.")
    keywords = arguments_of_classes(loss_func)
    if keywords is None:
        return False
    ignored = keywords.get("ignore_index", -100)
    weighs = keywords.get("weight") is not None or ignored != -100 or has_ignored(dataset)
    if weighs and not isinstance(loss_func, nn.Module):
        raise refused("the loss is a function that weighs its targets", "Give `nn.CrossEntropyLoss(...)`.")
    return weighs
