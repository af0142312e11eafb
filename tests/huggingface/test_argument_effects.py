"""The effects of arguments that the tests of what they are about do not show."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.huggingface import TrainerCallback, TrainingArguments
from pytorch_accelerated.huggingface.arguments.parallel import refuse_processes, warn_about_idle_devices
from pytorch_accelerated.huggingface.arguments.training_arguments import logger
from tests.huggingface.runs import Regression, Rows, losses, make_trainer
from tests.huggingface.texts import WORDS, tiny_classifier, tiny_language_model

# --------------------------------------------------------------------------------------------------- for the script


def test_only_values_for_the_script_are_kept(tmp_path: Path) -> None:
    args = TrainingArguments(do_train=True, do_predict=True, resume_from_checkpoint="there")
    assert (args.do_train, args.do_predict, args.resume_from_checkpoint) == (True, True, "there")
    plain = make_trainer(tmp_path / "plain", save_strategy="steps", save_steps=4)
    plain.train()
    trainer = make_trainer(tmp_path, resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-8"))
    assert trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint).global_step == 10
    assert trainer.state.log_history[:-1] == plain.state.log_history[:-1]
    trainer.train()
    assert trainer.state.log_history[0]["step"] == 1


# -------------------------------------------------------------------------------------------------------- optimizers


@pytest.mark.fact(
    "Arguments: optim names an optimizer of torch, which is made with learning_rate, adam_... and optim_args"
)
@pytest.mark.parametrize(
    ("optim", "arguments", "kind", "expected"),
    [
        ("adamw_torch", {}, torch.optim.AdamW, {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "fused": None}),
        (
            "adamw_torch_fused",
            {"learning_rate": 0.2, "adam_beta1": 0.8, "adam_beta2": 0.7, "adam_epsilon": 0.5},
            torch.optim.AdamW,
            {"lr": 0.2, "betas": (0.8, 0.7), "eps": 0.5, "fused": True},
        ),
        ("sgd", {"optim_args": "momentum=0.9, nesterov=True"}, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        ("rmsprop", {"optim_args": "alpha=1e-2"}, torch.optim.RMSprop, {"alpha": 0.01, "lr": 0.1}),
        ("adagrad", {}, torch.optim.Adagrad, {"lr": 0.1}),
    ],
)
def test_optimizers_are_made_by_name(
    optim: str, arguments: dict[str, Any], kind: type[Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    optimizer = make_trainer(tmp_path, optim=optim, **arguments).create_optimizer()
    assert type(optimizer) is kind
    assert {name: optimizer.defaults[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("optim_args", "message"),
    [("momentum", "'momentum' in it has no name and value"), ("speed=3", "SGD refused the arguments .*speed=3")],
)
def test_arguments_that_no_optimizer_takes_are_refused(optim_args: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_trainer(tmp_path, optim="sgd", optim_args=optim_args).create_optimizer()


# ------------------------------------------------------------------------------- precision, memory, compilation


class Watched(Regression):
    """Notes the dtype of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()
        self.linear.register_forward_hook(lambda module, inputs, output: self.dtypes.add(output.dtype))


@pytest.mark.fact("Arguments: bf16 is mixed precision in training and evaluation; weights and checkpoints stay float32")
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


@pytest.mark.fact("Arguments: fp16 is rejected on the CPU")
def test_float16_on_the_cpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="`fp16` is True, but the device is the CPU.*use `bf16`"):
        make_trainer(tmp_path, fp16=True)


