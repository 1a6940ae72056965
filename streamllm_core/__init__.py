"""The engine: tokens in, tokens out.

Runs language models whose layers may live outside the device (layer streaming) over texts of any length (rolling
cache with attention sinks), many texts in a pass. Knows no documents, records or jobs.
"""

from streamllm_core.cache import Stream
from streamllm_core.draft_model import ModelDrafter
from streamllm_core.drafting import Drafter, NgramDrafter
from streamllm_core.engine import Engine
from streamllm_core.engine_config import EngineConfig
from streamllm_core.errors import BudgetError, ModelError, NoFreeStream, StreamLLMError, WindowError
from streamllm_core.model import AutoModel, StreamingModel
from streamllm_core.request import Request
from streamllm_core.sampling import Sampling

__all__ = [
    "AutoModel",
    "BudgetError",
    "Drafter",
    "Engine",
    "EngineConfig",
    "ModelDrafter",
    "ModelError",
    "NgramDrafter",
    "NoFreeStream",
    "Request",
    "Sampling",
    "Stream",
    "StreamLLMError",
    "StreamingModel",
    "WindowError",
]
