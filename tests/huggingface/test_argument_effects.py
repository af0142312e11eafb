"""The effects of arguments that the tests of what they are about do not show."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pytorch_accelerated.huggingface import TrainerCallback, TrainingArguments
from pytorch_accelerated.huggingface.arguments.parallel import warn_about_idle_devices
from pytorch_accelerated.huggingface.training_args import logger
from tests.huggingface.runs import Regression, Rows, losses, make_trainer
from tests.huggingface.texts import WORDS, tiny_classifier, tiny_language_model

# ------------------------------------------------------------------------------- precision, memory, compilation


class Watched(Regression):
    """Notes the dtype of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()
        self.linear.register_forward_hook(lambda module, inputs, output: self.dtypes.add(output.dtype))


def test_a_run_in_bfloat16_equals_a_loop_with_autocast(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, parts={"model": Watched()}, bf16=True, optim="sgd", max_grad_norm=None)
    trainer.train()
    model, rows, expected = Regression(), Rows(10), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, start in enumerate([0, 2, 4, 6, 8] * 2):
        optimizer.param_groups[0]["lr"] = 0.1 * (10 - step) / 10
        with torch.autocast("cpu", torch.bfloat16):
            loss, _ = model(rows.x[start : start + 2], rows.labels[start : start + 2])
        loss.float().backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert losses(trainer) == pytest.approx(expected, rel=1e-5)
    assert trainer.model.dtypes == {torch.bfloat16}
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}
    trainer.model.dtypes.clear()
    trainer.evaluate()
    assert trainer.model.dtypes == {torch.bfloat16}


def test_a_process_that_uses_one_of_several_devices_gets_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    args = TrainingArguments()
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(args.distributed_state, "device", torch.device("cuda", 0))
    assert (args.n_gpu, args.train_batch_size, args.eval_batch_size) == (1, 8, 8)
    with pytest.warns(UserWarning, match="sees 4 devices and uses one.*torchrun --nproc-per-node 4"):
        warn_about_idle_devices(args)
    monkeypatch.setattr(args.distributed_state, "num_processes", 4)
    warn_about_idle_devices(args)


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


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # which PEFT asks for
@pytest.mark.parametrize("is_reentrant", [False, True])
def test_an_adapter_learns_the_same_with_activations_computed_twice(is_reentrant: bool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def run(**arguments: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], fan_in_fan_out=True)
        model = peft.get_peft_model(tiny_language_model(), config)
        tokens = torch.arange(len(WORDS) - 4)
        rows = [{"input_ids": tokens[shift : shift + 6], "labels": tokens[shift : shift + 6]} for shift in range(4)]
        trainer = make_trainer(tmp_path, parts={"model": model, "train_dataset": rows}, max_steps=3, **arguments)
        trainer.train()
        return losses(trainer), {name: value for name, value in model.state_dict().items() if "lora" in name}

    usual, weights = run()
    kwargs = {"use_reentrant": is_reentrant}
    checkpointed, weights_then = run(gradient_checkpointing=True, gradient_checkpointing_kwargs=kwargs)
    assert checkpointed == usual
    torch.testing.assert_close(weights_then, weights, rtol=0, atol=0)


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


def test_settings_of_workers_reach_the_loader_of_the_run(tmp_path: Path) -> None:
    class LookAtLoader(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.loader = kwargs["train_dataloader"]._fetcher._loader
            raise KeyboardInterrupt  # no worker is needed

    look = LookAtLoader()
    for pins in (True, False):
        trainer = make_trainer(
            tmp_path,
            look,
            dataloader_num_workers=1,
            dataloader_prefetch_factor=5,
            dataloader_multiprocessing_context="forkserver",
            dataloader_pin_memory=pins,
        )
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        assert look.loader.prefetch_factor == 5
        assert look.loader.multiprocessing_context.get_start_method() == "forkserver"
        assert look.loader.pin_memory == (pins and torch.accelerator.is_available())


# ----------------------------------------------------------------------------------------- evaluation, logging


@pytest.fixture
def _logger_as_before() -> Iterator[None]:
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.mark.usefixtures("_logger_as_before")
def test_the_logger_says_as_much_as_is_asked_for(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    def said(**arguments: Any) -> list[str]:
        caplog.clear()
        make_trainer(tmp_path, save_strategy="epoch", num_train_epochs=1, **arguments).train()
        return [record.message for record in caplog.records if record.name == logger.name]

    assert said(log_level="warning") == []
    assert said(log_level="info") == [
        "Training begins: steps 1 to 5",
        f"Saved {tmp_path}/checkpoint-5",
    ]
    said(log_level="error")
    said()  # passive
    assert logger.level == logging.ERROR
