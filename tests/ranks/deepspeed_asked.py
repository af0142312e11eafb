"""Runs under torchrun on two ranks: DeepSpeed by variables of `accelerate launch`, or by the user's Accelerator."""

import os
import sys

from accelerate import Accelerator, DeepSpeedPlugin

from tests.support.resuming import assert_same
from tests.support.zero import config, everything, make_model, make_trainer, train

OF_LAUNCH = {"USE_DEEPSPEED": "true", "DEEPSPEED_ZERO_STAGE": "2", "GRADIENT_CLIPPING": "0.5"}
variables = {f"ACCELERATE_{name}": value for name, value in OF_LAUNCH.items() if sys.argv[1] == "launch"}


def accelerator() -> Accelerator:
    return Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config(2)))


os.environ.update(variables)
asked = make_trainer(None, model=make_model(dropout=0.0), accelerator=None if variables else accelerator)
for name in variables:
    del os.environ[name]
first = everything(train(asked, epochs=1))
assert type(asked.optimizer).__name__ == "EngineOptimizer"
if variables:  # a trainer without, and the first one again
    plain = make_trainer(None, model=make_model(dropout=0.0))
    assert_same(first, everything(train(plain, epochs=1)), tolerance=2e-5)
    assert type(plain.optimizer).__name__ == "AdamW"
    train(asked, epochs=1)
    assert type(asked.optimizer).__name__ == "EngineOptimizer"
print("all is well", flush=True)
