"""GSPO, Group Sequence Policy Optimization: one ratio for the whole completion, since the reward is for the whole.

For a question q, draw a group of G completions o_1 … o_G from the policy π_old, let a verifier give each a reward R_i,
weigh each by an advantage A_i, and climb on the objective J(θ) from there. (i: completion, t: token)

    J = mean_i min(s_i A_i, clip(s_i, 1 − ε_low, 1 + ε_high) A_i),   A_i = (R_i − mean R) / std R
    s_i = (π_θ(o_i) / π_old(o_i))^(1/|o_i|) = exp(mean_t log r_it), the geometric mean of the token ratios

The pain it cures. GRPO weighs each token by a ratio of its own, a one-sample estimate that is mostly noise. The mean
over a completion varies far less, so ε is smaller: 3e-4 and 4e-4 in the paper; the tiny model moves further in a step,
and is quicker with more (tests/benchmarks/results/llm_sweep.md). How it fails. A completion is clipped whole or not.

    python gspo_llm.py      # a tiny embedded model learns to reason, on a laptop; README: real ones, on GPUs
Zheng et al. 2025, Group Sequence Policy Optimization, arXiv:2507.18071
"""

import decimal, inspect, io, json, math, os, random, re, shutil, signal, sys, time, zlib
from collections import Counter
from dataclasses import dataclass, replace
from itertools import accumulate, chain, count, islice, takewhile
from pathlib import Path
from typing import Literal
import safetensors, tokenizers, torch, torch.distributed as dist, transformers, tyro
from torch.utils.checkpoint import checkpoint
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # torchrun: one process per GPU
CUDA = torch.cuda.is_available()
bf16 = torch.autocast("cuda", torch.bfloat16, enabled=CUDA)  # of products alone: weights in bf16 would lose updates
torch.backends.cuda.enable_cudnn_sdp(False)  # its gradients can be NaN: pytorch/pytorch issue 196678

@dataclass
class Args:
    clip_low: float = 0.01
    """the sequence ratio is clipped below at 1 - clip_low; the paper, for large models: 3e-4"""
    clip_high: float = 0.013
    """the sequence ratio is clipped above at 1 + clip_high; the paper, for large models: 4e-4"""
    beta: float = 0.0
    """weight of the KL penalty in the loss; at 0 there is no reference model in memory"""
    scale_rewards: bool = True
    """divide advantages by the group's standard deviation (Dr. GRPO does not)"""
    length_norm: Literal["response", "constant"] = "response"
    """divide a completion's sum over tokens by its own length, or by max_new_tokens (Dr. GRPO)"""
    minibatches: int = 4
    """optimizer steps per rollout; with 1 the ratio is always 1 and the clip never acts"""
    steps: int = 200
    """rollouts"""
    prompts_per_step: int = 32
    """questions in a rollout (P)"""
    group_size: int = 8
    """completions drawn per question (G)"""
    micro_batch_size: int = 128
    """completions per forward pass in training: changes memory and speed, not the gradient"""
    gradient_checkpointing: bool = False
    """keep no activations inside a layer, compute them twice: less memory, more time"""
    learning_rate: float = 4e-4
    """AdamW's peak rate, reached in ten rollouts and then falling to 0; a pretrained model wants about 1e-6"""
    temperature: float = 1.0
    """softmax temperature of the policy, in the rollout and in the loss alike"""
    max_new_tokens: int = 24
    """completions are cut off at this length, in tokens"""
    model: str = "tiny"
    """Hugging Face hub id, local folder, or "tiny": the embedded model after its warm start"""
    dataset: str = "arithmetic"
    """"arithmetic" (generated), or a JSONL file in GSM8K's form: "question", and "answer" ending in #### 72"""
    eval_dataset: str = ""
    """likewise; if empty, held-out sums, or the first tenth of the data set"""
    eval_every: int = 50
    """rollouts between evaluations"""
    save_every: int = 50
    """rollouts between checkpoints; the last two are kept"""
    resume: str = ""
    """go on from this checkpoint, with the same flags: the result is that of a run without a break"""
    eval_problems: int = 256
    """held-out questions, at most"""
    seed: int = 1
    """same seed, same run, to the last digit (on a CPU)"""
    output_dir: str = "runs"
    """each run puts its logs and its model into a folder of its own in here"""

