"""GSPO, Group Sequence Policy Optimization: one ratio per completion, as there is one reward.

For each question, draw a group of G completions o_1 … o_G from the policy as it stands, π_old. A
verifier gives each a reward R_i. Turn the rewards into advantages A_i, and take gradient steps up
the objective J(θ), --minibatches of them per rollout. (Index i is a completion and t a token; π of
a token is its probability after the question and the tokens before it.)

    J   = mean_i min(s_i A_i, clip(s_i, 1 − ε_low, 1 + ε_high) A_i)
    A_i = (R_i − mean R) / std R                      the group is its own baseline
    s_i = (π_θ(o_i) / π_old(o_i))^(1/|o_i|)           the geometric mean of the token ratios

Why. GRPO weighs each token by a ratio of its own, and one sample of a token says next to nothing
about how its distribution has moved: the ratios are mostly noise. The mean over a completion varies
less and is clipped more narrowly still. GSPO clips far more tokens than GRPO, and by default learns
no worse.

Weakness. A completion is clipped as a whole or not at all. The paper clips at 3e-4 and 4e-4. The
tiny model moves further in a step and has wider bounds here; but 3e-4 to 0.2 made little difference
to where two seeds ended (tests/benchmarks/results/llm_sweep.md).

    python gspo_llm.py                  # a tiny model learns to reason, on a laptop, in a minute
    python gspo_llm.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset train.jsonl       # on a GPU

Zheng et al. 2025, Group Sequence Policy Optimization, arXiv:2507.18071.
"""

import inspect
import io
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import textwrap
import time
import zlib
from collections import defaultdict
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import accumulate, islice
from pathlib import Path
from typing import Literal

import safetensors
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
import tyro
from tokenizers import Tokenizer, decoders, models
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, GenerationConfig

SCRIPT = Path(__file__).stem
# torchrun starts one process per GPU, and tells each its rank among how many.
RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))
# On CUDA, matrix products are in bf16. Weights and Adam stay in float32: bf16 would lose updates.
mixed_precision = torch.autocast("cuda", torch.bfloat16, enabled=torch.cuda.is_available())


@dataclass
class Args:
    clip_low: float = 0.01
    """the sequence ratio is clipped below at 1 - clip_low; the paper, for large models: 3e-4"""
    clip_high: float = 0.013
    """the sequence ratio is clipped above at 1 + clip_high; the paper, for large models: 4e-4"""
    beta: float = 0.0
    """weight of GRPO's KL penalty in the loss; the paper has none, and 0 loads no reference"""
    scale_rewards: bool = True
    """divide advantages by the group's standard deviation (Dr. GRPO does not)"""
    minibatches: int = 4
    """optimizer steps per rollout; with 1 the ratio is always 1 and the clip never acts"""
    group_size: int = 8
    """completions drawn per question (G)"""
    prompts_per_step: int = 32
    """questions per training step (P)"""
    steps: int = 200
    """training steps in the whole run: each draws completions and learns from them"""
    learning_rate: float | None = None
    """AdamW's peak learning rate; if not given, 4e-4 for the tiny model and 1e-6 for any other"""
    warmup_steps: int = 10
    """training steps in which the learning rate rises to its peak; from there it falls towards 0"""
    max_grad_norm: float = 1.0
    """longer gradients are scaled down to this norm"""
    temperature: float = 1.0
    """softmax temperature of the policy, in the rollout and in the loss alike"""
    max_new_tokens: int | None = None
    """completions are cut off at this many tokens; if not given, 24 for arithmetic, else 256"""
    model: str = "tiny"
    """Hugging Face hub id, local folder, or "tiny": the embedded model after its warm start"""
    dataset: str = "arithmetic"
    """"arithmetic" (generated), or a JSONL file like GSM8K's: question, answer ending in #### 72"""
    eval_dataset: str = ""
    """JSONL file to evaluate on; if empty, unseen sums, or the data set's first tenth, up to 256"""
    prompt: str | None = None
    """template with {question}; if not given, the bare sum, or a request to end with ####"""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """where to compute; auto keeps the tiny model on the CPU and puts any other on a GPU"""
    micro_batch_size: int | None = None
    """completions per forward pass in training, for memory; if not given, 128 for tiny, else 8"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass: less memory, more time"""
    eval_every: int = 50
    """training steps between evaluations on the held-out questions"""
    eval_problems: int = 256
    """questions per evaluation, at most"""
    eval_only: bool = False
    """evaluate --model, print scores and samples, and train nothing"""
    save_every: int = 50
    """training steps between checkpoints; the last two are kept"""
    resume: str = ""
    """checkpoint to go on from, with its own flags; the result is that of an unbroken run"""
    seed: int = 1
    """same seed, same run, bit for bit (on a CPU)"""
    output_dir: str = "runs"
    """each run gets a folder of its own in here, for logs and checkpoints"""

    def __post_init__(self):
        if self.learning_rate is None:
            self.learning_rate = 4e-4 if self.model == "tiny" else 1e-6
        if self.micro_batch_size is None:
            self.micro_batch_size = 128 if self.model == "tiny" else 8
        if self.max_new_tokens is None:
            self.max_new_tokens = 24 if self.dataset == "arithmetic" else 256
        if self.prompt is None:
            self.prompt = "{question}"
            if self.dataset != "arithmetic":
                self.prompt += "\nReason step by step, then end with #### and the number."


