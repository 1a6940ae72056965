"""Weights in fewer bytes: how they are packed, and how they become numbers again."""

from streamllm_core.quantization.expansion import expand
from streamllm_core.quantization.formats import FORMATS, Format
from streamllm_core.quantization.quantizer import quantize

__all__ = ["FORMATS", "Format", "expand", "quantize"]
