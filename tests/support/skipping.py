"""A trainer some of whose updates count as skipped, as if fp16 had found infinite gradients."""

from collections.abc import Callable, Sequence

from pytorch_accelerated import Trainer
from pytorch_accelerated.steps.step import Call, Step, StepParts
from pytorch_accelerated.training.run import Run


def skipping_trainer(skips: Callable[[int], bool]) -> type[Trainer]:
    """A class of trainers; the weights move all the same.

    Args:
        skips: of the number of updates before one, whether that one is skipped.
    """

    class SkippingStep(Step):
        def finish(self, calls: Sequence[Call], *, is_skipped: bool) -> None:
            is_skipped = skips(self.parts.hooks.run_state.updates)
            done = [call for call in calls if not (is_skipped and call[1] == "scheduler_step")]
            super().finish(done, is_skipped=is_skipped)

    class SkippingRun(Run):
        def make_step(self, parts: StepParts, kind: type[Step] = SkippingStep) -> Step:
            return super().make_step(parts, kind)

    class SkippingTrainer(Trainer):
        _run_kind = SkippingRun

    return SkippingTrainer
