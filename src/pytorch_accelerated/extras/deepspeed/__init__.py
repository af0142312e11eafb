"""DeepSpeed: the config of the Hugging Face arguments, and the engine that a run trains with."""
