"""Makes the tiny model and puts it into the cache, where all scripts find it; for conftest.py."""

import torch
from conftest import script

grpo = script("grpo_llm")
grpo.load_policy(grpo.Args(), torch.device("cpu"))
