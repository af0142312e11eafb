"""The arguments of a run: each by its field, what follows from what, what is rejected, and command lines."""

import abc
import contextlib
import dataclasses
import importlib.util
import inspect
import json
import math
import pickle
import re
import sys
import typing
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pytorch_accelerated.errors import ArgumentTypeError, ConfigurationError, MissingDependencyError
from pytorch_accelerated.huggingface import Seq2SeqTrainingArguments, Trainer
from pytorch_accelerated.huggingface.arguments import argument as rules
from pytorch_accelerated.huggingface.arguments import fields
from pytorch_accelerated.huggingface.arguments.argument import Argument, arguments_of
from pytorch_accelerated.huggingface.arguments.fields import (
    IntervalStrategy,
    SaveStrategy,
    SchedulerType,
)
from pytorch_accelerated.huggingface.trainer_callback import ReportingCallback, TensorBoardCallback, reporting_callbacks
from pytorch_accelerated.huggingface.training_args import TrainingArguments
from scripts import huggingface_pages as pages
from tests.huggingface.runs import Regression, Rows

ALL = arguments_of(TrainingArguments)
SUPPORTED = {name: one for name, one in ALL.items() if not one.why_unsupported}
UNSUPPORTED = {name: one for name, one in ALL.items() if one.why_unsupported}
DEFAULTS = {one.name: one.default for one in dataclasses.fields(TrainingArguments)}
NEEDS: dict[str, dict[str, Any]] = {
    **{
        name: {one.needs: 1 if one.needs == "dataloader_num_workers" else True}
        for name, one in ALL.items()
        if one.needs
    },
    "load_best_model_at_end": {"eval_strategy": "epoch", "save_strategy": "epoch"},
}
BEST: dict[str, Any] = {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch"}


def make(**arguments: Any) -> TrainingArguments:
    """For names and values that a type checker would object to."""
    return TrainingArguments(**arguments)


def another_value(name: str) -> Any:
    """A value that differs from the default."""
    given: dict[str, Any] = {"fsdp": "full_shard", "fsdp_config": {"reshard_after_forward": False}}
    given["deepspeed"] = {"zero_optimization": {"stage": 2}}
    given["accelerator_config"] = rules.AcceleratorConfig(non_blocking=True).to_dict()
    if name in given:
        return given[name]
    argument = SUPPORTED[name]
    default = DEFAULTS[argument.same_as or name]
    for one in typing.get_args(typing.get_type_hints(fields.Arguments)[name]):
        if isinstance(one, type) and issubclass(one, Enum):
            return next(member.value for member in one if member != default)
    some = argument.choices[-1] if argument.choices else "some"
    of_kind = {
        rules.A_FLAG: not argument.default,
        rules.A_LIST: [some],
        rules.TRACKER_NAMES: [some],
        rules.A_DICT: {"a": 1},
        rules.STEPS: 0.5,
        rules.WARMUP_STEPS: 0.5,
    }
    assert argument.kind is not None
    values = [of_kind[argument.kind]] if argument.kind in of_kind else [2, 0.5, some]
    return next(value for value in values if holds(argument, value))


def holds(argument: Argument, value: Any) -> bool:
    assert argument.kind is not None
    return argument.kind.holds(value) and (argument.limit is None or argument.limit.holds(value))


# ---------------------------------------------------------------------------------------------- each argument by itself


@pytest.fixture(scope="module")
def parser() -> Any:
    from transformers import HfArgumentParser

    return HfArgumentParser(TrainingArguments)  # type: ignore[arg-type]  # a dataclass


@pytest.mark.parametrize("name", SUPPORTED)
def test_an_argument_comes_from_a_command_line_and_is_kept(name: str, parser: Any) -> None:
    needed, value = NEEDS.get(name, {}), another_value(name)
    texts = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else str(value)]
    companions = [f"--{other}={text}" for other, text in needed.items()]
    (parsed,) = parser.parse_args_into_dataclasses([*companions, f"--{name}", *texts])
    assert parsed == make(**{name: value}, **needed)
    assert parsed != make(**needed)
    assert make(**parsed.to_dict()) == dataclasses.replace(parsed) == pickle.loads(pickle.dumps(parsed)) == parsed
    target = SUPPORTED[name].same_as or name
    assert parsed.to_dict()[target] == (SUPPORTED[name].gives or value)


