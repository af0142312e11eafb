"""Records every hook, event and metric of a run in order, and reads the same order from text."""

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import TrainerCallback
from pytorch_accelerated.tracking import InMemoryRunHistory
from tests.support.processes import REPOSITORY
from tests.support.reference import sgd, tiny_model

PAGE = REPOSITORY / "docs" / "events.md"
EVENTS = tuple(name for name in vars(TrainerCallback) if name.startswith("on_"))
# The methods that the page shows; `count_batch_items` counts items when overridden.
_SHOWN = re.findall(r"^ *(\w+)(?:$|  )", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
SHOWN_HOOKS = tuple(name for name in dict.fromkeys(_SHOWN) if hasattr(Trainer, name) and name != "count_batch_items")
HOOKS = tuple(hook for hook in SHOWN_HOOKS if not hook.startswith("_"))
INTERNAL_HOOKS = (
    "_create_accelerator",
    "_create_callback_handler",
    "_prepare_model_optimizer_and_dataloaders",
    "_create_run_config",
    "_run_training",
    "_run_train_epoch",
    "_run_eval_epoch",
    "_run_evaluation",
    "_clip_gradients",
    "_perform_forward_and_backward_passes",
    "_update_loss_tracker",
    "_add_epoch_loss_to_run_history",
    "_check_eval_batch_size",
)


REMARKS = 40  # lines indented by more characters than this are remarks


class Rates(TrainerCallback):
    """The learning rate of each update."""

    def __init__(self) -> None:
        self.used: list[float] = []

    def on_optimizer_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        self.used.append(float(trainer.optimizer.param_groups[0]["lr"]))


class Recorder(TrainerCallback):
    """Records the calls of trainers created with `trainer`, in `calls`.

    Args:
        hooks: the trainer's methods to record.
    """

    def __init__(self, hooks: Iterable[str] = HOOKS) -> None:
        self.calls: list[str] = []
        self.hooks = tuple(hooks)

    def trainer(self, *callbacks: Any, base: type[Trainer] = Trainer, **kwargs: Any) -> Trainer:
        """A trainer of a tiny model whose hooks, events and metrics are recorded; events before other callbacks handle
        them.
        """
        kind: type[Trainer] = type(
            f"Recorded{base.__name__}", (base,), {hook: self._recorded(base, hook) for hook in self.hooks}
        )
        model = tiny_model()
        history = _RecordedHistory(self.calls)
        return kind(model, nn.MSELoss(), sgd(model), callbacks=(self, *callbacks), run_history=history, **kwargs)

    def _recorded(self, base: type[Trainer], hook: str) -> Any:
        original = getattr(base, hook)

        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(hook)
            return original(*args, **kwargs)

        return method


def _event(name: str) -> Any:
    def method(self: Recorder, trainer: Trainer, **kwargs: Any) -> None:
        self.calls.append(name)

    return method


for _name in EVENTS:
    setattr(Recorder, _name, _event(_name))


class _RecordedHistory(InMemoryRunHistory):
    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self.calls = calls

    def update_metric(self, name: str, value: float, *, shown: bool = True) -> None:
        self.calls.append(f"[{name}]")
        super().update_metric(name, value)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        calls, self.calls = self.calls, []  # recorded before the run was interrupted
        super().load_state_dict(state)
        self.calls = calls


def expand(text: str, *, counts: Mapping[str, int] | None = None, parts: Mapping[str, str] | None = None) -> list[str]:
    """The names that `text` stands for, in order.

    Lines below ``each of 3 updates:`` are repeated three times, lines below ``each update:`` as often as `counts` says
    for "update", and lines below ``the epoch:`` come once, as do names below a name. Text after two or more spaces is a
    remark; a line with the remark ``(if ...)``, and the lines below it, are left out.

    Args:
        text: one name, or the name of a part, per line.
        counts: numbers of repetitions, by singular noun.
        parts: texts by the line that stands for them.
    """
    lines = [line for line in text.splitlines() if line.strip() and _depth(line) < REMARKS]
    names: list[str] = []
    while lines:
        line, below = lines.pop(0), []
        while lines and _depth(lines[0]) > _depth(line):
            below.append(lines.pop(0))
        if "  (if " in line:
            continue
        name = re.split(r"\s{2,}", line.strip())[0]
        inner = expand("\n".join(below), counts=counts, parts=parts)
        if name.endswith(":"):
            names += inner * _times(name, counts or {})
        elif parts and name in parts:
            names += expand(parts[name], counts=counts, parts=parts)
        else:
            names += [name, *inner]
    return names


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


def _times(heading: str, counts: Mapping[str, int]) -> int:
    if match := re.fullmatch(r"each of (\d+) \w+:", heading):
        return int(match[1])
    if match := re.fullmatch(r"each ([\w ]+):", heading):
        return counts[match[1]]
    assert heading.startswith("the "), heading
    return 1