# ------------------------------------------------------------------------------------- Algorithm


def compute_advantages(rewards, args):
    """A_i: how much better than its group. rewards (P prompts, G samples) → advantages (P, G)."""
    rewards = rewards - rewards[:, :1]  # so that equal rewards give exactly 0
    advantages = rewards - rewards.mean(1, keepdim=True)
    if args.scale_rewards:
        advantages = advantages / (rewards.std(1, keepdim=True) + 1e-4)
    return advantages


def token_weights(mask, args):
    """Every completion counts the same. mask (B, T) of a whole optimizer step → weights (B, T)."""
    lengths = mask.sum(1, keepdim=True).clamp(min=1)  # |o_i|
    return mask / (lengths * len(mask))


def surrogate(logprobs, old_logprobs, advantages, mask, args):
    """PPO's clipped objective of each completion, at all its tokens: (B, T); advantages (B,)."""
    advantages = advantages[:, None]
    lengths = mask.sum(1, keepdim=True).clamp(min=1)
    log_ratio = ((logprobs - old_logprobs) * mask).sum(1, keepdim=True) / lengths  # its mean
    ratio = log_ratio.exp()  # s_i: (B, 1)
    clipped_ratio = ratio.clamp(1 - args.clip_low, 1 + args.clip_high)
    return torch.minimum(ratio * advantages, clipped_ratio * advantages) * mask


def kl_k3(logprobs, ref_logprobs):
    """Schulman's k3 of each token, (B, T): never negative, and KL(π ‖ π_ref) on average over π.

    That is its value. Its gradient, averaged over samples that are held fixed, is not that of this
    KL but of the reverse, KL(π_ref ‖ π), which also leads to the reference.
    """
    d = ref_logprobs - logprobs
    return d.exp() - d - 1


# ---------------------------------------------------------------------------------------- Update


def train_step(model, reference, tokenizer, optimizer, problems, rng, args):
    """One rollout and the gradient steps on it; `problems` yields (question, answer) pairs."""
    drawn = [next(problems) for _ in range(args.prompts_per_step)]
    batch, _, rewards = rollout(model, tokenizer, drawn, args.group_size, args.temperature, args)
    metrics = rollout_metrics(batch, rewards)
    if args.beta > 0:
        batch["ref_logprobs"] = batch_logprobs(reference, batch, args)
        metrics["kl"] = token_mean(kl_k3(batch["old_logprobs"], batch["ref_logprobs"]), batch)
    batch["advantages"] = compute_advantages(rewards, args).flatten()

    rows = list(range(len(batch["mask"])))
    rng.shuffle(rows)  # the same order in all processes
    minibatches = [take_rows(batch, part) for part in torch.tensor(rows).chunk(args.minibatches)]
    for minibatch in minibatches:  # all of them before the policy moves
        metrics |= recompute_old_logprobs(model, minibatch, args)  # logged: the last one's gap
    updates = [train_minibatch(model, optimizer, minibatch, args) for minibatch in minibatches]
    return metrics | mean_of(updates)


def train_minibatch(model, optimizer, batch, args):
    """One optimizer step on a batch with advantages (B,); returns the loss and what else to log.

    approx_kl, of π_old against π, is a mean over the tokens trained on.
    clip_ratio is the share of these tokens whose objective would differ without the clip.
    """
    # The weights are those of the whole minibatch. Micro-batches and processes only slice them,
    # so the gradient is the same however the rows are split.
    batch = batch | {"weights": token_weights(batch["mask"], args)}
    trained = rows_with_gradient(batch)
    num_tokens = batch["mask"][trained].sum()
    no_clip = replace(args, clip_low=math.inf, clip_high=math.inf)
    sums = {name: torch.zeros_like(num_tokens) for name in ("loss", "approx_kl", "clip_ratio")}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # not None: there may be no row to train on
    if args.gradient_checkpointing:
        recompute_activations(model)

    for rows in micro_batches(batch, trained, args):
        micro = take_rows(batch, rows)
        logprobs = token_logprobs(model, micro, args.temperature)
        inputs = (logprobs, micro["old_logprobs"], micro["advantages"], micro["mask"])
        objective = surrogate(*inputs, args)
        sums["clip_ratio"] += (objective != surrogate(*inputs, no_clip)).sum() / num_tokens
        if args.beta > 0:
            objective = objective - args.beta * kl_k3(logprobs, micro["ref_logprobs"])
        loss = -(micro["weights"] * objective).sum()
        loss.backward()
        sums["loss"] += loss.detach()
        sums["approx_kl"] += kl_k3(micro["old_logprobs"], logprobs.detach()).sum() / num_tokens

    for parameter in model.parameters():
        sum_over_processes(parameter.grad)
    grad_norm = clip_grad_norm_(model.parameters(), args.max_grad_norm)
    optimizer.step()
    metrics = {name: sum_over_processes(value).item() for name, value in sums.items()}
    return metrics | {"grad_norm": grad_norm.item()}