@pytest.mark.parametrize("name", SUPPORTED)
def test_a_supported_argument_keeps_its_rules(name: str) -> None:
    """Its default holds; another kind, a value beyond the limit, or one that is no choice is rejected by name."""
    argument, default = SUPPORTED[name], getattr(make(), name)
    assert argument.kind is not None
    assert (default is None and argument.may_be_none) or holds(argument, default)
    shown = name if argument.gives or not argument.same_as else argument.same_as
    with pytest.raises((ArgumentTypeError, ConfigurationError), match=f"`{shown}` (is|cannot work:) b'wrong'"):
        make(**{name: b"wrong"})
    beyond = [] if argument.limit is None else [-2, -1, 0, 1, 2**32, 1.0, 1.5, math.inf, math.nan]
    rejected: list[Any] = [value for value in beyond if argument.kind.holds(value) and not holds(argument, value)]
    assert bool(rejected) == (argument.limit is not None)
    if argument.choices:
        rejected.append(["other"] if argument.kind in (rules.A_LIST, rules.TRACKER_NAMES) else "other")
    for value in rejected:
        with pytest.raises(ConfigurationError, match=re.escape(f"`{name}` is {value!r}: ")):
            make(**{name: value})
    if argument.needs:
        with pytest.raises(ConfigurationError, match=rf"`{name}` is .*, but `{argument.needs}` is .*no effect"):
            make(**{name: another_value(name)})


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_unsupported_argument_is_rejected_with_a_remedy_unless_it_asks_for_nothing(name: str) -> None:
    argument, without = UNSUPPORTED[name], make()
    with pytest.raises(ArgumentTypeError, match=re.escape(f"`{name}` is 'some value', but this argument is unsupp")):
        make(**{name: "some value"})
    assert argument.why_unsupported.endswith(".")
    for value in (argument.default, *argument.also):
        args = make(**{name: value})
        assert args == without
        assert args.to_dict() == without.to_dict()
    assert getattr(without, name) == (0 if name == "local_rank" else argument.default)
    assert name not in without.to_dict()


@pytest.mark.parametrize("name", sorted(arguments_of(Seq2SeqTrainingArguments).keys() - ALL.keys()))
def test_an_argument_of_a_subclass_is_checked_there(name: str) -> None:
    arguments: dict[str, Any] = {name: b"wrong"}
    with pytest.raises(ArgumentTypeError, match=f"`{name}` is b'wrong': give "):
        Seq2SeqTrainingArguments(**arguments)
    with pytest.raises(TypeError, match=name):
        make(**arguments)


def test_the_page_of_arguments_is_up_to_date() -> None:
    text = pages.ARGUMENTS_PAGE.read_text(encoding="utf-8")
    assert text == pages.arguments_page(), "run: python scripts/huggingface_pages.py"


def test_defaults_and_names_are_those_of_transformers() -> None:
    import transformers

    theirs = {one.name: one.default for one in dataclasses.fields(transformers.TrainingArguments)}
    # Theirs is filled in later, or tells nothing apart that ours does: "none" from left out.
    differing = {"report_to", "gradient_checkpointing", "activation_checkpointing", "include_for_metrics"}
    common = DEFAULTS.keys() & theirs.keys() - differing
    assert {name: DEFAULTS[name] for name in common} == {name: theirs[name] for name in common}
    assert theirs.keys() - DEFAULTS.keys() == set()  # supported, or with a remedy
    # What only we have is there for older scripts.
    assert {name for name in SUPPORTED.keys() - theirs if not SUPPORTED[name].same_as} == {"logging_dir"}


@pytest.mark.parametrize(
    ("name", "unsupported"),
    [
        *(("OptimizerNames", None), ("SchedulerType", {"GREEDY"}), ("IntervalStrategy", set())),
        *((name, set()) for name in ("SaveStrategy", "ParallelMode", "HubStrategy")),
    ],
)
def test_enums_have_the_members_of_transformers(name: str, unsupported: set[str] | None) -> None:
    from transformers import training_args as genuine

    ours, theirs = ({member.name: member.value for member in getattr(module, name)} for module in (fields, genuine))
    assert ours.items() <= theirs.items()
    assert unsupported is None or theirs.keys() - ours.keys() == unsupported


