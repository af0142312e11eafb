"""The differences from the reference that are meant, each with its reason. Any other one fails the suite."""

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from tests.differential.comparing import Finding


@dataclass(frozen=True)
class Difference:
    """A difference that is meant.

    Attributes:
        what: what it is about.
        reference: what the reference does.
        ours: what this library does.
        reason: why.
        where: patterns of the observations that show it; ``*`` stands for anything.
    """

    what: str
    reference: str
    ours: str
    reason: str
    where: tuple[str, ...]

    def covers(self, finding: Finding) -> bool:
        """Whether it explains `finding`."""
        return any(fnmatchcase(finding.name, pattern) for pattern in self.where)


_ON_RANKS = "rank ? of 2, gathering"

SECTIONS: dict[str, tuple[Difference, ...]] = {
    "Losses, updates and what is recorded": (
        Difference(
            "Losses with gradient accumulation",
            "`train_loss_epoch` is the loss divided by `gradient_accumulation_steps`",
            "the mean loss of the epoch's samples",
            "The loss of a run should not depend on how its batches are cut.",
            (
                "*/*accumulation*/history/train_loss_epoch",
                "stock_callbacks.evaluating_by_steps/accumulation/history/train_loss_epoch",
                "running.arguments/step limit and accumulation/history/train_loss_epoch",
            ),
        ),
        Difference(
            "Short batches and short windows in an update",
            "every batch weighs the same, however short it is, and a window cut short by the end of the epoch is "
            "divided by `gradient_accumulation_steps` all the same",
            "every sample weighs the same: the update equals the one of a single large batch",
            "Accumulating is a way to save memory, not another optimization. Weights and later losses follow.",
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
            "the gradient of the update is clipped once, when it is complete",
            "Clipping a sum that isn't finished changes its direction.",
            ("running.arguments/accumulation and clipping/*",),
        ),
        Difference(
            "Data that does not divide by the ranks",
            "the last batches are filled up with samples of the epoch's beginning, which count twice",
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
            "one more than the updates of the run",
            "the updates of the run",
            "It is the number of updates.",
            ("*/config/max_num_train_steps",),
        ),
        Difference(
            "`num_update_steps_per_epoch` and `NUM_UPDATE_STEPS_PER_EPOCH` on several ranks",
            "the updates of all ranks added up: twice as many with two ranks",
            "the updates of the epoch; the same as `PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH`",
            "An update is one step of the optimizer on all ranks together. Schedules made from it end with the run.",
            (f"{_ON_RANKS}.training/*/config/num_update_steps_per_epoch",),
        ),
        Difference(
            "Run config without an evaluation set, or after `evaluate` alone",
            "sizes of the run that didn't happen: the training batch size, one epoch, 0 updates",
            "`None`",
            "There is no such loader. With loaders of your own, the config has their batch sizes.",
            (
                "*/config/eval_per_device_batch_size",
                "*/config/eval_total_batch_size",
                "running.config_as_dict/after evaluate/*",
            ),
        ),
        Difference(
            '`run_config["num_epochs"]`',
            "`TypeError`: fields are attributes only",
            "fields are items, too, as in earlier releases",
            "Older scripts read them so.",
            ("idioms.files_of_ones_own/items",),
        ),
        Difference(
            "A second `train` with `reset_run_history=False`",
            "ends after its first update: the updates of the earlier run count against its limit",
            "runs all its epochs, numbered on",
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
            "Batches without a target, of a single item, or dicts with a loss function that can't take them",
            "`IndexError` or `KeyError` from inside the library",
            "a `ValueError` that says what the batch is and which method to override",
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
            "The first rate and the last one",
            "the first call of `step` sets the rates of update 0 again: all rates come one update late, and the "
            "minimum is never reached",
            "update n has the rates of n finished updates; after the last update the minimum is reached",
            "A schedule should fit the run that it is for. States of schedulers carry the number over.",
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
            "the decay ends as many updates early as the warmup takes, with a jump to the minimum; "
            "`warmup_starting_lr_ratio` sets the first rate but not the slope",
            "half a cosine from the end of the warmup to the start of the cooldown; the warmup begins at the ratio",
            "That is what the arguments say.",
            (
                "schedulers.cosine/warmup*/rates/*",
                "schedulers.cosine/all/rates/*",
                "schedulers.cosine_by_number/*",
            ),
        ),
        Difference(
            "Checkpoints of `WSDLrScheduler`",
            "with several checkpoints the last one lies at a part of the run, and all that follows is trained at "
            "the minimum; short runs end with `ZeroDivisionError`",
            "the last checkpoint is at `total_steps`",
            "The last decay should be the end of the run.",
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
            "Schedulers in a run that `max_num_train_steps` ends",
            "the schedule is as long as `num_epochs` says",
            "the schedule is as long as the run; `NUM_EPOCHS` times updates per epoch gives exactly its updates",
            "A run that ends at 99.8 % of its rate has not been annealed.",
            ("scheduling.placeholders/step limit/times a number/*",),
        ),
        Difference(
            "timm's schedulers",
            "run an epoch ahead, or several updates where they count updates; without an evaluation set they are "
            "never stepped",
            "stepped with the number of finished epochs, and of updates",
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
            "A scheduler made by `create_scheduler` alone",
            "the override is called only if `create_scheduler_fn` is given",
            "the override is enough",
            "Overriding a method should have an effect.",
            ("scheduling.of_ones_own/overridden/*",),
        ),
        Difference(
            "Subclasses of `StatefulSchedulerBase`",
            "must define `state_dict` and `load_state_dict`",
            "need only `get_updated_values`",
            "The base knows what it counts.",
            ("scheduling.of_ones_own/subclass", "schedulers.subclasses/_Halving"),
        ),
        Difference(
            "States of schedulers",
            "hold the settings, and WSD's not its position",
            "hold the position and the values that are scheduled from; the reference's are taken over",
            "Settings belong to the script; a resumed run should go on where it was.",
            ("schedulers.states/*/keys",),
        ),
        Difference(
            "Arguments that can't work",
            "`AssertionError`, `TypeError` or `KeyError`, or accepted: a warmup longer than the run",
            "a `ValueError` that names the argument and the remedy",
            "Errors should name their cause.",
            ("schedulers.bad_arguments/*", "schedulers.other_fields/absent/raises"),
        ),
    ),
    "Order and stopping": (
        Difference(
            "`StopTrainingError` within an update",
            "the update is dropped where it is",
            "the update is finished first, and all ranks stop at the same place",
            "Otherwise gradients stay behind, and other ranks wait for ever.",
            ("order.stopping/on_train_step_*/calls",),
        ),
        Difference(
            "`StopTrainingError` elsewhere",
            "what belongs to the same moment is left out; raised by `on_training_run_start` or "
            "`on_training_run_end` it ends the script",
            "the event of the same moment still comes, then `on_stop_training_error` and the end of the run; "
            "`train` returns. An epoch that is complete is counted.",
            "Every way to stop should end in the same way.",
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
            "An override should not depend on another argument. The default does nothing then.",
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
            "counts batches, and evaluates between a forward and its backward pass; the loss is shown but not kept",
            "counts updates, and evaluates when one is finished; the loss is kept as `intermediate_eval_loss`",
            "Within an update there is nothing consistent to evaluate.",
            ("order.with_other_callbacks/steps*/calls", "stock_callbacks.evaluating_by_steps/*"),
        ),
    ),
    "Callbacks": (
        Difference(
            "A loss that is not a number",
            "the process ends with `SystemExit`",
            "the run is ended like an early stop; then `NonFiniteLossError` (an `ArithmeticError`) says which batch",
            "A library should not end the process, and callbacks should hear of it.",
            ("stock_callbacks.not_a_number/*",),
        ),
        Difference(
            "`ModelEmaCallback`",
            "the average is updated once an epoch",
            "the average is updated after each update",
            "`decay=0.99` is meant per update: a hundred epochs is no useful memory.",
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
            "nothing is ever better than NaN: the run stops",
            "NaN is no value; the first number is the first best",
            "One bad evaluation should not end a run that recovers.",
            ("stock_callbacks.early_stopping/nan*",),
        ),
        Difference(
            "Metrics that are recorded after the logger has run",
            "are logged an epoch late, the last ones never",
            "are logged when the epoch ends",
            "Values should be shown with the epoch they belong to.",
            ("stock_callbacks.logging/metrics after/*",),
        ),
        Difference(
            "Something that is no callback",
            "`AttributeError` when it is added",
            "a `TypeError` that says what a callback is",
            "Errors should name their cause.",
            ("stock_callbacks.handlers/no class at all/*",),
        ),
    ),
    "Data": (
        Difference(
            "`worker_init_fn` of the default loader arguments",
            "seeds numpy in each worker",
            "absent: rows and their augmentation are seeded by epoch and batch, whatever the number of workers",
            "The same run with another number of workers, or resumed, should see the same data.",
            ("running.*/*worker_init_fn",),
        ),
        Difference(
            "`collate_fn` among the loader arguments",
            "`TypeError`: given twice",
            "is used",
            "It is an argument of a loader.",
            ("running.samplers/collate_fn",),
        ),
        Difference(
            "Attributes of prepared loaders",
            "`batch_size` is None and `drop_last` False, whatever was asked for",
            "what was asked for",
            "They are read to compute sizes.",
            ("loaders.attributes/*",),
        ),
        Difference(
            "`gather`",
            "0-dim tensors stay 0-dim on one process; nested values and `padding_value` exclude each other",
            "0-dim tensors become one row of each rank, on one process too; nested values are taken with padding",
            "The result should have the same shape at any number of processes.",
            ("*gathering.gather/0-dim/shape", "*gathering.gather/nested with padding"),
        ),
        Difference(
            "`DataLoaderSlice`",
            "has no attributes of its loader",
            "has those of its loader",
            "It stands in the loader's place.",
            ("small_parts.slices/batch_size",),
        ),
        Difference(
            "`LimitBatches` within another",
            "`KeyError` when the outer one ends",
            "may be nested",
            "A context manager should put back what it found.",
            ("small_parts.limits/nested",),
        ),
    ),
    "Checkpoints": (
        Difference(
            "`load_checkpoint` before a scheduler exists",
            "`ValueError`",
            "loads the rest",
            "Schedulers are made when a run starts.",
            ("checkpoints.loading/*",),
        ),
        Difference(
            "`load_training_state` before a run",
            "loads nothing, without a word",
            "loads",
            "A restored model should be a restored model.",
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
            "Parameters that a model or a module with children holds itself",
            "are never frozen",
            "are frozen with their group; those of the model itself with the first",
            "A frozen backbone whose class token is trained isn't frozen.",
            ("small_parts.freezing/backbone*",),
        ),
        Difference(
            "`freeze(set_modules_as_eval=True)`",
            "freezes nothing, and sets no module to evaluation",
            "does both",
            "That is what it says.",
            ("small_parts.freezing/*frozen as evaluation/*",),
        ),
        Difference(
            "An index of a layer group that does not exist",
            "everything is frozen",
            "an `IndexError` with the groups that there are",
            "Errors should name their cause.",
            ("small_parts.freezing/*index too large/*",),
        ),
        Difference(
            "Counters in an average",
            "stay as they were at the beginning",
            "are copied",
            "BatchNorm's counter has no average.",
            ("small_parts.averaging/batch norm/num_batches_tracked/values",),
        ),
    ),
    "Names and arguments": (
        Difference(
            "`save_checkpoint` with more than three positional arguments",
            "the fourth is `save_scheduler`, the fifth `save_per_node`",
            "the fourth is `save_per_node`; `save_scheduler` goes by name",
            "The order is that of earlier releases, which saved no scheduler. Give both by name.",
            ("signatures.members/*Trainer*/save_checkpoint/*",),
        ),
        Difference(
            "Arguments of run histories, by name",
            "`metric_name`, `metric_value`",
            "`name`, `value`",
            "Shorter; by position nothing changes, and the other names are a `TypeError`.",
            ("signatures.members/*RunHistory/*/metric_*",),
        ),
        Difference(
            "Arguments of the decorators and of `ModelEma.update_fn`, by name",
            "`func`; `ema_model_weights`, `updated_model_weights`",
            "`function`; `average`, `current`",
            "They are called by position.",
            ("signatures.members/*process_zero*/func", "signatures.members/ModelEma/update_fn/*"),
        ),
        Difference(
            "Arguments of events in `TrainerCallback`",
            "by position or by name",
            "by name; `super().on_train_step_end(trainer, batch, batch_output)` works, too",
            "Events may get more arguments.",
            ("signatures.members/TrainerCallback/on_*_step_end/*",),
        ),
        Difference(
            "`CallbackHandler()` without callbacks",
            "an argument is missing",
            "a handler without callbacks",
            "The argument is optional.",
            ("signatures.members/CallbackHandler/()/callbacks",),
        ),
        Difference(
            "`TerminateOnNaNCallback.check_for_nan_after_batch`",
            "is there",
            "isn't: losses are read in bulk, not after each batch",
            "Reading a loss waits for the device.",
            ("signatures.members/TerminateOnNaNCallback/check_for_nan_after_batch",),
        ),
        Difference(
            "Names that a module only imports",
            "can be imported from there: callbacks from `trainer`, `ModelEma` from `callbacks`, ...",
            "are imported from the module that defines them, or from its package",
            "Each name has one home. What is meant to be imported from two places can be.",
            ("signatures.names/*",),
        ),
    ),
}


def all_differences() -> Iterator[Difference]:
    """Those of all sections."""
    for section in SECTIONS.values():
        yield from section


def explanation(finding: Finding) -> Difference | None:
    """The first difference that covers `finding`, None if it isn't meant."""
    return next((difference for difference in all_differences() if difference.covers(finding)), None)
