"""Processes exchange gradients where the model is called as a whole, and the run says so where it is not."""

import json

import pytest

from tests.support.processes import run_on_ranks

ON_RANKS = """
import json, sys, warnings
import torch
from torch import nn
from pytorch_accelerated import Trainer
from tests.support.reference import regression_data, sgd, tiny_model

class OfParts(Trainer):
    whole = False

    def calculate_train_batch_loss(self, batch):
        model = self.model if self.whole else self.get_model()
        outputs = model(batch[0])
        return {"loss": self.loss_func(outputs, batch[1]), "model_outputs": outputs, "batch_size": len(outputs)}

found = {}
for whole in (False, True):
    torch.manual_seed(0)
    model = tiny_model()
    trainer = OfParts(model, nn.MSELoss(), sgd(model), callbacks=(), seed=1)
    assert trainer.internal_run.ranks.count == 2
    trainer.whole = whole
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train(regression_data(20), 2, regression_data(6), per_device_batch_size=2)
    sums = trainer.gather(sum(parameter.detach().double().sum() for parameter in model.parameters()))
    told = [str(one.message) for one in caught if "each process trains a model of its own" in str(one.message)]
    hooks = len(model._forward_pre_hooks)
    found[str(whole)] = {"same": bool(sums[0] == sums[1]), "warnings": len(told), "hooks": hooks}
print(json.dumps(found))
"""


@pytest.mark.processes
def test_a_model_that_is_passed_by_is_warned_about_once() -> None:
    first, second = (json.loads(told.splitlines()[-1]) for told in run_on_ranks(ON_RANKS, 2).stdout_of_ranks)
    whole = {"same": True, "warnings": 0, "hooks": 0}
    assert first == {"False": {"same": False, "warnings": 1, "hooks": 0}, "True": whole}
    assert second == {"False": {"same": False, "warnings": 0, "hooks": 0}, "True": whole}
