"""Makes the tiny model and puts it into the cache, where all scripts find it; for conftest.py."""

import os
from pathlib import Path

import torch
from conftest import script

grpo = script("grpo_llm")
grpo.load_policy(grpo.Args(), torch.device("cpu"))
Path(os.environ["XDG_CACHE_HOME"], "tiny_model_is_made").touch()
