"""The names that scripts import from here, wherever they are defined."""

from pytorch_accelerated.huggingface.arguments.strategies import HubStrategy as HubStrategy
from pytorch_accelerated.huggingface.arguments.strategies import IntervalStrategy as IntervalStrategy
from pytorch_accelerated.huggingface.arguments.strategies import OptimizerNames as OptimizerNames
from pytorch_accelerated.huggingface.arguments.strategies import ParallelMode as ParallelMode
from pytorch_accelerated.huggingface.arguments.strategies import SaveStrategy as SaveStrategy
from pytorch_accelerated.huggingface.arguments.strategies import SchedulerType as SchedulerType
from pytorch_accelerated.huggingface.arguments.training_arguments import TrainingArguments as TrainingArguments