# ---------------------------------------------------------------------------- Log-probabilities


def forward(model, input_ids, attention_mask, **options):
    """The model's logits; positions are counted from the first real token, not from the padding."""
    positions = (attention_mask.cumsum(1)[:, -input_ids.shape[1] :] - 1).clamp(min=0)
    options |= {"attention_mask": attention_mask, "position_ids": positions}
    return model(input_ids, **options).logits


def policy_logprobs(model, logits, temperature):
    """log π over the vocabulary, float32, (…, V) → (…, V): for the sampler and the loss alike."""
    # No top-k, no top-p: the sampler's distribution must be the policy, or the ratio is wrong.
    logits, config = logits.float() / temperature, model.generation_config
    if config.pad_token_id not in config.eos_token_id:  # then it must never be sampled
        logits[..., config.pad_token_id] = torch.finfo(logits.dtype).min
    return logits.log_softmax(-1)


@mixed_precision
def token_logprobs(model, batch, temperature):
    """log π of each completion token, with gradient: (B, T), 0 where the mask is 0."""
    width = int(batch["mask"].sum(1).max())  # columns beyond the longest row are left out
    mask, ids = batch["mask"][:, :width], batch["completion_ids"][:, :width]
    input_ids = torch.cat([batch["prompt_ids"], ids], 1)
    attention_mask = torch.cat([batch["prompt_mask"], mask.long()], 1)
    # Logits predict the next token: the last prompt token's are needed, the last token's are not.
    logits = forward(model, input_ids, attention_mask, use_cache=False, logits_to_keep=width + 1)
    logprobs = policy_logprobs(model, logits[:, :-1], temperature)
    chosen = logprobs.gather(2, ids[..., None])[..., 0] * mask
    return F.pad(chosen, (0, batch["mask"].shape[1] - width))


@torch.no_grad()
def batch_logprobs(model, batch, args):
    """token_logprobs of a whole rollout, without gradient and in micro-batches: (B, T)."""
    logprobs = torch.zeros_like(batch["mask"])
    for rows in micro_batches(batch, torch.arange(len(logprobs)), args):
        logprobs[rows] = token_logprobs(model, take_rows(batch, rows), args.temperature)
    return sum_over_processes(logprobs)  # each process has filled in its rows


def in_bf16(model):
    """Whether mixed_precision is at work."""
    return model.device.type == "cuda"


def recompute_old_logprobs(model, batch, args):
    """In bf16, decoding and training round differently: take old_logprobs from the training pass.

    Otherwise the ratio would not be 1 before the first update. It takes the micro-batches of
    train_minibatch, as other padding rounds differently, too. Returns the gap, for the log.
    """
    rows = rows_with_gradient(batch) if in_bf16(model) else []
    if len(rows) == 0:
        return {}
    kept = take_rows(batch, rows)
    batch["old_logprobs"][rows] = batch_logprobs(model, kept, args)
    gap = (batch["old_logprobs"][rows] - kept["old_logprobs"]).abs()
    name = "sampling/sampling_logp_difference"
    return {f"{name}/mean": token_mean(gap, kept), f"{name}/max": gap.max()}


def rows_with_gradient(batch):
    """Row numbers: all under a KL penalty, otherwise those with an advantage."""
    if "ref_logprobs" in batch:
        return torch.arange(len(batch["mask"]))
    return batch["advantages"].nonzero()[:, 0]


def micro_batches(batch, rows, args):
    """Yield this process's share of the rows, few enough at a time for memory."""
    lengths = batch["mask"][rows].sum(1)
    # Similar lengths together: less padding. An index on the host fits rows on any device.
    rows = rows[lengths.argsort(stable=True).cpu()]
    mine = rows[RANK::WORLD]
    for start in range(0, len(mine), args.micro_batch_size):
        yield mine[start : start + args.micro_batch_size]


def take_rows(batch, rows):
    """The batch of these rows alone."""
    return {name: tensor[rows] for name, tensor in batch.items()}


def token_mean(values, batch):
    """The mean of values (B, T) over the completion tokens of a batch."""
    return (values * batch["mask"]).sum() / batch["mask"].sum()


# --------------------------------------------------------------------------------------- Rollout


