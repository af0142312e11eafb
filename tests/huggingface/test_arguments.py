"""The arguments of a run: defaults, what follows from what, what is rejected, and command lines."""

import abc
import contextlib
import copy
import dataclasses
import importlib.util
import inspect
import json
import math
import pickle
import re
import sys
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pytorch_accelerated.errors import ArgumentTypeError, ConfigurationError, MissingDependencyError
from pytorch_accelerated.huggingface import Trainer
from pytorch_accelerated.huggingface.arguments.strategies import (
    IntervalStrategy,
    OptimizerNames,
    ParallelMode,
    SaveStrategy,
    SchedulerType,
)
from pytorch_accelerated.huggingface.arguments.training_arguments import TrainingArguments
from pytorch_accelerated.huggingface.events import reporting
from pytorch_accelerated.huggingface.events.reporting import TensorBoardCallback
from pytorch_accelerated.huggingface.events.trackers import ReportingCallback, reporting_callbacks
from tests.support.processes import run_on_ranks

RANKS = Path(__file__).parents[1] / "ranks"


def make(**arguments: Any) -> TrainingArguments:
    """For names and values that a type checker would object to."""
    return TrainingArguments(**arguments)


def make_trainer_of(args: TrainingArguments) -> Trainer:
    return Trainer(torch.nn.Linear(1, 1), args)


@pytest.mark.fact(
    "Arguments: Defaults are batches of 8, 3 epochs, lr 5e-5, AdamW(0.9, 0.999, 1e-8), no weight decay, clipping at 1"
)
@pytest.mark.fact("Arguments: Defaults are logging and saving every 500 steps, no evaluation, seed 42")
@pytest.mark.fact('Arguments: By default nothing is reported anywhere, and output_dir is "trainer_output"')
def test_without_arguments_the_well_known_defaults_apply() -> None:
    args = TrainingArguments()
    assert (args.per_device_train_batch_size, args.per_device_eval_batch_size) == (8, 8)
    assert (args.num_train_epochs, args.max_steps, args.learning_rate, args.weight_decay) == (3.0, -1, 5e-5, 0.0)
    assert (args.adam_beta1, args.adam_beta2, args.adam_epsilon, args.max_grad_norm) == (0.9, 0.999, 1e-8, 1.0)
    assert (args.lr_scheduler_type, args.warmup_steps) == (SchedulerType.LINEAR, 0)
    assert (args.logging_strategy, args.logging_steps) == (IntervalStrategy.STEPS, 500)
    assert (args.eval_strategy, args.eval_steps, args.do_eval) == (IntervalStrategy.NO, None, False)
    assert (args.save_strategy, args.save_steps, args.save_total_limit) == (SaveStrategy.STEPS, 500, None)
    assert (args.seed, args.logging_nan_inf_filter, args.remove_unused_columns) == (42, True, True)
    assert (args.report_to, args.output_dir, args.disable_tqdm) == ([], "trainer_output", False)


@pytest.mark.parametrize(
    ("name", "value"),
    [("past_index", 0), ("push_to_hub", 0), ("save_safetensors", 1), ("tf32", True), ("local_rank", 3)],
)
def test_a_value_that_nearly_asks_for_nothing_is_rejected(name: str, value: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="unsupported"):
        make(**{name: value})


def test_reading_an_unknown_attribute_is_the_usual_error() -> None:
    args = TrainingArguments()
    assert not hasattr(args, "learning_rat")
    with pytest.raises(AttributeError, match="'TrainingArguments' object has no attribute 'learning_rat'"):
        args.learning_rat  # type: ignore[attr-defined]  # noqa: B018  # it is the reading that fails


def test_an_unsupported_argument_that_is_set_later_is_rejected_too() -> None:
    args: Any = TrainingArguments()
    args.push_to_hub = False
    args.check()
    args.push_to_hub = True
    with pytest.raises(ArgumentTypeError, match="`push_to_hub` is True, but this argument is unsupported"):
        args.check()