# ----------------------------------------------------------------------------------------------- what follows from what


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"report_to": [], "output_dir": "trainer_output", "disable_tqdm": False, "do_eval": False}),
        ({}, {"lr_scheduler_type": SchedulerType.LINEAR, "save_strategy": SaveStrategy.STEPS}),
        ({"eval_strategy": "steps", "logging_steps": 7}, {"eval_steps": 7, "do_eval": True}),
        ({"eval_strategy": "epoch"}, {"do_eval": True}),
        (BEST, {"metric_for_best_model": "loss", "greater_is_better": False}),
        ({"metric_for_best_model": "accuracy"}, {"greater_is_better": True}),
        ({"metric_for_best_model": "eval_my_loss"}, {"greater_is_better": False}),
        ({"metric_for_best_model": "error", "greater_is_better": False}, {"greater_is_better": False}),
        ({"torch_compile_backend": "eager"}, {"torch_compile": True}),
        ({"include_num_input_tokens_seen": True}, {"include_num_input_tokens_seen": "all"}),
        *(({"fsdp": given}, {"fsdp": None}) for given in ("", False, None, "false")),
        ({"fsdp": True}, {"fsdp": True}),
        ({"max_grad_norm": None}, {"max_grad_norm": None}),
        ({"warmup_steps": None}, {"warmup_steps": 0}),
        ({"logging_strategy": "epoch", "logging_steps": 0}, {"logging_steps": 0}),
        ({"lr_scheduler_kwargs": '{"num_cycles": 2}'}, {"lr_scheduler_kwargs": {"num_cycles": 2}}),
        ({"report_to": "none", "logging_dir": "logs"}, {"report_to": []}),
        ({"report_to": ["none"]}, {"report_to": []}),
        ({"report_to": []}, {"report_to": []}),
        ({"report_to": "tensorboard"}, {"report_to": ["tensorboard"]}),
        ({"logging_dir": "logs"}, {"report_to": ["tensorboard"]}),
        ({"local_rank": 3}, {"local_rank": 0}),
        ({"save_strategy": "no", "save_steps": 20.0}, {"save_strategy": "no", "save_steps": 20}),
        ({"eval_strategy": IntervalStrategy.STEPS, "eval_steps": 0.25}, {"eval_strategy": "steps", "eval_steps": 0.25}),
        *(({name: Path("there")}, {name: "there"}) for name in ("output_dir", "logging_dir", "resume_from_checkpoint")),
    ],
    ids=str,
)
def test_values_follow_from_those_that_are_given(given: dict[str, Any], expected: dict[str, Any]) -> None:
    args = make(**given)
    assert {name: getattr(args, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        *(
            ({name: value}, ArgumentTypeError, "unsupported")
            for name, value in (("local_rank", 1.0), ("push_to_hub", 0), ("save_safetensors", 1), ("tf32", True))
        ),
        ({"learning_rat": 1}, TypeError, "unexpected keyword argument 'learning_rat'"),
        ({"push_to_hub": True, "hub_strategy": 1}, ArgumentTypeError, "`push_to_hub` is True.*`hub_strategy` is 1"),
        *(
            ({name: word}, ConfigurationError, f"`{name}` cannot work: '{word}' is not .*Did you mean '{meant}'")
            for name, word, meant in (
                ("optim", "adamw_toch", "adamw_torch"),
                ("lr_scheduler_type", "cosin", "cosine"),
                ("eval_strategy", "epochs", "epoch"),
                ("save_strategy", "Steps", "steps"),
            )
        ),
        (
            {"save_strategy": 3},
            ValueError,
            "3 is not a valid SaveStrategy. Choose among 'no', 'steps', 'epoch', 'best'",
        ),
        ({"eval_strategy": "best"}, ValueError, "'best' is not a valid IntervalStrategy"),
        (
            {"optim": "galore_adamw"},
            ConfigurationError,
            "'galore_adamw' is not a valid OptimizerNames.*optimizer_cls_and_kwargs",
        ),
        *(
            (arguments, ValueError, "_steps` is .*: give a whole number of updates, or a share")
            for arguments in (
                *({"logging_steps": 0}, {"save_steps": 0}, {"eval_strategy": "steps", "eval_steps": 0}),
                *({"save_steps": -5}, {"eval_steps": 10.5}, {"logging_steps": math.inf}, {"save_steps": math.nan}),
            )
        ),
        ({"fp16": True, "bf16": True}, ConfigurationError, "`fp16` and `bf16` are both True"),
        ({"learning_rate": -1, "fp16": True, "bf16": True}, ConfigurationError, "`learning_rate` is -1.*`fp16` and"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, ConfigurationError, "`lr_scheduler_type` is 'reduce_lr_on_pl"),
        ({"save_strategy": "best"}, ConfigurationError, "`save_strategy` is 'best', but `eval_strategy` is 'no'"),
        ({"lr_scheduler_kwargs": "{'a': 1}"}, ConfigurationError, "`lr_scheduler_kwargs`.*no JSON can be read"),
        ({"lr_scheduler_kwargs": "[1]"}, ArgumentTypeError, r"`lr_scheduler_kwargs` is \[1\]: give a dict"),
        ({"fsdp": True, "fsdp_config": "nowhere.json"}, ConfigurationError, "`fsdp_config` is 'nowhere.json'"),
        ({"fsdp": "full_shard offload"}, ConfigurationError, "but 'offload' is unsupported"),
        ({"fsdp": True, "fsdp_config": {"forward_prefetch": True}}, ConfigurationError, "has 'forward_prefetch', but"),
        ({"fsdp": True, "fsdp_config": {"fsdp_version": 1}}, ConfigurationError, "`fsdp_config` has version 1"),
        (
            {"warmup_ratio": 0.1, "warmup_steps": 3},
            ConfigurationError,
            "two names of one .*: give `warmup_steps` alone",
        ),
        ({"evaluation_strategy": "epoch", "eval_strategy": "steps"}, ConfigurationError, "give `eval_strategy` alone"),
        ({"accelerator_config": {"split": True}}, TypeError, "'split'"),
        *(
            ({name: value}, ArgumentTypeError, re.escape(f"`{name}` is {value!r}: give"))
            for name, value in (
                *(("do_train", "false"), ("per_device_train_batch_size", "8"), ("per_device_train_batch_size", 8.0)),
                *(("max_steps", True), ("learning_rate", "5e-5"), ("seed", None), ("label_names", "labels")),
                *(("log_level", 10), ("include_for_metrics", "inputs"), ("fsdp", ["full_shard"]), ("fsdp_config", [1])),
                *(("adafactor", "false"), ("ddp_find_unused_parameters", 1)),
            )
        ),
    ],
)
def test_arguments_that_cannot_work_are_refused(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make(**arguments)


@pytest.mark.parametrize(
    ("evaluates", "saves", "fits"),
    [
        *(("epoch", "epoch", True), ("steps", "steps", True), ("epoch", "best", True), ("steps", "best", True)),
        *(("epoch", "steps", False), ("steps", "no", False), ("no", "steps", False), ("no", "no", False)),
        *(("no", "best", False), (3, 6, True), (3, 3, True), (0.1, 0.3, True), (3, 4, False), (6, 3, False)),
        *((0.2, 0.5, False), (5, 0.5, False)),
    ],
)
def test_the_best_model_needs_an_evaluation_of_each_checkpoint(evaluates: Any, saves: Any, fits: bool) -> None:
    arguments = {"eval_strategy": evaluates, "save_strategy": saves}
    message = f"`eval_strategy` is '{evaluates}'"
    if not isinstance(saves, str):
        arguments = {"eval_strategy": "steps", "eval_steps": evaluates, "save_steps": saves}
        message = "is not a multiple of `eval_steps`"
    with contextlib.nullcontext() if fits else pytest.raises(ValueError, match=message):
        make(load_best_model_at_end=True, **arguments)


def test_arguments_changed_later_are_checked_when_the_trainer_is_made(tmp_path: Path) -> None:
    args: Any = TrainingArguments(str(tmp_path), use_cpu=True, push_to_hub=False)
    args.lr_scheduler_type = "cosine"
    Trainer(Regression(), args)
    assert args.lr_scheduler_type is SchedulerType.COSINE
    args.eval_strategy, args.save_strategy, args.load_best_model_at_end = "epoch", "steps", True
    with pytest.raises(ConfigurationError, match="`eval_strategy` is 'epoch' and `save_strategy` is 'steps'"):
        Trainer(Regression(), args)
    args.push_to_hub = True
    with pytest.raises(ArgumentTypeError, match="`push_to_hub` is True, but this argument is unsupported"):
        args.check()


def test_trackers_are_reported_to_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = [name for name in ("tensorboard", "mlflow", "wandb") if importlib.util.find_spec(name)]
    assert TrainingArguments(report_to="all").report_to == installed
    assert reporting_callbacks(["tensorboard"]) == [TensorBoardCallback]
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(MissingDependencyError, match="pip install tensorboard$"):
        TensorBoardCallback()
    pytest.importorskip("mlflow")
    assert isinstance(reporting_callbacks(["mlflow"])[0], ReportingCallback)
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match="wand is not supported"):  # that of transformers, which has further ones
        reporting_callbacks(["wand"])


