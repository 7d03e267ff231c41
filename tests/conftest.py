"""Small models, short runs and helpers that the tests share."""

import importlib
import os
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from oracles import row_by_row
from scripts import CLASSIC_SCRIPTS, LLM_SCRIPTS, ROOT  # noqa: F401
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn.utils.rnn import pad_sequence

# the same tests on every machine; tests/benchmarks/gpu.py is for GPUs
os.environ["CUDA_VISIBLE_DEVICES"] = ""
SEED_SHIFT = int(os.environ.get("SEED_SHIFT", 0))  # see tests/README.md
if SEED_SHIFT:
    manual_seed = torch.manual_seed
    torch.manual_seed = lambda seed: manual_seed(int(seed) + SEED_SHIFT)


def pytest_configure(config):
    if getattr(config.option, "dist", "no") == "load":
        config.option.dist = "loadfile"  # what a file's tests share is made once
    torch.set_num_threads(1)  # these models are small, and threads would wait for busy cores


def script(name: str):
    return importlib.import_module(name)


def random_model(kind="llama", vocab=11, stops=(1,), seed=0, **more):
    """A random decoder of peaked distributions, so that a wrong position or shift cannot hide."""
    torch.manual_seed(seed)
    shape = {"vocab_size": vocab, "hidden_size": 32, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "max_position_embeddings": 128}
    shape |= dict.fromkeys(["bos_token_id", "eos_token_id", "pad_token_id"])
    if kind != "gpt2":  # which has learned positions
        shape |= {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8}
    config = transformers.AutoConfig.for_model(kind, **shape | more)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.7 * parameter.shape[-1] ** -0.5)
    model.generation_config.eos_token_id = list(stops)
    return model


def batch_of(model, prompts, lengths, temperature=1.0):
    """A batch as generate makes it, of random tokens, with completions of these lengths, as many to
    each prompt; the longest are cut off. Its old_logprobs are those of plain passes."""
    rows = [torch.tensor(row) for row in prompts for _ in range(len(lengths) // len(prompts))]
    padded = pad_sequence(rows, batch_first=True, padding_side="left", padding_value=-1)
    lengths = torch.tensor(lengths)
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).float()
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(2, model.config.vocab_size, mask.shape, generator=g)
    batch = {"prompt_ids": padded.clamp(min=0), "prompt_mask": (padded >= 0).long(), "mask": mask}
    batch |= {"completion_ids": ids * mask.long(), "ended": lengths < lengths.max()}
    with torch.no_grad():
        return batch | {"old_logprobs": row_by_row(model, batch, temperature).float()}


@pytest.fixture
def short_run(tmp_path):
    """Flags of a run of seconds: two small steps."""
    flags = {"steps": 2, "prompts_per_step": 4, "group_size": 4, "eval_problems": 8}
    return flags | {"output_dir": str(tmp_path / "runs")}


def set_task(monkeypatch, module, verify):
    """Let a script ask sums of two numbers, and reward completions by this function."""
    sums = [(f"{a}+{b}=", str(a + b)) for a in range(10) for b in range(10)]
    monkeypatch.setattr(module, "load_problems", {"train": sums[:80], "test": sums[80:]}.get)
    monkeypatch.setattr(module, "verify", verify)


def refused(function, *args):
    """The function must end in one line, by sys.exit; returns the line."""
    with pytest.raises(SystemExit) as caught:
        function(*args)
    line = caught.value.code
    assert len(line.splitlines()) == 1 and len(line) < 1000
    return line


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory):
    """The folder of a random Qwen2 with dropout, whose tokens are bytes, with a chat template."""
    folder = tmp_path_factory.mktemp("qwen")
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*special, *alphabet])}
    more = {"eos_token": special[2], "extra_special_tokens": special[1:]}
    tokenizer = transformers.Qwen2Tokenizer(vocab=vocab, merges=[], **more)
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    more = {"tie_word_embeddings": True, "attention_dropout": 0.5, "max_position_embeddings": 4096}
    random_model("qwen2", len(vocab), stops=[2, 0], **more).save_pretrained(folder)
    return str(folder)


def weights(folder):
    """Of a run's last checkpoint."""
    last = max(Path(folder).glob("step-*"))
    return transformers.AutoModelForCausalLM.from_pretrained(last).state_dict()


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def scalars(folder, name):
    """What a run has logged under this name."""
    events = EventAccumulator(str(folder), {"scalars": 0}).Reload()
    return [event.value for event in events.Scalars(name)]


def calls_of(monkeypatch, owner, name):
    """The arguments and the result of each call of a function of this module or object."""
    calls, real = [], getattr(owner, name)

    def watched(*args, **options):
        calls.append((args, real(*args, **options)))
        return calls[-1][1]

    monkeypatch.setattr(owner, name, watched)
    return calls