def test_a_subclass_may_define_an_unsupported_argument_itself() -> None:
    @dataclass
    class MyArguments(TrainingArguments):
        push_to_hub: bool = False
        project: str = ""

    args = MyArguments(push_to_hub=True, hub_token=None, project="mine")  # type: ignore[call-arg]
    assert (args.push_to_hub, args.project) == (True, "mine")
    assert args.to_dict()["push_to_hub"] is True


def test_a_subclass_may_be_abstract_too() -> None:
    class Named(abc.ABC):
        @property
        @abc.abstractmethod
        def name(self) -> str: ...

    @dataclass
    class MyArguments(TrainingArguments, Named):
        name: str = "mine"

    assert MyArguments(save_safetensors=True).name == "mine"  # type: ignore[call-arg]


def test_an_unknown_argument_is_a_type_error_that_names_the_nearest_one() -> None:
    with pytest.raises(TypeError, match="`learning_rat` is 1, but there is no argument.* mean `learning_rate`"):
        make(learning_rat=1)
    with pytest.raises(TypeError, match=r"`zzz` is 1.*docs/reference/huggingface_arguments\.md"):
        make(zzz=1)


def test_all_unknown_arguments_come_in_one_error() -> None:
    with pytest.raises(ArgumentTypeError, match="`push_to_hub` is True.*`bogus` is 1"):
        make(push_to_hub=True, bogus=1)


@pytest.mark.fact("Arguments: A misspelt word is rejected with the argument and the nearest word")
@pytest.mark.parametrize(
    ("name", "word", "meant"),
    [
        ("optim", "adamw_toch", "adamw_torch"),
        ("lr_scheduler_type", "cosin", "cosine"),
        ("eval_strategy", "epochs", "epoch"),
        ("save_strategy", "Steps", "steps"),
        ("train_sampling_strategy", "randm", "random"),
    ],
)
def test_a_misspelt_word_brings_the_nearest_one(name: str, word: str, meant: str, tmp_path: Path) -> None:
    message = f"`{name}` cannot work: '{word}' is no .*Did you mean '{meant}'"
    with pytest.raises(ConfigurationError, match=message):
        make(**{name: word})
    args = TrainingArguments(str(tmp_path))
    setattr(args, name, word)
    with pytest.raises(ConfigurationError, match=message):
        make_trainer_of(args)


def test_words_that_are_set_later_become_what_they_would_have_been(tmp_path: Path) -> None:
    args: Any = TrainingArguments(str(tmp_path), use_cpu=True)
    args.lr_scheduler_type = "cosine"
    make_trainer_of(args)
    assert args.lr_scheduler_type is SchedulerType.COSINE


@pytest.mark.parametrize("word", ["zzz", 3])
def test_a_word_that_is_near_no_other_brings_all(word: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=f"{word!r} is no SaveStrategy. Choose among 'no', 'steps', 'epoch', 'best'"
    ):
        make(save_strategy=word)


@pytest.mark.fact("Arguments: Strategies are enums whose members equal their strings: no, steps, epoch")
@pytest.mark.fact('Arguments: save_strategy may also be "best"; an unknown strategy is a ValueError')
def test_strategies_equal_their_strings() -> None:
    args = TrainingArguments(logging_strategy="epoch", eval_strategy=IntervalStrategy.STEPS, save_strategy="no")
    assert args.logging_strategy is IntervalStrategy.EPOCH
    assert args.eval_strategy == "steps"
    assert f"{args.save_strategy}" == str(args.save_strategy) == "no"
    assert [word.value for word in IntervalStrategy] == ["no", "steps", "epoch"]
    assert [word.value for word in SaveStrategy] == ["no", "steps", "epoch", "best"]
    with pytest.raises(ValueError, match="`eval_strategy` cannot work: 'best' is no IntervalStrategy.*'no', 'steps'"):
        TrainingArguments(eval_strategy="best")
    with pytest.raises(ValueError, match="`save_strategy` cannot work: 'sometimes'"):
        TrainingArguments(save_strategy="sometimes")


