"""Runs under torchrun on two ranks: the private members of DeepSpeed that `extras.deepspeed.pieces` uses."""

import importlib
from typing import Any

import torch

from pytorch_accelerated.extras.deepspeed.pieces import layout_of, norm_of, piece_of, scale_of
from tests.support.zero import config, make_model, make_optimizer

deepspeed: Any = importlib.import_module("deepspeed")
deepspeed.init_distributed("gloo")
expected = torch.zeros(())
for stage in range(4):
    model = make_model(dropout=0.0)
    whole = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimizer = make_optimizer(model)
    groups = [list(group["params"]) for group in optimizer.param_groups]
    settings = {**config(stage), "train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True}
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]
    layout = layout_of(engine, groups)
    for name, parameter in model.named_parameters():
        rows = [(row, flat) for flat, rows in layout for row in rows if row.parameter is parameter]
        assert len(rows) == 1
        row, flat = rows[0]
        replica = stage == 0 and torch.distributed.get_rank() > 0
        found = row.piece(flat.detach(), is_replica=replica).full_tensor()
        if torch.distributed.get_rank() == 0:
            assert torch.equal(found, whole[name]), (stage, name)
        if stage == 3:
            assert torch.equal(piece_of(parameter).part, row.of(flat.detach()))
    engine.backward(engine(torch.ones(2, 3)).sum(), scale_wrt_gas=False)
    if stage == 0:  # which has whole gradients
        expected = torch.nn.utils.get_total_norm([each.grad for each in model.parameters() if each.grad is not None])
    engine.step()
    norm = norm_of(engine, 1.0)
    assert (norm is None) == (scale_of(engine.optimizer) is None) == (stage == 0)
    if norm is not None:
        assert abs(norm.item() - expected.item()) < 1e-5 * expected.item()
        assert scale_of(engine.optimizer).cur_scale == 1
print("all is well", flush=True)
