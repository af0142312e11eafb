"""The intended differences from the reference: a row of the page for those who come from it, and where it is seen.

Any other difference fails the tests.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from tests.differential.both import observations
from tests.differential.comparing import Finding, differences
from tests.support.processes import REPOSITORY

PAGE = REPOSITORY / "docs" / "coming_from" / "pytorch_accelerated.md"

#: The first cell of a row of the page, and patterns for the names of the observations; ``*`` stands for anything.
WHERE: Mapping[str, Sequence[str]] = {
    # Losses, updates and what is recorded
    "Losses with gradient accumulation": (
        "*/*accumulation*/history/train_loss_epoch",
        "stock_callbacks.evaluating_by_steps/accumulation/history/train_loss_epoch",
        "running.arguments/step limit and accumulation/history/train_loss_epoch",
    ),
    "Short batches and short windows in an update": (
        "running.arguments/accumulation, short last*/*",
        "running.arguments/accumulation longer than the epoch/*",
        "running.arguments/step limit and accumulation/*",
        "scheduling.of_torch/accumulation/weights",
    ),
    "Clipping with gradient accumulation": ("running.arguments/accumulation and clipping/*",),
    "Data that does not divide evenly among the ranks": (
        "rank ? of 2, gathering.training/uneven/weights",
        "rank ? of 2, gathering.training/uneven/history/*",
        "rank ? of 2, gathering.tracked_losses/*",
    ),
    "`run_config.max_num_train_steps`": ("*/config/max_num_train_steps",),
    "`num_update_steps_per_epoch` and `NUM_UPDATE_STEPS_PER_EPOCH` on several ranks": (
        "rank ? of 2, gathering.training/*/config/num_update_steps_per_epoch",
    ),
    "Run config without an evaluation set, or after `evaluate` alone": (
        "*/config/eval_per_device_batch_size",
        "*/config/eval_total_batch_size",
        "running.config_as_dict/after evaluate/*",
    ),
    '`run_config["num_epochs"]`': ("idioms.configurations_read_as_items/items",),
    "A second `train` with `reset_run_history=False`": ("running.runs_after_each_other/*",),
    "`num_epochs=0` and empty datasets": ("running.arguments/no epochs", "running.datasets/an empty set"),
    "Batches without a target, with a single item, or dicts that the loss function can't take": (
        "running.batches/one item/raises",
        "running.batches/a tensor/raises",
        "running.batches/a dict/raises",
    ),
    "A recorded tensor with one element": ("running.histories/kind of a tensor",),
    "A metric that was never recorded": ("running.histories/deleting what never was/raises",),
    # Schedulers
    "A second `train` with a schedule": ("scheduling.in_a_second_run/of torch", "scheduling.in_a_second_run/after*"),
    "The first and the last learning rate": (
        "scheduling.in_a_second_run/of the library",
        "schedulers.states/*/rates",
        "schedulers.subclasses/*/rates/at first",
        "schedulers.other_fields/momentum/at first",
        "schedulers.wsd/*/rates/at first",
        "schedulers.cosine/*/rates/at first",
        "checkpoints.loading/without scheduler/rate",
        "idioms.schedules_of_several_groups",
    ),
    "Cosine with warmup": (
        "schedulers.cosine/warmup*/rates/*",
        "schedulers.cosine/all/rates/*",
    ),
    "Checkpoints of `WSDLrScheduler`": (
        "schedulers.wsd/*checkpoints/*",
        "schedulers.wsd/few steps, * checkpoints",
        "stock_callbacks.warmup_stable_decay/two*",
    ),
    "`WSDLrScheduler.get_current_step` after `step_update`": ("schedulers.wsd/*/current step",),
    "Schedulers in a run that ends at `max_num_train_steps`": ("scheduling.placeholders/step limit/times a number/*",),
    "timm's schedulers": ("scheduling.of_timm/*",),
    "Arithmetic of placeholders": ("scheduling.placeholders/*", "scheduling.of_torch/arithmetic"),
    "An overridden `create_scheduler` without `create_scheduler_fn`": ("scheduling.of_ones_own/overridden/*",),
    "Subclasses of `StatefulSchedulerBase`": ("scheduling.of_ones_own/subclass", "schedulers.subclasses/_Halving"),
    "States of schedulers": ("schedulers.states/*/keys",),
    "Arguments that can't work": ("schedulers.bad_arguments/*", "schedulers.other_fields/absent/raises"),
    # Order and stopping
    "`StopTrainingError` within an update": ("order.stopping/on_train_step_*/calls",),
    "`StopTrainingError` elsewhere": (
        "order.stopping/*_epoch_end/calls",
        "order.stopping/*/epoch at the end",
        "order.stopping/on_training_run_*/calls",
    ),
    "`scheduler_step` without a scheduler": ("order.scheduler_steps/without",),
    "`LimitEvalStepsCallback(n)`": ("order.with_other_callbacks/*limited*/calls",),
    "`StepBasedEvaluationCallback`": (
        "order.with_other_callbacks/steps*/calls",
        "stock_callbacks.evaluating_by_steps/*",
    ),
    # Callbacks
    "A loss that is not a number": ("stock_callbacks.not_a_number/*",),
    "`ModelEmaCallback`": ("stock_callbacks.averaging/*/average", "stock_callbacks.averaging/*/history/ema_model_*"),
    "Files of best models": ("stock_callbacks.saving_the_best/*", "stock_callbacks.average_file/keys"),
    "Early stopping and a NaN in the first evaluation": ("stock_callbacks.early_stopping/nan*",),
    "Metrics recorded after the logger has run": ("stock_callbacks.logging/metrics after/*",),
    "An object that is not a callback": ("stock_callbacks.handlers/no class at all/*",),
    # Data
    "`worker_init_fn` of the default loader arguments": ("running.*/*worker_init_fn",),
    "`collate_fn` among the loader arguments": ("running.samplers/collate_fn",),
    "Attributes of prepared loaders": ("loaders.attributes/*",),
    "`gather`": ("*gathering.gather/0-dim/shape", "*gathering.gather/nested with padding"),
    "`DataLoaderSlice`": ("small_parts.slices/batch_size",),
    "Nested `LimitBatches`": ("small_parts.limits/nested",),
    # Checkpoints
    "`load_checkpoint` before a scheduler exists": ("checkpoints.loading/*",),
    "`load_training_state` before a run": ("checkpoints.training_states/before a run/*",),
    # Freezing and averaging
    "Groups and layers without parameters": ("small_parts.freezing/backbone*flags*",),
    "Parameters held directly by a model or by a module with children": ("small_parts.freezing/backbone*",),
    "`freeze(set_modules_as_eval=True)`": ("small_parts.freezing/*frozen as evaluation/*",),
    "The index of a layer group that does not exist": ("small_parts.freezing/*index too large/*",),
    "Counters in an average": ("small_parts.averaging/batch norm/num_batches_tracked/values",),
    # Names and arguments
    "`save_checkpoint` with more than three positional arguments": ("signatures.members/*Trainer*/save_checkpoint/*",),
    "Arguments of run histories, by name": ("signatures.members/*RunHistory/*/metric_*",),
    "Arguments of the decorators and of `ModelEma.update_fn`, by name": (
        "signatures.members/*process_zero*/func",
        "signatures.members/ModelEma/update_fn/*",
    ),
    "Arguments of events in `TrainerCallback`": ("signatures.members/TrainerCallback/on_*_step_end/*",),
    "`CallbackHandler()` without callbacks": ("signatures.members/CallbackHandler/()/callbacks",),
    "`TerminateOnNaNCallback.check_for_nan_after_batch`": (
        "signatures.members/TerminateOnNaNCallback/check_for_nan_after_batch",
    ),
    "Defaults in the signatures of `Trainer` and `ModelEmaCallback`": (
        "signatures.members/Trainer/()/callbacks",
        "signatures.members/ModelEmaCallback/()/*",
    ),
    "Names that a module only imports": ("signatures.names/*",),
}


def rows_of_the_page() -> list[str]:
    """The first cell of each row in the tables of differences."""
    lines = PAGE.read_text(encoding="utf-8").partition("## What is different on purpose")[2].splitlines()
    cells = [line.split(" | ")[0].removeprefix("|").strip() for line in lines if line.startswith("| ")]
    return [cell for cell in cells if cell not in ("", "---")]


def findings() -> list[Finding]:
    """All differences between the two libraries."""
    return list(differences(*observations()))


def explanation(finding: Finding) -> str | None:
    """The first row that covers `finding`, or None if `finding` is unintended."""
    return next((row for row, patterns in WHERE.items() if covers(patterns, finding)), None)


def covers(patterns: Sequence[str], finding: Finding) -> bool:
    """Whether one of `patterns` is the name of `finding`."""
    return any(fnmatchcase(finding.name, pattern) for pattern in patterns)
