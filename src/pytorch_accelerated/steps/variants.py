"""Chooses the kind of step that a run needs, from its settings and ranks.

A variant that changes gradients does so in `Step.complete`, with `_always_completes` set: the Hugging Face step has an
`applying`, a `clip` and a `compute` of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pytorch_accelerated.callbacks.warning import warn_user
from pytorch_accelerated.facts.context import Context
from pytorch_accelerated.models.held import held_parts, trained_outside
from pytorch_accelerated.models.preparation import is_replicated
from pytorch_accelerated.steps.guarded import AnomalyStep, GuardedStep, savers_among
from pytorch_accelerated.steps.safe_points import NotedStep, SafePoint
from pytorch_accelerated.steps.several_ranks import OutsideStep, UnevenStep
from pytorch_accelerated.steps.splitting import SplittingStep
from pytorch_accelerated.steps.step import Step


def make_step(
    context: Context, kind: type[Step], own: Mapping[str, Callable[..., Any]], *, steps_scheduler: bool, is_noted: bool
) -> Step:
    """`kind` with the variants that a run requires. Its model must be prepared.

    Args:
        context: of the run.
        kind: the step without variants.
        own, steps_scheduler: see `Step`.
        is_noted: whether the run has a safe point, which the step must leave.
    """
    several = context.ranks.count > 1
    variants = {
        NotedStep: is_noted,
        AnomalyStep: context.settings.detect_anomaly,
        GuardedStep: context.settings.nonfinite_policy is not None,
        SplittingStep: context.settings.split_on_oom,
        UnevenStep: several,
        OutsideStep: several and bool(trained_outside(context.holder, held_parts(context.holder))),
    }
    bases = [variant for variant, is_needed in variants.items() if is_needed]
    if kind is not Step or not bases:
        bases.insert(0, kind)
    made: type[Step] = bases[0] if len(bases) == 1 else type(kind.__name__, tuple(bases), {})
    return made(context, own, steps_scheduler=steps_scheduler)


def make_safe_point(context: Context) -> SafePoint | None:
    """What keeps the last safe point of a run that callbacks save after an error.

    None if none does; with a warning, if it cannot be saved then.
    """
    if not any(saver.save_on_exception for saver in savers_among(context.callbacks)):
        return None
    if context.ranks.count == 1 and is_replicated(context.accelerator):
        return SafePoint(context)
    several = "the other ranks would wait for the one that failed"
    reason = several if context.ranks.count > 1 else "the model is sharded"
    warn_user(
        context.ranks,
        f"`save_on_exception` has no effect in this run: {reason}. Use `save_every_n_steps` or `save_every_n_minutes`.",
    )
    return None
