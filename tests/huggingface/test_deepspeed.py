"""`deepspeed`: its config, and runs with it that equal those without."""

import copy
import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pytorch_accelerated.errors import ConfigurationError, LaunchError, MissingDependencyError
from pytorch_accelerated.huggingface import TrainingArguments
from pytorch_accelerated.huggingface.arguments.deepspeed import engine_config, filled_config
from tests.huggingface.runs import make_trainer
from tests.support.processes import REPOSITORY, run_under_torchrun
from tests.support.resuming import assert_same

SCRIPT = REPOSITORY / "tests" / "ranks" / "huggingface_deepspeed.py"
IS_INSTALLED = importlib.util.find_spec("deepspeed") is not None
needs_package = pytest.mark.skipif(not IS_INSTALLED, reason="needs the package deepspeed")

AUTOMATIC: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "fp16": {"enabled": "auto"},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
    "zero_optimization": {
        "stage": 2,
        "overlap_comm": False,
        "reduce_bucket_size": "auto",
        "stage3_max_live_parameters": 1e9,
    },
}
ARGUMENTS: dict[str, Any] = {
    "use_cpu": True,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 3,
    "learning_rate": 1e-3,
    "weight_decay": 0.1,
    "adam_beta1": 0.8,
    "adam_epsilon": 1e-7,
    "warmup_steps": 0.1,
    "max_grad_norm": 0.5,
    "bf16": True,
}


class Alone(TrainingArguments):
    """Arguments of one process, which no package and no launcher is needed to know."""

    @property
    def world_size(self) -> int:
        return 1


def model_with(**config: Any) -> Any:
    return SimpleNamespace(config=SimpleNamespace(**config))


# ----------------------------------------------------------------------------------------------------------- the config


@pytest.mark.parametrize(
    "model",
    [
        model_with(hidden_size=16),
        model_with(hidden_sizes=[8, 24]),
        model_with(text_config=SimpleNamespace(hidden_size=12)),
        model_with(text_config=SimpleNamespace(hidden_sizes=[6, 4])),
    ],
)
@needs_package
def test_the_filled_config_is_that_of_transformers(model: Any, tmp_path: Path) -> None:
    from transformers import TrainingArguments as Genuine
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    args = Alone(str(tmp_path), **ARGUMENTS, deepspeed=copy.deepcopy(AUTOMATIC))
    theirs = HfTrainerDeepSpeedConfig(copy.deepcopy(AUTOMATIC))
    genuine = Genuine(str(tmp_path), **ARGUMENTS)
    theirs.trainer_config_process(genuine)
    theirs.trainer_config_finalize(genuine, model, 45)
    assert filled_config(args, model, 45) == theirs.config


def test_automatic_values_follow_from_the_arguments(tmp_path: Path) -> None:
    args = Alone(str(tmp_path), **ARGUMENTS, deepspeed=copy.deepcopy(AUTOMATIC))
    filled = filled_config(args, model_with(hidden_size=16), 45)
    assert "auto" not in json.dumps(filled)
    assert (filled["train_batch_size"], filled["scheduler"]["params"]["warmup_num_steps"]) == (12, 5)
    # What belongs to the loop is not DeepSpeed's business.
    assert engine_config(args, model_with(hidden_size=16)) == {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 2, "overlap_comm": False, "reduce_bucket_size": 256},
        "zero_allow_untested_optimizer": True,
        "torch_autocast": {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []},
    }
    assert args.deepspeed == AUTOMATIC
    without_zero = engine_config(Alone(str(tmp_path), deepspeed={}), None)
    assert without_zero is not None
    assert without_zero["gradient_clipping"] == 0.0  # the loop clips
    assert engine_config(Alone(str(tmp_path)), None) is None


