"""Run in a process of its own by test_snapshot.py: restore streams, read on, save the logits.

Arguments: model folder, device, folder of the snapshots, their names (numbers).
"""

import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

from streamllm_core import AutoModel
from tests.streamllm_core.tiny_engines import random_tokens, read, small_engine

model = AutoModel.from_pretrained(sys.argv[1], device=sys.argv[2], dtype="float32")
folder = Path(sys.argv[3])
found = {}
for name in sys.argv[4:]:
    engine = small_engine(model)
    stream = engine.restore(load_file(folder / f"{name}.safetensors"))
    assert stream.last_hidden is not None
    found[f"{name}.next"] = model.head(stream.last_hidden[None]).cpu()
    found[f"{name}.more"] = read(engine, stream, random_tokens(50, 1))
save_file(found, folder / "found.safetensors")
