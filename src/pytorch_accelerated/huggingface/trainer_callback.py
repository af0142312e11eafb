"""The names that scripts import from here, wherever they are defined."""

from pytorch_accelerated.huggingface.events.callbacks import CallbackHandler as CallbackHandler
from pytorch_accelerated.huggingface.events.callbacks import DefaultFlowCallback as DefaultFlowCallback
from pytorch_accelerated.huggingface.events.callbacks import EarlyStoppingCallback as EarlyStoppingCallback
from pytorch_accelerated.huggingface.events.callbacks import PrinterCallback as PrinterCallback
from pytorch_accelerated.huggingface.events.callbacks import TrainerCallback as TrainerCallback
from pytorch_accelerated.huggingface.events.progress import ProgressCallback as ProgressCallback
from pytorch_accelerated.huggingface.events.state import ExportableState as ExportableState
from pytorch_accelerated.huggingface.events.state import TrainerControl as TrainerControl
from pytorch_accelerated.huggingface.events.state import TrainerState as TrainerState
