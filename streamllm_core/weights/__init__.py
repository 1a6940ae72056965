"""Where layer bytes come from."""

from streamllm_core.weights.source import WeightSource, open_source

__all__ = ["WeightSource", "open_source"]