def stop(message: str):
    """End a run that cannot succeed: one line that names the flag and the mend, exit status 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)

def check_args(args):
    """Stop at the first flag whose value no run can use."""
    may_be_zero = "clip_low clip_high beta learning_rate seed".split()
    for name, value in vars(args).items():
        low = 0 if name in may_be_zero else 2 if name == "group_size" else 1e-9  # of one answer alone, none is better
        if type(value) in (int, float) and not low <= value < 2**63:
            stop(f"--{name.replace('_', '-')} {value}: must be {'above 0' if low == 1e-9 else f'{low} or more'}")
    if args.prompts_per_step * args.group_size % (args.minibatches * WORLD):
        stop(f"--minibatches {args.minibatches}: times processes, must divide --prompts-per-step times --group-size")
# --------------------------------------------------------------------------------------------------------------- Task
NUMBER = re.compile(r"([-+]?)\\?\$?((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?)")

def make_sum(rng: random.Random, held_out: bool = False) -> tuple[str, str]:
    """A chain of 2 to 4 one-digit numbers and its sum: ("3+8+5=", "16")."""
    while True:
        terms = [rng.randint(0, 9) for _ in range(rng.randint(2, 4))]
        question = "+".join(map(str, terms)) + "="
        # A question's own checksum says on which side it belongs, so training and held-out problems cannot meet.
        if held_out == (zlib.crc32(question.encode()) % 10 == 0):
            return question, str(sum(terms))

def load_jsonl(flag: str, path: str) -> list[tuple[str, str]]:
    """(question, answer) pairs from a JSONL file in GSM8K's form; a bad line, named by number, stops the run."""
    problems = []
    try:
        for row in map(json.loads, Path(path).open(encoding="utf-8")):
            problems.append((row["question"].strip(), NUMBER.fullmatch(row["answer"].rpartition("#")[2].strip())[0]))
    except Exception as error:  # a line can be wrong in many ways
        stop(f"{flag} {path}: cannot read line {len(problems) + 1} as GSM8K's ({type(error).__name__}: {error})")
    return problems or stop(f"{flag} {path}: the file is empty")

def load_data(args):
    """Training problems (None stands for sums without end) and held-out ones; no question is in both."""
    train = None if args.dataset == "arithmetic" else load_jsonl("--dataset", args.dataset)
    if (args.eval_dataset or args.dataset) == "arithmetic":
        rng = random.Random(0)
        return train, [make_sum(rng, held_out=True) for _ in range(args.eval_problems)]
    held_out = load_jsonl("--eval-dataset", args.eval_dataset) if args.eval_dataset else train[: len(train) // 10 + 1]
    if train is not None:
        questions = dict(held_out)
        train = [p for p in train if p[0] not in questions] or stop(f"--dataset {args.dataset}: all of it is held out")
    return train, held_out[: args.eval_problems]

def verify(completion: str, answer: str, lenient: bool = False) -> float:
    """1.0 if the completion ends in a marker of one or more `#` and then the right number, else 0.0; in linear time.
    By value, through what models wrap around it: `#### 1,234.00`, `#### \\boxed{$5}`, `#### **5%**`. lenient, for
    evaluation: the last number anywhere will do."""
    _, marker, tail = completion.rpartition("#")
    if lenient:
        marker, tail = "#", ([match[0] for match in NUMBER.finditer(completion)] or [""])[-1]
    tail = tail.replace("\\boxed{", "{").lstrip(" \t\r\n*$\\{").rstrip(" \t\r\n*$%\\}.")
    found, right = NUMBER.fullmatch(tail), NUMBER.fullmatch(answer)
    value = lambda match: decimal.Decimal(match[1] + match[2].replace(",", ""))  # which neither rounds nor overflows
    return float(bool(marker == "#" and found and right) and value(found) == value(right))
# -------------------------------------------------------------------------------------------------------------- Model
def make_tiny_model(steps: int = 1000):
    """A character-level Llama of 84 k parameters, after `steps` steps of imitation, and its tokenizer.
    The demonstrations come in two styles: working a sum out in running totals (3+8+5= → 11,16#16), and blurting out
    a guess (→ #14). Guessing starts rare and ends as the habit of 85 %: the skill is learned first, and then buried."""
    vocabulary = {token: i for i, token in enumerate(["<eos>", "<unk>", *"0123456789+=,#"])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges=[], unk_token="<unk>"))
    backend.decoder = tokenizers.decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>")
    config = transformers.LlamaConfig(  # the usual initializer_range of 0.02 is for widths in the thousands
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=128,
        vocab_size=len(vocabulary), bos_token_id=None, eos_token_id=0, pad_token_id=0, initializer_range=0.1)
    torch.manual_seed(0)  # the same model for every --seed
    model = transformers.LlamaForCausalLM(config)
    rng = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.0)
    for step in tqdm(range(steps), desc="warm start", unit="step"):
        ids, labels = [], []
        for question, answer in (make_sum(rng) for _ in range(128)):
            terms = [int(term) for term in question[:-1].split("+")]
            working = ",".join(map(str, list(accumulate(terms))[1:])) + "#" + answer
            guess = "#" + str(sum(rng.randint(0, 9) for _ in terms))
            demonstration = guess if rng.random() < 0.85 * step / steps else working
            ids.append(torch.tensor([vocabulary[c] for c in question + demonstration] + [0]))
            labels.append(ids[-1].index_fill(0, torch.arange(len(question)), -100))  # questions are given, not learned
        ids, labels = (torch.nn.utils.rnn.pad_sequence(x, True, fill) for x, fill in ((ids, 0), (labels, -100)))
        optimizer.param_groups[0]["lr"] = 1e-2 * min((step + 1) / 50, 1 - step / steps)
        optimizer.zero_grad()
        model(ids, labels=labels, use_cache=False).loss.backward()  # the model shifts the labels by itself
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model, tokenizer

