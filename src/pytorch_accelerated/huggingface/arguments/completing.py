"""How arguments are completed: by other names, by reading values, and by defaults that follow from other arguments."""

from __future__ import annotations

import dataclasses
from numbers import Real

from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.huggingface.arguments.argument import arguments_of
from pytorch_accelerated.huggingface.arguments.checks import check_kinds
from pytorch_accelerated.huggingface.arguments.fields import Arguments
from pytorch_accelerated.huggingface.arguments.strategies import IntervalStrategy, SchedulerType


def complete(args: Arguments) -> None:
    """Bring all values into one form, and fill in those that follow from others.

    Raises:
        ArgumentTypeError: if a value is of the wrong kind.
        ConfigurationError: if a value cannot be read, or two names of one argument contradict each other.
    """
    if args.output_dir is None:
        args.output_dir = "trainer_output"
    _apply_other_names(args)
    read_values(args)
    check_kinds(args)
    _fill_in_what_follows(args)


def _apply_other_names(args: Arguments) -> None:
    """Move what was given under other names, so that a later `dataclasses.replace` can't contradict itself."""
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    for other, argument in arguments_of(type(args)).items():
        if not (name := argument.same_as) or (given := getattr(args, other)) == defaults[other]:
            continue
        if argument.gives is not None and given is not True:
            continue  # no flag, which is reported with all other values of the wrong kind
        if argument.limit and isinstance(given, Real) and not argument.limit.holds(given):
            raise ConfigurationError(f"`{other}` is {given!r}: give {argument.limit.words}.")
        present, value = getattr(args, name), given if argument.gives is None else argument.gives
        if isinstance(value, list):
            value = [*present, *(item for item in value if item not in present)]
        elif present not in (defaults[name], value):
            raise ConfigurationError(
                f"`{other}` is {given!r} and `{name}` is {present!r}, but they are two names of one argument: "
                f"give `{name}` alone."
            )
        setattr(args, name, value)
        setattr(args, other, defaults[other])


def read_values(args: Arguments) -> None:
    """Bring values into the form that is checked, strings to members of their enums for example."""
    for name, argument in arguments_of(type(args)).items():
        if argument.kind and not (getattr(args, name) is None and argument.may_be_none):
            setattr(args, name, argument.kind.read(name, getattr(args, name)))


def _fill_in_what_follows(args: Arguments) -> None:
    """Fill in defaults that depend on other arguments."""
    if args.eval_strategy == IntervalStrategy.STEPS and args.eval_steps is None:
        args.eval_steps = args.logging_steps
    if args.eval_strategy != IntervalStrategy.NO:
        args.do_eval = True
    needs_metric = args.load_best_model_at_end or args.lr_scheduler_type == SchedulerType.REDUCE_ON_PLATEAU
    if needs_metric and args.metric_for_best_model is None:
        args.metric_for_best_model = "loss"
    if args.metric_for_best_model is not None and args.greater_is_better is None:
        args.greater_is_better = not args.metric_for_best_model.endswith("loss")
    if args.torch_compile_backend is not None or args.torch_compile_mode is not None:
        args.torch_compile = True
    if args.report_to is None:
        args.report_to = [] if args.logging_dir is None else ["tensorboard"]
    if args.disable_tqdm is None:
        args.disable_tqdm = False