def test_strategies_are_those_of_transformers() -> None:
    from transformers.trainer_utils import IntervalStrategy as GenuineInterval
    from transformers.trainer_utils import SaveStrategy as GenuineSave
    from transformers.trainer_utils import SchedulerType as GenuineSchedule
    from transformers.training_args import OptimizerNames as GenuineOptimizers

    assert words_of(IntervalStrategy) == words_of(GenuineInterval)
    assert words_of(SaveStrategy) == words_of(GenuineSave)
    assert words_of(SchedulerType).items() <= words_of(GenuineSchedule).items()
    assert words_of(OptimizerNames).items() <= words_of(GenuineOptimizers).items()


def words_of(enum: type[Enum]) -> dict[str, str]:
    return {name: member.value for name, member in enum.__members__.items()}


@pytest.mark.fact("Arguments: eval_steps defaults to logging_steps, and an eval_strategy sets do_eval")
def test_evaluation_steps_default_to_logging_steps() -> None:
    args = TrainingArguments(eval_strategy="steps", logging_steps=7)
    assert (args.eval_steps, args.do_eval) == (7, True)
    assert TrainingArguments(eval_strategy="epoch").do_eval


@pytest.mark.fact('Arguments: logging_steps=0 with "steps" is a ValueError')
@pytest.mark.parametrize(
    "arguments",
    [
        {"logging_steps": 0},
        {"save_steps": 0},
        {"eval_strategy": "steps", "eval_steps": 0},
        {"save_steps": -5},
    ],
)
def test_steps_that_would_never_come_are_refused(arguments: dict[str, Any]) -> None:
    name = next(name for name in arguments if name.endswith("_steps"))
    with pytest.raises(
        ValueError, match=rf"`{name}` is {arguments[name]}.*or {name.removesuffix('steps')}strategy='no'"
    ):
        TrainingArguments(**arguments)


def test_unused_numbers_of_steps_may_be_zero() -> None:
    assert TrainingArguments(logging_strategy="epoch", logging_steps=0).logging_steps == 0


@pytest.mark.fact("Arguments: Numbers of steps are integers or fractions in (0, 1); 10.5 is a ValueError")
@pytest.mark.parametrize("name", ["logging_steps", "eval_steps", "save_steps"])
def test_steps_are_whole_numbers_or_shares(name: str) -> None:
    assert getattr(make(**{name: 0.25}), name) == 0.25
    whole = getattr(make(**{name: 20.0}), name)
    assert (whole, type(whole)) == (20, int)
    for wrong in (10.5, math.inf, math.nan, -0.5):
        with pytest.raises(ValueError, match=f"`{name}` is {wrong}"):
            make(**{name: wrong})


@pytest.mark.fact('Arguments: load_best_model_at_end needs matching strategies, unless save_strategy is "best"')
@pytest.mark.parametrize(
    ("eval_strategy", "save_strategy", "fits"),
    [
        ("epoch", "epoch", True), ("steps", "steps", True), ("epoch", "best", True), ("steps", "best", True),
        ("epoch", "steps", False), ("steps", "no", False), ("no", "steps", False), ("no", "no", False),
        ("no", "best", False),
    ],
)  # fmt: skip
def test_the_best_model_needs_an_evaluation_of_each_checkpoint(
    eval_strategy: str, save_strategy: str, fits: bool
) -> None:
    strategies = {"eval_strategy": eval_strategy, "save_strategy": save_strategy}
    with contextlib.nullcontext() if fits else pytest.raises(ValueError, match=f"`eval_strategy` is '{eval_strategy}'"):
        make(load_best_model_at_end=True, **strategies)