def test_one_process_has_nothing_to_cut(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="`fsdp` is True, but there is one process.*torchrun"):
        make_trainer(tmp_path, fsdp=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fsdp": "full_shard offload"}, "`fsdp` is 'full_shard offload', but 'offload' is unsupported"),
        ({"fsdp": True, "fsdp_config": {"forward_prefetch": True}}, "`fsdp_config` has 'forward_prefetch', but"),
        ({"fsdp": True, "fsdp_config": {"fsdp_version": 1}}, "`fsdp_config` has version 1"),
        ({"fsdp": True, "fsdp_config": {"min_num_params": -1}}, "`min_num_params` in `fsdp_config` is -1"),
        (
            {"fsdp": True, "fsdp_config": {"min_num_params": 1, "transformer_layer_cls_to_wrap": "Layer"}},
            "the layers follow from one of them",
        ),
    ],
)
def test_unsupported_ways_to_shard_a_model_are_rejected(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        TrainingArguments(**arguments)


@pytest.mark.fact("Arguments: A process that sees several devices gets one warning with the torchrun command")
def test_a_process_that_uses_one_of_several_devices_gets_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    args = TrainingArguments()
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(args.distributed_state, "device", torch.device("cuda", 0))
    assert (args.n_gpu, args.train_batch_size, args.eval_batch_size) == (1, 8, 8)
    with pytest.warns(UserWarning, match="sees 4 devices and uses one.*torchrun --nproc-per-node 4"):
        warn_about_idle_devices(args)
    monkeypatch.setattr(args.distributed_state, "num_processes", 4)
    warn_about_idle_devices(args)


@pytest.mark.fact("Arguments: use_cpu is rejected if it comes too late for this process")
def test_arguments_that_come_too_late_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    args = TrainingArguments(use_cpu=True)
    refuse_processes(args)
    monkeypatch.setattr(args.distributed_state, "device", torch.device("cuda", 0))
    with pytest.raises(ConfigurationError, match="`use_cpu` is True, but this process has used cuda since"):
        refuse_processes(args)


@pytest.mark.fact(
    "Arguments: gradient_checkpointing recomputes the layers of a transformers model, with the same gradients"
)
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


@pytest.mark.fact("Arguments: gradient_checkpointing is rejected if the model does not have it")
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
    with pytest.raises(ConfigurationError, match="`gradient_checkpointing` is True, but Regression has no method"):
        make_trainer(tmp_path, gradient_checkpointing=True)


class _Blocks(nn.Module):
    """Frozen but for its last layer, which it may compute twice, as wrapped models of `transformers` do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.block, self.head = nn.Linear(2, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.embedding.requires_grad_(False)
        self.head.requires_grad_(False)
        self.computes_twice = False

    def gradient_checkpointing_enable(self, kwargs: Any = None) -> None:
        self.computes_twice = True

    def enable_input_require_grads(self) -> None:
        self.embedding.register_forward_hook(lambda module, args, output: output.requires_grad_(True))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        x = self.embedding(x)
        x = checkpoint(self.block, x, use_reentrant=True) if self.computes_twice else self.block(x)
        return (((self.head(x) - labels) ** 2).mean(),)


class _Delegating(nn.Module):
    """Asks the model in it for what it does not have itself."""

    def __init__(self) -> None:
        super().__init__()
        self.base_model = _Blocks()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model, name)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.base_model(x, labels)


@pytest.mark.fact("Arguments: gradient_checkpointing reaches a model inside a wrapper, also one with frozen layers")
def test_a_wrapped_frozen_model_learns_the_same_with_activations_computed_twice(tmp_path: Path) -> None:
    def run(**arguments: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
        trainer = make_trainer(tmp_path, parts={"model": _Delegating()}, **arguments)
        trainer.train()
        return losses(trainer), trainer.model.state_dict()

    usual, weights = run()
    checkpointed, weights_then = run(gradient_checkpointing=True)
    assert checkpointed == usual
    torch.testing.assert_close(weights_then, weights, rtol=0, atol=0)
    assert not torch.equal(weights["base_model.block.weight"], _Blocks().block.weight)


@pytest.mark.fact("Arguments: gradient_checkpointing gives the same gradients for a model with a LoRA adapter of PEFT")
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


@pytest.mark.fact("Arguments: torch_compile, torch_compile_backend and torch_compile_mode compile the model")
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


@pytest.mark.fact("Arguments: dataloader_drop_last drops the last training batch if it is not full")
def test_a_last_batch_that_is_not_full_may_be_left_out(tmp_path: Path) -> None:
    steps = {}
    for drops in (False, True):
        trainer = make_trainer(tmp_path, per_device_train_batch_size=4, dataloader_drop_last=drops, num_train_epochs=1)
        assert trainer.train().global_step == (2 if drops else 3)
        steps[drops] = losses(trainer)
        assert len(trainer.predict(Rows(5)).predictions) == 5
    assert steps[True][:1] == steps[False][:1]


class Telling(Regression):
    """Notes what the rows say about the process that they come from."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        self.seen.append(int(x[0, 0]))
        return super().forward(x / 1e6, labels)


class RowsOfWorkers(Rows):
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {**super().__getitem__(index), "x": torch.full((2,), float(os.getpid()))}


@pytest.mark.fact("Arguments: dataloader_persistent_workers keeps the workers from epoch to epoch")
def test_workers_may_stay(tmp_path: Path) -> None:
    workers = []
    for stay in (False, True):
        trainer = make_trainer(
            tmp_path,
            parts={"model": Telling(), "train_dataset": RowsOfWorkers(4)},
            dataloader_num_workers=1,
            dataloader_persistent_workers=stay,
        )
        trainer.train()
        workers.append(len(set(trainer.model.seen)))
        assert os.getpid() not in trainer.model.seen
    assert workers == [2, 1]


@pytest.mark.fact("Arguments: Settings of workers and pinning reach the loader of a run")
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


@pytest.mark.fact("Arguments: length_column_name is the column with the lengths for group_by_length")
def test_lengths_come_from_the_column_that_is_named(tmp_path: Path) -> None:
    class Ordered(Regression):
        seen: list[float] = []

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            self.seen += x[:, 0].tolist()
            return super().forward(x, labels)

    rows = [{"x": torch.full((2,), float(length)), "labels": torch.ones(1), "size": length} for length in range(6)]
    arguments: dict[str, Any] = {"train_sampling_strategy": "group_by_length", "num_train_epochs": 1}
    parts = {"model": Ordered(), "train_dataset": rows}
    trainer = make_trainer(tmp_path, parts=parts, length_column_name="size", **arguments)
    trainer.train()
    assert Ordered.seen == [5, 4, 3, 2, 1, 0]
    with pytest.raises(ConfigurationError, match="neither 'length'.*name it with `length_column_name`"):
        make_trainer(tmp_path, parts=parts, **arguments).get_train_dataloader()


# ----------------------------------------------------------------------------------------- evaluation, logging


@pytest.mark.fact("Evaluation: eval_accumulation_steps is the number of batches whose outputs stay on the device")
@pytest.mark.parametrize("steps", [None, 1, 3])
def test_outputs_leave_the_device_after_so_many_batches(steps: int | None, tmp_path: Path) -> None:
    import gc
    import weakref

    outputs: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def keep(logits: torch.Tensor, labels: Any) -> torch.Tensor:
        alive.append(sum(output() is not None for output in outputs))
        kept = nn.Parameter(logits.clone(), requires_grad=False)  # an object that nothing else refers to
        outputs.append(weakref.ref(kept))
        return kept

    trainer = make_trainer(
        tmp_path,
        parts={"preprocess_logits_for_metrics": keep},
        per_device_eval_batch_size=1,
        eval_accumulation_steps=steps,
    )
    gc.disable()
    try:
        trainer.predict(Rows(7))
    finally:
        gc.enable()
    # The batch before is let go when the next one has come.
    assert max(alive) <= (steps or 1)
    assert max(alive) >= (steps or 1) - 1


@pytest.mark.fact("Events: eval_on_start evaluates before the first step")
def test_an_evaluation_may_come_first(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, eval_on_start=True, eval_strategy="epoch", num_train_epochs=1)
    expected = make_trainer(tmp_path).evaluate()["eval_loss"]
    trainer.train()
    first = trainer.state.log_history[0]
    assert (first["step"], first["eval_loss"]) == (0, expected)


@pytest.fixture
def _logger_as_before() -> Iterator[None]:
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.mark.usefixtures("_logger_as_before")
@pytest.mark.fact("Arguments: log_level is the level of our Hugging Face logger, which reports runs and checkpoints")
def test_the_logger_says_as_much_as_is_asked_for(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    def said(**arguments: Any) -> list[str]:
        caplog.clear()
        make_trainer(tmp_path, save_strategy="epoch", num_train_epochs=1, **arguments).train()
        return [record.message for record in caplog.records if record.name == logger.name]

    assert said(log_level="warning") == []
    assert said(log_level="info") == [
        "Training begins: steps 1 to 5, 2 samples each",
        f"Saved {tmp_path}/checkpoint-5",
    ]
    said(log_level="error")
    said()  # passive
    assert logger.level == logging.ERROR


@pytest.mark.fact("Arguments: log_on_each_node=False treats the first processes of other machines as replicas")
@pytest.mark.parametrize("on_each_node", [True, False])
def test_the_first_process_of_a_machine_may_be_quiet(on_each_node: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    args = TrainingArguments(log_level="info", log_level_replica="error", log_on_each_node=on_each_node, use_cpu=True)
    assert args.should_log
    state = args.distributed_state
    monkeypatch.setattr(state, "process_index", 2)  # the first one of the second machine
    assert state.local_process_index == 0
    assert args.should_log == on_each_node
    assert args.get_process_log_level() == (logging.INFO if on_each_node else logging.ERROR)