# --------------------------------------------------------------------------------------------- subclasses, copies, JSON


def test_a_subclass_may_have_its_own_fields_and_defaults() -> None:
    class Named(abc.ABC):
        @property
        @abc.abstractmethod
        def name(self) -> str: ...

    @dataclass
    class MyArguments(TrainingArguments, Named):
        name: str = "mine"
        dropout: float = field(default=0.1)
        hub_token: str | None = None  # an unsupported name is theirs to use
        folder: Path | None = None
        flag: bool = False
        learning_rate: float = 0.1
        seed: int | None = None  # type: ignore[assignment]  # users do that
        eval_strategy: str = field(default_factory=lambda: "epoch")
        evaluation_strategy: str | None = field(default_factory=lambda: None)
        warmup_ratio: float | None = field(default_factory=lambda: 0.1)
        include_for_metrics: list[str] = field(default_factory=lambda: ["loss"])
        weight_decay: "float" = field(
            default=0.5, metadata=dict(TrainingArguments.__dataclass_fields__["weight_decay"].metadata)
        )

        def __post_init__(self) -> None:
            super().__post_init__()
            self.run_name = f"dropout {self.dropout}"

    args = MyArguments(dropout=0.5, hub_token="secret", folder=Path("data"))
    assert (args.dropout, args.run_name, args.do_eval, args.name) == (0.5, "dropout 0.5", True, "mine")
    assert (args.learning_rate, args.seed, args.warmup_steps) == (0.1, None, 0.1)
    assert args.to_dict()["folder"] == "data"
    assert "secret" not in args.to_json_string()
    assert MyArguments(evaluation_strategy="steps").eval_strategy == "steps"
    assert MyArguments(include_inputs_for_metrics=True).include_for_metrics == ["loss", "inputs"]
    for arguments, message in (
        ({"push_to_hub": True}, "`push_to_hub` is True"),
        ({"dropuot": 0.5}, "'dropuot'"),
        ({"learning_rate": -1}, "`learning_rate` is -1: give a finite number"),
        ({"learning_rate": "1"}, "`learning_rate` is '1': give a number"),
        ({"seed": -1}, "`seed` is -1: give"),
        ({"flag": "false"}, "`flag` is 'false': give True or False"),
        ({"weight_decay": -1}, "`weight_decay` is -1: give"),
    ):
        with pytest.raises((ArgumentTypeError, ConfigurationError, TypeError), match=message):
            MyArguments(**arguments)  # type: ignore[arg-type]  # on purpose


