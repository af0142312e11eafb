"""Train parts of a model: freeze its layer groups, and unfreeze them step by step."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from pytorch_accelerated.errors import LayerGroupIndexError
from pytorch_accelerated.ranks.compat.torch import is_batch_norm
from pytorch_accelerated.ranks.wrappers import innermost


class LayerGroup(NamedTuple):
    """A module that is an attribute of the model.

    Attributes:
        layer_group_idx: the two indexes that mean this group, counted from the start and from the end.
        module: the module.
        is_frozen: whether nothing in it is trained, apart from batch norms that the freezer leaves trainable. True for
            a group without parameters.
    """

    layer_group_idx: tuple[int, int]
    module: nn.Module
    is_frozen: bool


class Layer(LayerGroup):
    """A module without children.

    Attributes:
        layer_group_idx: the two indexes of the group that it belongs to.
        module: the module.
        is_frozen: whether nothing in it is trained. True for a layer without parameters.
    """


class ModelFreezer:
    """Freezes and unfreezes the layer groups of a model: the modules that are its attributes, in their order.

    A group is frozen with everything in it, including direct parameters of modules with children. The direct parameters
    of the model (class tokens, position embeddings) belong to the first group. A parameter that two groups share is
    frozen with either.

    Freezing means that no gradients are computed. Give the optimizer the remaining parameters,
    ``get_trainable_parameters()``, and later add those that `unfreeze` returns::

        freezer = ModelFreezer(model)
        freezer.freeze()
        optimizer = torch.optim.AdamW(freezer.get_trainable_parameters(), lr=1e-3)
        ...
        for param_group in freezer.unfreeze().values():
            optimizer.add_param_group({**param_group, "lr": 1e-5})

    The mode of a module (training or evaluation) is independent of this: in training mode a frozen batch norm still
    updates its running statistics, and dropout is still active. ``freeze(set_modules_as_eval=True)`` changes the mode,
    but ``model.train()``, which the loop calls in each epoch before `Trainer.train_epoch_start`, changes it back. To
    keep it, freeze again there::

        class FineTuner(Trainer):
            def train_epoch_start(self):
                super().train_epoch_start()
                self.freezer.freeze(set_modules_as_eval=True)

    With multiple processes, freeze and unfreeze on every rank, and before a run, not during one: data-parallel wrappers
    check only once which parameters have gradients.

    Args:
        model: the model, ``trainer.get_model()``; of a wrapped one that inside.
        freeze_batch_norms: False excludes batch norms from freezing, as is usual when the new data has other
            statistics: their weights stay trainable, and in training mode they still normalise by the batch and update
            their running statistics. `set_modules_as_eval` does not change them either.
    """

    def __init__(self, model: nn.Module, freeze_batch_norms: bool = False) -> None:
        self.model = innermost(model)
        self.freeze_batch_norms = freeze_batch_norms

    def get_layer_groups(self) -> list[LayerGroup]:
        """The current layer groups of the model."""
        modules = list(self.model.children())
        return [
            LayerGroup((index, index - len(modules)), module, self._is_group_frozen(index, module))
            for index, module in enumerate(modules)
        ]

    def get_layers(self) -> list[Layer]:
        """The current layers of all groups; a shared layer belongs to the first of its groups."""
        seen: set[nn.Module] = set()
        return [
            Layer(group.layer_group_idx, module, not any(parameter.requires_grad for parameter in module.parameters()))
            for group in self.get_layer_groups()
            for _, module in group.module.named_modules(memo=seen)
            if not list(module.children())
        ]

    def get_trainable_parameters(self) -> list[nn.Parameter]:
        """The parameters that are not frozen, each once."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def freeze(self, from_index: int = 0, to_index: int = -2, set_modules_as_eval: bool = False) -> None:
        """Freeze the groups between two indexes, both included; by default all but the last.

        Their gradients are deleted, so that an optimizer that has these parameters no longer changes them.

        Args:
            from_index: of the group at one end, counted from the start, or from the end if negative.
            to_index: of the group at the other end.
            set_modules_as_eval: set the modules of these groups to evaluation mode.

        Raises:
            LayerGroupIndexError: an IndexError, if there is no group with one of the indexes.
        """
        for index, module in self._groups_between(from_index, to_index):
            for parameter in self._parameters_to_freeze(index, module):
                parameter.requires_grad = False
                parameter.grad = None
            if set_modules_as_eval:
                still_training = [batch_norm for batch_norm in self._exempt_modules(module) if batch_norm.training]
                module.eval()
                for batch_norm in still_training:
                    batch_norm.train()

    def unfreeze(
        self, from_index: int = -1, to_index: int = 0, set_modules_as_training: bool = True
    ) -> dict[int, dict[str, list[nn.Parameter]]]:
        """Make the groups between two indexes trainable, both included; by default all.

        This includes parameters that were not trainable before the first `freeze`.

        Args:
            from_index: of the group at one end, counted from the start, or from the end if negative.
            to_index: of the group at the other end.
            set_modules_as_training: set the modules of these groups to training mode.

        Returns:
            By group index counted from the start, ``{"params": [...]}`` with the parameters that this call has made
            trainable, for `Optimizer.add_param_group`. A shared parameter is in the first of its groups; groups without
            changes are left out.

        Raises:
            LayerGroupIndexError: an IndexError, if there is no group with one of the indexes.
        """
        param_groups = {}
        for index, module in self._groups_between(from_index, to_index):
            unfrozen = [parameter for parameter in self._parameters_of(index, module) if not parameter.requires_grad]
            # Integers, as in quantised models, cannot have gradients.
            unfrozen = [parameter for parameter in unfrozen if parameter.is_floating_point() or parameter.is_complex()]
            for parameter in unfrozen:
                parameter.requires_grad = True
            if unfrozen:
                param_groups[index] = {"params": unfrozen}
            if set_modules_as_training:
                module.train()
        return param_groups

    def _groups_between(self, from_index: int, to_index: int) -> list[tuple[int, nn.Module]]:
        modules = list(enumerate(self.model.children()))
        for index in (from_index, to_index):
            if not -len(modules) <= index < len(modules):
                raise LayerGroupIndexError(
                    f"There is no layer group {index}: the groups are the modules that are attributes of "
                    f"{type(self.model).__name__}, and it has {len(modules)}. Choose other indexes."
                )
        first, last = sorted(index % len(modules) for index in (from_index, to_index))
        return modules[first : last + 1]

    def _parameters_of(self, index: int, module: nn.Module) -> list[nn.Parameter]:
        # Direct parameters of a model are mostly added to its input, so they belong to the first group.
        held_by_model = self.model.parameters(recurse=False) if index == 0 else ()
        return list(dict.fromkeys([*held_by_model, *module.parameters()]))

    def _parameters_to_freeze(self, index: int, module: nn.Module) -> list[nn.Parameter]:
        exempt = {parameter for batch_norm in self._exempt_modules(module) for parameter in batch_norm.parameters()}
        return [parameter for parameter in self._parameters_of(index, module) if parameter not in exempt]

    def _exempt_modules(self, module: nn.Module) -> list[nn.Module]:
        if self.freeze_batch_norms:
            return []
        return [child for child in module.modules() if is_batch_norm(child)]

    def _is_group_frozen(self, index: int, module: nn.Module) -> bool:
        # If a group has only exempt batch norms, these decide.
        parameters = self._parameters_to_freeze(index, module) or self._parameters_of(index, module)
        return not any(parameter.requires_grad for parameter in parameters)
