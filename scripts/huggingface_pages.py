"""Writes the page about the arguments of the Hugging Face API, which follows from the code.

    python scripts/huggingface_pages.py

A test fails where it is not up to date.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from pytorch_accelerated.huggingface import Seq2SeqTrainingArguments, TrainingArguments  # noqa: E402
from pytorch_accelerated.huggingface.arguments.argument import Argument, arguments_of  # noqa: E402

ARGUMENTS_PAGE = ROOT / "docs" / "reference" / "huggingface_arguments.md"

_ARGUMENTS_HEAD = """\
# The arguments of the Hugging Face API

Written by `scripts/huggingface_pages.py`; change the code instead.

`pytorch_accelerated.huggingface.TrainingArguments` has the names and defaults of `transformers` 5.23 and 5.24, where
the loop can do what they say. No argument is ignored: using one that is unsupported is an error that says why, and what
to do instead. The last column is the equivalent for the native `pytorch_accelerated.Trainer`; `train(...)` is its
method, and callbacks come from `pytorch_accelerated.callbacks`.

## Supported arguments
"""
# The equivalents for the native Trainer.
_LOGS = "the run history has everything; `on_train_epoch_end` or a logging callback decides what is shown"
_DDP = "`Trainer(accelerator=Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(...)]))`"
_NATIVE = {
    "output_dir": "`SaveTrainingStateCallback(save_dir)`",
    "do_train": "your script",
    "do_eval": "your script",
    "do_predict": "your script",
    "resume_from_checkpoint": "`train(resume_from=...)`",
    "per_device_train_batch_size": "`train(per_device_batch_size=8)`",
    "per_device_eval_batch_size": "`train(eval_per_device_batch_size=8)`",
    "gradient_accumulation_steps": "`train(gradient_accumulation_steps=1)`",
    "num_train_epochs": "`train(num_epochs=3)`, whole ones",
    "max_steps": "`train(max_num_train_steps=...)`",
    "seed": "`set_seed(42)` first, or `Trainer(seed=42)`",
    "data_seed": "`Trainer(seed=42)`",
    "full_determinism": "torch's own settings, in your script",
    "learning_rate": "the optimizer that you make",
    "optim": "the optimizer that you make",
    "optim_args": "the optimizer that you make",
    "weight_decay": "the optimizer that you make",
    "adam_beta1": "the optimizer that you make",
    "adam_beta2": "the optimizer that you make",
    "adam_epsilon": "the optimizer that you make",
    "max_grad_norm": "`train(gradient_clip_norm=1.0)`",
    "lr_scheduler_type": "`train(create_scheduler_fn=...)`",
    "lr_scheduler_kwargs": "arguments of `create_scheduler_fn()`",
    "warmup_steps": "arguments of `create_scheduler_fn()`",
    "label_smoothing_factor": "`CrossEntropyLoss(label_smoothing=...)`",
    "average_tokens_across_devices": "always: see `count_batch_items`",
    "bf16": '`Trainer(mixed_precision="bf16")`',
    "fp16": '`Trainer(mixed_precision="fp16")`',
    "gradient_checkpointing": "the model's own method, called before",
    "gradient_checkpointing_kwargs": "the model's own method, called before",
    "use_cache": "the model's own configuration",
    "torch_compile": "`Trainer(compile_model=True)`",
    "torch_compile_backend": '`Trainer(compile_model={"backend": ...})`',
    "torch_compile_mode": '`Trainer(compile_model={"mode": ...})`',
    "use_cpu": "`Trainer(accelerator=Accelerator(cpu=True))`",
    "remove_unused_columns": "the `collate_fn` yields what the model takes",
    "label_names": "the loss function gets them",
    "train_sampling_strategy": '`train(train_dataloader_kwargs={"sampler": ...})`',
    "length_column_name": '`train(train_dataloader_kwargs={"sampler": ...})`',
    "dataloader_drop_last": '`train(train_dataloader_kwargs={"drop_last": True})`',
    "dataloader_num_workers": "`train(train_dataloader_kwargs=..., eval_dataloader_kwargs=...)`",
    "dataloader_pin_memory": "`train(train_dataloader_kwargs=..., eval_dataloader_kwargs=...)`",
    "dataloader_persistent_workers": "`train(train_dataloader_kwargs=..., eval_dataloader_kwargs=...)`",
    "dataloader_prefetch_factor": "`train(train_dataloader_kwargs=..., eval_dataloader_kwargs=...)`",
    "dataloader_multiprocessing_context": "`train(train_dataloader_kwargs=..., eval_dataloader_kwargs=...)`",
    "ignore_data_skip": "none: a run resumes where it stopped",
    "logging_strategy": _LOGS,
    "logging_steps": _LOGS,
    "logging_first_step": _LOGS,
    "logging_nan_inf_filter": '`train(nonfinite_policy="skip")` skips the update',
    "logging_dir": "`TrackerCallback(folder=...)`",
    "report_to": "`TrackerCallback`, `CSVLoggerCallback` or `JSONLoggerCallback`",
    "run_name": "`TrackerCallback(run_name=...)`",
    "disable_tqdm": "`Trainer(callbacks=...)` without `ProgressBarCallback`",
    "log_level": "`logging`",
    "log_level_replica": "`logging`",
    "log_on_each_node": "none: only the first process of all logs",
    "skip_memory_metrics": "`ProfilerCallback`",
    "include_num_input_tokens_seen": "a callback's `on_train_step_end`",
    "eval_strategy": "every epoch, if there is an `eval_dataset`; `StepBasedEvaluationCallback`",
    "eval_steps": "`StepBasedEvaluationCallback`",
    "eval_delay": "`request_evaluation()` in a callback",
    "eval_on_start": "`trainer.evaluate(...)` before `train`",
    "eval_accumulation_steps": "as it is",
    "eval_do_concat_batches": "`predict` returns rows joined",
    "prediction_loss_only": "`evaluate` computes losses, `predict` predictions",
    "include_for_metrics": "`MetricsCallback`, or your own callback with `on_eval_step_end`",
    "batch_eval_metrics": "`MetricsCallback`, or your own callback with `on_eval_step_end`",
    "save_strategy": "`SaveTrainingStateCallback(save_every_n_epochs=1)`",
    "save_steps": "`SaveTrainingStateCallback`",
    "save_total_limit": "`SaveTrainingStateCallback`",
    "save_only_model": "`SaveBestModelCallback(save_optimizer=False)`",
    "load_best_model_at_end": "`SaveBestModelCallback`",
    "metric_for_best_model": "`SaveBestModelCallback(watch_metric=...)`",
    "greater_is_better": "`SaveBestModelCallback`",
    "restore_callback_states_from_checkpoint": "always: `state_dict` of callbacks",
    "ddp_backend": "`Trainer(accelerator=Accelerator(kwargs_handlers=[InitProcessGroupKwargs(...)]))`",
    "ddp_timeout": "`Trainer(accelerator=Accelerator(kwargs_handlers=[InitProcessGroupKwargs(...)]))`",
    "ddp_find_unused_parameters": _DDP,
    "ddp_bucket_cap_mb": _DDP,
    "ddp_broadcast_buffers": _DDP,
    "ddp_static_graph": _DDP,
    "accelerator_config": "always: every row is used exactly once",
    "fsdp": "torch's `fully_shard(model)`",
    "fsdp_config": "arguments of `fully_shard`",
    "deepspeed": "`Trainer(accelerator=Accelerator(deepspeed_plugin=...))`",
    "project": "`TrackerCallback(project=...)`",
}
_SEQ2SEQ_HEAD = """\

