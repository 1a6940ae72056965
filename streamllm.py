"""One-file facade: ``from streamllm import AutoModel`` works as users of StreamLLM expect."""

from streamllm_core import AutoModel, Engine, EngineConfig, StreamingModel

__all__ = ["AutoModel", "Engine", "EngineConfig", "StreamingModel"]
