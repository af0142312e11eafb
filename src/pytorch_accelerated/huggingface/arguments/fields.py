"""All arguments of a run, each with everything that is known about it; see `Argument`. Before them, the words for some.

Checks, errors, command lines and docs/reference/huggingface_arguments.md are made from these fields. Their annotations
are read when the program runs, so this module doesn't postpone them.
"""

import difflib
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, NoReturn

from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.huggingface.arguments import argument as rules
from pytorch_accelerated.huggingface.arguments.argument import (
    AT_LEAST_0,
    AT_LEAST_1,
    BELOW_1,
    FINITE,
    argument,
    other_name,
    unsupported,
)


class _Word(str, Enum):
    """Base of these enums."""

    __str__ = str.__str__

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        words = [word.value for word in cls]
        close = difflib.get_close_matches(str(value).lower(), words, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ConfigurationError(
            f"{value!r} is not a valid {cls.__name__}.{hint} Choose among {', '.join(map(repr, words))}."
        )


class IntervalStrategy(_Word):
    """When to log or evaluate."""

    NO = "no"
    STEPS = "steps"
    EPOCH = "epoch"


class SaveStrategy(_Word):
    """When to save; "best" is after each evaluation that is better than all before."""

    NO = "no"
    STEPS = "steps"
    EPOCH = "epoch"
    BEST = "best"


class SchedulerType(_Word):
    """The shape of the learning rate over a run."""

    LINEAR = "linear"
    COSINE = "cosine"
    COSINE_WITH_RESTARTS = "cosine_with_restarts"
    POLYNOMIAL = "polynomial"
    CONSTANT = "constant"
    CONSTANT_WITH_WARMUP = "constant_with_warmup"
    INVERSE_SQRT = "inverse_sqrt"
    REDUCE_ON_PLATEAU = "reduce_lr_on_plateau"
    COSINE_WITH_MIN_LR = "cosine_with_min_lr"
    COSINE_WARMUP_WITH_MIN_LR = "cosine_warmup_with_min_lr"
    WARMUP_STABLE_DECAY = "warmup_stable_decay"


class OptimizerNames(_Word):
    """The optimizers that are made by name."""

    ADAMW_TORCH = "adamw_torch"
    ADAMW_TORCH_FUSED = "adamw_torch_fused"
    ADAFACTOR = "adafactor"
    ADEMAMIX = "ademamix"
    SGD = "sgd"
    ADAGRAD = "adagrad"
    ADAMW_BNB = "adamw_bnb_8bit"
    ADAMW_8BIT = "adamw_8bit"
    ADEMAMIX_8BIT = "ademamix_8bit"
    LION_8BIT = "lion_8bit"
    LION = "lion_32bit"
    PAGED_ADAMW = "paged_adamw_32bit"
    PAGED_ADAMW_8BIT = "paged_adamw_8bit"
    PAGED_ADEMAMIX = "paged_ademamix_32bit"
    PAGED_ADEMAMIX_8BIT = "paged_ademamix_8bit"
    PAGED_LION = "paged_lion_32bit"
    PAGED_LION_8BIT = "paged_lion_8bit"
    RMSPROP = "rmsprop"
    SCHEDULE_FREE_ADAMW = "schedule_free_adamw"
    SCHEDULE_FREE_RADAM = "schedule_free_radam"
    SCHEDULE_FREE_SGD = "schedule_free_sgd"
    RMSPROP_BNB = "rmsprop_bnb"
    RMSPROP_8BIT = "rmsprop_bnb_8bit"
    RMSPROP_32BIT = "rmsprop_bnb_32bit"


class SamplingStrategy(_Word):
    """The order of the training rows.

    "batch_rebalance" has the rows of "random" in an update, but dealt out by their length, so that the batches of one
    step are about equally long on all ranks.
    """

    RANDOM = "random"
    SEQUENTIAL = "sequential"
    GROUP_BY_LENGTH = "group_by_length"
    BATCH_REBALANCE = "batch_rebalance"


class ParallelMode(_Word):
    """Whether this process trains alone or with others; all members but the first two exist for scripts only."""

    NOT_PARALLEL = "not_parallel"
    DISTRIBUTED = "distributed"
    NOT_DISTRIBUTED = "not_distributed"
    SAGEMAKER_MODEL_PARALLEL = "sagemaker_model_parallel"
    SAGEMAKER_DATA_PARALLEL = "sagemaker_data_parallel"
    TPU = "tpu"


class HubStrategy(_Word):
    """When `transformers` uploads checkpoints, for scripts that import it; nothing is uploaded here."""

    END = "end"
    EVERY_SAVE = "every_save"
    CHECKPOINT = "checkpoint"
    ALL_CHECKPOINTS = "all_checkpoints"


_LOG_LEVELS = ("passive", "debug", "info", "warning", "error", "critical")
# Why arguments are unsupported that belong together, and what to do instead.
_HUB = "Nothing is uploaded in a run. Call `trainer.model.push_to_hub(...)`, or do it in `on_save`."
_OTHER_TRACKER = "Its service has a callback of its own: pass that in `callbacks`."
_LIGER = "Call liger_kernel's own function before you make the Trainer."
_FULL_EVAL = "Use bf16=True, or convert a model that is only evaluated."


@dataclass
class Arguments:
    """The fields of `TrainingArguments`, and what classes derived from transformers' read of the class."""

    default_optim = OptimizerNames.ADAMW_TORCH_FUSED.value
    place_model_on_device: ClassVar[bool | None] = None  # a property of a subclass may say so
    # Fields that may be a dict as text; a subclass adds its own.
    _VALID_DICT_FIELDS: ClassVar[list[str]] = [
        "accelerator_config",
        "fsdp_config",
        "deepspeed",
        "activation_checkpointing_kwargs",
        "gradient_checkpointing_kwargs",
        "lr_scheduler_kwargs",
    ]

    # What comes out
    output_dir: str | None = argument(None, "Folder for checkpoints and logs. Default: trainer_output.")
    do_train: bool = argument(False, "For your script: whether to train.")
    do_eval: bool = argument(False, "For your script: whether to evaluate.")
    do_predict: bool = argument(False, "For your script: whether to predict.")
    resume_from_checkpoint: str | None = argument(None, "For your script: what it gives to train().")

    # How long, and with what
    per_device_train_batch_size: int = argument(8, "Rows in a training batch on one device.", limit=AT_LEAST_1)
    per_device_eval_batch_size: int = argument(8, "Rows in an evaluation batch on one device.", limit=AT_LEAST_1)
    gradient_accumulation_steps: int = argument(1, "Batches per update, as if they were one.", limit=AT_LEAST_1)
    num_train_epochs: float = argument(3.0, "Epochs; the last may be partial.", limit=FINITE)
    max_steps: int = argument(-1, "Updates; overrides num_train_epochs.", limit=rules.MAX_STEPS)
    auto_find_batch_size: bool = argument(False, "When memory runs out, halve the batch size.")
    seed: int = argument(42, "Seeds every generator at the start.", limit=rules.A_SEED)
    data_seed: int | None = argument(None, "Seed for the order of rows. Default: seed.", limit=rules.A_SEED)
    full_determinism: bool = argument(False, "Use deterministic algorithms only, which may be slow.")

    # Optimizer and schedule
    learning_rate: float = argument(5e-05, "The peak of the schedule.", limit=FINITE)
    optim: OptimizerNames | str = argument(
        "adamw_torch_fused",
        "The optimizer by name: of torch, transformers (adafactor), bitsandbytes (8-bit, paged).",
        kind=rules.a_word_of(OptimizerNames, " Make any other yourself: see `optimizer_cls_and_kwargs`."),
    )
    optim_args: str | None = argument(None, "Further arguments of the optimizer: name=value,name=value.")
    weight_decay: float = argument(0.0, "Weight decay of all but biases and norm layers.", limit=FINITE)
    adam_beta1: float = argument(0.9, "AdamW: decay of the mean gradient.", limit=BELOW_1)
    adam_beta2: float = argument(0.999, "AdamW: decay of the mean squared gradient.", limit=BELOW_1)
    adam_epsilon: float = argument(1e-08, "AdamW: added to the denominator.", limit=FINITE)
    max_grad_norm: float | None = argument(1.0, "Limit of the gradient's norm. 0: no limit.", limit=FINITE)
    lr_scheduler_type: SchedulerType | str = argument("linear", "The shape of the learning rate over the run.")
    lr_scheduler_kwargs: dict[str, Any] | str | None = argument(None, "Arguments of the schedule, as JSON.")
    warmup_steps: float = argument(
        0, "Updates, or share of the run, of rising rates.", kind=rules.WARMUP_STEPS, limit=rules.WARMUP
    )
    label_smoothing_factor: float = argument(0.0, "Share spread over all classes.", limit=BELOW_1)
    average_tokens_across_devices: bool = argument(True, "Means over tokens cover all devices.")

    # Precision, memory, compilation
    bf16: bool = argument(False, "Mixed precision in bfloat16.")
    fp16: bool = argument(False, "Mixed precision in float16, with loss scaling.")
    gradient_checkpointing: bool = argument(False, "Recompute activations instead of keeping them.")
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = argument(
        None, "Arguments of the model's gradient_checkpointing_enable, as JSON."
    )
    use_cache: bool = argument(False, "Have the model return caches, which few ways of finetuning need.")
    torch_compile: bool = argument(False, "Compile the model. True if a backend or a mode is given.")
    torch_compile_backend: str | None = argument(None, "The backend of torch.compile.")
    torch_compile_mode: str | None = argument(None, "The mode of torch.compile.")
    use_cpu: bool = argument(False, "Train on the CPU even if there is a GPU.")

    # Data
    remove_unused_columns: bool = argument(True, "Drop columns that the model's forward does not name.")
    label_names: list[str] | None = argument(
        None, "Columns that are labels. Default: parameters of forward with 'label' in their name."
    )
    train_sampling_strategy: SamplingStrategy | str = argument("random", "The order of the training rows.")
    length_column_name: str = argument("length", "Column with the length of a row, to order by.")
    dataloader_drop_last: bool = argument(False, "Drop a last batch that is not full.")
    dataloader_num_workers: int = argument(0, "Processes that fetch data.", limit=AT_LEAST_0)
    dataloader_pin_memory: bool = argument(True, "Copy to the device from pinned memory.")
    dataloader_persistent_workers: bool = argument(
        False, "Keep the workers from epoch to epoch.", needs="dataloader_num_workers"
    )
    dataloader_prefetch_factor: int | None = argument(
        None, "Batches that each worker fetches ahead.", limit=AT_LEAST_1, needs="dataloader_num_workers"
    )
    dataloader_multiprocessing_context: str | None = argument(
        None, "How workers start: fork, spawn or forkserver.", needs="dataloader_num_workers"
    )
    ignore_data_skip: bool = argument(False, "At a resume, begin the epoch's data again.")

    # Logging
    logging_strategy: IntervalStrategy | str = argument("steps", "When to log.")
    logging_steps: float = argument(500, "Log every N updates, or share of the run.", kind=rules.STEPS)
    logging_first_step: bool = argument(False, "Log the first update too.")
    logging_nan_inf_filter: bool = argument(True, "Leave non-finite losses out of the logged mean.")
    logging_dir: str | None = argument(None, "Folder for TensorBoard. Default: below output_dir.")
    report_to: None | str | list[str] = argument(
        None, "none, trackers by name, or all of tensorboard, mlflow and wandb.", kind=rules.TRACKER_NAMES
    )
    run_name: str | None = argument(None, "Name of this run in trackers. Default: time and host.")
    project: str = argument("huggingface", "MLflow's experiment, W&B's project.")
    disable_tqdm: bool | None = argument(None, "Print logs instead of showing progress bars.")
    log_level: str = argument("passive", "The level of the first process's logger.", choices=_LOG_LEVELS)
    log_level_replica: str = argument("warning", "The same on all other processes.", choices=_LOG_LEVELS)
    log_on_each_node: bool = argument(True, "Log on the first process of each machine.")
    skip_memory_metrics: bool = argument(True, "False: log how many bytes a stage has added.")
    include_num_input_tokens_seen: str = argument(
        "no",
        "Count the tokens of the input: no, all, non_padding.",
        kind=rules.TOKENS_TO_COUNT,
        choices=("no", "all", "non_padding"),
    )

    # Evaluation
    eval_strategy: IntervalStrategy | str = argument("no", "When to evaluate.")
    eval_steps: float | None = argument(None, "Like logging_steps, which is the default.", kind=rules.STEPS)
    eval_delay: float = argument(0, "Updates or epochs before the first evaluation.", limit=FINITE)
    eval_on_start: bool = argument(False, "Evaluate before the first update, too.")
    eval_accumulation_steps: int | None = argument(None, "Changes nothing here.", limit=AT_LEAST_1)
    eval_do_concat_batches: bool = argument(True, "Join the predictions of batches.")
    prediction_loss_only: bool = argument(False, "Keep the loss only.")
    include_for_metrics: list[str] = argument(
        [], "What compute_metrics gets in addition: inputs, loss.", choices=("inputs", "loss")
    )
    batch_eval_metrics: bool = argument(False, "Call compute_metrics after each batch.")

    # Checkpoints and the best model
    save_strategy: SaveStrategy | str = argument("steps", "When to save a checkpoint.")
    save_steps: float = argument(500, "Save every N updates, or share of the run.", kind=rules.STEPS)
    save_total_limit: int | None = argument(
        None, "Checkpoints to keep; the best is never deleted.", limit=rules.KEPT_CHECKPOINTS
    )
    save_only_model: bool = argument(False, "Leave out what only resuming needs.")
    load_best_model_at_end: bool = argument(False, "Load the best weights at the end.")
    metric_for_best_model: str | None = argument(None, "The metric that compares models.")
    greater_is_better: bool | None = argument(None, "Default: unless the metric's name ends with loss.")
    restore_callback_states_from_checkpoint: bool = argument(False, "Restore callbacks at a resume.")

    # Multiple processes
    ddp_backend: str | None = argument(None, "Backend of the communication: nccl, gloo, ...")
    ddp_timeout: int = argument(1800, "Seconds that a process waits for the others.", limit=AT_LEAST_1)
    ddp_find_unused_parameters: bool | None = argument(
        None, "Look for parameters without a gradient. Default: True, unless activations are recomputed."
    )
    ddp_bucket_cap_mb: int | None = argument(None, "Megabytes exchanged together.", limit=AT_LEAST_1)
    ddp_broadcast_buffers: bool | None = argument(None, "Send buffers before each forward.")
    ddp_static_graph: bool | None = argument(None, "Whether every step uses the same parameters.")
    accelerator_config: dict[str, Any] | str | None = argument(
        None, "How accelerate would deal out batches; as JSON or a path.", kind=rules.AN_ACCELERATOR_CONFIG
    )
    fsdp: str | None = argument(None, "true, full_shard, shard_grad_op, auto_wrap.", kind=rules.SHARDING)
    fsdp_config: dict[str, Any] | str | None = argument(
        None,
        "transformer_layer_cls_to_wrap, reshard_after_forward; as JSON or a path.",
        kind=rules.A_DICT_OR_FILE,
        needs="fsdp",
    )
    deepspeed: dict[str, Any] | str | None = argument(
        None, "DeepSpeed's config, as JSON or a path.", kind=rules.A_DICT_OR_FILE
    )

    # Other names, most of them from older scripts
    activation_checkpointing: bool = other_name("gradient_checkpointing", False)
    activation_checkpointing_kwargs: dict[str, Any] | str | None = other_name("gradient_checkpointing_kwargs")
    adafactor: bool = other_name("optim", False, gives=OptimizerNames.ADAFACTOR)
    evaluation_strategy: IntervalStrategy | str | None = other_name("eval_strategy")
    group_by_length: bool = other_name("train_sampling_strategy", False, gives=SamplingStrategy.GROUP_BY_LENGTH)
    include_inputs_for_metrics: bool = other_name("include_for_metrics", False, gives=["inputs"])
    include_tokens_per_second: bool = other_name("include_num_input_tokens_seen", False, gives="all")
    no_cuda: bool = other_name("use_cpu", False)
    warmup_ratio: float | None = other_name("warmup_steps", limit=BELOW_1)

    # Unsupported
    optim_target_modules: str | None = unsupported(None, "Pass the optimizer that it is for in `optimizers`.")
    bf16_full_eval: bool = unsupported(False, _FULL_EVAL)
    fp16_full_eval: bool = unsupported(False, _FULL_EVAL)
    tf32: bool | None = unsupported(None, 'Call `torch.set_float32_matmul_precision("high")`.', also=(False,))
    use_liger_kernel: bool = unsupported(False, _LIGER)
    liger_kernel_config: str | None = unsupported(None, _LIGER)
    neftune_noise_alpha: float | None = unsupported(None, "Let a forward hook of the embedding add noise.")
    torch_empty_cache_steps: int | None = unsupported(None, "Call `torch.cuda.empty_cache()` in `on_step_end`.")
    trackio_space_id: str | None = unsupported(None, _OTHER_TRACKER)
    trackio_bucket_id: str | None = unsupported(None, _OTHER_TRACKER)
    trackio_static_space_id: str | None = unsupported(None, _OTHER_TRACKER)
    eval_use_gather_object: bool = unsupported(False, "Objects are gathered as they are.", also=(True,))
    save_on_each_node: bool = unsupported(False, "Save to a folder that all machines share.")
    enable_jit_checkpoint: bool = unsupported(False, "A signal leads to a checkpoint anyway.", also=(True,))
    sortish_sampler: bool = unsupported(False, "Use train_sampling_strategy='group_by_length'.")
    push_to_hub: bool = unsupported(False, _HUB)
    hub_token: str | None = unsupported(None, _HUB)
    hub_private_repo: bool | None = unsupported(None, _HUB, also=(False,))
    hub_model_id: str | None = unsupported(None, _HUB)
    hub_strategy: str = unsupported("every_save", _HUB)
    hub_always_push: bool = unsupported(False, _HUB)
    hub_revision: str | None = unsupported(None, _HUB)
    parallelism_config: str | None = unsupported(None, "Use `fsdp` for models that are too large.")
    dataloader_in_order: bool = unsupported(True, "Exact runs depend on the order.")
    debug: str = unsupported("", "Call `torch.autograd.set_detect_anomaly(True)`.", also=([],))
    local_rank: int = unsupported(-1, "The launcher sets it.")
    # Unsupported, of older versions
    overwrite_output_dir: bool = unsupported(False, "Your script reads it. Give True or False.", also=(True,))
    save_safetensors: bool = unsupported(True, "Weights are always saved as safetensors. Leave it out.")
