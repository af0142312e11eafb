"""What a run has measured, and its words on the screen. For extras: text, figures, warnings said once."""

from pytorch_accelerated.record import text
from pytorch_accelerated.record.bars import Progress
from pytorch_accelerated.record.loss import widest_float
from pytorch_accelerated.record.plotting import decorate, new_figure
from pytorch_accelerated.record.step_records import Pace
from pytorch_accelerated.record.values import joined
from pytorch_accelerated.record.warning import warn_user
from pytorch_accelerated.record.watching import WatchedMetric, is_finite_number

__all__ = [
    "Pace",
    "Progress",
    "decorate",
    "joined",
    "new_figure",
    "text",
    "warn_user",
    "WatchedMetric",
    "is_finite_number",
    "widest_float",
]
