"""What a step of a run is made of: its variants, and what keeps the last safe point."""

from __future__ import annotations

from collections.abc import Callable

from pytorch_accelerated.callbacks.warning import warn_user
from pytorch_accelerated.checkpointing.training_state import LiveRun
from pytorch_accelerated.processes.ranks import Ranks
from pytorch_accelerated.steps.anomaly import AnomalyStep
from pytorch_accelerated.steps.guarded import GuardedStep
from pytorch_accelerated.steps.safe_points import NotedStep, SafePoint
from pytorch_accelerated.steps.splitting import SplittingStep
from pytorch_accelerated.training.hooks import TrainerHooks
from pytorch_accelerated.training.step import Step, StepParts
from pytorch_accelerated.training.uneven import UnevenStep


def step_kind(parts: StepParts, kind: type[Step]) -> type[Step]:
    """`kind` with the variants that the settings and the ranks require.

    Args:
        parts: the parts of the step.
        kind: the step without variants.
    """
    variants: list[type[Step]] = [] if parts.before_applying is None else [NotedStep]
    if parts.settings.detect_anomaly:
        variants.append(AnomalyStep)
    if parts.settings.nonfinite_policy is not None:
        variants.append(GuardedStep)
    if parts.settings.split_on_oom:
        variants.append(SplittingStep)
    if parts.uneven is not None:
        variants.append(UnevenStep)
    bases = [*([kind] if kind is not Step or not variants else []), *variants]
    return bases[0] if len(bases) == 1 else type(kind.__name__, tuple(bases), {})


def make_safe_point(
    hooks: TrainerHooks, ranks: Ranks, contents: Callable[[], LiveRun], *, is_sharded: bool
) -> SafePoint | None:
    """What keeps the last safe point of a run; None, with a warning, if it cannot be saved after an error.

    Args:
        hooks: the trainer, once its model is prepared.
        ranks: the processes.
        contents: returns the parts of the run.
        is_sharded: whether a rank may have only a shard of the model.
    """
    if ranks.count == 1 and not is_sharded:
        return SafePoint(hooks, contents)
    reason = "the other ranks would wait for the one that failed" if ranks.count > 1 else "the model is sharded"
    warn_user(
        ranks,
        f"`save_on_exception` has no effect in this run: {reason}. Save often enough with `save_every_n_steps` or "
        "`save_every_n_minutes`.",
    )
    return None
