"""What runs on CUDA only, without CUDA:
decoding with a recorded step, and what an update keeps in memory.

A CUDA graph is emulated on the CPU. Within `torch.cuda.graph` every operation is put on tape and
has no effect; a replay runs the tape again on the same tensors and writes the results into the same
memory. An operation that hands a value to Python, for which a GPU would have to be waited for,
fails. On the tape nothing of Python is left: a step that reads a new tensor, or counts in a Python
number, would repeat what was recorded.
"""

from contextlib import contextmanager

import pytest
import torch
import transformers
from conftest import LLM_SCRIPTS, random_model, script
from test_llm_rollout import KINDS, PROMPTS, plain_logprobs
from torch.utils._python_dispatch import TorchDispatchMode

grpo = script("grpo_llm")
aten = torch.ops.aten
WAITS = (aten._local_scalar_dense, aten.nonzero, aten.equal, aten.masked_select, aten.is_nonzero)


class Tape(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operations, self.before, self.made = [], {}, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function._overloadpacket not in WAITS, f"{function} waits for the GPU"
        kwargs = kwargs or {}
        writes = [
            x
            for x, declared in zip(args, function._schema.arguments, strict=False)
            if declared.alias_info and declared.alias_info.is_write
        ]
        for tensor in writes:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.made:
                self.before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        result = function(*args, **kwargs)
        results = [
            x
            for x in (result if isinstance(result, (tuple, list)) else [result])
            if isinstance(x, torch.Tensor)
        ]
        # neither a view nor in place
        if not any(output.alias_info for output in function._schema.returns):
            self.made |= {x.untyped_storage().data_ptr() for x in results}
        # which keeps the memory alive, too
        self.operations.append((function, args, kwargs, results))
        return result


class Graph:
    """Stands in for torch.cuda.CUDAGraph."""

    replays = 0

    def replay(self):
        Graph.replays += 1
        for function, args, kwargs, results in self.tape.operations:
            returns = function._schema.returns
            if any(output.alias_info and not output.alias_info.is_write for output in returns):
                continue  # a view: of memory that is the same
            new = function(*args, **kwargs)
            if not any(output.alias_info for output in returns):
                new = [
                    x
                    for x in (new if isinstance(new, (tuple, list)) else [new])
                    if isinstance(x, torch.Tensor)
                ]
                for old, value in zip(results, new, strict=True):
                    old.copy_(value)


@pytest.fixture
def cuda(monkeypatch):
    """The scripts believe that they are on CUDA;
    transformers, while recording, that a stream is being captured."""
    recording = []

    @contextmanager
    def record(graph):
        graph.tape = Tape()
        recording.append(graph)
        with graph.tape:
            yield
        recording.pop()
        for storage, content in graph.tape.before.values():
            storage.copy_(content)

    for name in LLM_SCRIPTS:
        monkeypatch.setattr(script(name), "CUDA", True)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", record)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(recording))
    monkeypatch.setattr(Graph, "replays", 0)


def windowed():
    """A model whose attention reaches back three tokens."""
    torch.manual_seed(0)
    shape = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    ids = {"vocab_size": 11, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    model = transformers.MistralForCausalLM(
        transformers.MistralConfig(**shape, **ids, initializer_range=0.4, sliding_window=3)
    )
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = [1], 0
    return model.eval()


def test_the_emulation_is_that_of_a_graph(cuda):
    x, y, graph = torch.zeros(3), torch.ones(3), torch.cuda.CUDAGraph()
    n = 1
    with torch.cuda.graph(graph):
        x += n
        out = (x * 2).view(3)
    assert x.tolist() == [0, 0, 0], "recorded, not run"
    n, y = 5, y + 1
    graph.replay()
    graph.replay()
    assert x.tolist() == [2, 2, 2] and out.tolist() == [4, 4, 4]
    with pytest.raises(AssertionError, match="waits"), torch.cuda.graph(graph):
        bool(x.all())


@torch.no_grad()
@pytest.mark.parametrize("kind", [*KINDS, "windowed"])
@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
def test_recorded_decoding_is_the_models(kind, temperature, cuda, monkeypatch):
    """Every log-prob against a full forward pass; greedy, the very tokens of the CPU's path."""
    model = windowed() if kind == "windowed" else random_model(kind)
    torch.manual_seed(1)
    batch = grpo.generate(model, PROMPTS, 3, 12, temperature)
    assert Graph.replays == 10, (
        "12 tokens: the first from the prompt, the second from the step that warms up"
    )
    trained, _ = grpo.token_logprobs(model, batch, temperature or 1.0)
    for i in range(9):
        completion = batch["completion_ids"][i][batch["mask"][i].bool()].tolist()
        expected = plain_logprobs(
            model, PROMPTS[i // 3], completion, temperature or 1.0, forbidden=[0]
        )
        for found in (batch["old_logprobs"], trained):
            torch.testing.assert_close(found[i, : len(completion)], expected, rtol=0, atol=1e-5)
    if temperature == 0:
        monkeypatch.setattr(grpo, "CUDA", False)
        plain = grpo.generate(model, PROMPTS, 3, 12, 0.0)
        for name in ("completion_ids", "mask", "ended"):
            kept = batch["mask"].bool() if name == "completion_ids" else slice(None)
            assert torch.equal(batch[name][kept], plain[name][kept])


@torch.no_grad()
def test_it_ends_when_all_have_ended_but_asks_seldom(cuda):
    model = random_model("llama", stops=(1, 2, 3, 4))
    torch.manual_seed(0)
    batch = grpo.generate(model, PROMPTS, 4, 60, 1.0)
    assert batch["ended"].all() and batch["mask"].sum(1).max() < 32 and Graph.replays == 30
    model = random_model("llama", stops=(1,))
    model.generation_config.eos_token_id = [10**6]
    assert grpo.generate(model, PROMPTS, 4, 50, 1.0)["mask"].shape == (12, 50)


@torch.no_grad()
def test_recorded_decoding_in_bf16(cuda):
    """Autocast leaves rotated keys in float32 and values in bf16:
    a cache of one type must take both."""
    model = random_model("qwen2")
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        batch = grpo.generate(model, PROMPTS, 3, 10, 1.0)
        trained, _ = grpo.token_logprobs(model, batch, 1.0)
    assert (batch["old_logprobs"] - trained).abs().max() < 0.15


@pytest.mark.slow
def test_a_run_with_recorded_decoding_learns(cuda, quick, monkeypatch):
    """The default task, all rollouts recorded:
    each new call must begin with a cache and a graph of its own."""
    real = grpo.generate
    monkeypatch.setattr(grpo, "CUDA", False)

    def generate(*args):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(grpo, "CUDA", True)
            return real(*args)

    monkeypatch.setattr(grpo, "generate", generate)
    run = grpo.main(grpo.Args(**quick | {"steps": 15, "prompts_per_step": 16, "eval_problems": 64}))
    assert Graph.replays > 100 and run["eval/pass@1"] > run["eval/pass@1_initial"] + 0.15


# ------------------------------------------------------------------------------ memory of an update


class Saved(torch.autograd.graph.saved_tensors_hooks):
    """Collects what autograd keeps for the way back, each piece once, the weights apart."""

    def __init__(self, model):
        self.weights, self.kept = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}
        super().__init__(self.pack, lambda tensor: tensor)

    def pack(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.weights:
            self.kept[storage.data_ptr()] = storage
        return tensor


def update(model, batch, **flags):
    args = grpo.Args(**flags)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    saved = Saved(model)
    with saved:
        grpo.train_minibatch(model, optimizer, batch, args)
    return sum(storage.nbytes() for storage in saved.kept.values()), [
        p.grad.clone() for p in model.parameters()
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_checkpointed_layers_keep_less_and_give_the_same_gradient(kind):
    """And they are off while sampling, where they would throw away the cache;
    dropout stays off throughout."""
    model = random_model(kind, vocab=50)
    if kind == "gpt2":
        assert any(
            isinstance(module, torch.nn.Dropout) and module.p > 0 for module in model.modules()
        )
    torch.manual_seed(0)
    batch = grpo.generate(model, PROMPTS, 4, 20, 1.0)
    batch |= {"advantages": torch.randn(12), "ref_logprobs": batch["old_logprobs"] - 0.1}
    plain, gradients = update(model, batch)
    model.activation_checkpointing_enable()
    less, same = update(model, batch, gradient_checkpointing=True)
    for a, b in zip(gradients, same, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)
    assert less < 0.7 * plain
    torch.manual_seed(0)
    assert torch.equal(
        grpo.generate(model, PROMPTS, 4, 20, 1.0)["old_logprobs"], batch["old_logprobs"]
    )


def test_log_probs_in_chunks(cuda, monkeypatch):
    """With a large vocabulary the logits are kept once, as the model gave them, and in float32
    never all at a time."""
    model = random_model("llama", vocab=2000)
    torch.manual_seed(0)
    batch = grpo.generate(model, PROMPTS, 8, 20, 1.0)
    batch |= {"advantages": torch.randn(24), "ref_logprobs": batch["old_logprobs"] - 0.1}
    sizes, asked, real, split = [], [], grpo.log_softmax, torch.Tensor.split
    monkeypatch.setattr(
        grpo,
        "log_softmax",
        lambda model, logits, t: sizes.append(len(logits)) or real(model, logits, t),
    )
    with torch.autocast("cpu", torch.bfloat16):
        _, gradients = update(model, batch)
        assert sizes == [24, 24], "forth, and again on the way back"
        sizes.clear(), asked.clear()
        monkeypatch.setattr(
            torch.Tensor,
            "split",
            lambda x, n: asked.append(n) or split(x, min(n, 5) if x.ndim > 1 else n),
        )
        kept, same = update(model, batch)
    assert sizes == [5, 5, 5, 5, 4] * 2 or sizes == [5, 5, 5, 5, 4, 4, 5, 5, 5, 5]
    assert asked[-1] == 2**26 // (batch["mask"].shape[1] * 2000), "a quarter of a GiB in float32"
    assert kept < 24 * batch["mask"].shape[1] * 2000 * 4, (
        "less than one copy of the logits in float32"
    )
    for a, b in zip(gradients, same, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-5)
