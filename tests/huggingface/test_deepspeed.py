"""`deepspeed` of the arguments: what its "auto" stands for, and configs that contradict them.

`transformers` fills the same configs from the same arguments, where it and DeepSpeed are installed.
"""

import copy
import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pytorch_accelerated.errors import ConfigurationError, LaunchError, MissingDependencyError
from pytorch_accelerated.extras.deepspeed.config import fill_in
from pytorch_accelerated.huggingface import TrainingArguments
from tests.huggingface.runs import make_trainer

HAS_PACKAGES = all(importlib.util.find_spec(name) for name in ("deepspeed", "transformers"))
needs_packages = pytest.mark.skipif(not HAS_PACKAGES, reason="needs deepspeed and transformers: make deepspeed")
WARMUP = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
DECAY: dict[str, Any] = {"type": "WarmupDecayLR", "params": {**WARMUP, "total_num_steps": "auto"}}
ADAMW: dict[str, Any] = {
    "type": "AdamW",
    "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
}
BUCKETS = {"reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"}
SIZES = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
ALL: dict[str, Any] = {
    **SIZES,
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "bf16": {"enabled": "auto"},
    "optimizer": ADAMW,
    "scheduler": DECAY,
    "zero_optimization": {"stage": 3, **BUCKETS, "stage3_param_persistence_threshold": "auto", "overlap_comm": False},
}


def with_stage(stage: int) -> dict[str, Any]:
    return {**ALL, "zero_optimization": {**ALL["zero_optimization"], "stage": stage}}


def model_with(**config: Any) -> Any:
    return SimpleNamespace(config=SimpleNamespace(**config))


WIDE = model_with(hidden_size=16)
#: Configs, arguments, models and lengths of runs.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Any, int]] = {
    "all of stage 3": (ALL, {}, WIDE, 45),
    "all of stage 2": (with_stage(2), {}, WIDE, 45),
    "all of stage 1": (with_stage(1), {}, WIDE, 45),
    "all of stage 0": (with_stage(0), {}, WIDE, 45),
    "batches": (ALL, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}, WIDE, 45),
    "rates": (ALL, {"learning_rate": 1e-3, "warmup_steps": 7, "max_steps": 45}, WIDE, 45),
    "share of warmup": (ALL, {"warmup_steps": 0.1}, WIDE, 45),
    "no warmup": (ALL, {"warmup_steps": 0}, WIDE, 45),
    "adam": (ALL, {"adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-7, "weight_decay": 0.1}, WIDE, 45),
    "clipping": (ALL, {"max_grad_norm": 0.3}, WIDE, 45),
    "no clipping": (ALL, {"max_grad_norm": 0.0}, WIDE, 45),
    "bf16": (ALL, {"bf16": True}, WIDE, 45),
    "bf16 as a number says": ({**SIZES, "bf16": {"enabled": True}, **with_stage(1)}, {"bf16": True}, WIDE, 45),
    "several widths": (ALL, {}, model_with(hidden_sizes=[8, 24]), 45),
    "width of a text model": (ALL, {}, model_with(text_config=SimpleNamespace(hidden_size=12)), 45),
    "widths of a text model": (ALL, {}, model_with(text_config=SimpleNamespace(hidden_sizes=[6, 4])), 45),
    "no width": ({**SIZES, "zero_optimization": {"stage": 3}}, {}, torch.nn.Linear(1, 1), 45),
    "numbers that agree": (
        {
            "train_batch_size": 12,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 3,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 5e-5, "betas": [0.9, 0.999]}},
            "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 5, "total_num_steps": 45}},
            "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8},
        },
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "warmup_steps": 5},
        WIDE,
        45,
    ),
    "sections of DeepSpeed's own": (
        {**ALL, "flops_profiler": {"enabled": False}, "wall_clock_breakdown": False, "aio": {"block_size": 1048576}},
        {},
        WIDE,
        45,
    ),
    "a schedule without an end": ({**ALL, "scheduler": {"type": "WarmupLR", "params": WARMUP}}, {}, WIDE, 45),
}


def filled(folder: Path, config: dict[str, Any], arguments: dict[str, Any], model: Any, updates: int) -> dict[str, Any]:
    """The config as a run of so many updates has it; the arguments' own stays as it was given."""
    args: Any = TrainingArguments(str(folder), use_cpu=True, deepspeed=copy.deepcopy(config), **arguments)
    found: dict[str, Any] = args.hf_deepspeed_config.config
    fill_in(found, args, model, updates)
    assert args.deepspeed == config
    return {name: value for name, value in found.items() if name != "steps_per_print"}  # which accelerate sets