@pytest.mark.fact("Arguments: load_best_model_at_end needs save_steps to be a multiple of eval_steps")
@pytest.mark.parametrize(
    ("eval_steps", "save_steps", "fits"),
    [(3, 6, True), (3, 3, True), (0.1, 0.3, True), (3, 4, False), (6, 3, False), (0.2, 0.5, False), (5, 0.5, False)],
)
def test_checkpoints_must_come_at_multiples_of_evaluations(eval_steps: float, save_steps: float, fits: bool) -> None:
    steps: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": eval_steps, "save_steps": save_steps}
    assert make(**steps).save_steps == save_steps
    with contextlib.nullcontext() if fits else pytest.raises(ValueError, match="is not a multiple of `eval_steps`"):
        make(load_best_model_at_end=True, **steps)


@pytest.mark.fact(
    'Arguments: load_best_model_at_end compares by "loss" by default; greater is better unless the name ends so'
)
def test_the_direction_of_the_metric_follows_from_its_name() -> None:
    assert TrainingArguments().greater_is_better is None
    args = TrainingArguments(load_best_model_at_end=True, eval_strategy="epoch", save_strategy="epoch")
    assert (args.metric_for_best_model, args.greater_is_better) == ("loss", False)
    assert TrainingArguments(metric_for_best_model="accuracy").greater_is_better is True
    assert TrainingArguments(metric_for_best_model="eval_my_loss").greater_is_better is False
    assert TrainingArguments(metric_for_best_model="error", greater_is_better=False).greater_is_better is False


@pytest.mark.fact("Arguments: fp16 together with bf16 is a ValueError")
@pytest.mark.fact("Arguments: reduce_lr_on_plateau needs an eval_strategy, and depends on the loss by default")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fp16": True, "bf16": True}, "`fp16` and `bf16` are both True"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "`lr_scheduler_type` is 'reduce_lr_on_plateau'"),
        ({"save_strategy": "best"}, "`save_strategy` is 'best', but `eval_strategy` is 'no'"),
        ({"report_to": "wand"}, r"`report_to` is \['wand'\]: choose among 'tensorboard', 'mlflow', 'wandb', "),
        ({"report_to": ["tensorboard", "none"]}, "`report_to`"),
        ({"optim": "muon"}, "'muon' is no OptimizerNames.*optimizer_cls_and_kwargs"),
        ({"lr_scheduler_kwargs": "{'a': 1}"}, "`lr_scheduler_kwargs`.*no JSON can be read"),
        ({"lr_scheduler_kwargs": "[1]"}, "`lr_scheduler_kwargs`.*not of a dict"),
        ({"fsdp": True, "fsdp_config": "no_such_file.json"}, "`fsdp_config` is 'no_such_file.json'"),
        ({"warmup_ratio": 0.1, "warmup_steps": 3}, "two names of one argument: give `warmup_steps` alone"),
        ({"evaluation_strategy": "epoch", "eval_strategy": "steps"}, "give `eval_strategy` alone"),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        TrainingArguments(**arguments)
    assert isinstance(caught.value, ConfigurationError)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("do_train", "false"), ("per_device_train_batch_size", "8"), ("per_device_train_batch_size", 8.0),
        ("max_steps", True), ("learning_rate", "5e-5"), ("seed", None), ("label_names", "labels"), ("log_level", 10),
        ("include_for_metrics", "inputs"), ("fsdp", ["full_shard"]), ("fsdp_config", [1]), ("adafactor", "false"),
        ("ddp_find_unused_parameters", 1),
    ],
)  # fmt: skip
def test_a_value_that_is_nearly_of_its_kind_is_a_type_error(name: str, value: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=re.escape(f"`{name}` is {value!r}: give")):
        make(**{name: value})


def test_all_complaints_come_in_one_error() -> None:
    with pytest.raises(ConfigurationError, match="`learning_rate` is -1.*`fp16` and `bf16`"):
        TrainingArguments(learning_rate=-1, fp16=True, bf16=True)


def test_arguments_changed_later_can_be_checked_again() -> None:
    args = TrainingArguments()
    args.label_names = []
    args.eval_strategy = "epoch"
    args.check()
    args.save_strategy = "steps"
    args.load_best_model_at_end = True
    with pytest.raises(ConfigurationError, match="`eval_strategy` is 'epoch' and `save_strategy` is 'steps'"):
        args.check()


