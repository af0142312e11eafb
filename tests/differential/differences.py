"""The intended differences from the reference, each with its reason. Any other difference fails the tests."""

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from tests.differential.comparing import Finding


@dataclass(frozen=True)
class Difference:
    """An intended difference.

    Attributes:
        what: its subject.
        reference: the behaviour of the reference.
        ours: the behaviour of this library.
        reason: why they differ.
        where: patterns for the names of the observations that show it; ``*`` stands for anything.
    """

    what: str
    reference: str
    ours: str
    reason: str
    where: tuple[str, ...]

    def covers(self, finding: Finding) -> bool:
        """Whether this difference explains `finding`."""
        return any(fnmatchcase(finding.name, pattern) for pattern in self.where)


_ON_RANKS = "rank ? of 2, gathering"

SECTIONS: dict[str, tuple[Difference, ...]] = {
    "Losses, updates and what is recorded": (
        Difference(
            "Losses with gradient accumulation",
            "`train_loss_epoch` is the loss divided by `gradient_accumulation_steps`",
            "the mean loss of the epoch's samples",
            "The loss of a run should not depend on how its data is split into batches.",
            (
                "*/*accumulation*/history/train_loss_epoch",
                "stock_callbacks.evaluating_by_steps/accumulation/history/train_loss_epoch",
                "running.arguments/step limit and accumulation/history/train_loss_epoch",
            ),
        ),
        Difference(
            "Short batches and short windows in an update",
            "every batch has the same weight, even a short one, and a short window at the end of the epoch is still "
            "divided by `gradient_accumulation_steps`",
            "every sample has the same weight: the update equals that of one large batch",
            "Accumulation should save memory, not change the optimization. Weights and later losses differ as a "
            "result.",
            (
                "running.arguments/accumulation, short last*/*",
                "running.arguments/accumulation longer than the epoch/*",
                "running.arguments/step limit and accumulation/*",
                "scheduling.of_torch/accumulation/weights",
            ),
        ),
        Difference(
            "Clipping with gradient accumulation",
            "gradients are clipped after each batch",
            "the complete gradient of the update is clipped once",
            "Clipping a partial sum changes its direction.",
            ("running.arguments/accumulation and clipping/*",),
        ),
        Difference(
            "Data that does not divide evenly among the ranks",
            "the last batches are filled up with samples from the start of the epoch, which count twice",
            "every sample counts once, in losses, updates and metrics",
            "Results should not depend on the number of processes.",
            (
                f"{_ON_RANKS}.training/uneven/weights",
                f"{_ON_RANKS}.training/uneven/history/*",
                f"{_ON_RANKS}.tracked_losses/*",
            ),
        ),
        Difference(
            "`run_config.max_num_train_steps`",
            "one more than the number of updates in the run",
            "the number of updates in the run",
            "That is what the name says.",
            ("*/config/max_num_train_steps",),
        ),
        Difference(
            "`num_update_steps_per_epoch` and `NUM_UPDATE_STEPS_PER_EPOCH` on several ranks",
            "the updates of all ranks added up: twice as many with two ranks",
            "the updates in the epoch; the same as `PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH`",
            "An update is one step of the optimizer on all ranks together. Schedules computed from it end with the "
            "run.",
            (f"{_ON_RANKS}.training/*/config/num_update_steps_per_epoch",),
        ),
        Difference(
            "Run config without an evaluation set, or after `evaluate` alone",
            "values for loaders and epochs that don't exist: the training batch size, one epoch, 0 updates",
            "`None`",
            "There is no such loader. With your own loaders, the config has their batch sizes.",
            (
                "*/config/eval_per_device_batch_size",
                "*/config/eval_total_batch_size",
                "running.config_as_dict/after evaluate/*",
            ),
        ),
        Difference(
            '`run_config["num_epochs"]`',
            "`TypeError`: fields are only attributes",
            "fields are items too, as in earlier releases",
            "Older scripts read them this way.",
            ("idioms.files_of_ones_own/items",),
        ),
        Difference(
            "A second `train` with `reset_run_history=False`",
            "ends after its first update: the updates of the earlier run count against its limit",
            "runs all its epochs and continues their numbers",
            "`num_epochs` is the number of epochs to run.",
            ("running.runs_after_each_other/*",),
        ),
        Difference(
            "`num_epochs=0` and empty datasets",
            "nothing happens",
            "an error that says what is empty",
            "A run that trains nothing is a mistake in nearly every script.",
            ("running.arguments/no epochs", "running.datasets/an empty set"),
        ),
        Difference(
            "Batches without a target, with a single item, or dicts that the loss function can't take",
            "`IndexError` or `KeyError` from inside the library",
            "a `ValueError` that describes the batch and names the method to override",
            "Errors should name their cause.",
            ("running.batches/one item/raises", "running.batches/a tensor/raises", "running.batches/a dict/raises"),
        ),
        Difference(
            "A metric that was never recorded",
            "`delete_metric` raises `KeyError`",
            "`delete_metric` raises `ValueError`, with the names that exist",
            "Errors should name their cause.",
            ("running.histories/deleting what never was/raises",),
        ),
    ),
    "Schedulers": (
        Difference(
            "The first and the last learning rate",
            "the first call of `step` sets the rates of update 0 again, so all rates come one update late and the "
            "minimum is never reached",
            "update n uses the rates for n finished updates; the minimum is reached after the last update",
            "A schedule should fit its run. Saved scheduler states keep their update number.",
            (
                "schedulers.counting/*",
                "schedulers.states/*/rates",
                "schedulers.subclasses/*/rates/at first",
                "schedulers.other_fields/momentum/at first",
                "schedulers.wsd/*/rates/at first",
                "schedulers.cosine/*/rates/at first",
                "scheduling.of_the_package/*",
                "checkpoints.loading/without scheduler/rate",
                "idioms.schedules_of_several_groups",
            ),
        ),
        Difference(
            "Cosine with warmup",
            "the decay ends early by the length of the warmup and jumps to the minimum; `warmup_starting_lr_ratio` "
            "sets the first rate but not the slope",
            "half a cosine from the end of the warmup to the start of the cooldown; the warmup starts at the ratio",
            "That is what the arguments say.",
            (
                "schedulers.cosine/warmup*/rates/*",
                "schedulers.cosine/all/rates/*",
                "schedulers.cosine_by_number/*",
            ),
        ),
        Difference(
            "Checkpoints of `WSDLrScheduler`",
            "with several checkpoints the last one comes before the end of the run, and everything after it is "
            "trained at the minimum; short runs raise `ZeroDivisionError`",
            "the last checkpoint is at `total_steps`",
            "The last decay should end with the run.",
            (
                "schedulers.wsd/*checkpoints/*",
                "schedulers.wsd/few steps, * checkpoints",
                "schedulers.wsd_phases/*",
                "stock_callbacks.warmup_stable_decay/two*",
            ),
        ),
        Difference(
            "`WSDLrScheduler.get_current_step` after `step_update`",
            "only `step` counts",
            "the number that was set",
            "Both ways of stepping should say where the schedule is.",
            ("schedulers.wsd/*/current step",),
        ),
        Difference(
            "Schedulers in a run that ends at `max_num_train_steps`",
            "the schedule covers `num_epochs`",
            "the schedule covers the run; `NUM_EPOCHS` times updates per epoch is exactly its number of updates",
            "A run that ends at 99.8 % of its learning rate has not been annealed.",
            ("scheduling.placeholders/step limit/times a number/*",),
        ),
        Difference(
            "timm's schedulers",
            "are an epoch ahead, or several updates if they count updates; without an evaluation set they are never "
            "stepped",
            "are stepped with the number of finished epochs or updates",
            "That is what timm's documentation asks for.",
            ("scheduling.of_timm/*",),
        ),
        Difference(
            "Arithmetic of placeholders",
            "a placeholder times or plus a number",
            "`+ - * / //` with numbers and each other, on both sides",
            "Needed for `T_max=NUM_EPOCHS * NUM_UPDATE_STEPS_PER_EPOCH`.",
            ("scheduling.placeholders/*", "scheduling.of_torch/arithmetic"),
        ),
        Difference(
            "An overridden `create_scheduler` without `create_scheduler_fn`",
            "the override is not called",
            "the override is called",
            "Overriding a method should have an effect.",
            ("scheduling.of_ones_own/overridden/*",),
        ),
        Difference(
            "Subclasses of `StatefulSchedulerBase`",
            "must define `state_dict` and `load_state_dict`",
            "need only `get_updated_values`",
            "The base class knows what to save.",
            ("scheduling.of_ones_own/subclass", "schedulers.subclasses/_Halving"),
        ),
        Difference(
            "States of schedulers",
            "hold the settings; WSD's lacks its position",
            "hold the position and the base values; states of the reference can be loaded",
            "Settings belong to the script; a resumed run should continue where it stopped.",
            ("schedulers.states/*/keys",),
        ),
        Difference(
            "Arguments that can't work",
            "`AssertionError`, `TypeError` or `KeyError`; some are accepted, such as a warmup longer than the run",
            "a `ValueError` that names the argument and how to fix it",
            "Errors should name their cause.",
            ("schedulers.bad_arguments/*", "schedulers.other_fields/absent/raises"),
        ),
    ),
    "Order and stopping": (
        Difference(
            "`StopTrainingError` within an update",
            "the update is abandoned",
            "the update is finished first, and all ranks stop at the same point",
            "Otherwise gradients are left behind and other ranks wait forever.",
            ("order.stopping/on_train_step_*/calls",),
        ),
        Difference(
            "`StopTrainingError` elsewhere",
            "the rest of the event is skipped; raised in `on_training_run_start` or `on_training_run_end`, it ends "
            "the script",
            "the current event is completed, then `on_stop_training_error` and the end of the run follow; `train` "
            "returns. A complete epoch is counted.",
            "All ways to stop should end the same way.",
            (
                "order.stopping/*_epoch_end/calls",
                "order.stopping/*/epoch at the end",
                "stock_callbacks.overrides_that_call_super/TrainerOnly/outcome",
                "order.stopping/on_training_run_*/calls",
            ),
        ),
        Difference(
            "`scheduler_step` without a scheduler",
            "is not called",
            "is called after each update",
            "An override should not depend on another argument. Without a scheduler, the default does nothing.",
            ("order.scheduler_steps/without",),
        ),
        Difference(
            "`LimitEvalStepsCallback(n)`",
            "evaluates n + 1 batches",
            "evaluates n batches",
            "That is what its argument says.",
            ("order.with_other_callbacks/*limited*/calls",),
        ),
        Difference(
            "`StepBasedEvaluationCallback`",
            "counts batches, and evaluates between a forward pass and its backward pass; the loss is shown but not "
            "recorded",
            "counts updates, and evaluates after an update; the loss is recorded as `intermediate_eval_loss`",
            "Inside an update there is no consistent state to evaluate.",
            ("order.with_other_callbacks/steps*/calls", "stock_callbacks.evaluating_by_steps/*"),
        ),
    ),
    "Callbacks": (
        Difference(
            "A loss that is not a number",
            "the process exits with `SystemExit`",
            "the run ends like an early stop, then raises `NonFiniteLossError` (an `ArithmeticError`) that names the "
            "batch",
            "A library should not exit the process, and callbacks should be told.",
            ("stock_callbacks.not_a_number/*",),
        ),
        Difference(
            "`ModelEmaCallback`",
            "the average is updated once an epoch",
            "the average is updated after each update",
            "`decay=0.99` is meant per update: an average over a hundred epochs is not useful.",
            ("stock_callbacks.averaging/*/average", "stock_callbacks.averaging/*/history/ema_model_*"),
        ),
        Difference(
            "Files of best models",
            "the watched value is under its name in the first file, and under `loss` in later ones",
            "always under its name, with the epoch",
            "One thing, one name.",
            ("stock_callbacks.saving_the_best/*", "stock_callbacks.average_file/keys"),
        ),
        Difference(
            "Early stopping and a NaN in the first evaluation",
            "nothing ever beats NaN, so the run stops",
            "NaN is ignored; the first number is the first best value",
            "One bad evaluation should not end a run that recovers.",
            ("stock_callbacks.early_stopping/nan*",),
        ),
        Difference(
            "Metrics recorded after the logger has run",
            "are logged an epoch late, and the last ones never",
            "are logged at the end of the epoch",
            "Values should appear with the epoch they belong to.",
            ("stock_callbacks.logging/metrics after/*",),
        ),
        Difference(
            "An object that is not a callback",
            "`AttributeError` when it is added",
            "a `TypeError` that explains what a callback is",
            "Errors should name their cause.",
            ("stock_callbacks.handlers/no class at all/*",),
        ),
    ),
    "Data": (
        Difference(
            "`worker_init_fn` of the default loader arguments",
            "seeds numpy in each worker",
            "is absent: rows and their augmentation are seeded by epoch and batch, for any number of workers",
            "A run should see the same data with any number of workers and after a resume.",
            ("running.*/*worker_init_fn",),
        ),
        Difference(
            "`collate_fn` among the loader arguments",
            "`TypeError`: passed twice",
            "is used",
            "It is an argument of a loader.",
            ("running.samplers/collate_fn",),
        ),
        Difference(
            "Attributes of prepared loaders",
            "`batch_size` is always None and `drop_last` always False",
            "have the requested values",
            "Scripts read them to compute sizes.",
            ("loaders.attributes/*",),
        ),
        Difference(
            "`gather`",
            "0-dim tensors stay 0-dim on one process; nested values cannot be combined with `padding_value`",
            "0-dim tensors become one row per rank, on one process too; nested values can be padded",
            "The result should have the same shape for any number of processes.",
            ("*gathering.gather/0-dim/shape", "*gathering.gather/nested with padding"),
        ),
        Difference(
            "`DataLoaderSlice`",
            "lacks the attributes of its loader",
            "has the attributes of its loader",
            "It replaces the loader.",
            ("small_parts.slices/batch_size",),
        ),
        Difference(
            "Nested `LimitBatches`",
            "`KeyError` when the outer one ends",
            "works",
            "A context manager should restore what it found.",
            ("small_parts.limits/nested",),
        ),
    ),
    "Checkpoints": (
        Difference(
            "`load_checkpoint` before a scheduler exists",
            "`ValueError`",
            "loads the rest",
            "Schedulers are created when a run starts.",
            ("checkpoints.loading/*",),
        ),
        Difference(
            "`load_training_state` before a run",
            "silently loads nothing",
            "loads",
            "Loading should load.",
            ("checkpoints.training_states/before a run/*",),
        ),
    ),
    "Freezing and averaging": (
        Difference(
            "Groups and layers without parameters",
            "`is_frozen` is False",
            "`is_frozen` is True",
            "Nothing in them is trained.",
            ("small_parts.freezing/backbone*flags*",),
        ),
        Difference(
            "Parameters held directly by a model or by a module with children",
            "are never frozen",
            "are frozen with their group; those of the model itself with the first group",
            "A backbone whose class token is trained isn't frozen.",
            ("small_parts.freezing/backbone*",),
        ),
        Difference(
            "`freeze(set_modules_as_eval=True)`",
            "freezes nothing, and sets no module to evaluation mode",
            "does both",
            "That is what the argument says.",
            ("small_parts.freezing/*frozen as evaluation/*",),
        ),
        Difference(
            "The index of a layer group that does not exist",
            "everything is frozen",
            "an `IndexError` that lists the groups",
            "Errors should name their cause.",
            ("small_parts.freezing/*index too large/*",),
        ),
        Difference(
            "Counters in an average",
            "keep their initial value",
            "are copied",
            "BatchNorm's counter cannot be averaged.",
            ("small_parts.averaging/batch norm/num_batches_tracked/values",),
        ),
    ),
    "Names and arguments": (
        Difference(
            "`save_checkpoint` with more than three positional arguments",
            "the fourth is `save_scheduler`, the fifth `save_per_node`",
            "the fourth is `save_per_node`; `save_scheduler` is keyword-only",
            "This is the order of earlier releases, which saved no scheduler. Pass both by name.",
            ("signatures.members/*Trainer*/save_checkpoint/*",),
        ),
        Difference(
            "Arguments of run histories, by name",
            "`metric_name`, `metric_value`",
            "`name`, `value`",
            "Shorter names. Positional calls work unchanged; the old names raise `TypeError`.",
            ("signatures.members/*RunHistory/*/metric_*",),
        ),
        Difference(
            "Arguments of the decorators and of `ModelEma.update_fn`, by name",
            "`func`; `ema_model_weights`, `updated_model_weights`",
            "`function`; `average`, `current`",
            "They are passed by position.",
            ("signatures.members/*process_zero*/func", "signatures.members/ModelEma/update_fn/*"),
        ),
        Difference(
            "Arguments of events in `TrainerCallback`",
            "by position or by name",
            "by name; `super().on_train_step_end(trainer, batch, batch_output)` works too",
            "Events may gain arguments.",
            ("signatures.members/TrainerCallback/on_*_step_end/*",),
        ),
        Difference(
            "`CallbackHandler()` without callbacks",
            "fails: an argument is missing",
            "a handler without callbacks",
            "The argument is optional.",
            ("signatures.members/CallbackHandler/()/callbacks",),
        ),
        Difference(
            "`TerminateOnNaNCallback.check_for_nan_after_batch`",
            "exists",
            "does not exist: losses are read in bulk, not after each batch",
            "Reading a loss waits for the device.",
            ("signatures.members/TerminateOnNaNCallback/check_for_nan_after_batch",),
        ),
        Difference(
            "Names that a module only imports",
            "can be imported from there: callbacks from `trainer`, `ModelEma` from `callbacks`, ...",
            "are imported from the module that defines them, or from its package",
            "Each name has one home. Names meant to be imported from two places still can be.",
            ("signatures.names/*",),
        ),
    ),
}


def all_differences() -> Iterator[Difference]:
    """The differences of all sections."""
    for section in SECTIONS.values():
        yield from section


def explanation(finding: Finding) -> Difference | None:
    """The first difference that covers `finding`, or None if `finding` is unintended."""
    return next((difference for difference in all_differences() if difference.covers(finding)), None)
