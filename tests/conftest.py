"""Small models, tokenizers and helpers that the tests share."""

import importlib
import os
import sys
from pathlib import Path

import pytest
import torch
import transformers

ROOT = Path(__file__).parents[1]
os.environ["CUDA_VISIBLE_DEVICES"] = (
    ""  # the same tests on every machine; tests/benchmarks/gpu.py is for GPUs
)
sys.path.insert(0, str(ROOT))
LLM_SCRIPTS = sorted(path.stem for path in ROOT.glob("*_llm.py"))
CLASSIC_SCRIPTS = ["reinforce", "actor_critic", "trpo", "ppo"]  # in the order of the lineage


def script(name: str):
    return importlib.import_module(name)


def random_model(kind: str = "llama", vocab: int = 11, stops=(1,), pad: int = 0, seed: int = 0):
    """A random causal LM with peaked distributions, so that a wrong position or shift cannot hide."""
    torch.manual_seed(seed)
    ids = {"vocab_size": vocab, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    shape = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    if kind == "gpt2":  # learned absolute positions
        config = transformers.GPT2Config(
            n_embd=16, n_layer=2, n_head=2, n_positions=64, initializer_range=0.8, **ids
        )
        model = transformers.GPT2LMHeadModel(config)
    elif kind == "qwen2":
        model = transformers.Qwen2ForCausalLM(
            transformers.Qwen2Config(**shape, num_key_value_heads=1, initializer_range=0.4, **ids)
        )
    else:
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**shape, initializer_range=0.4, **ids)
        )
    model.generation_config.eos_token_id = list(stops)
    model.generation_config.pad_token_id = pad
    return model.eval()


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """One cache for the whole session and its subprocesses: the warm start is made once."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    return Path(os.environ["XDG_CACHE_HOME"]) / "torch/hub"


@pytest.fixture
def quick(tmp_path):
    """Flags of a run of seconds: two small steps."""
    return {
        "steps": 2,
        "prompts_per_step": 4,
        "group_size": 4,
        "eval_problems": 8,
        "output_dir": str(tmp_path / "runs"),
    }


@pytest.fixture
def refused(capsys):
    """Call it with a function: that must end with exit status 2 and one line on stderr, which is returned."""

    def check(function, *args):
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            function(*args)
        assert caught.value.code == 2
        errors = [
            line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")
        ]
        assert len(errors) == 1
        return errors[0]

    return check


def last_checkpoint(folder) -> Path:
    return max(Path(folder).glob("step-*"))
