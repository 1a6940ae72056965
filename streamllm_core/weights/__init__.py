"""Where layer bytes come from."""

from streamllm_core.weights.default_model import DEFAULT_MODEL
from streamllm_core.weights.gguf_tokenizer import tokenizer_note
from streamllm_core.weights.source import WeightSource, open_headers, open_source

__all__ = ["DEFAULT_MODEL", "WeightSource", "open_headers", "open_source", "tokenizer_note"]