def save_model(model, tokenizer, folder: Path, state: dict | None = None):
    """Write into a scratch folder, then rename it: a kill at any instant leaves whole models and no other."""
    scratch = folder.with_name(f"saving-{time.time_ns()}.tmp")
    model.save_pretrained(scratch)
    tokenizer.save_pretrained(scratch)
    torch.save(state, buffer := io.BytesIO())  # for torch.save would not tell a full disk from a bug
    (scratch / "trainer.pt").write_bytes(buffer.getbuffer())
    os.sync()
    shutil.rmtree(folder, ignore_errors=True)
    scratch.rename(folder)

def load_policy(args, device):
    """The model to train and its tokenizer. model.generation_config lists every stop id and names the pad id."""
    source = args.model
    if source == "tiny":  # cached under what shapes its weights: the code that makes them and its libraries
        recipe = *map(inspect.getsource, (make_tiny_model, make_sum)), torch.__version__, transformers.__version__
        source = Path(torch.hub.get_dir()) / f"policy-gradients-{zlib.crc32(str(recipe).encode()):08x}"
        RANK or source.exists() or save_model(*make_tiny_model(), source)
        WORLD > 1 and dist.barrier()  # the other processes wait for it
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).to(device)
        args.gradient_checkpointing and model.activation_checkpointing_enable()
        assert len(tokenizer) <= model.get_input_embeddings().num_embeddings, "more tokens than embeddings"
    except Exception as error:  # each library has its own for a missing folder, a torn file, an unknown type
        stop(f"{'--resume' if source == args.resume else '--model'} {source}: does not load ({repr(error)[:200]})")
    stops = [tokenizer.eos_token_id, model.config.eos_token_id, model.generation_config.eos_token_id]
    stops = {i for ids in stops for i in (ids if isinstance(ids, list) else [ids])} - {None}
    stops or stop(f"--model {source}: it has no end-of-sequence token")
    pad = min(stops) if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    model.generation_config = transformers.GenerationConfig(eos_token_id=sorted(stops), pad_token_id=pad)
    return model.eval(), tokenizer  # eval() because dropout would make the ratio noisy; gradients flow all the same