## Further arguments of Seq2SeqTrainingArguments
"""
_UNSUPPORTED_HEAD = """\

## Unsupported arguments

Arguments of `transformers` 5.24, and of older versions that scripts may still use. Scripts may give them the values
that ask for nothing; reading an argument that was left out returns the first of these.
"""


def arguments_page() -> str:
    """Every argument, with its meaning or the reason why it is unsupported."""
    common, of_seq2seq = (arguments_of(kind) for kind in (TrainingArguments, Seq2SeqTrainingArguments))
    help_of = {field.name: field.metadata["help"] for field in dataclasses.fields(Seq2SeqTrainingArguments)}
    columns = {
        name: (f"`{name}`", _default(one), help_of[name], _native(name, one)) for name, one in of_seq2seq.items()
    }
    unsupported = [
        (f"`{name}`", ", ".join(f"`{value!r}`" for value in (one.default, *one.also)), one.why_unsupported)
        for name, one in common.items()
        if one.why_unsupported
    ]
    return "\n".join(
        [
            _ARGUMENTS_HEAD,
            *_table(
                ("argument", "default", "meaning", "native `Trainer`"),
                [columns[name] for name, one in common.items() if not one.why_unsupported],
            ),
            _SEQ2SEQ_HEAD,
            *_table(
                ("argument", "default", "meaning"),
                [columns[name][:3] for name in of_seq2seq if name not in common],
            ),
            _UNSUPPORTED_HEAD,
            *_table(("argument", "value that turns it off", "why, and what to do instead"), unsupported),
            "",
        ]
    )


def _native(name: str, argument: Argument) -> str:
    return "" if argument.same_as else _NATIVE.get(name, "")


def _default(argument: Argument) -> str:
    return "" if argument.default is None else f"`{argument.default!r}`"


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in [header, ("---",) * len(header), *rows]]


if __name__ == "__main__":
    ARGUMENTS_PAGE.write_text(arguments_page(), encoding="utf-8")