@pytest.mark.fact("Arguments: warmup_steps below 1 is a fraction of the run, rounded up")
def test_the_warmup_may_be_a_share() -> None:
    assert TrainingArguments(warmup_steps=0.25).get_warmup_steps(11) == 3
    assert TrainingArguments(warmup_steps=3).get_warmup_steps(11) == 3
    assert TrainingArguments(warmup_steps=1.0).get_warmup_steps(11) == 1
    assert TrainingArguments().get_warmup_steps(11) == 0


@pytest.mark.fact('Arguments: report_to "none" or ["none"] becomes [], "tensorboard" becomes ["tensorboard"]')
@pytest.mark.parametrize(
    ("given", "names"),
    [(None, []), ("none", []), (["none"], []), ([], []), ("tensorboard", ["tensorboard"])],
)
def test_report_to_becomes_a_list(given: str | list[str] | None, names: list[str]) -> None:
    args = TrainingArguments(report_to=given)
    assert args.report_to == names
    assert reporting_callbacks(names) == [TensorBoardCallback] * len(names)


@pytest.mark.fact("Arguments: report_to takes several names; all means tensorboard, mlflow and wandb, where installed")
def test_several_trackers_are_reported_to_by_name() -> None:
    installed = [name for name in ("tensorboard", "mlflow", "wandb") if importlib.util.find_spec(name)]
    assert TrainingArguments(report_to="all").report_to == installed
    pytest.importorskip("mlflow")
    kinds = [type(callback) for callback in reporting_callbacks(["mlflow", "tensorboard"])]
    assert kinds == [type, ReportingCallback]
    with pytest.raises((RuntimeError, MissingDependencyError), match="comet"):  # not among what the tests install
        make_trainer_of(TrainingArguments(report_to="comet_ml"))


@pytest.mark.fact("Arguments: logging_dir turns TensorBoard on; if that is missing, an error names the extra")
def test_a_logging_dir_means_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TrainingArguments(logging_dir="logs").report_to == ["tensorboard"]
    assert TrainingArguments(logging_dir="logs", report_to="none").report_to == []
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert TrainingArguments(logging_dir="logs").report_to == ["tensorboard"]
    with pytest.raises(MissingDependencyError, match=r"pytorch-accelerated\[tensorboard\]"):
        reporting.TensorBoardCallback()


def test_a_changed_copy_of_arguments_with_old_names_is_not_a_contradiction() -> None:
    args = TrainingArguments(evaluation_strategy="epoch", include_inputs_for_metrics=True, logging_dir="logs")
    changed = dataclasses.replace(args, eval_strategy="steps")
    assert (changed.eval_strategy, changed.include_for_metrics) == ("steps", ["inputs"])