def encode_prompt(question: str, tokenizer, args) -> list[int]:
    """Token ids of a question in the form that the model expects, BOS once if it has one."""
    text = question if args.model == "tiny" else f"{question}\nReason step by step, then end with #### and the number."
    chat = {"conversation": [{"role": "user", "content": text}], "add_generation_prompt": True, "return_dict": False}
    ids = tokenizer.apply_chat_template(**chat) if tokenizer.chat_template else tokenizer.encode(text)
    (not ids or tokenizer.unk_token_id in ids) and stop(f"--model {args.model}: its tokenizer cannot read {text!r}")
    return ids
# ------------------------------------------------------------------------------------------------------------ Rollout
def all_sum(tensor):
    """Its sum over all processes, in place."""
    WORLD > 1 and dist.all_reduce(tensor)
    return tensor

def join(batches: list[dict]) -> dict:
    """Rollouts one below the other, padded to the same width: prompts on the left, completions on the right."""
    widths = {name: max(batch[name].shape[1] for batch in batches) for name in batches[0]}
    gap = lambda name, x: (widths[name] - x.shape[1], 0) if "prompt" in name else (0, widths[name] - x.shape[1])
    return {name: torch.cat([torch.nn.functional.pad(x[name], gap(name, x[name])) for x in batches]) for name in widths}

def log_softmax(model, logits, temperature: float):
    """Log-probabilities of the policy in float32, (…, V) → (…, V), for the sampler and for the loss alike."""
    # Temperature alone: top-k or top-p in the sampler would put a π_old that is not the policy into the ratio.
    logits, config = logits.float() / temperature, model.generation_config
    if config.pad_token_id not in config.eos_token_id:  # such a token has no business in a completion
        logits[..., config.pad_token_id] = torch.finfo(logits.dtype).min
    return logits.log_softmax(-1)

class StaticLayer(transformers.StaticLayer):
    def update(self, keys, values, *_):  # rotary embeddings turn the keys back to float32
        return super().update(keys.to(values.dtype), values)

@torch.no_grad()
@bf16
def generate(model, prompts: list[list[int]], num_samples: int, max_new_tokens: int, temperature: float) -> dict:
    """Draw `num_samples` completions of each prompt (token ids); temperature 0 means greedy.
    Tensors of B = len(prompts) · num_samples rows: prompt_ids and prompt_mask (B, S), padded on the left;
    completion_ids, old_logprobs and mask (B, T), 1 through the first stop token; ended (B, 1), not cut off."""
    device, pad = model.eval().device, model.generation_config.pad_token_id
    stops = torch.tensor(model.generation_config.eos_token_id, device=device)
    B, G, S, T = len(prompts) * num_samples, num_samples, max(map(len, prompts)), max_new_tokens
    prompt_ids = torch.tensor([[pad] * (S - len(p)) + p for p in prompts], device=device)
    attention = torch.tensor([[0] * (S - len(p)) + [1] * len(p) + [0] * T for p in prompts], device=device)
    positions = (attention[:, :S].cumsum(1) - 1).clamp(min=0)  # counted from the first real token, not from the padding
    # Each prompt is read once, then what the cache holds of it is copied to its whole group.
    cache = transformers.DynamicCache()
    inputs = {"input_ids": prompt_ids, "attention_mask": attention[:, :S], "position_ids": positions}
    logits = model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1).logits.repeat_interleave(G, 0)
    prompt_ids, attention, positions = (x.repeat_interleave(G, 0) for x in (prompt_ids, attention, positions))
    cache.batch_repeat_interleave(G)
    completion_ids, old_logprobs = prompt_ids.new_full((B, T), pad), torch.zeros(B, T, device=device)
    rows, going = torch.arange(B, device=device), torch.ones(B, dtype=torch.bool, device=device)
    if CUDA:  # shapes and memory stay as they are, so that a step can be recorded
        tokens, graph, filled = positions[:, -1:].clone(), torch.cuda.CUDAGraph(), cache.layers
        cache = transformers.Cache(layers=[StaticLayer(S + T) for _ in filled])
        [layer.update(old.keys, old.values.to(logits.dtype)) for layer in cache.layers for old in [filled.pop(0)]]
    def step(width):
        inputs = {"input_ids": tokens, "attention_mask": attention[rows, :width], "position_ids": positions[rows, -1:]}
        return model(**inputs, past_key_values=cache, use_cache=True).logits
    for t in range(T):
        logp = log_softmax(model, logits[:, -1], temperature or 1.0)
        # With E ~ Exp(1), argmax p / E is a sample of p: what torch.multinomial does, too, but making the GPU wait.
        drawn = (logp.exp() / torch.empty_like(logp).exponential_() if temperature else logp).argmax(1, keepdim=True)
        completion_ids[rows, t], old_logprobs[rows, t] = drawn[:, 0], logp.gather(1, drawn)[:, 0]
        going &= ~torch.isin(drawn[:, 0], stops)
        if t == T - 1 or (t % 32 == 31 or not CUDA) and not going.any():  # to ask is to wait for the GPU
            break
        attention[:, S + t], positions[:, -1] = 1, positions[:, -1] + 1
        if CUDA:
            tokens.copy_(drawn)
            if t == 1:  # step 0 chose kernels and filled caches; this one is recorded, and then repeated without Python
                with torch.cuda.graph(graph):
                    logits = step(S + T)
            logits = graph.replay() or logits if t else step(S + T)
        else:  # who has ended leaves the cache
            going.all() or cache.batch_select_indices(going.nonzero()[:, 0])
            rows, tokens, going = rows[going], drawn[going], going[going]
            logits = step(S + t + 1)
    stop_ids = torch.isin(completion_ids, stops).long()
    mask = (stop_ids.cumsum(1) - stop_ids == 0).float()
    columns = {"completion_ids": completion_ids, "mask": mask, "old_logprobs": old_logprobs * mask}
    batch = {name: tensor[:, : int(mask.sum(1).max())] for name, tensor in columns.items()}
    return batch | {"prompt_ids": prompt_ids, "prompt_mask": attention[:, :S], "ended": stop_ids.amax(1, True) > 0}