@needs_packages
@pytest.mark.parametrize("name", CASES)
def test_automatic_values_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    from transformers import TrainingArguments as Genuine
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    config, arguments, model, updates = CASES[name]
    theirs = HfTrainerDeepSpeedConfig(copy.deepcopy(config))
    genuine = Genuine(str(tmp_path), use_cpu=True, **arguments)
    theirs.trainer_config_process(genuine)
    theirs.trainer_config_finalize(genuine, model, updates)
    assert filled(tmp_path, config, arguments, model, updates) == theirs.config


def test_automatic_values_follow_from_the_arguments(tmp_path: Path) -> None:
    arguments = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "warmup_steps": 0.1, "bf16": True}
    found = filled(tmp_path, ALL, arguments, WIDE, 45)
    assert "auto" not in json.dumps(found)
    assert found == {
        "train_batch_size": 12,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 1.0,
        "fp16": {"enabled": False, "loss_scale": 0},
        "bf16": {"enabled": True},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 5e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 5e-5, "warmup_num_steps": 5, "total_num_steps": 45},
        },
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": 256,
            "stage3_prefetch_bucket_size": 230,
            "stage3_param_persistence_threshold": 160,
            "overlap_comm": False,
        },
    }


def test_sizes_and_clipping_that_are_left_out_follow_from_the_arguments_too(tmp_path: Path) -> None:
    found = filled(tmp_path, {}, {"gradient_accumulation_steps": 3}, WIDE, 45)
    expected = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 3}
    assert found == {**expected, "gradient_clipping": 1.0, "zero_optimization": {"stage": 0}}


def test_arguments_that_change_before_the_run_count(tmp_path: Path) -> None:
    args: Any = TrainingArguments(str(tmp_path), use_cpu=True, deepspeed=copy.deepcopy(ALL))
    args.learning_rate, args.gradient_accumulation_steps = 0.5, 2
    for updates in (45, 90):  # as two trainings of one trainer have them
        config = args.hf_deepspeed_config.config
        fill_in(config, args, WIDE, updates)
        assert (config["train_batch_size"], config["optimizer"]["params"]["lr"]) == (16, 0.5)
        assert config["scheduler"]["params"]["total_num_steps"] == updates


@pytest.mark.parametrize("write", [str, lambda file: file.read_text()], ids=["path", "JSON"])
def test_a_config_may_be_a_file_or_text(write: Any, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(ALL))
    args: Any = TrainingArguments(str(tmp_path), use_cpu=True, deepspeed=write(file))
    assert args.hf_deepspeed_config.is_zero3()
    assert not args.hf_deepspeed_config.is_offload()
    assert args.to_dict()["deepspeed"] == ALL


def test_nothing_is_there_without_a_config(tmp_path: Path) -> None:
    trainer: Any = make_trainer(tmp_path)
    assert not trainer.is_deepspeed_enabled
    args = trainer.args
    assert trainer.deepspeed is args.deepspeed is args.hf_deepspeed_config is args.deepspeed_plugin is None


WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"train_micro_batch_size_per_gpu": 2}, {}, "per_gpu: 2, but `per_device_train_batch_size` is 8: write 'auto'"),
    ({"gradient_accumulation_steps": 2}, {}, "steps: 2, but `gradient_accumulation_steps` is 1: write 'auto' there"),
    ({"gradient_clipping": 2}, {}, "gradient_clipping: 2, but `max_grad_norm` is 1.0: write 'auto' there"),
    ({"optimizer": {"type": "AdamW", "params": {"lr": 1}}}, {}, "lr: 1, but `learning_rate` is 5e-05: write 'auto'"),
    (
        {"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.9]}}},
        {},
        r"betas: \[0.9, 0.9\], but \[`adam_beta1`, `adam_beta2`\] is \[0.9, 0.999\]: write 'auto' there",
    ),
    ({"optimizer": ADAMW}, {"optim": "sgd"}, "optimizer.type: 'AdamW', but `optim` is 'sgd': leave one out"),
    ({"optimizer": ADAMW}, {"optim_args": "amsgrad=true"}, "'AdamW', but `optim_args` is 'amsgrad=true': leave one"),
    ({"optimizer": {}}, {}, "optimizer.type: None: give a name, such as 'AdamW', or leave it all out"),
    ({"scheduler": {}}, {}, "scheduler.type: None: give a name, such as 'WarmupLR', or leave it all out"),
    ({"scheduler": DECAY}, {"lr_scheduler_type": "cosine"}, "'WarmupDecayLR', but `lr_scheduler_type` is 'cosine': l"),
    (
        {"scheduler": {"type": "WarmupCosineLR"}},
        {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 2}},
        "'WarmupCosineLR', but `lr_scheduler_kwargs` is {'num_cycles': 2}: leave one out",
    ),
    ({"bf16": {"enabled": False}}, {"bf16": True}, "bf16.enabled: False, but `bf16` is True: write 'auto' there"),
    ({"bf16": {"enabled": True}}, {}, "bf16.enabled: True, but `bf16` is False: write 'auto' there"),
    ({"fp16": {"enabled": True}}, {"bf16": True}, "fp16.enabled: True, but `fp16` is False: write 'auto' there"),
    ({}, {"fsdp": True}, "`fsdp` is True, but `deepspeed` is given, which doesn't go with it: leave one out"),
    ({}, {"auto_find_batch_size": True}, "`auto_find_batch_size` is True, but `deepspeed` is given"),
    ({}, {"ddp_bucket_cap_mb": 5}, "`ddp_bucket_cap_mb` is 5, but `deepspeed` is given, which doesn't go with it"),
    ({"zero_optimization": 2}, {}, "`deepspeed` has zero_optimization: 2: give a dict"),
    ({"zero_optimisation": {"stage": 3}}, {}, "'zero_optimisation', which has no .* out, or write 'zero_optimization'"),
    ({"gradient_cliping": 0.1}, {}, "'gradient_cliping', which has no .*: leave it out, or write 'gradient_clipping'"),
    ({"amp": {"enabled": True}}, {}, "`deepspeed` has amp.enabled: True: leave it out"),
    ({"data_efficiency": {"enabled": True}}, {}, "`deepspeed` has data_efficiency.enabled: True: leave it out"),
    ({"tensor_parallel": {"autotp_size": 2}}, {}, "`deepspeed` has tensor_parallel.autotp_size: 2: leave it out"),
    ({"zero_optimization": {"stage": "auto"}}, {}, "zero_optimization.stage: 'auto': give 0, 1, 2 or 3"),
    ({"zero_optimization": {"stage": 4}}, {}, "`deepspeed` has zero_optimization.stage: 4: give 0, 1, 2 or 3"),
    (
        {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
        {},
        "zero_optimization.offload_param.device: 'cpu', which has no effect at stage 2: use stage 3, or leave it out",
    ),
    (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpuu"}}},
        {},
        "zero_optimization.offload_optimizer.device: 'cpuu', from which no state is saved: give 'cpu'",
    ),
]


@pytest.mark.parametrize(("config", "arguments", "complaint"), WRONG, ids=lambda value: str(value)[:60])
def test_contradictions_are_refused_with_both_sides(
    config: dict[str, Any], arguments: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        TrainingArguments(str(tmp_path), use_cpu=True, deepspeed=config, **arguments)


def test_one_error_has_all_contradictions(tmp_path: Path) -> None:
    config = {"gradient_clipping": 2, "train_micro_batch_size_per_gpu": 3}
    with pytest.raises(ConfigurationError, match="per_gpu: 3, but .*; .*gradient_clipping: 2, but"):
        TrainingArguments(str(tmp_path), use_cpu=True, deepspeed=config)


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 44}}},
            "total_num_steps: 44, but the number of updates of the run is 45: write 'auto' there",
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}},
            "warmup_num_steps: 9, but the warmup by `warmup_steps` is 1: write 'auto' there",
        ),
    ],
)
def test_values_that_contradict_a_run_are_refused(config: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        filled(tmp_path, config, {}, WIDE, 45)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{'stage': 2}")
    for file, reason in (("bad.json", "Expecting"), ("missing.json", "No such file")):
        with pytest.raises(ConfigurationError, match=f"`deepspeed` is .*{file}', from which no JSON.*{reason}"):
            TrainingArguments(str(tmp_path), deepspeed=str(tmp_path / file))


def test_parts_of_the_trainer_dont_go_with_sections_of_the_config(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    parts = {"model": model, "optimizers": (optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer))}
    config = {"train_batch_size": 7, "optimizer": ADAMW, "scheduler": DECAY}
    with pytest.raises(ConfigurationError, match="type: 'AdamW', and the Trainer is given a SGD: leave") as raised:
        make_trainer(tmp_path, parts=parts, deepspeed=config)
    assert "'WarmupDecayLR', and the Trainer is given a ConstantLR: leave one out" in str(raised.value)
    assert "train_batch_size: 7, but 1 processes x `per_device_train_batch_size` x `gradient_acc" in str(raised.value)


def test_the_missing_package_and_the_missing_launcher_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if HAS_PACKAGES:
        with pytest.raises(LaunchError, match="torchrun --nproc-per-node 1"):
            make_trainer(tmp_path, deepspeed={})
    else:
        with pytest.raises(MissingDependencyError, match="pip install deepspeed"):
            make_trainer(tmp_path, deepspeed={})
