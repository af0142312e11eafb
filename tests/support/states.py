"""What is in training states and checkpoints: for tests of other rooms, the one door to the room that writes them."""

from pytorch_accelerated.states.policy import read_metric_records
from pytorch_accelerated.states.publish import begin
from pytorch_accelerated.states.verify import find_state, list_states, read_manifest, verify

__all__ = ["begin", "find_state", "list_states", "read_manifest", "read_metric_records", "verify"]
