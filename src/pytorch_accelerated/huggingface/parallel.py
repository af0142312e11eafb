"""What the arguments say about devices, precision, compilation and several processes, for the native trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytorch_accelerated.huggingface.arguments import TrainingArguments


def native_arguments(args: TrainingArguments) -> dict[str, Any]:
    """What the native trainer is made with."""
    return {
        "mixed_precision": "bf16" if args.bf16 else "fp16" if args.fp16 else None,
        "compile_model": compile_arguments(args),
    }


def compile_arguments(args: TrainingArguments) -> bool | dict[str, Any]:
    """What the native trainer is told about compilation."""
    if not args.torch_compile:
        return False
    given = {"backend": args.torch_compile_backend, "mode": args.torch_compile_mode}
    return {name: value for name, value in given.items() if value is not None} or True