@pytest.mark.parametrize(
    "arguments",
    [
        {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch"},
        {"report_to": "none", "logging_dir": "logs"},
        {"fsdp": "true", "fsdp_config": '{"min_num_params": 1}', "include_num_input_tokens_seen": True},
    ],
)
def test_copies_of_arguments_are_the_same(arguments: dict[str, Any]) -> None:
    args: Any = make(**arguments, push_to_hub=False)
    copies = [copy.copy(args), copy.deepcopy(args), pickle.loads(pickle.dumps(args)), dataclasses.replace(args)]
    for copied in [*copies, make(**args.to_dict())]:
        assert copied == args
        assert copied.push_to_hub is False
    assert dataclasses.replace(args, max_steps=3).max_steps == 3


def test_words_and_flags_are_read_as_people_write_them() -> None:
    args = make(include_num_input_tokens_seen=True, fsdp=True, torch_compile_backend="eager")
    assert (
        args.to_dict().items() >= {"include_num_input_tokens_seen": "all", "fsdp": True, "torch_compile": True}.items()
    )
    assert [make(fsdp=given).fsdp for given in ("", False, None, "false")] == [None] * 4
    assert TrainingArguments(max_grad_norm=None).max_grad_norm is None


def test_dicts_may_come_as_json_or_as_files(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"version": 2}')
    args = make(lr_scheduler_kwargs='{"num_cycles": 2}', fsdp=True, fsdp_config=str(file))
    assert (args.lr_scheduler_kwargs, args.fsdp_config) == ({"num_cycles": 2}, {"version": 2})


@pytest.mark.fact("Arguments: users may subclass the dataclass and add fields")
def test_a_subclass_may_have_its_own_fields() -> None:
    @dataclass
    class MyArguments(TrainingArguments):
        dropout: float = field(default=0.1)
        hub_token: str | None = None  # an unsupported name is theirs to use
        folder: Path | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            self.run_name = f"dropout {self.dropout}"

    args = MyArguments(dropout=0.5, eval_strategy="epoch", hub_token="secret", folder=Path("data"))
    assert (args.dropout, args.run_name, args.do_eval) == (0.5, "dropout 0.5", True)
    assert args.to_dict()["folder"] == "data"
    assert "secret" not in args.to_json_string()
    with pytest.raises(ArgumentTypeError, match="`push_to_hub` is True"):
        MyArguments(push_to_hub=True)  # type: ignore[call-arg]
    with pytest.raises(ArgumentTypeError, match="Did you mean `dropout`"):
        MyArguments(dropuot=0.5)  # type: ignore[call-arg]


def test_subclasses_may_use_private_names() -> None:
    ours = {name for kind in TrainingArguments.__mro__[:-1] for name in vars(kind) if name.startswith("_")}
    assert {name for name in ours if not name.startswith("__")} == set()


def test_a_subclass_may_have_its_own_init() -> None:
    class MyArguments(TrainingArguments):
        def __init__(self, name: str, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.name = name

    args = MyArguments("mine", learning_rate=0.1)
    assert (args.name, args.learning_rate) == ("mine", 0.1)


@pytest.mark.fact("Arguments: to_dict and to_json_string return plain JSON: enums as values, dtypes by name")
def test_arguments_are_plain_json() -> None:
    @dataclass
    class MyArguments(TrainingArguments):
        dtype: torch.dtype = torch.float32
        sizes: tuple[int, ...] = (1, 2)
        number: object = np.float32(0.5)

    args = MyArguments(eval_strategy="epoch", lr_scheduler_kwargs={"dtype": torch.bfloat16})
    read = json.loads(args.to_json_string())
    assert read == args.to_dict()
    assert (read["eval_strategy"], read["dtype"], read["sizes"], read["number"]) == ("epoch", "float32", [1, 2], 0.5)
    assert read["lr_scheduler_kwargs"] == {"dtype": "bfloat16"}
    assert type(args.to_dict()["eval_strategy"]) is str


def test_an_argument_that_json_has_no_place_for_is_named() -> None:
    @dataclass
    class MyArguments(TrainingArguments):
        model: object = None

    with pytest.raises(ArgumentTypeError, match="`model` is Linear"):
        MyArguments(model=torch.nn.Linear(1, 1)).to_dict()


def test_arguments_for_trackers_are_single_values() -> None:
    values = TrainingArguments(label_names=["a"], eval_strategy="epoch").to_sanitized_dict()
    assert {type(value) for value in values.values()} <= {bool, int, float, str}
    assert (values["label_names"], values["train_batch_size"]) == ("['a']", 8)


@pytest.mark.usefixtures("_process_without_a_trainer")
@pytest.mark.fact("Arguments: train_batch_size and eval_batch_size are those of one device")
def test_this_process_is_alone() -> None:
    args = TrainingArguments(per_device_train_batch_size=4, per_device_eval_batch_size=16, use_cpu=True)
    assert (args.train_batch_size, args.eval_batch_size) == (4, 16)
    assert (args.world_size, args.process_index, args.local_process_index, args.n_gpu) == (1, 0, 0, 0)
    assert (args.device, args.parallel_mode) == (torch.device("cpu"), ParallelMode.NOT_PARALLEL)
    assert args.should_save
    assert args.should_log


@pytest.mark.fact("Arguments: log_level is for the first process, log_level_replica for the others")
def test_the_level_of_the_first_process_is_log_level() -> None:
    import logging

    assert TrainingArguments(log_level="debug").get_process_log_level() == logging.DEBUG
    assert TrainingArguments().get_process_log_level() == logging.NOTSET


@pytest.mark.fact("Arguments: Making the arguments creates no output_dir")
def test_making_arguments_touches_no_file(tmp_path: Path) -> None:
    make(output_dir=tmp_path / "results", logging_dir=str(tmp_path / "logs"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fact("Arguments: HfArgumentParser makes the arguments from a command line")
def test_the_genuine_parser_makes_them_from_a_command_line() -> None:
    from transformers import HfArgumentParser

    parser = HfArgumentParser(TrainingArguments)  # type: ignore[arg-type]
    (empty,) = parser.parse_args_into_dataclasses([])
    assert empty == TrainingArguments()
    words = "--output_dir out --bf16 --no_remove_unused_columns --label_names a b --report_to none --fsdp_config {}"
    words += ' --lr_scheduler_kwargs {"num_cycles":2} --fsdp true --optim sgd --max_steps 10 --warmup_ratio 0.1'
    (parsed,) = parser.parse_args_into_dataclasses(words.split())
    assert parsed == TrainingArguments(
        output_dir="out",
        bf16=True,
        remove_unused_columns=False,
        label_names=["a", "b"],
        report_to="none",
        lr_scheduler_kwargs={"num_cycles": 2},
        optim="sgd",
        max_steps=10,
        fsdp="true",
        warmup_steps=0.1,
        fsdp_config={},
    )


@pytest.mark.processes
@pytest.mark.fact("Arguments: Each process has its own process_index, local_process_index, should_save and should_log")
def test_each_of_two_processes_knows_its_place(tmp_path: Path) -> None:
    run_on_ranks(RANKS / "huggingface_arguments.py", 2, cwd=tmp_path)


@pytest.mark.usefixtures("_process_without_a_trainer")
def test_the_first_process_goes_first(caplog: pytest.LogCaptureFixture) -> None:
    done = []
    with caplog.at_level("DEBUG", "pytorch_accelerated.huggingface"):
        for local in (True, False):
            with TrainingArguments(use_cpu=True).main_process_first(local=local, desc="reading"):
                done.append(local)
    assert done == [True, False]
    assert "reading" in caplog.text


SETTINGS: dict[str, Any] = {
    "learning_rate": 0.7, "batch_size": 3, "weight_decay": 0.2, "num_epochs": 9, "max_steps": 11, "steps": 17,
    "gradient_accumulation_steps": 5, "seed": 13, "activation_checkpointing": True, "strategy": "epoch", "delay": 2.0,
    "accumulation_steps": 19, "loss_only": True, "total_limit": 4, "level": "info", "first_step": True,
    "nan_inf_filter": True, "on_each_node": False, "replica_level": "debug", "beta1": 0.5, "beta2": 0.6,
    "epsilon": 1e-3, "args": "momentum=0.5", "warmup_steps": 6, "train_batch_size": 33, "eval_batch_size": 44,
    "drop_last": True, "num_workers": 2, "pin_memory": False, "persistent_workers": True, "prefetch_factor": 7,
    "multiprocessing_context": "spawn", "auto_find_batch_size": True, "ignore_data_skip": True, "sampler_seed": 21,
}  # fmt: skip


@pytest.mark.fact("Arguments: set_training and the other setters of transformers set the same arguments as there")
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize(
    "name", ["training", "evaluate", "testing", "save", "logging", "optimizer", "lr_scheduler", "dataloader"]
)
def test_a_setter_sets_what_that_of_transformers_sets(name: str, given: bool) -> None:
    import transformers

    before: dict[str, Any] = {
        "logging_steps": 99, "eval_steps": 98, "save_steps": 97, "max_steps": 96, "learning_rate": 0.9, "data_seed": 1,
        "per_device_train_batch_size": 95, "per_device_eval_batch_size": 94, "logging_first_step": True,
        "prediction_loss_only": True, "logging_nan_inf_filter": False, "report_to": "none",
    }  # fmt: skip
    ours, theirs = TrainingArguments("x", **before), transformers.TrainingArguments("x", **before)
    parameters = inspect.signature(getattr(theirs, f"set_{name}")).parameters
    named = {"optimizer": "sgd", "lr_scheduler": "cosine"}
    chosen = {one: SETTINGS.get(one, named.get(name)) for one in parameters if one in SETTINGS or one == "name"}
    for args in (ours, theirs):
        assert getattr(args, f"set_{name}")(**(chosen if given else {})) is args
    assert ours.gradient_checkpointing == (given and name == "training")
    shared = {one.name for one in dataclasses.fields(ours)} & {one.name for one in dataclasses.fields(theirs)}
    other_form = {"report_to", "local_rank", "disable_tqdm", "fsdp_config", "fsdp", "accelerator_config", "debug"}
    other_form |= {"activation_checkpointing", "gradient_checkpointing", "include_num_input_tokens_seen"}
    for shown in shared - other_form:
        assert (getattr(ours, shown) or None) == (getattr(theirs, shown) or None), shown


def test_a_setter_rejects_unknown_and_unsupported_values() -> None:
    with pytest.raises(ArgumentTypeError, match="`set_training` got 'rate'. It takes learning_rate, batch_size, "):
        TrainingArguments("x").set_training(rate=1)
    with pytest.raises(ConfigurationError, match="`eval_steps` is 0"):
        TrainingArguments("x").set_evaluate("steps", 0)
    with pytest.raises(ArgumentTypeError, match="`push_to_hub` is True, but this argument is unsupported"):
        TrainingArguments("x").set_push_to_hub("model")


@pytest.mark.fact("Arguments: An unsupported argument may ask for nothing on a command line and in JSON, too")
def test_command_lines_and_json_may_ask_for_nothing(tmp_path: Path) -> None:
    from transformers import HfArgumentParser

    parser: Any = HfArgumentParser(TrainingArguments)  # type: ignore[arg-type]  # a dataclass
    words = "--tf32 False --push_to_hub False --local_rank 0 --hub_token None --overwrite_output_dir --save_safetensors"
    (args,) = parser.parse_args_into_dataclasses(["--output_dir", "out", *words.split()])
    assert args == TrainingArguments("out")
    assert (args.tf32, args.push_to_hub, args.local_rank, args.overwrite_output_dir) == (False, False, 0, True)
    with pytest.raises(ArgumentTypeError, match="`push_to_hub` is True"):
        parser.parse_args_into_dataclasses(["--output_dir", "out", "--push_to_hub"])
    written = {"output_dir": "out", "tf32": False, "push_to_hub": False, "local_rank": -1, "no_cuda": True}
    (tmp_path / "args.json").write_text(json.dumps(written))
    (args,) = parser.parse_json_file(str(tmp_path / "args.json"))
    assert args == TrainingArguments("out", use_cpu=True)
    assert make(**written) == args


def test_scripts_find_what_they_read_of_the_arguments() -> None:
    import transformers

    kinds: list[Any] = [TrainingArguments, transformers.TrainingArguments]
    ours, theirs = (kind("x", use_cpu=True, bf16=True) for kind in kinds)
    for name in ("_n_gpu", "mixed_precision", "deepspeed_plugin", "fsdp_plugin_args", "_setup_devices"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.distributed_state.is_main_process


@pytest.mark.fact("Arguments: warmup_steps=None, the default of some subclasses, means no warmup")
def test_no_warmup_may_be_none(tmp_path: Path) -> None:
    assert TrainingArguments(str(tmp_path), warmup_steps=None).warmup_steps == 0  # type: ignore[arg-type]
