"""A run of the Hugging Face face that logs to MLflow: ``huggingface_trackers.py FOLDER [UPDATE]``.

It saves a checkpoint every 3 updates, logs each update and resumes if there is a checkpoint. After the given update it
kills itself. At the end it writes its logs to the file `log_history.json`.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from pytorch_accelerated.huggingface import TrainerCallback
from tests.huggingface.runs import make_trainer

folder = Path(sys.argv[1])
killed_after = int(sys.argv[2]) if len(sys.argv) > 2 else None


class Kill(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == killed_after:
            os.kill(os.getpid(), signal.SIGKILL)


settings: dict[str, Any] = {
    "max_steps": 8,
    "logging_steps": 1,
    "save_steps": 3,
    "save_strategy": "steps",
    "eval_strategy": "epoch",
}
trainer = make_trainer(folder, Kill(), report_to="mlflow", run_name="run", **settings)
trainer.train(resume_from_checkpoint=killed_after is None)
trainer.evaluate()
(folder / "log_history.json").write_text(json.dumps(trainer.state.log_history))