@pytest.mark.parametrize(
    ("config", "arguments", "complaint"),
    [
        ({"train_micro_batch_size_per_gpu": 2}, {}, "train_micro_batch_size_per_gpu: 2, but `per_device_train_batch"),
        ({"gradient_accumulation_steps": 2}, {}, "gradient_accumulation_steps: 2, but `gradient_accumulation_steps`"),
        ({"gradient_clipping": 2}, {}, "gradient_clipping: 2, but `max_grad_norm` is 1.0"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1}}}, {}, "lr: 1, but `learning_rate` is 5e-05"),
        ({"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.9]}}}, {}, r"\[`adam_beta1`, `adam_beta2`\]"),
        ({"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}, {}, "torch_adam: give it in `optim_args`"),
        ({"optimizer": {"type": "Lamb"}}, {}, "optimizer.type: 'Lamb' and `optim` is 'adamw_torch_fused'"),
        ({"optimizer": {"type": "AdamW"}}, {"optim": "sgd"}, "optimizer.type: 'AdamW' and `optim` is 'sgd'"),
        ({"scheduler": {"type": "OneCycle"}}, {}, "scheduler.type: 'OneCycle': give 'WarmupLR'"),
        ({"scheduler": {"type": "WarmupLR"}}, {}, "'WarmupLR', but `lr_scheduler_type` is 'linear'"),
        ({"fp16": {"enabled": True}}, {}, "fp16.enabled: True, which cannot be resumed"),
        ({}, {"fp16": True}, "`fp16` is True, which does not go with `deepspeed`"),
        ({"bf16": {"enabled": True}}, {"bf16": True}, "converts the weights"),
        ({"bf16": {"enabled": False}}, {"bf16": True}, "bf16.enabled: False, but `bf16` is True"),
        ({}, {"fsdp": True}, "`fsdp` is True, which does not go with"),
        ({}, {"auto_find_batch_size": True}, "`auto_find_batch_size` is True"),
        ({}, {"ddp_bucket_cap_mb": 5}, "`ddp_bucket_cap_mb` is 5, which does not go with"),
        ({"zero_optimization": {"stage": 3}}, {}, "stage: 3: give 0, 1 or 2"),
        ({"zero_optimization": {"stage": "two"}}, {}, "stage: 'two': give 0, 1 or 2"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, {}, "offload_optimizer.device: .cpu., which"),
        (
            {"zero_optimization": {"stage": 2, "round_robin_gradients": True}},
            {},
            "round_robin_gradients: True, which",
        ),
        ({"zero_optimization": 2}, {}, "has zero_optimization: 2: give a dict"),
    ],
)
def test_contradictions_are_refused(
    config: dict[str, Any], arguments: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        Alone(str(tmp_path), deepspeed=config, **arguments)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("reduce_bucket_size", "reduce_bucket_size: 'auto', but the config of this Linear has no hid"),
        ("allgather_bucket_size", "'auto' for allgather_bucket_size, which follows from no argument"),
        ("overlap_comm", "'auto' for overlap_comm, which follows from no argument"),
    ],
)
def test_values_that_follow_from_nothing_cannot_be_automatic(name: str, why: str, tmp_path: Path) -> None:
    args = Alone(str(tmp_path), deepspeed={"zero_optimization": {"stage": 2, name: "auto"}})
    with pytest.raises(ConfigurationError, match=why):
        engine_config(args, torch.nn.Linear(1, 1))


def test_the_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # as if it were not installed
    with pytest.raises(MissingDependencyError, match="pip install deepspeed$"):
        make_trainer(tmp_path, deepspeed={})


# ---------------------------------------------------------------------------------------------------------------- runs


@needs_package
def test_a_launcher_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(LaunchError, match="torchrun --nproc-per-node 1"):
        make_trainer(tmp_path, deepspeed={})


@needs_package
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("ranks", [1, 2])
def test_runs_with_deepspeed_equal_runs_without(ranks: int, tmp_path: Path) -> None:
    found = {}
    for stage in ("0", "1", "none", "2"):  # each goes on from checkpoints of those before
        folder = tmp_path / stage
        folder.mkdir()
        run_under_torchrun(SCRIPT, ranks, folder, stage, env={"DS_ACCELERATOR": "cpu"})
        found[stage] = [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]
        for other in found[stage][1:]:
            assert_same(other, found[stage][0])
    plain, *_ = found.pop("none")
    events = plain.pop("events")
    for deepspeed, *_ in found.values():
        assert deepspeed.pop("events") == events
        rates = deepspeed.pop("rates")
        assert rates[:4] == pytest.approx([0.0, 0.0, 0.05, 0.1])  # DeepSpeed's schedules begin one update late
        assert rates[-1] == pytest.approx(0.1 * 2 / (len(rates) - 2))
        torch.testing.assert_close(deepspeed, plain, rtol=1e-5, atol=1e-6)
