"""What runs on CUDA only, without CUDA: bf16, memory of an update, and recorded decoding.

bf16 is autocast's own on a CPU, in the functions in which the scripts have it on CUDA.

Recorded decoding is tests/benchmarks/gpu.py's, a variant that no script has. A CUDA graph is
emulated: within `torch.cuda.graph` every operation is put on tape and has no effect; a replay runs
the tape again on the same tensors and writes the results into the same memory. An operation that
hands a value to Python, or makes a tensor of Python's values, fails: on a GPU, the one would wait
and the other would copy. On the tape nothing of Python is left: a step that reads a new tensor, or
counts in a Python number, would repeat what was recorded.
"""

import sys
from contextlib import contextmanager

import pytest
import torch
import transformers
from conftest import ROOT, random_model, script
from test_llm_rollout import KINDS, PROMPTS, plain_logprobs
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.append(str(ROOT / "tests/benchmarks"))
grpo, gpu = script("grpo_llm"), script("gpu")
CPU = torch.device("cpu")


def windowed():
    """A model whose attention reaches back three tokens."""
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=11,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.4,
        sliding_window=3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = transformers.MistralForCausalLM(config)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = [1], 0
    return model.eval()


def check_against_plain_forwards(model, batch, temperature):
    """Of completions of PROMPTS, each log-prob, the sampler's and the trainer's."""
    group = len(batch["mask"]) // len(PROMPTS)
    trained = grpo.token_logprobs(model, batch, temperature)
    for i, length in enumerate(batch["mask"].sum(1).int().tolist()):
        completion = batch["completion_ids"][i, :length].tolist()
        expected = plain_logprobs(model, PROMPTS[i // group], completion, temperature, [0])
        for found in (batch["old_logprobs"], trained):
            torch.testing.assert_close(found[i, :length], expected, rtol=0, atol=1e-5)


# ---------------------------------------------------------------------------- models of other kinds


@torch.no_grad()
def test_decoding_with_a_sliding_window():
    """The cache forgets; prompts are padded on the left; rows leave as they end."""
    model = windowed()
    torch.manual_seed(1)
    batch = grpo.generate(model, PROMPTS, 3, 12, 1.0)
    assert batch["mask"].sum(1).unique().numel() > 2
    check_against_plain_forwards(model, batch, 1.0)


@pytest.mark.parametrize("kind", ["Lfm2", "Qwen3Next"])
def test_linear_attention_is_refused(kind, pretrained, tmp_path, refused):
    """Its state cannot be cut to the rows that are still being written."""
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=400,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        layer_types=["conv" if kind == "Lfm2" else "linear_attention", "full_attention"],
        eos_token_id=2,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(pretrained).save_pretrained(tmp_path)
    error = refused(grpo.load_policy, grpo.Args(model=str(tmp_path)), CPU)
    assert "--model" in error and "linear attention" in error


# --------------------------------------------------------------------------------------------- bf16


def ratio_errors(model, batch, args):
    """|ratio − 1|, at most, of a token and of a sequence."""
    log_ratio = grpo.batch_logprobs(model, batch, args) - batch["old_logprobs"]
    of_sequence = log_ratio.sum(1) / batch["mask"].sum(1)
    return [(x.exp() - 1).abs().max().item() for x in (log_ratio, of_sequence)]


def rollout_in(dtype, kind):
    """A model and its rollout, whose sampler is a little off, as another kernel's would be."""
    model, args = random_model(kind, vocab=50), grpo.Args(micro_batch_size=8)
    torch.manual_seed(0)
    with gpu.products_in(dtype, CPU):
        batch = grpo.generate(model, PROMPTS, 8, 20, 1.0)
    batch["old_logprobs"] += 0.01 * batch["mask"]
    batch["advantages"] = torch.ones(len(batch["mask"]))
    return model, batch, args


def test_sampler_and_trainer_multiply_in_bf16():
    """Every layer of the model, in both; without, a GPU would take twice the time and more."""
    seen, model = [], random_model("llama", vocab=50)
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    for dtype in (torch.float32, torch.bfloat16):
        with gpu.products_in(dtype, CPU):
            batch = grpo.generate(model, PROMPTS, 2, 4, 1.0)
            assert set(seen) == {dtype}
            seen.clear()
            grpo.token_logprobs(model, batch, 1.0)
            assert set(seen) == {dtype}
            seen.clear()


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_in_bf16_old_logprobs_are_retaken(kind):
    model, batch, args = rollout_in(torch.bfloat16, kind)
    sampled = batch["old_logprobs"].clone()
    with gpu.products_in(torch.bfloat16, CPU):
        assert min(ratio_errors(model, batch, args)) > 3e-3
        metrics = grpo.recompute_old_logprobs(model, batch, args)
        assert max(ratio_errors(model, batch, args)) < 1e-4
    gap, name = (batch["old_logprobs"] - sampled).abs(), "sampling/sampling_logp_difference"
    assert set(metrics) == {f"{name}/mean", f"{name}/max"}
    assert metrics[f"{name}/max"] == gap.max() > 5e-3
    torch.testing.assert_close(metrics[f"{name}/mean"], gap.sum() / batch["mask"].sum())


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_in_float32_old_logprobs_stay(kind):
    model, batch, args = rollout_in(torch.float32, kind)
    sampled = batch["old_logprobs"].clone()
    assert grpo.recompute_old_logprobs(model, batch, args) == {}
    assert torch.equal(batch["old_logprobs"], sampled)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("beta", [0.0, 0.01])
@pytest.mark.parametrize("micro_batch_size", [24, 3])
def test_the_first_update_in_bf16_sees_a_ratio_of_one(micro_batch_size, beta, kind):
    """What surrogate is given in a whole train_step. Micro-batches of other rows are as wide as
    another longest row, and rounded otherwise."""
    model, batch, args = rollout_in(torch.bfloat16, kind)
    args.micro_batch_size, args.prompts_per_step, args.beta = micro_batch_size, 3, beta
    with gpu.products_in(torch.bfloat16, CPU):
        assert gpu.largest_ratio_error(model, batch, args) < 1e-4


# ------------------------------------------------------------------------------ memory of an update


class Saved(torch.autograd.graph.saved_tensors_hooks):
    """Collects what autograd keeps for the way back, each piece once, the weights apart."""

    def __init__(self, model):
        self.weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.kept = {}
        super().__init__(self.pack, lambda tensor: tensor)

    def pack(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.weights:
            self.kept[storage.data_ptr()] = storage
        return tensor


def update(model, batch, **flags):
    """Bytes kept for the way back, and the gradient."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    saved = Saved(model)
    with saved:
        grpo.train_minibatch(model, optimizer, batch, grpo.Args(**flags))
    kept = sum(storage.nbytes() for storage in saved.kept.values())
    return kept, [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("kind", KINDS)
def test_checkpointed_layers_keep_less_and_give_the_same_gradient(kind):
    """And they are off while sampling, where they would throw away the cache;
    dropout stays off throughout."""
    model = random_model(kind, vocab=50)
    if kind == "gpt2":
        assert any(isinstance(x, torch.nn.Dropout) and x.p > 0 for x in model.modules())
    torch.manual_seed(0)
    batch = grpo.generate(model, PROMPTS, 4, 20, 1.0)
    trained = batch | {"advantages": torch.randn(12), "ref_logprobs": batch["old_logprobs"] - 0.1}
    plain, gradients = update(model, trained)
    model.activation_checkpointing_enable()
    less, same = update(model, trained, gradient_checkpointing=True)
    for a, b in zip(gradients, same, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)
    assert less < 0.7 * plain
    torch.manual_seed(0)
    again = grpo.generate(model, PROMPTS, 4, 20, 1.0)
    for name in ("old_logprobs", "entropy"):
        assert torch.equal(again[name], batch[name])


# -------------------------------------------------------------------------------- recorded decoding

aten = torch.ops.aten
WAITS = [aten._local_scalar_dense, aten.nonzero, aten.equal, aten.masked_select, aten.is_nonzero]
WAITS += [aten.lift_fresh]  # torch.tensor(3): a copy from the CPU


def tensors_in(result):
    results = result if isinstance(result, (tuple, list)) else [result]
    return [x for x in results if isinstance(x, torch.Tensor)]


class Tape(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operations, self.before, self.made = [], {}, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function._overloadpacket not in WAITS, f"{function} waits for the GPU"
        kwargs = kwargs or {}
        for tensor, declared in zip(args, function._schema.arguments, strict=False):
            if declared.alias_info and declared.alias_info.is_write:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self.made:
                    self.before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        result = function(*args, **kwargs)
        if not any(output.alias_info for output in function._schema.returns):  # new memory
            self.made |= {x.untyped_storage().data_ptr() for x in tensors_in(result)}
        # which keeps the memory alive, too
        self.operations.append((function, args, kwargs, tensors_in(result)))
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
                for old, value in zip(results, tensors_in(new), strict=True):
                    old.copy_(value)


@pytest.fixture
def graphs(monkeypatch):
    """CUDA graphs, emulated; transformers believes that a stream is captured while recording."""
    recording = []

    @contextmanager
    def record(graph, capture_error_mode="global"):
        assert capture_error_mode == "thread_local", "other threads may do as they like"
        graph.tape = Tape()
        recording.append(graph)
        with graph.tape:
            yield
        recording.pop()
        for storage, content in graph.tape.before.values():
            storage.copy_(content)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", record)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(recording))
    monkeypatch.setattr(Graph, "replays", 0)


def test_the_emulation_is_that_of_a_graph(graphs):
    x, y, graph = torch.zeros(3), torch.ones(3), torch.cuda.CUDAGraph()
    n = 1
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        x += n
        out = (x * 2).view(3)
    assert x.tolist() == [0, 0, 0], "recorded, not run"
    n, y = 5, y + 1
    graph.replay()
    graph.replay()
    assert x.tolist() == [2, 2, 2] and out.tolist() == [4, 4, 4]
    for waits in (lambda: bool(x.all()), lambda: torch.tensor([3])):
        with (
            pytest.raises(AssertionError, match="waits"),
            torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"),
        ):
            waits()


@torch.no_grad()
@pytest.mark.parametrize("kind", [*KINDS, "windowed"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_recorded_decoding_is_the_models(kind, temperature, graphs):
    model = windowed() if kind == "windowed" else random_model(kind)
    torch.manual_seed(1)
    batch = gpu.recorded_generate(model, PROMPTS, 3, 12, temperature)
    assert Graph.replays == 10, "the first token is the prompt's, the second that of a plain step"
    assert batch["mask"].sum(1).unique().numel() > 2
    check_against_plain_forwards(model, batch, temperature)


@torch.no_grad()
@pytest.mark.parametrize("kind", [*KINDS, "windowed"])
def test_greedy_it_is_the_scripts_decoding(kind, graphs):
    """Twice, since each call must begin with a cache and a graph of its own."""
    model = windowed() if kind == "windowed" else random_model(kind)
    for prompts in (PROMPTS, PROMPTS[1:] + [[4, 4, 4]]):
        recorded = gpu.recorded_generate(model, prompts, 2, 12, 0.0)
        plain = grpo.generate(model, prompts, 2, 12, 0.0)
        assert recorded.keys() == plain.keys()
        for name, tensor in plain.items():
            torch.testing.assert_close(recorded[name], tensor, rtol=0, atol=1e-5)


@torch.no_grad()
def test_it_ends_when_all_have_ended_but_asks_seldom(graphs):
    model = random_model("llama", stops=(1, 2, 3, 4))
    torch.manual_seed(0)
    batch = gpu.recorded_generate(model, PROMPTS, 4, 60, 1.0)
    assert batch["ended"].all() and batch["mask"].sum(1).max() < 32 and Graph.replays == 30


@torch.no_grad()
def test_recorded_decoding_in_bf16(graphs):
    """Autocast leaves rotated keys in float32, values in bf16: a cache of one type takes both."""
    model = random_model("qwen2")
    torch.manual_seed(0)
    with gpu.products_in(torch.bfloat16, CPU):
        batch = gpu.recorded_generate(model, PROMPTS, 3, 10, 1.0)
        trained = grpo.token_logprobs(model, batch, 1.0)
    gap = (batch["old_logprobs"] - trained).abs().max()
    assert gap < 0.15 and Graph.replays == 8


def test_what_cannot_be_recorded_is_refused(graphs, refused):
    model = random_model()
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    error = refused(gpu.recorded_generate, model, PROMPTS, 2, 4, 1.0)
    assert "dynamic" in error and Graph.replays == 0
