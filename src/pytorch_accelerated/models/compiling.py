"""Compiling a model in place, as a whole or block by block, and what became of it."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from pytorch_accelerated.errors import ConfigurationError

MANY_RECOMPILES = 8


@dataclasses.dataclass
class CompileReport:
    """What was compiled since a run began; of other models in the process, too.

    Attributes:
        graphs: compiled in all.
        recompiles: how often code was compiled again, because a shape, a dtype, a mode or a Python value was another
            one. Training and evaluation each need a version of their own.
        graph_breaks: why code could not be compiled in one piece, and how often.
    """

    graphs: int = 0
    recompiles: int = 0
    graph_breaks: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def advice(self) -> str | None:
        """What to do about many recompilations, if there were many."""
        if self.recompiles <= MANY_RECOMPILES:
            return None
        return (
            f"Code of the model was compiled again {self.recompiles} times in this run, each time for other shapes or "
            "values, which may take more time than it saves. Make batches alike, with `drop_last=True` or by padding "
            "to a few lengths, or pass `compile_model={'dynamic': True}`."
        )


def compile_in_place(model: nn.Module, arguments: Mapping[str, Any] | bool) -> None:
    """Compile `model`, or its repeated blocks, when next called. Names in its state dict stay as they are.

    What is compiled already is left as it is.

    Args:
        model: to compile.
        arguments: for `torch.compile`, or True for none. With ``regional=True`` each repeated block is compiled and
            the rest is not: blocks of a class share their code, so that it takes a fraction of the time.

    Raises:
        ConfigurationError: if there are no repeated blocks.
    """
    options = dict(arguments) if isinstance(arguments, Mapping) else {}
    modules = [model]
    if options.pop("regional", False):
        modules = list(repeated_blocks(model))
        if not modules:
            raise ConfigurationError(
                f"`compile_model` has regional=True, but {type(model).__name__} has no repeated blocks: no class of "
                "yours, and no module with parts of its own, occurs twice in an nn.ModuleList or nn.Sequential. Leave "
                "`regional` out to compile the whole model."
            )
    for module in modules:
        if module._compiled_call_impl is None:
            _compile(module, options)


def _compile(module: nn.Module, options: dict[str, Any]) -> None:
    """As ``module.compile(**options)``, which does nothing for a class of torch, such as nn.Sequential.

    The compiler passes over code of torch's own, unless code of somebody else calls it.
    """
    if not is_of_torch(module):
        module.compile(**options)
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    module._compiled_call_impl = torch.compile(call, **options)


def repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules that share an `nn.ModuleList` or `nn.Sequential` with another one of their class.

    Single layers of torch are no blocks: there is little to be gained from compiling one alone.
    """
    children = list(module.children())
    is_list = isinstance(module, (nn.ModuleList, nn.Sequential))
    times = collections.Counter(type(child) for child in children if is_list and _may_be_block(child))
    for child in children:
        if times[type(child)] > 1:
            yield child
        else:
            yield from repeated_blocks(child)


def _may_be_block(module: nn.Module) -> bool:
    is_layer = is_of_torch(module) and not list(module.children())
    # A list has no forward pass that could be compiled.
    return not is_layer and not isinstance(module, (nn.ModuleList, nn.ModuleDict))


def is_of_torch(module: nn.Module) -> bool:
    """Whether its class is one of torch's, not the user's."""
    return type(module).__module__.partition(".")[0] == "torch"


class CompileWatch:
    """Keeps a report of what is compiled until it is closed.

    Attributes:
        report: kept up to date.
    """

    def __init__(self) -> None:
        # Imported at first use: it takes most of a second.
        from torch._dynamo.callback import callback_handler
        from torch._dynamo.utils import counters

        self.report = CompileReport()
        self._handler = callback_handler
        self._counters = counters
        self._graphs_before = self._graphs()
        self._breaks_before = self._breaks()
        self._handler.register_end_callback(self._count)

    def close(self) -> None:
        """Stop counting."""
        with contextlib.suppress(ValueError):  # `torch._dynamo.reset` forgets all who listen
            self._handler.remove_end_callback(self._count)

    def _count(self, event: Any) -> None:
        number = str(event.compile_id).rpartition("/")[2]  # "3/0" is code 3 compiled for the first time
        is_code = event.callback_trigger.name == "DYNAMO"  # not the late compilation of a backward pass, say
        self.report.recompiles += is_code and number.isdigit() and int(number) > 0
        self.report.graphs = self._graphs() - self._graphs_before
        self.report.graph_breaks = dict(self._breaks() - self._breaks_before)

    def _graphs(self) -> int:
        return int(self._counters["stats"]["unique_graphs"])

    def _breaks(self) -> collections.Counter[str]:
        """By the first line of the reason: the others are advice."""
        breaks: collections.Counter[str] = collections.Counter()
        for kind in ("graph_break", "unimplemented"):
            for reason, times in self._counters[kind].items():
                breaks[reason.partition("\n")[0]] += times
        return breaks