@torch.no_grad()
@mixed_precision
def generate(model, prompts, num_samples, max_new_tokens, temperature):
    """Draw `num_samples` completions of each prompt, a list of token ids; temperature 0 is greedy.

    Returns tensors of B = len(prompts) · num_samples rows:
    prompt_ids, prompt_mask (B, S): padded on the left;
    completion_ids, mask (B, T): the mask is 1 up to and including the first stop token;
    old_logprobs, entropy (B, T): log π of each token and the policy's entropy there, in nats;
    ended (B, 1): False where a completion was cut off.
    """
    model.eval()
    device, G, T = model.device, num_samples, max_new_tokens
    pad_id = model.generation_config.pad_token_id
    stop_ids = torch.tensor(model.generation_config.eos_token_id, device=device)
    B, S = len(prompts) * G, max(map(len, prompts))
    rows = [[pad_id] * (S - len(ids)) + ids for ids in prompts for _ in range(G)]
    prompt_ids = torch.tensor(rows, device=device)
    rows = [[0] * (S - len(ids)) + [1] * len(ids) for ids in prompts for _ in range(G)]
    prompt_mask = torch.tensor(rows, device=device)
    completion_ids = torch.full((B, T), pad_id, device=device)
    mask, old_logprobs, entropy = torch.zeros(3, B, T, device=device)

    # Each prompt is read once; what the cache then holds of it is copied to its whole group.
    cache = DynamicCache(config=model.config)
    options = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
    logits = forward(model, prompt_ids[::G], prompt_mask[::G], **options).repeat_interleave(G, 0)
    cache.batch_repeat_interleave(G)
    rows = torch.arange(B, device=device)  # the completions still being written
    attention_mask = prompt_mask
    for t in range(T):
        logprobs = policy_logprobs(model, logits[:, -1], temperature or 1.0)
        probs = logprobs.exp()
        tokens = torch.multinomial(probs, 1) if temperature > 0 else probs.argmax(1, keepdim=True)
        completion_ids[rows, t] = tokens[:, 0]
        mask[rows, t] = 1.0  # a stop token counts
        old_logprobs[rows, t] = logprobs.gather(1, tokens)[:, 0]
        entropy[rows, t] = -(probs * logprobs).sum(1)
        unfinished = ~torch.isin(tokens[:, 0], stop_ids)
        if t == T - 1 or not unfinished.any():
            break
        if not unfinished.all():  # finished rows leave the cache
            cache.batch_select_indices(unfinished.nonzero()[:, 0])
            rows, tokens = rows[unfinished], tokens[unfinished]
            attention_mask = attention_mask[unfinished]
        attention_mask = F.pad(attention_mask, (0, 1), value=1)  # the new token is real
        logits = forward(model, tokens, attention_mask, **options)

    ended = torch.isin(completion_ids, stop_ids).any(1, keepdim=True)
    batch = {"completion_ids": completion_ids, "mask": mask}
    batch |= {"old_logprobs": old_logprobs, "entropy": entropy}
    batch = {name: tensor[:, : t + 1] for name, tensor in batch.items()}
    return batch | {"prompt_ids": prompt_ids, "prompt_mask": prompt_mask, "ended": ended}


