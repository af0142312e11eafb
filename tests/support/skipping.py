"""A trainer some of whose updates count as skipped, as if fp16 had found infinite gradients."""

from collections.abc import Callable

from pytorch_accelerated import Trainer
from pytorch_accelerated.training.run import Run
from pytorch_accelerated.training.step import Step, StepParts


def skipping_trainer(is_skipped: Callable[[int], bool]) -> type[Trainer]:
    """A class of trainers; the weights move all the same.

    Args:
        is_skipped: of the number of updates before one, whether that one is skipped.
    """

    class SkippingStep(Step):
        def complete(self) -> bool:
            super().complete()
            return is_skipped(self.parts.hooks.run_state.updates)

    class SkippingRun(Run):
        def make_step(self, parts: StepParts, kind: type[Step] = SkippingStep) -> Step:
            return super().make_step(parts, kind)

    class SkippingTrainer(Trainer):
        _run_kind = SkippingRun

    return SkippingTrainer