def test_subclasses_may_use_private_names_and_an_init_of_their_own() -> None:
    ours = {name for kind in TrainingArguments.__mro__[:-1] for name in vars(kind) if name.startswith("_")}
    assert {name for name in ours if not name.startswith("__")} == {"_VALID_DICT_FIELDS"}  # as in transformers

    class MyArguments(TrainingArguments):
        def __init__(self, name: str, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.name = name

    args = MyArguments("mine", learning_rate=0.1)
    assert (args.name, args.learning_rate) == ("mine", 0.1)


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
    args.number = torch.nn.Linear(1, 1)
    with pytest.raises(ArgumentTypeError, match="`number` is Linear"):
        args.to_dict()
    values = TrainingArguments(label_names=["a"], eval_strategy="epoch").to_sanitized_dict()  # for trackers
    assert {type(value) for value in values.values()} <= {bool, int, float, str}
    assert (values["label_names"], values["train_batch_size"]) == ("['a']", 8)


def test_command_lines_and_json_may_ask_for_nothing(parser: Any, tmp_path: Path) -> None:
    words = "--tf32 False --push_to_hub False --local_rank 0 --hub_token None --overwrite_output_dir --save_safetensors"
    (args,) = parser.parse_args_into_dataclasses(["--output_dir", "out", *words.split()])
    assert args == TrainingArguments("out")
    assert (args.tf32, args.push_to_hub, args.local_rank, args.overwrite_output_dir) == (False, False, 0, True)
    with pytest.raises(ArgumentTypeError, match="`push_to_hub` is True"):
        parser.parse_args_into_dataclasses(["--output_dir", "out", "--push_to_hub"])
    written = {"output_dir": "out", "tf32": False, "push_to_hub": False, "local_rank": -1, "no_cuda": True}
    (tmp_path / "args.json").write_text(json.dumps(written))
    (args,) = parser.parse_json_file(str(tmp_path / "args.json"))
    assert args == make(**written) == TrainingArguments("out", use_cpu=True)


READ_FROM_ARGUMENTS = """_n_gpu mixed_precision deepspeed_plugin fsdp_plugin_args _setup_devices n_gpu device world_size
process_index local_process_index train_batch_size eval_batch_size should_save should_log"""


@pytest.mark.usefixtures("_process_without_a_trainer")
def test_all_arguments_of_transformers_at_once_are_taken() -> None:
    """As it writes them, and as versions before 5 did."""
    import transformers

    theirs: Any = transformers.TrainingArguments("out", use_cpu=True, learning_rate=0.5)
    expected = TrainingArguments("out", use_cpu=True, learning_rate=0.5, disable_tqdm=theirs.disable_tqdm)
    older: dict[str, Any] = {
        "fsdp": [], "evaluation_strategy": None,
        "include_inputs_for_metrics": False, "overwrite_output_dir": True,
        "save_safetensors": True, "warmup_ratio": 0.0,
    }  # fmt: skip
    for written in (theirs.to_dict(), json.loads(theirs.to_json_string()), {**theirs.to_dict(), **older}):
        args = TrainingArguments(**{**written, "dataloader_pin_memory": True, "report_to": None})
        assert args == expected
    attributes = {one.name: getattr(theirs, one.name) for one in dataclasses.fields(theirs)}
    assert TrainingArguments(**attributes).accelerator_config == expected.accelerator_config
    for name in READ_FROM_ARGUMENTS.split():
        assert getattr(expected, name) == getattr(theirs, name), name
    assert expected.parallel_mode.value == theirs.parallel_mode.value
    assert expected.distributed_state.is_main_process


def test_how_accelerate_deals_out_batches_is_an_object_that_scripts_read_and_change(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"even_batches": false}')
    for given in ({"even_batches": False}, '{"even_batches": false}', str(tmp_path / "config.json")):
        args: Any = TrainingArguments(str(tmp_path), use_cpu=True, accelerator_config=given)
        assert (args.accelerator_config.even_batches, args.accelerator_config.split_batches) == (False, False)
    assert dataclasses.replace(args, seed=1).accelerator_config == args.accelerator_config
    args.accelerator_config.split_batches = True
    Trainer(Regression(), args, train_dataset=Rows(2))  # of one process, nothing is split
    args.accelerator_config.gradient_accumulation_kwargs = {"num_steps": 4}
    with pytest.raises(ConfigurationError, match="num_steps: 4: give `gradient_accumulation_steps`"):
        Trainer(Regression(), args, train_dataset=Rows(2))


# -------------------------------------------------------------------------------------------------------------- setters

SETTINGS: dict[str, Any] = {
    "learning_rate": 0.7, "batch_size": 3, "weight_decay": 0.2, "num_epochs": 9, "max_steps": 11, "steps": 17,
    "gradient_accumulation_steps": 5, "seed": 13, "activation_checkpointing": True, "strategy": "epoch", "delay": 2.0,
    "accumulation_steps": 19, "loss_only": True, "total_limit": 4, "level": "info", "first_step": True,
    "nan_inf_filter": True, "on_each_node": False, "replica_level": "debug", "beta1": 0.5, "beta2": 0.6,
    "epsilon": 1e-3, "args": "momentum=0.5", "warmup_steps": 6, "train_batch_size": 33, "eval_batch_size": 44,
    "drop_last": True, "num_workers": 2, "pin_memory": False, "persistent_workers": True, "prefetch_factor": 7,
    "multiprocessing_context": "spawn", "auto_find_batch_size": True, "ignore_data_skip": True, "sampler_seed": 21,
}  # fmt: skip


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
    assert vars(theirs.accelerator_config).items() <= vars(ours.accelerator_config).items()
    other_form |= {"activation_checkpointing", "gradient_checkpointing", "include_num_input_tokens_seen"}
    for shown in shared - other_form:
        assert (getattr(ours, shown) or None) == (getattr(theirs, shown) or None), shown


def test_a_setter_of_uploads_says_what_to_do_instead() -> None:
    with pytest.raises(ArgumentTypeError, match=r"push_to_hub\(\.\.\.\)"):
        TrainingArguments("x").set_push_to_hub("me/model")