def rollout(model, tokenizer, problems, num_samples, temperature, args):
    """Completions of each (question, answer): tensors of generate, texts, and rewards (P, G)."""
    prompts = [encode_prompt(question, tokenizer, args) for question, _ in problems]
    mine = prompts[len(prompts) * RANK // WORLD : len(prompts) * (RANK + 1) // WORLD]
    batch = {}
    if mine:
        batch = generate(model, mine, num_samples, args.max_new_tokens, temperature)
    if WORLD > 1:  # each process has drawn a part, perhaps none; now all get all of it
        batch = gather(batch, model.device)
    lengths = batch["mask"].sum(1).int().tolist()
    rows = zip(batch["completion_ids"].tolist(), lengths, strict=True)
    completions = tokenizer.batch_decode([ids[:n] for ids, n in rows], skip_special_tokens=True)
    answers = [answer for _, answer in problems for _ in range(num_samples)]
    rewards = torch.tensor(list(map(verify, completions, answers)), device=model.device)
    return batch, completions, rewards.view(-1, num_samples)


def join(batches):
    """Batches stacked, padded to one width: prompts on the left, the rest on the right."""
    joined = {}
    for name in batches[0]:
        rows = [row for batch in batches for row in batch[name]]
        side = "left" if name.startswith("prompt") else "right"
        joined[name] = pad_sequence(rows, batch_first=True, padding_side=side)
    return joined


def rollout_metrics(batch, rewards):
    """What to log of a rollout; the entropy is a mean over its tokens."""
    lengths = batch["mask"].sum(1)
    return {
        "reward": rewards.mean(),
        "reward_std": rewards.std(1).mean(),
        "frac_reward_zero_std": (rewards == rewards[:, :1]).all(1).float().mean(),
        "completions/mean_length": lengths.mean(),
        "completions/clipped_ratio": (~batch["ended"]).float().mean(),
        "entropy": token_mean(batch["entropy"], batch),
        "num_tokens": int(lengths.sum()),
        "num_prompts": len(rewards),
    }


def mean_of(updates):
    """The mean of each number over the updates."""
    return {name: sum(each[name] for each in updates) / len(updates) for name in updates[0]}


# ------------------------------------------------------------------------------------------ Task

NUMBER = re.compile(r"[-+]?\\?\$?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")


def number_value(text):
    """The value of what NUMBER finds, $1,234.50 say; exact, and of any size."""
    return Decimal(text.replace(",", "").replace("$", "").replace("\\", ""))


def verify(completion: str, answer: str) -> float:
    """The reward: 1.0 if the right number stands right after the last `#`, whatever follows.

    GSM8K's `#### 5` counts, and so do `# 5`, `#### $5`, `#### **5**` and `#### \\boxed{5}`.
    A completion is hostile text: it is never evaluated, and read in linear time.
    """
    _, marker, tail = completion.rpartition("#")
    found = NUMBER.match(tail.replace("\\boxed", "").lstrip(" \t\r\n*${\\"))
    if not marker or not found:
        return 0.0
    return float(number_value(found[0]) == number_value(answer))


def last_number(completion):
    """The last number anywhere, "" if none: the lenient score tells lack of skill from form."""
    return ["", *NUMBER.findall(completion)][-1]


def make_sum(rng, held_out=False):
    """A chain of 2 to 4 one-digit numbers and its sum: ("3+8+5=", "16")."""
    while True:
        terms = [rng.randint(0, 9) for _ in range(rng.randint(2, 4))]
        question = "+".join(map(str, terms)) + "="
        # The question's checksum decides its side, so training and held-out sums cannot meet.
        if held_out == (zlib.crc32(question.encode()) % 10 == 0):
            return question, str(sum(terms))


def load_jsonl(flag, path):
    """[(question, answer)] from a JSONL file in GSM8K's form; a bad line stops the run."""
    problems = []
    try:
        with open(path, encoding="utf-8") as file:
            for line in file:
                row = json.loads(line)
                answer = NUMBER.fullmatch(row["answer"].rpartition("#")[2].strip())[0]
                problems.append((row["question"].strip(), answer))
    except OSError as error:
        stop(f"{flag} {path}: {error.strerror}")
    except Exception:  # not text, not JSON, not an object, a field missing, no number …
        form = '{"question": "…", "answer": "… #### 72"}'
        stop(f"{flag} {path}: line {len(problems) + 1} is not of the form {form}")
    if not problems:
        stop(f"{flag} {path}: the file is empty")
    return problems


def load_data(args):
    """Training problems (None: an endless stream of sums) and held-out ones, none in both."""
    train = None
    if args.dataset != "arithmetic":
        train = load_jsonl("--dataset", args.dataset)
    if args.eval_dataset:
        held_out = load_jsonl("--eval-dataset", args.eval_dataset)
    elif train:
        held_out = train[: min(256, len(train) // 10 + 1)]
    else:
        rng = random.Random(0)
        held_out = [make_sum(rng, held_out=True) for _ in range(args.eval_problems)]
    if train:
        questions = {question for question, _ in held_out}
        train = [problem for problem in train if problem[0] not in questions]
        if not train:
            stop(f"--dataset {args.dataset}: all of its questions are held out for evaluation")
    return train, held_out[: args.eval_problems]


def problem_stream(train, seed):
    """Training problems without end: fresh sums, or pass after pass over the data, shuffled."""
    rng = random.Random(seed)
    while True:
        if train is None:
            yield make_sum(rng)
        else:
            yield from rng.sample(train, len(train))


# ---------------------------------------------------------------------------------------- Policy


def demonstration(question, guess_rate, rng):
    """An answer to imitate, worked out in running totals (3+8+5= → 11,16#16) or guessed (#14)."""
    terms = [int(term) for term in question[:-1].split("+")]
    guess = sum(rng.randint(0, 9) for _ in terms)
    if rng.random() < guess_rate:
        return f"#{guess}"
    totals = [str(total) for total in accumulate(terms)]
    return ",".join(totals[1:]) + "#" + totals[-1]


def make_tiny_model(steps=1000):
    """A character-level Llama of 84 k parameters after `steps` of imitation, and its tokenizer.

    Guesses begin rare and end as the habit of 85 %: the skill is learned first, then buried.
    """
    vocabulary = {token: i for i, token in enumerate(["<eos>", "<unk>", *"0123456789+=,#"])}
    bpe = Tokenizer(models.BPE(vocabulary, merges=[], unk_token="<unk>"))
    bpe.decoder = decoders.Fuse()
    special = {"eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<eos>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, **special)
    config = transformers.LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        initializer_range=0.1,  # the usual 0.02 is for widths in the thousands
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(0)  # the same model for every --seed
    rng = random.Random(0)
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.0)
    for step in tqdm(range(steps), desc="warm start", unit="step", disable=None):
        questions, texts = [], []
        for _ in range(128):
            question, _ = make_sum(rng)
            questions.append(question)
            texts.append(question + demonstration(question, 0.85 * step / steps, rng) + "<eos>")
        inputs = tokenizer(texts, padding=True, return_tensors="pt")
        ids, padding = inputs["input_ids"], inputs["attention_mask"] == 0
        lengths = torch.tensor([[len(question)] for question in questions])
        given = torch.arange(ids.shape[1]) < lengths  # the question is given, not learned
        labels = ids.masked_fill(given | padding, -100)
        optimizer.param_groups[0]["lr"] = 1e-2 * min((step + 1) / 50, 1 - step / steps)
        optimizer.zero_grad()
        model(ids, labels=labels, use_cache=False).loss.backward()  # it shifts the labels itself
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model, tokenizer


def tiny_model_folder():
    """Where the tiny model is kept after the first run, under a key of what shapes its weights."""
    recipe = [inspect.getsource(part) for part in (make_tiny_model, demonstration, make_sum)]
    key = zlib.crc32(str([*recipe, torch.__version__, transformers.__version__]).encode())
    folder = Path(torch.hub.get_dir()) / f"policy-gradients-{key:08x}"
    if RANK == 0 and not folder.exists():
        print(f"warm start: half a minute, this once; the model is kept in {folder}", flush=True)
        save_model(*make_tiny_model(), folder)
    if WORLD > 1:
        dist.barrier()  # the other processes wait for it
    return folder


def load_policy(args, device):
    """The model and its tokenizer. model.generation_config has every stop id, and the pad id."""
    source = tiny_model_folder() if args.model == "tiny" else args.model
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    except Exception as error:  # each library has its own for a missing folder or a torn file
        flag = "--resume" if source == args.resume else "--model"
        reason = str(error).strip().partition("\n")[0]
        stop(f"{flag} {source}: cannot be loaded: {reason}")
    layers = DynamicCache(config=model.config).layers
    if not all(hasattr(layer, "batch_select_indices") for layer in layers):
        stop(f"--model {source}: linear attention and other recurrent layers are not supported")
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        stop(f"--model {source}: its tokenizer has more tokens than the model has embeddings")
    stop_ids = set()
    for part in (tokenizer, model.config, model.generation_config):
        ids = part.eos_token_id
        stop_ids.update(ids if isinstance(ids, list) else [ids])
    stop_ids = sorted(stop_ids - {None})
    if not stop_ids:
        stop(f"--model {source}: it has no end-of-sequence token")
    pad_id = stop_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    model.generation_config = GenerationConfig(eos_token_id=stop_ids, pad_token_id=pad_id)
    if args.gradient_checkpointing:
        model.activation_checkpointing_enable()
    return model.to(device).eval(), tokenizer  # eval(): dropout would make the ratio noisy


def recompute_activations(model):
    """Checkpointing works in training mode: put its layers there, but not the dropout in them."""
    for layer in model.modules():
        layer.training = getattr(layer, "gradient_checkpointing", False)


def encode_prompt(question, tokenizer, args):
    """Token ids of --prompt with the question in it, in the chat template if there is one."""
    text = args.prompt.replace("{question}", question)
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    else:
        ids = tokenizer.encode(text)
    if not ids or tokenizer.unk_token_id in ids:
        stop(f"--prompt: the tokenizer of --model {args.model} cannot read {text[:60]!r}")
    return ids


# -------------------------------------------------------------------------------------- Plumbing


def stop(message):
    """End a run that cannot succeed: one line that names the flag and the fix, exit status 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def check_args(args):
    """Stop at the first flag whose value no run can use."""
    may_be_zero = ("clip_low", "clip_high", "beta")
    may_be_zero += ("learning_rate", "warmup_steps", "seed")
    for name, value in vars(args).items():
        flag, low = f"--{name.replace('_', '-')}", 0 if name in may_be_zero else 1e-9
        if type(value) in (int, float) and not low <= value < 2**63:
            stop(f"{flag} {value}: must be {'0 or more' if low == 0 else 'above 0'}, and finite")
    if args.group_size < 2:
        stop("--group-size 1: completions are compared with each other, so there must be two")
    if args.prompts_per_step * args.group_size % (args.minibatches * WORLD):
        stop("--minibatches: times processes, must divide --prompts-per-step times --group-size")
    if "{question}" not in args.prompt:
        stop("--prompt: must contain {question}")


def check_prompts(problems, model, tokenizer, args):
    """Stop if a question cannot be asked: now, not in hours."""
    context = getattr(model.config, "max_position_embeddings", math.inf)
    for question, _ in problems:
        if len(encode_prompt(question, tokenizer, args)) + args.max_new_tokens > context:
            stop(f"--max-new-tokens: no room for {args.max_new_tokens} after {question[:60]!r}")


def start_device(args):
    """The device to compute on; under torchrun each process has a GPU of its own."""
    name = args.device
    if name == "auto":
        gpu = torch.accelerator.current_accelerator(check_available=True)
        name = "cpu" if gpu is None or args.model == "tiny" else gpu.type
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    try:
        device = torch.zeros(1, device=name).device
    except (AssertionError, RuntimeError):
        stop(f"--device {args.device}: torch {torch.__version__} finds none here")
    transformers.utils.logging.disable_progress_bar()
    if args.model == "tiny":
        torch.set_num_threads(min(torch.get_num_threads(), 2))  # more would slow it down
    torch.backends.cuda.enable_cudnn_sdp(False)  # its gradients can be NaN: pytorch issue 196678
    if WORLD > 1:
        dist.init_process_group(device_id=device if device.type == "cuda" else None)
    return device


def sum_over_processes(tensor):
    """The sum of every process's tensor, in place."""
    if WORLD > 1:
        dist.all_reduce(tensor)
    return tensor


def gather(batch, device):
    """The batches of all processes, joined."""
    parts = [{}] * WORLD
    dist.all_gather_object(parts, {name: tensor.cpu() for name, tensor in batch.items()})
    joined = join([part for part in parts if part])
    return {name: tensor.to(device) for name, tensor in joined.items()}


def save_model(model, tokenizer, folder, state=None):
    """Write into a scratch folder, then rename it: a kill at any time leaves whole models only."""
    scratch = folder.with_name(f"saving-{time.time_ns()}.tmp")
    model.save_pretrained(scratch)
    tokenizer.save_pretrained(scratch)
    buffer = io.BytesIO()  # for torch.save reports a full disk as RuntimeError
    torch.save(state, buffer)
    (scratch / "trainer.pt").write_bytes(buffer.getbuffer())
    os.sync()
    shutil.rmtree(folder, ignore_errors=True)
    scratch.rename(folder)


def save_checkpoint(model, tokenizer, optimizer, run_folder, state, args):
    """Save into run_folder/step-…, and keep the last two checkpoints."""
    if RANK > 0:
        return
    state = state | {"optimizer": optimizer.state_dict(), "args": vars(args)}
    state |= {"script": SCRIPT, "processes": WORLD}
    save_model(model, tokenizer, run_folder / f"step-{state['step']:06d}", state)
    outdated = sorted(run_folder.glob("step-" + "[0-9]" * 6))[:-2]
    for folder in [*outdated, *run_folder.glob("saving-*.tmp")]:
        shutil.rmtree(folder)


def load_checkpoint(args):
    """The flags and the state of --resume; what does not shape the result may be given anew."""
    try:
        path = Path(args.resume) / "trainer.pt"
        state = torch.load(path, map_location="cpu", weights_only=True)
        begun, script, processes = Args(**state["args"]), state["script"], state["processes"]
    except Exception:  # missing, torn, or another program's
        stop(f"--resume {args.resume}: not a checkpoint of this script")
    if (script, processes) != (SCRIPT, WORLD):
        stop(f"--resume {args.resume}: begun by {script}.py, number of processes: {processes}")
    anew = ["resume", "steps", "eval_every", "eval_problems", "save_every"]
    anew += ["device", "micro_batch_size", "gradient_checkpointing"]
    words = {word.partition("=")[0].replace("_", "-") for word in sys.argv}
    for name, default in vars(Args(model=args.model, dataset=args.dataset)).items():
        flag, value = f"--{name.replace('_', '-')}", getattr(args, name)
        given = value != default or flag in words
        if given and name in anew:
            setattr(begun, name, value)
        elif given and value != getattr(begun, name):
            stop(f"{flag} {value}: the run was begun with {getattr(begun, name)}")
    return begun, state


def learning_rate_at(step, args):
    """A line up to the peak, which every run reaches, and one down, to 0 after the last step."""
    warmup = max(1, min(args.warmup_steps, args.steps))
    end = args.steps + 1
    return args.learning_rate * min(step / warmup, (end - step) / (end - warmup))


def watch_ctrl_c():
    """Ctrl-C ends the run after the step under way: the list returned gets an entry."""
    presses = []

    def on_interrupt(number, frame):
        if WORLD == 1:  # the next one kills; under torchrun it is the same one, repeated
            signal.signal(number, signal.SIG_DFL)
        presses.append(number)

    signal.signal(signal.SIGINT, on_interrupt)
    return presses


def open_run(args, step):
    """The run's folder, and a TensorBoard writer in the first process; prints all flags."""
    folder = Path(args.output_dir) / f"{SCRIPT}__{args.seed}__{time.time_ns()}"
    if args.resume:
        folder = Path(args.resume).resolve().parent
    if RANK > 0 or args.eval_only:
        return folder, None
    writer = SummaryWriter(folder, purge_step=step + 1)
    writer.add_text("hyperparameters", str(args))
    print(f"run in {folder}: {args}")
    return folder, writer


def log(writer, metrics, step):
    """Write every number to TensorBoard; only the first process has a writer."""
    if writer is not None:
        for name, value in metrics.items():
            writer.add_scalar(name, float(value), step)


# ------------------------------------------------------------------------------------- Main loop


def evaluate(model, tokenizer, problems, args, writer, step, k=8):
    """Scores on held-out problems, from k samples each at temperature 1 and one greedy; logged.

    pass@1: share of right samples; pass@k: of problems with one or more; lenient: the last number
    anywhere counts. Prints one sample, or with --eval-only eight.
    """
    torch.manual_seed(RANK)  # the same dice at every evaluation
    results = defaultdict(list)
    for start in range(0, len(problems), args.prompts_per_step):
        chunk = problems[start : start + args.prompts_per_step]
        batch, completions, rewards = rollout(model, tokenizer, chunk, k, 1.0, args)
        _, _, greedy_rewards = rollout(model, tokenizer, chunk, 1, 0.0, args)
        results["pass@1"] += rewards.flatten().tolist()
        results[f"pass@{k}"] += rewards.amax(1).tolist()
        results["pass@1_greedy"] += greedy_rewards.flatten().tolist()
        results["mean_length"] += batch["mask"].sum(1).tolist()
        for i, completion in enumerate(completions):
            answer = chunk[i // k][1]
            results["pass@1_lenient"].append(verify("#" + last_number(completion), answer))
    scores = {f"eval/{name}": sum(values) / len(values) for name, values in results.items()}
    log(writer, scores, step)
    if RANK == 0:
        tqdm.write(f"step {step}: held-out pass@1 {scores['eval/pass@1']:.3f}; for example")
        for i in range(min(len(chunk), 8 if args.eval_only else 1)):
            question, answer = chunk[i]
            sample = textwrap.shorten(f"{question} → {completions[i * k]}", 400)
            tqdm.write(f"    {sample} (right: {answer})")
    return scores


def finish(state, args, writer, folder, seconds):
    """Close the log and say how it went; returns what main returns."""
    before, after = state["before"]["eval/pass@1"], state["after"]["eval/pass@1"]
    if WORLD > 1:
        dist.barrier()  # torchrun ends the others as soon as one fails
        dist.destroy_process_group()
    if writer is not None:
        writer.close()
        print(f"pass@1 {before:.3f} → {after:.3f}; {seconds:.0f} s; model and logs in {folder}")
    if state["step"] < args.steps and not args.eval_only:
        resume = f"stopped; go on with --resume {folder}/step-{state['step']:06d}"
        sys.exit(resume if RANK == 0 else 0)
    scores = state["after"] | {"eval/pass@1_initial": before}
    return scores | {"seconds": seconds, "folder": str(folder)}


def main(args: Args) -> dict:
    """Train, or with --eval-only evaluate; returns scores, first pass@1, seconds and the folder."""
    start = time.perf_counter()
    state = {"step": 0, "num_prompts": 0, "num_tokens": 0}
    if args.resume:
        args, state = load_checkpoint(args)
    check_args(args)
    device = start_device(args)
    train, held_out = load_data(args)
    model, tokenizer = load_policy(replace(args, model=args.resume or args.model), device)
    check_prompts(held_out + (train or []), model, tokenizer, args)
    reference = None
    if args.beta > 0 and not args.eval_only:
        reference = load_policy(args, device)[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0, fused=True)
    problems = islice(problem_stream(train, args.seed), state["num_prompts"], None)
    folder, writer = open_run(args, state["step"])
    if args.resume:
        optimizer.load_state_dict(state["optimizer"])
    else:
        scores = evaluate(model, tokenizer, held_out, args, writer, 0)
        state |= {"before": scores, "after": scores}

    presses = watch_ctrl_c()
    last_step = 0 if args.eval_only else args.steps
    bar = tqdm(range(state["step"] + 1, last_step + 1), desc=SCRIPT, disable=RANK > 0 or None)
    for step in bar:
        step_start = time.perf_counter()
        rng = random.Random(f"{args.seed} {step}")  # the same in all processes …
        torch.manual_seed(rng.getrandbits(32) + RANK)  # … but each draws samples of its own
        learning_rate = learning_rate_at(step, args)
        optimizer.param_groups[0]["lr"] = learning_rate
        metrics = train_step(model, reference, tokenizer, optimizer, problems, rng, args)
        if not all(map(math.isfinite, metrics.values())):
            bar.close()
            sys.exit(f"error: step {step}: loss not finite; lower --learning-rate; see {folder}")
        seconds = time.perf_counter() - step_start
        metrics |= {"step_time": seconds, "tokens_per_second": metrics["num_tokens"] / seconds}
        for name in ("num_prompts", "num_tokens"):  # from here on, of the whole run
            state[name] += metrics[name]
            metrics[name] = state[name]
        log(writer, metrics | {"learning_rate": learning_rate}, step)
        bar.set_postfix(reward=f"{metrics['reward']:.2f}")
        state["step"] = step
        if step % args.eval_every == 0 or step == args.steps:
            state["after"] = evaluate(model, tokenizer, held_out, args, writer, step)
        interrupted = sum_over_processes(torch.tensor(len(presses), device=device)) > 0
        if step % args.save_every == 0 or step == args.steps or interrupted:
            save_checkpoint(model, tokenizer, optimizer, folder, state, args)
        if interrupted:
            break
    return finish(state, args, writer, folder, time.perf_counter() - start)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # before the first step there is nothing to save
    args = tyro.cli(Args)
    try:
        main(args)
    except (OSError, safetensors.SafetensorError) as error:
        stop(f"--output-dir: {error}")  # a full disk, say; checkpoints saved before are whole

# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0",
#     "transformers==5.23.0",
#     "tyro==1.0.17",
#     "tensorboard==2.21.0",
#     "tqdm==4.70.1",
# ]
# ///
