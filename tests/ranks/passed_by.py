"""Runs on two ranks: gradients are exchanged where the model is called as a whole; else the run says so once."""

import warnings
from typing import Any

import torch
from torch import nn

from pytorch_accelerated import Trainer
from tests.support.reference import regression_data, sgd, tiny_model


class OfParts(Trainer):
    whole = False

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        model = self.model if self.whole else self.get_model()
        outputs = model(batch[0])
        return {"loss": nn.functional.mse_loss(outputs, batch[1]), "model_outputs": outputs, "batch_size": len(outputs)}


found = {}
for whole in (False, True):
    torch.manual_seed(0)
    model = tiny_model()
    trainer = OfParts(model, nn.MSELoss(), sgd(model), callbacks=(), seed=1)
    assert trainer.run_context.ranks.count == 2
    trainer.whole = whole
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train(regression_data(20), 2, regression_data(6), per_device_batch_size=2)
    sums = trainer.gather(sum(parameter.detach().double().sum() for parameter in model.parameters()))
    told = [str(one.message) for one in caught if "each process trains a model of its own" in str(one.message)]
    hooks = len(model._forward_pre_hooks)
    found[str(whole)] = {"same": bool(sums[0] == sums[1]), "warnings": len(told), "hooks": hooks}
of_whole = {"same": True, "warnings": 0, "hooks": 0}
of_parts = {"same": False, "warnings": int(trainer.run_context.ranks.is_first), "hooks": 0}
assert found == {"False": of_parts, "True": of_whole}, found
