"""Small models, tokenizers and helpers that the tests share."""

import importlib
import os
import sys
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from oracles import row_by_row
from scripts import CLASSIC_SCRIPTS, LLM_SCRIPTS, ROOT  # noqa: F401
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOMS = "benchmarks", "examples", "learn"
# the same tests on every machine; tests/benchmarks/gpu.py is for GPUs
os.environ["CUDA_VISIBLE_DEVICES"] = ""
for room in (".", *(f"tests/{room}" for room in ROOMS)):
    sys.path.insert(0, str(ROOT / room))

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
    """A random causal LM of peaked distributions, so that a wrong position or shift cannot hide."""
    torch.manual_seed(seed)
    ids = {"vocab_size": vocab, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    if kind == "gpt2":  # learned absolute positions
        more |= {"n_positions": 64, "initializer_range": 0.8}
    else:
        more |= {"intermediate_size": 32, "initializer_range": 0.4}
    if kind == "qwen2":
        more |= {"num_key_value_heads": 1}
    config = transformers.AutoConfig.for_model(kind, **shape, **ids, **more)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = list(stops)
    return model.eval()


def batch_of(model, prompts, lengths, temperature=1.0):
    """A batch as generate makes it, with completions of these lengths, as many to each prompt. The
    longest ones are cut off, and all others end with a stop token. Its log π_old, also in place of
    the sampler's, are those of plain passes."""
    g = torch.Generator().manual_seed(0)
    stops = model.generation_config.eos_token_id
    others = [token for token in range(model.config.vocab_size) if token not in stops]
    lengths = torch.tensor(lengths)[:, None]
    column, width = torch.arange(int(lengths.max())), max(map(len, prompts))
    ids = torch.tensor(others)[torch.randint(len(others), (len(lengths), len(column)), generator=g)]
    ended = lengths < len(column)
    ids[(column == lengths - 1) & ended] = stops[0]
    mask = (column < lengths).float()
    rows = [prompt for prompt in prompts for _ in range(len(lengths) // len(prompts))]
    batch = {
        "prompt_ids": torch.tensor([[0] * (width - len(row)) + row for row in rows]),
        "prompt_mask": torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]),
        "completion_ids": ids * mask.long(),
        "mask": mask,
        "ended": ended[:, 0],
    }
    with torch.no_grad():
        logprobs = row_by_row(model, batch, temperature).float()
    return batch | {"sampled_logprobs": logprobs, "old_logprobs": logprobs}


@pytest.fixture
def short_run(tmp_path):
    """Flags of a run of seconds: two small steps."""
    flags = {"steps": 2, "prompts_per_step": 4, "group_size": 4, "eval_problems": 8}
    return flags | {"output_dir": str(tmp_path / "runs")}


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
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(special)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}"
        "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
        "{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    more = {"tie_word_embeddings": True, "attention_dropout": 0.5}
    model = random_model("qwen2", len(tokenizer), stops=[2, 0], **more)  # stops as Qwen2.5's own
    model.save_pretrained(folder)
    return str(folder)


def reward_by(monkeypatch, module, verify):
    """Let the script ask its own problems, but reward completions by this function."""
    monkeypatch.setattr(module, "load_task", lambda path: (module.load_problems, verify))


class Characters:
    """A tokenizer for random_model(), with what encode_prompts() and rollout() need of one: a
    prompt's characters are its tokens."""

    chat_template = eos_token_id = None

    def __call__(self, texts):
        return {"input_ids": [[3 + ord(c) % 7 for c in text] for text in texts]}

    def decode(self, ids, skip_special_tokens=False):
        return f"#{int(sum(ids)) % 3}"


def last_checkpoint(folder) -> Path:
    return max(Path(folder).glob("step-*"))


def weights(folder):
    """Of a run's last checkpoint."""
    return transformers.AutoModelForCausalLM.from_pretrained(last_checkpoint(folder)).state_dict()


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
