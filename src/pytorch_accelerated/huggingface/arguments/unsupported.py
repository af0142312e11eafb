"""Arguments of Hugging Face's Trainer that are not taken over: why, and what to do instead.

Scripts pass and read them all the same, with the value that asks for nothing. That is what they get.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any


@dataclass(frozen=True)
class NotTakenOver:
    """Why there is no such argument, and what to do instead, each as a sentence.

    Attributes:
        off: the value that asks for nothing but what happens anyway; the argument's default.
        also: further values that do.
        kind: of values, for command lines; default: that of `off`, or a string.
    """

    reason: str
    remedy: str
    off: Any = None
    also: tuple[Any, ...] = ()
    kind: Any = None


_HUB = NotTakenOver(
    "Nothing is uploaded during a run.",
    "Call `trainer.model.push_to_hub(...)` when it is over, or from an `on_save` of your own.",
)
_OTHER_TRACKER = NotTakenOver(
    "It is about a service that has a callback of its own.",
    "Give that callback to the Trainer in `callbacks`, and the setting to the callback.",
)
_LIGER = NotTakenOver(
    "The Trainer does not replace parts of the model.",
    "Call liger_kernel's own function for your model before you make the Trainer.",
)
_FULL_EVAL = NotTakenOver(
    "Weights are evaluated as they are trained.",
    "Mixed precision (bf16=True) covers evaluations; or convert the model, `model.to(torch.bfloat16)`, before you make "
    "a Trainer that only evaluates.",
    off=False,
)
_ACCELERATE_LOADERS = NotTakenOver(
    "Loaders are this library's: every row is used exactly once, on every number of processes.",
    "Leave it out.",
)

_FIELDS: dict[str, Any] = {}
_LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")

NOT_TAKEN_OVER: dict[str, NotTakenOver] = {
    "optim_target_modules": NotTakenOver(
        "It is for optimizers that are not torch's.", "Make that optimizer, and pass it in `optimizers`."
    ),
    "bf16_full_eval": _FULL_EVAL,
    "fp16_full_eval": _FULL_EVAL,
    "tf32": NotTakenOver(
        "It changes a setting of the whole process.",
        'Call `torch.set_float32_matmul_precision("high")` in your script.',
        also=(False,),
        kind=bool | None,
    ),
    "use_liger_kernel": replace(_LIGER, off=False),
    "liger_kernel_config": _LIGER,
    "use_cache": NotTakenOver("It is a setting of the model.", "Set `model.config.use_cache`.", off=False),
    "neftune_noise_alpha": NotTakenOver(
        "The Trainer does not change what the model computes.",
        "Register a forward hook on the embedding that adds the noise while `module.training` is True.",
        kind=float | None,
    ),
    "torch_empty_cache_steps": NotTakenOver(
        "It slows a run down without giving it memory that it would not get anyway.",
        "If you must, call `torch.cuda.empty_cache()` in an `on_step_end` of your own.",
        kind=int | None,
    ),
    "project": replace(_OTHER_TRACKER, off="huggingface"),
    "trackio_space_id": _OTHER_TRACKER,
    "trackio_bucket_id": _OTHER_TRACKER,
    "trackio_static_space_id": _OTHER_TRACKER,
    "eval_use_gather_object": NotTakenOver(
        "Nested structures, strings and objects are gathered as they are.", "Leave it out.", off=False, also=(True,)
    ),
    "save_on_each_node": NotTakenOver(
        "A checkpoint of several machines is one folder, complete or not there at all.",
        "Save to a folder that all of them share.",
        off=False,
    ),
    "enable_jit_checkpoint": NotTakenOver(
        "A signal that ends the run brings a checkpoint in any case, unless `save_strategy` is 'no'.",
        "Leave it out.",
        off=False,
        also=(True,),
    ),
    "sortish_sampler": NotTakenOver(
        "Nothing reads it in transformers either.",
        "Use train_sampling_strategy='group_by_length' to have rows of about one length in a batch.",
        off=False,
    ),
    "push_to_hub": replace(_HUB, off=False),
    "hub_token": _HUB,
    "hub_private_repo": replace(_HUB, also=(False,), kind=bool | None),
    "hub_model_id": _HUB,
    "hub_strategy": replace(_HUB, off="every_save"),
    "hub_always_push": replace(_HUB, off=False),
    "hub_revision": _HUB,
    "accelerator_config": _ACCELERATE_LOADERS,
    "parallelism_config": NotTakenOver(
        "Tensor and context parallelism are not supported.", "Use `fsdp` for models that are too large."
    ),
    "dataloader_in_order": NotTakenOver(
        "Batches come in their order, on which exact runs and resumes rest.", "Leave it out.", off=True
    ),
    "debug": NotTakenOver(
        "Its options are about float16 overflows and other machines.",
        "Call `torch.autograd.set_detect_anomaly(True)`; losses that are not finite are reported in any case.",
        off="",
        also=([],),
    ),
    "local_rank": NotTakenOver(
        "The launcher tells each process its place, which reading this gives.",
        "Leave it out; torchrun sets LOCAL_RANK.",
        off=-1,
        also=(0,),
    ),
    # Of older versions
    "dispatch_batches": replace(_ACCELERATE_LOADERS, also=(False,), kind=bool | None),
    "split_batches": replace(_ACCELERATE_LOADERS, off=False),
    "fp16_backend": NotTakenOver("There is one backend.", "Use fp16=True or bf16=True.", off="auto", also=("amp",)),
    "half_precision_backend": NotTakenOver(
        "There is one backend.", "Use fp16=True or bf16=True.", off="auto", also=("amp", "cuda_amp", "cpu_amp")
    ),
    "fp16_opt_level": NotTakenOver("It is for apex.", "Use fp16=True or bf16=True.", off="O1"),
    "fsdp_min_num_params": NotTakenOver("It is a setting of FSDP.", "Put `min_num_params` into `fsdp_config`.", off=0),
    "fsdp_transformer_layer_cls_to_wrap": NotTakenOver(
        "It is a setting of FSDP.", "Put `transformer_layer_cls_to_wrap` into `fsdp_config`."
    ),
    "jit_mode_eval": NotTakenOver("TorchScript is no longer developed.", "Use `torch_compile`.", off=False),
    "overwrite_output_dir": NotTakenOver(
        "It is for your script to read.", "Give True or False.", off=False, also=(True,)
    ),
    "past_index": NotTakenOver("Models keep their past themselves.", "Leave it out.", off=-1),
    "push_to_hub_model_id": _HUB,
    "push_to_hub_organization": _HUB,
    "push_to_hub_token": _HUB,
    "ray_scope": NotTakenOver(
        "There is no search for hyperparameters.", "Run the script once for each choice.", off="last"
    ),
    "save_safetensors": NotTakenOver("Weights are always saved as safetensors.", "Leave it out.", off=True),
    "sharded_ddp": NotTakenOver("It is for fairscale.", "Use `fsdp`.", off=""),
    "tpu_metrics_debug": NotTakenOver("TPUs are not supported.", "Leave it out.", off=False),
    "tpu_num_cores": NotTakenOver("TPUs are not supported.", "Leave it out.", kind=int | None),
    "use_ipex": NotTakenOver("That package is no longer developed.", "Leave it out.", off=False),
    "use_legacy_prediction_loop": NotTakenOver("There is one loop.", "Leave it out.", off=False),
    "use_mps_device": NotTakenOver("The device is found without it.", "Leave it out.", off=False, also=(True,)),
}

_OF_GENERATION = ("predict_with_generate", "generation_config", "generation_max_length", "generation_num_beams")


def asks_for_nothing(name: str, value: Any) -> bool:
    """Whether an argument that is not taken over has a value that it need not be taken over for."""
    entry = NOT_TAKEN_OVER[name]
    value = None if value == "None" else value  # as command lines have it
    accepted = [entry.off, *entry.also]
    if name == "local_rank":  # older launchers put it on the command line, too
        accepted += [int(os.environ[name]) for name in _LOCAL_RANKS if os.environ.get(name, "").isdigit()]
    return any(isinstance(value, type(one)) and value == one for one in accepted)


def with_names_not_taken_over(kind: type) -> type:
    """A class of arguments with a field for each, so that command lines and JSON may have them, too.

    They come last, by keyword only, and count neither when arguments are compared nor when they are shown.
    """
    for name, entry in NOT_TAKEN_OVER.items():
        kind.__annotations__[name] = entry.kind or (str | None if entry.off is None else type(entry.off))
        told = {"help": f"Not taken over; {entry.off!r} asks for nothing."}
        _FIELDS[name] = field(default=entry.off, kw_only=True, repr=False, compare=False, metadata=told)
        setattr(kind, name, _FIELDS[name])
    return kind


def names_not_taken_over(kind: type) -> list[str]:
    """Those of a class of arguments, without what a subclass has made an argument of its own."""
    return [one.name for one in fields(kind) if one is _FIELDS.get(one.name)]


def explain_unknown(name: str, value: Any, known: Iterable[str]) -> str:
    """Why there is no argument `name`, and what to do, as a few sentences."""
    refused = NOT_TAKEN_OVER.get(name)
    if refused is not None:
        return f"`{name}` is {value!r}, but it is not taken over. {refused.reason} {refused.remedy}"
    if name in _OF_GENERATION:
        return f"`{name}` is {value!r}, but it is one of the Seq2SeqTrainingArguments, for a Seq2SeqTrainer: use these."
    close = difflib.get_close_matches(name, known, n=1)
    remedy = f"Did you mean `{close[0]}`?" if close else "docs/huggingface_arguments.md lists all there are."
    return f"`{name}` is {value!r}, but there is no argument of that name. {remedy}"
