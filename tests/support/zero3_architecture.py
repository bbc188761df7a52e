"""A pass through a tiny model that ZeRO-3 divides while it is read, in a process of its own, which the fault may stop.

`python zero3_architecture.py KIND SIZES` prints the type of the factor of its embeddings, where it comes so far.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile

import torch
from zero_failures import zero_engine


def main(kind: str, sizes: str) -> None:
    from cpu_engines import use_cpu_processes
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    use_cpu_processes()
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    torch.distributed.init_process_group("gloo")
    config = {"hidden_size": 48, "num_hidden_layers": 2, "vocab_size": 64, "pad_token_id": 0, **json.loads(sizes)}
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config)).save_pretrained(folder)
        dividing = HfDeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}})
        module = AutoModelForCausalLM.from_pretrained(folder)
        del dividing
    engine = zero_engine(module, 3)
    ids = torch.arange(8)[None]
    engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
    print(module.model.normalizer.dtype, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