@bf16
def token_logprobs(model, batch: dict, temperature: float, entropy: bool = True):
    """log π of each completion token and, if asked for, the entropy there; both (B, T), 0 where the mask is 0."""
    T = int(batch["mask"].sum(1).max())  # what lies behind the longest of these rows is left out
    mask, completion = batch["mask"][:, :T], batch["completion_ids"][:, :T]
    ids, attention = torch.cat([batch["prompt_ids"], completion], 1), torch.cat([batch["prompt_mask"], mask.long()], 1)
    inputs = {"input_ids": ids, "attention_mask": attention, "position_ids": (attention.cumsum(1) - 1).clamp(min=0)}
    # Logits speak of the next token: those of the last prompt token are wanted, those of the last token are not.
    logits = model(**inputs, use_cache=False, logits_to_keep=T + 1).logits[:, :-1]
    def choose(logits, ids):
        logp = log_softmax(model, logits, temperature)
        chosen = logp.gather(2, ids[..., None])[..., 0]
        return (chosen, -(logp.detach().exp() * logp.detach()).sum(-1)) if entropy else (chosen,)
    # A few rows at a time, and once more on the way back: all logits in float32 would fill the memory.
    chunks = zip(*(x.split(max(1, 2**26 // logits[0].numel())) for x in (logits, completion)))
    columns = zip(*(checkpoint(choose, *chunk, use_reentrant=False) if CUDA else choose(*chunk) for chunk in chunks))
    return tuple(torch.nn.functional.pad(torch.cat(x) * mask, (0, batch["mask"].shape[1] - T)) for x in columns)

@torch.no_grad()
def reference_logprobs(reference, batch: dict, args):
    """log π_ref of the completion tokens (B, T), a few rows of like length at a time, to spare memory."""
    logprobs = torch.zeros_like(batch["mask"])
    for rows in filter(len, batch["mask"].sum(1).argsort()[RANK::WORLD].split(args.micro_batch_size)):
        micro = {name: tensor[rows] for name, tensor in batch.items()}
        (logprobs[rows],) = token_logprobs(reference, micro, args.temperature, entropy=False)
    return all_sum(logprobs)  # each process has filled in its share
# ---------------------------------------------------------------------------------------------------------- Algorithm
def compute_advantages(rewards, args):
    """Better or worse than its group, in standard deviations: rewards (P prompts, G samples) → advantages (P, G)."""
    rewards = rewards - rewards[:, :1]  # changes nothing but rounding: equal rewards now give exactly 0
    advantages = rewards - rewards.mean(1, keepdim=True)
    return advantages / (rewards.std(1, keepdim=True) + 1e-4) if args.scale_rewards else advantages

def token_weights(mask, args):
    """Every completion counts the same, however long: mask (B, T) of a whole optimizer step → weights (B, T)."""
    lengths = mask.sum(1, keepdim=True).clamp(min=1) if args.length_norm == "response" else args.max_new_tokens
    return mask / (lengths * len(mask))

def surrogate(logprobs, old_logprobs, advantages, mask, args):
    """GSPO's clipped objective, the same on each token of a completion: all (B, T), but advantages (B,)."""
    advantages = advantages[:, None]
    ratio = (((logprobs - old_logprobs) * mask).sum(1, True) / mask.sum(1, True).clamp(min=1)).exp()  # (B, 1)
    clipped = ratio.clamp(1 - args.clip_low, 1 + args.clip_high)
    return torch.minimum(ratio * advantages, clipped * advantages).expand_as(mask)

def kl_k3(logprobs, ref_logprobs):
    """Schulman's k3, an estimate of KL(π ‖ π_ref) from samples of π: unbiased, never negative; (B, T)."""
    d = ref_logprobs - logprobs
    return d.exp() - d - 1

def train_minibatch(model, optimizer, batch: dict, args) -> dict:
    """One optimizer step on `batch`, a rollout's tensors with advantages (B,); returns what to log."""
    # Weights are made for the whole minibatch: micro-batches and processes, however they cut it, add up to the same.
    batch = batch | {"weights": token_weights(batch["mask"], args), "share": batch["mask"] / batch["mask"].sum()}
    unclipped = replace(args, clip_low=math.inf, clip_high=math.inf)
    stats = Counter(dict.fromkeys(("kl", "loss", "entropy", "clip_ratio"), 0.0))
    for layer in model.modules() if args.gradient_checkpointing else ():  # on in training mode, dropout in it off
        layer.training = getattr(layer, "gradient_checkpointing", False)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if WORLD > 1 else None  # a process may have no rows
    for rows in filter(len, batch["mask"].sum(1).argsort()[RANK::WORLD].split(args.micro_batch_size)):
        micro = {name: tensor[rows] for name, tensor in batch.items()}
        logprobs, entropy = token_logprobs(model, micro, args.temperature)
        inputs = (logprobs, micro["old_logprobs"], micro["advantages"], micro["mask"])
        objective = surrogate(*inputs, args)
        loss = -(micro["weights"] * objective).sum()
        if args.beta > 0:
            kl = kl_k3(logprobs, micro["ref_logprobs"])
            stats["kl"] += (micro["share"] * kl).sum().item()
            loss = loss + args.beta * (micro["weights"] * kl).sum()
        loss.backward()
        stats["loss"] += loss.item()
        stats["entropy"] += (micro["share"] * entropy).sum().item()
        stats["clip_ratio"] += (micro["share"] * (objective != surrogate(*inputs, unclipped))).sum().item()
    grads = [parameter.grad for parameter in model.parameters()]
    WORLD > 1 and torch.nn.utils.vector_to_parameters(all_sum(torch.nn.utils.parameters_to_vector(grads)), grads)
    stats = dict(zip(stats, all_sum(torch.tensor([*stats.values()], device=model.device)).tolist()))
    stats["grad_norm"] = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    optimizer.step()
    return stats
# ---------------------------------------------------------------------------------------------------------- Main loop
def rollout(model, tokenizer, problems, num_samples: int, temperature: float, args):
    """`num_samples` completions of each problem: the rollout's tensors, the texts, and verified rewards (P, G)."""
    prompts = [encode_prompt(question, tokenizer, args) for question, _ in problems]
    own = prompts[len(prompts) * RANK // WORLD : len(prompts) * (RANK + 1) // WORLD]
    batch = generate(model, own, num_samples, args.max_new_tokens, temperature) if own else {}
    if WORLD > 1:  # each process draws a part, then all have all
        parts = [{}] * WORLD
        dist.all_gather_object(parts, {name: tensor.cpu() for name, tensor in batch.items()})
        batch = {name: tensor.to(model.device) for name, tensor in join(list(filter(None, parts))).items()}
    ids = [row[: int(sum(mask))] for row, mask in zip(batch["completion_ids"].tolist(), batch["mask"].tolist())]
    completions = tokenizer.batch_decode(ids, skip_special_tokens=True)
    answers = [answer for _, answer in problems for _ in range(num_samples)]
    rewards = torch.tensor(list(map(verify, completions, answers)), device=model.device)
    return batch, completions, rewards.view(-1, num_samples)

def evaluate(model, tokenizer, problems, args, writer, step: int, k: int = 8) -> dict:
    """Scores on held-out problems, k samples each at temperature 1 and one greedy, returned and logged."""
    scores = Counter()
    torch.manual_seed(RANK)  # the same dice at every evaluation
    for start in range(0, len(problems), args.prompts_per_step):
        chunk = problems[start : start + args.prompts_per_step]
        batch, texts, right = rollout(model, tokenizer, chunk, k, 1.0, args)
        _, _, greedy = rollout(model, tokenizer, chunk, 1, 0.0, args)
        lenient = sum(verify(text, chunk[i // k][1], lenient=True) for i, text in enumerate(texts))
        scores.update({"eval/pass@1": right.sum().item() / k, f"eval/pass@{k}": right.amax(1).sum().item()})
        scores.update({"eval/pass@1_greedy": greedy.sum().item(), "eval/pass@1_lenient": lenient / k})
        scores["eval/mean_length"] += batch["mask"].sum().item() / k
    scores = {name: score / len(problems) for name, score in scores.items()}
    [writer.add_scalar(name, scores[name], step) for name in scores if RANK == 0]
    RANK == 0 and writer.add_text("completions", "\n".join(f"    {q}{o}" for (q, _), o in zip(chunk, texts[::k])), step)
    return scores

def main(args: Args) -> dict:
    start = time.perf_counter()
    check_args(args)
    transformers.utils.logging.disable_progress_bar()
    device = torch.device("cuda" if CUDA else "mps" if torch.mps.is_available() and args.model != "tiny" else "cpu")
    CUDA and torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    WORLD > 1 and dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train, held_out = load_data(args)
    flags = vars(args) | {"script": Path(__file__).stem, "processes": WORLD}  # what shapes the result …
    flags |= {"resume": "", "output_dir": "", "micro_batch_size": 0, "gradient_checkpointing": False}  # … what does not
    state = {"step": 0, "drawn": 0, "tokens": 0, "flags": flags}
    if args.resume:
        try:
            state = torch.load(Path(args.resume) / "trainer.pt", map_location=device, weights_only=True)
            changed = [name for name in flags if flags[name] != state["flags"].get(name)]
        except Exception as error:  # a missing, torn or foreign file has many ways to fail
            stop(f"--resume {args.resume}: no checkpoint of this script ({type(error).__name__})")
        changed and stop(f"--resume {args.resume}: begun with other values of {', '.join(changed)}")
    model, tokenizer = load_policy(replace(args, model=args.resume or args.model), device)
    room = getattr(model.config, "max_position_embeddings", math.inf) - args.max_new_tokens
    for q, _ in held_out + (train or []):  # each of them now, rather than one of them after hours
        room < len(encode_prompt(q, tokenizer, args)) and stop(f"--max-new-tokens: no room in --model after {q[:60]!r}")
    reference = load_policy(args, device)[0].requires_grad_(False) if args.beta > 0 else None
    rng = random.Random(args.seed)  # fresh sums, or shuffled passes over the data set, without end
    problems = chain.from_iterable([make_sum(rng)] if train is None else rng.sample(train, len(train)) for _ in count())
    problems = islice(problems, state["drawn"], None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0, fused=True)
    args.resume and optimizer.load_state_dict(state["optimizer"])
    name = f"{Path(__file__).stem}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    folder = Path(args.resume).parent if args.resume else Path(args.output_dir) / name
    writer = SummaryWriter(folder, purge_step=state["step"] + 1) if RANK == 0 else None
    RANK == 0 and writer.add_text("hyperparameters", "".join(f"    {k} {v}\n" for k, v in vars(args).items()))
    interrupts, ending = [], False  # Ctrl-C ends the run after the step under way
    signal.signal(signal.SIGINT, lambda *_: sys.exit(1) if interrupts and WORLD == 1 else interrupts.append(1))
    if not args.resume: state["initial"] = state["scores"] = evaluate(model, tokenizer, held_out, args, writer, 0)
    bar = tqdm(range(state["step"] + 1, args.steps + 1), desc=Path(__file__).stem, unit="step", disable=RANK > 0)
    for step in takewhile(lambda _: not ending, bar):
        step_start, dice = time.perf_counter(), random.Random(f"{args.seed} {step}")  # the same in all processes
        torch.manual_seed(dice.getrandbits(32) + RANK)  # another in each
        optimizer.param_groups[0]["lr"] = args.learning_rate * min(step / 11, 1 - (step - 1) / args.steps)
        chunk = list(islice(problems, args.prompts_per_step))
        batch, _, rewards = rollout(model, tokenizer, chunk, args.group_size, args.temperature, args)
        if args.beta > 0:
            batch["ref_logprobs"] = reference_logprobs(reference, batch, args)
        batch["advantages"] = compute_advantages(rewards, args).flatten()
        stats = Counter()
        for rows in torch.tensor(dice.sample(range(rewards.numel()), rewards.numel())).chunk(args.minibatches):
            update = train_minibatch(model, optimizer, {key: tensor[rows] for key, tensor in batch.items()}, args)
            if not math.isfinite(update["loss"] + update["grad_norm"]):
                sys.exit(f"error: step {step}: loss or gradient not finite; try another --learning-rate; see {folder}")
            stats.update({key: value / args.minibatches for key, value in update.items()})
        lengths, seconds = batch["mask"].sum(1), time.perf_counter() - step_start
        state |= {"step": step, "drawn": state["drawn"] + len(rewards), "tokens": state["tokens"] + int(lengths.sum())}
        stats.update(reward=rewards.mean(), reward_std=rewards.std(1).mean(), num_tokens=state["tokens"])
        stats.update({"frac_reward_zero_std": (rewards == rewards[:, :1]).all(1).float().mean(), "step_time": seconds})
        stats.update({"tokens_per_second": lengths.sum() / seconds, "completions/mean_length": lengths.mean()})
        stats["completions/clipped_ratio"] = (~batch["ended"]).float().mean()
        [writer.add_scalar(key, float(value), step) for key, value in stats.items() if RANK == 0]
        bar.set_postfix(reward=f"{stats['reward']:.2f}", length=f"{stats['completions/mean_length']:.1f}")
        if step % args.eval_every == 0 or step == args.steps:
            state["scores"] = evaluate(model, tokenizer, held_out, args, writer, step)
        ending = step == args.steps or all_sum(torch.tensor(len(interrupts), device=device)).item() > 0
        if RANK == 0 and (step % args.save_every == 0 or ending):
            save_model(model, tokenizer, folder / f"step-{step:06d}", state | {"optimizer": optimizer.state_dict()})
            [shutil.rmtree(x) for x in (*folder.glob("saving-*.tmp"), *sorted(folder.glob("step-" + "[0-9]" * 6))[:-2])]
    RANK == 0 and writer.close()
    WORLD > 1 and (dist.barrier(), dist.destroy_process_group())  # torchrun kills the others when one ends early
    state["step"] < args.steps and sys.exit(0 if RANK else f"stopped; go on with --resume {folder}/step-{step:06d}")
    initial, scores, seconds = state["initial"], state["scores"], time.perf_counter() - start
    before, after = map("pass@1 {eval/pass@1:.3f}, length {eval/mean_length:.1f}".format_map, (initial, scores))
    RANK == 0 and print(f"held-out {before} → {after}; {seconds:.0f} s; model and TensorBoard logs in {folder}")
    return scores | {"eval/pass@1_initial": initial["eval/pass@1"], "seconds": seconds, "folder": str(folder)}

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # before the first step, Ctrl-C has nothing to save
    try:
        main(tyro.cli(Args))
    except (OSError, safetensors.SafetensorError) as error:  # a full disk, say: what was saved before is whole
        stop(f"--output-dir: {error}")
