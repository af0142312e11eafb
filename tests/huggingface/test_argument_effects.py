"""The effects of arguments that the tests of what they are about do not show."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import DistributedType

from pytorch_accelerated.huggingface import TrainingArguments
from pytorch_accelerated.huggingface.training_args import logger
from tests.huggingface.runs import Regression, losses, make_trainer
from tests.huggingface.texts import WORDS, tiny_classifier

# ------------------------------------------------------------------------------- precision, memory, compilation


def test_a_process_without_a_launcher_uses_all_devices_that_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    args: Any = TrainingArguments(per_device_eval_batch_size=3)
    assert (args.n_gpu, args._n_gpu, args.train_batch_size, args.eval_batch_size) == (0, 0, 8, 3)
    state = args.distributed_state
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(state, "device", torch.device("cuda"))
    assert (args.n_gpu, args._n_gpu, args.train_batch_size, args.eval_batch_size) == (4, 4, 32, 12)
    assert (args.parallel_mode.value, args.to_sanitized_dict()["train_batch_size"]) == ("not_distributed", 32)
    args._n_gpu = 1  # as scripts do
    assert (args.n_gpu, args.train_batch_size, args.parallel_mode.value) == (1, 8, "not_parallel")
    args = TrainingArguments()
    monkeypatch.setattr(state, "device", torch.device("cuda", 1))  # one that somebody has chosen
    assert (args.n_gpu, args.train_batch_size) == (1, 8)
    monkeypatch.setattr(state, "device", torch.device("cuda"))
    monkeypatch.setattr(state, "distributed_type", DistributedType.MULTI_GPU)
    assert (args.n_gpu, args.train_batch_size) == (1, 8)


def test_activations_are_computed_twice(tmp_path: Path) -> None:
    def run(**arguments: Any) -> tuple[list[float], int]:
        model, calls = tiny_classifier(), []
        model.distilbert.transformer.layer[0].ffn.register_forward_hook(lambda *_: calls.append(1))
        rows = [{"input_ids": torch.arange(4) + shift % (len(WORDS) - 4), "labels": shift % 2} for shift in range(6)]
        trainer = make_trainer(tmp_path, parts={"model": model, "train_dataset": rows}, max_steps=3, **arguments)
        trainer.train()
        return losses(trainer), len(calls)

    usual, calls = run()
    for kwargs in ({"use_reentrant": False}, '{"use_reentrant": false}'):
        checkpointed, calls_then = run(gradient_checkpointing=True, gradient_checkpointing_kwargs=kwargs)
        assert checkpointed == usual
        assert (calls, calls_then) == (3, 6)


def test_models_receive_the_settings_of_activation_checkpointing(tmp_path: Path) -> None:
    class Telling(Regression):
        told: list[Any] = []

        def gradient_checkpointing_enable(self, kwargs: Any = None) -> None:
            self.told.append(kwargs)

    make_trainer(tmp_path, parts={"model": Telling()})
    make_trainer(tmp_path, parts={"model": Telling()}, gradient_checkpointing=True)
    trainer = make_trainer(
        tmp_path,
        parts={"model_init": Telling},
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
    )
    trainer.train()  # with another new model
    assert Telling.told == [None, {"use_reentrant": False}, {"use_reentrant": False}]


def test_the_model_is_compiled_as_the_arguments_say(tmp_path: Path) -> None:
    import torch._dynamo

    options: list[dict[str, Any]] = []

    def noting_backend(graph: torch.fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        options.append(kwargs)
        return graph.forward

    torch._dynamo.register_backend(compiler_fn=noting_backend, name="noting_backend")
    usual = make_trainer(tmp_path)
    usual.train()
    assert options == []
    compiled = make_trainer(tmp_path, torch_compile_backend="noting_backend", torch_compile_mode="reduce-overhead")
    assert compiled.args.torch_compile
    compiled.train()
    assert options
    assert all(kwargs.get("mode") == "reduce-overhead" for kwargs in options)
    assert losses(compiled) == pytest.approx(losses(usual), rel=1e-6)


# -------------------------------------------------------------------------------------------------------------- data


def test_settings_of_workers_reach_the_loader(tmp_path: Path) -> None:
    for pins in (True, False):
        loader = make_trainer(
            tmp_path,
            dataloader_num_workers=1,
            dataloader_prefetch_factor=5,
            dataloader_multiprocessing_context="forkserver",
            dataloader_pin_memory=pins,
        ).get_train_dataloader()
        assert loader.prefetch_factor == 5
        assert loader.multiprocessing_context.get_start_method() == "forkserver"
        assert loader.pin_memory == (pins and torch.accelerator.is_available())


# ----------------------------------------------------------------------------------------- evaluation, logging


def test_the_logger_says_as_much_as_is_asked_for(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level("DEBUG", logger.name)  # which brings back the level of now when the test is over

    def said(**arguments: Any) -> list[str]:
        caplog.clear()
        make_trainer(tmp_path, save_strategy="epoch", num_train_epochs=1, **arguments).train()
        return [record.message for record in caplog.records if record.name == logger.name]

    assert said(log_level="warning") == []
    begun, saved = said(log_level="info")
    assert "steps 1 to 5" in begun
    assert f"{tmp_path}/checkpoint-5" in saved
    said(log_level="error")
    said()  # passive
    assert logger.level == logging.ERROR
