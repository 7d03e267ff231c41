"""PPO, Proximal Policy Optimization, for language models: a critic judges every token.

For each question, draw G completions o_1 … o_G from the policy as it stands, π_old. A verifier
gives each a reward R_i. Before every token the critic V, a model of its own, says what reward it
expects from there on; how much better it came is the token's advantage A_it. Then take gradient
steps up the objective J(θ), each on a minibatch of completions, and let V learn from what came.
(Index i is a completion and t a token; π of a token is its probability after the question and the
tokens before it.)

    J    = Σ_i Σ_t min(r_it A_it, clip(r_it, 1 − ε, 1 + ε) A_it) / Σ_i |o_i|
    A_it = Σ_l (γλ)^l δ_i,t+l   with   δ_it = R_it + γ V_i,t+1 − V_it             this is GAE
    R_it = −β (log π_old − log π_ref), and at the last token R_i is added to it
    r_it = π_θ(o_it) / π_old(o_it)                            1 until the policy moves
    V_it is fitted to A_it + V_it as of the rollout; in J, A_it is scaled to mean 0 and std 1

After the last token V is 0, as nothing follows. This holds for an answer that is cut off, too: it
is judged as it stands, so its reward is complete.

Why. RLOO and GRPO give every token of an answer the same credit. What a critic expects falls at
the token that spoils the answer, and a λ below 1 lays the blame there. Nor does it need other
answers to compare with: --group-size 1 --prompts-per-step 256.

Weakness. The critic is as large as the policy, in memory and in time, and learns from the same few
rewards. With λ = 1 it is a baseline and no more; with a smaller λ its errors bias the policy. Even
where all rewards are equal, they move it. GRPO asks the group instead, and has KL in the loss.

    python tests/examples/ppo_llm.py               # a tiny model learns to reason, on a laptop
    python tests/examples/ppo_llm.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset train.jsonl

Schulman et al. 2017, arXiv:1707.06347. GAE: Schulman et al. 2015, arXiv:1506.02438. On language
models: Stiennon et al. 2020, arXiv:2009.01325; Ouyang et al. 2022, InstructGPT, arXiv:2203.02155.
"""

import copy
import functools
import inspect
import json
import math
import os
import random
import re
import runpy
import shutil
import sys
import time
import zlib
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import accumulate, islice
from pathlib import Path
from statistics import fmean
from typing import Literal

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported after the process group, it would keep threads alive
import torch.nn.functional as F
import transformers
import tyro
from tokenizers import Tokenizer, decoders, models
from torch.autograd.graph import allow_mutation_on_saved_tensors
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, GenerationConfig

SCRIPT = Path(__file__).stem
# torchrun starts one process per GPU, and tells each its rank among how many.
RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))


@dataclass
class Args:
    clip_low: float = 0.2
    """the ratio is clipped below at 1 - clip_low"""
    clip_high: float = 0.2
    """the ratio is clipped above at 1 + clip_high"""
    beta: float = 0.01
    """weight of the KL penalty in the reward; with 0, no reference model is loaded"""
    gamma: float = 1.0
    """γ, the discount factor from one token to the next"""
    gae_lambda: float = 1.0
    """λ of GAE: 0 trusts the critic (TD error), 1 trusts the rewards (Monte Carlo)"""
    vf_coef: float = 0.5
    """weight of the critic's loss; as Adam scales each step, it matters for max_grad_norm alone"""
    ent_coef: float = 0.0
    """weight of the entropy bonus, which keeps the policy from being too sure"""
    minibatches: int = 4
    """optimizer steps per pass over a rollout, each on an equal part of its groups"""
    update_epochs: int = 1
    """passes over each rollout (μ), each in a new order: the more, the further the policy moves"""
    group_size: int = 8
    """completions drawn per question (G)"""
    prompts_per_step: int = 32
    """questions per training step (P)"""
    steps: int = 200
    """training steps, each a rollout and the updates on it; with 0, the model is only evaluated"""
    learning_rate: float | None = None
    """AdamW's peak learning rate; if not given, 4e-4 for the tiny model and 1e-6 for any other"""
    warmup_steps: int = 10
    """training steps in which the learning rate rises to its peak; from there it falls towards 0"""
    max_grad_norm: float = 1.0
    """longer gradients are scaled down to this norm"""
    temperature: float = 1.0
    """softmax temperature of the policy: in the rollout, in the loss, and when it is evaluated"""
    max_new_tokens: int | None = None
    """completions are cut off at this many tokens; if not given, 24 for arithmetic, else 256"""
    model: str = "tiny"
    """Hugging Face hub id, local folder, or "tiny": the embedded model after its warm start"""
    dataset: str = "arithmetic"
    """"arithmetic" (generated sums), or a JSONL file with "question" and "answer" on each line"""
    eval_dataset: str = ""
    """JSONL file to evaluate on; if empty, unseen sums, or the data set's first tenth, up to 256"""
    verifier: str = "strict"
    """strict: the number after the last #, as in GSM8K; flexible: the last number anywhere; or
    FILE.py, where verify(completion, answer) returns the reward, any float"""
    prompt: str | None = None
    """template with {question}; if not given, the question, and for strict a request to end in #"""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """where to compute; auto keeps the tiny model on the CPU and puts any other on a GPU"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """of matrix products; weights stay in float32; auto is bfloat16 on CUDA, else float32"""
    micro_batch_size: int | None = None
    """completions per forward pass in training, for memory; if not given, 256 for tiny, else 8"""
    eval_every: int = 50
    """training steps between evaluations on held-out questions, and between checkpoints"""
    eval_problems: int = 256
    """questions per evaluation, at most"""
    resume: str = ""
    """checkpoint to go on from, with its own flags but for those given anew"""
    seed: int = 1
    """same seed, same run, bit for bit (on a CPU)"""
    output_dir: str = "runs"
    """each run gets a folder of its own in here, for logs and checkpoints"""

    def __post_init__(self):
        if self.learning_rate is None:
            self.learning_rate = 4e-4 if self.model == "tiny" else 1e-6
        if self.micro_batch_size is None:
            self.micro_batch_size = 256 if self.model == "tiny" else 8
        if self.max_new_tokens is None:
            self.max_new_tokens = 24 if self.dataset == "arithmetic" else 256


# ------------------------------------------------------------------------------------- Algorithm


def at_last_token(rewards, mask):
    """Rewards of completions (B,), each laid on its last token, ended or cut off: (B, T)."""
    return rewards[:, None] * (mask - F.pad(mask[:, 1:], (0, 1)))


def compute_advantages(rewards, values, mask, args):
    """A_it, by GAE: all (B, T), rewards of 0 where the mask is 0."""
    values = F.pad(values * mask, (0, 1))  # after the last token nothing follows
    delta = rewards + args.gamma * values[:, 1:] - values[:, :-1]
    advantages, following = torch.zeros_like(rewards), 0.0
    for t in reversed(range(rewards.shape[1])):
        following = delta[:, t] + args.gamma * args.gae_lambda * following
        advantages[:, t] = following
    return advantages


def token_weights(mask, args):
    """Every token of a minibatch counts the same: its mask (B, T) → weights (B, T)."""
    return mask / mask.sum()


def importance_ratio(logprobs, old_logprobs, mask):
    """r_it, of each token: (B, T)."""
    return ((logprobs - old_logprobs) * mask).exp()


def surrogate(logprobs, old_logprobs, advantages, mask, args):
    """The clipped objective of each token, to be maximised: all (B, T).

    With A < 0 a large ratio is not clipped: a bad token made likelier is pushed back in full.
    """
    ratio = importance_ratio(logprobs, old_logprobs, mask)
    clipped_ratio = ratio.clamp(1 - args.clip_low, 1 + args.clip_high)
    return torch.minimum(ratio * advantages, clipped_ratio * advantages)


def is_clipped(logprobs, old_logprobs, advantages, mask, args):
    """Tokens whose gradient the clip takes, as the ratio is as far as A wants: bool (B, T)."""
    unclipped = importance_ratio(logprobs, old_logprobs, mask) * advantages
    return surrogate(logprobs, old_logprobs, advantages, mask, args) < unclipped


def kl_k3(logprobs, other_logprobs):
    """Schulman's k3 of each token, (B, T): never negative, and KL(π ‖ other) on average over π.

    Its gradient, where the samples are π's own and fixed, is that of KL(other ‖ π) instead.
    """
    d = other_logprobs - logprobs
    return d.exp() - d - 1


def whiten(advantages, mask):
    """Advantages (B, T) with mean 0 and standard deviation 1 over all tokens of the rollout."""
    tokens = advantages[mask > 0]
    return (advantages - tokens.mean()) / (tokens.std(correction=0) + 1e-4) * mask


# ---------------------------------------------------------------------------------------- Update


def train_step(model, reference, tokenizer, optimizer, problems, rng, args):
    """One rollout and the updates on it; `problems` yields (question, answer) pairs.

    Returns what to log, and the group to show.
    """
    drawn = [next(problems) for _ in range(args.prompts_per_step)]
    G, T = args.group_size, args.temperature
    batch, completions, rewards = rollout(model, tokenizer, drawn, G, T, args)
    metrics = rollout_metrics(batch, rewards)
    batch, gap = recompute_old_logprobs(model, batch, args)
    mask = batch["mask"]
    shaped = at_last_token(rewards.flatten(), mask)
    if args.beta > 0:
        log_ratio = batch["old_logprobs"] - batch_logprobs(reference, batch, args)
        metrics["kl"] = token_mean(log_ratio, batch)
        shaped = shaped - args.beta * log_ratio  # R_it
    values = batch_values(model, batch, args)
    advantages = compute_advantages(shaped, values, mask, args)
    batch["returns"] = values + advantages  # what the critic should have said
    missed, returns = advantages[mask > 0], batch["returns"][mask > 0]  # A is what V has missed
    unexplained = missed.var(correction=0) / (returns.var(correction=0) + 1e-8)
    metrics["explained_variance"] = 1 - unexplained
    batch["advantages"] = whiten(advantages, mask)
    advantages = (batch["advantages"].sum(1) / mask.sum(1)).view_as(rewards)  # of whole answers
    updates = update(model, optimizer, batch, rng, args)
    return metrics | gap | updates, describe_group(drawn, completions, rewards, advantages)


def update(model, optimizer, batch, rng, args):
    """Passes over a rollout, each in a new order of its groups; returns what to log, on average."""
    groups, logged = torch.arange(len(batch["mask"])).view(-1, args.group_size), defaultdict(list)
    for _ in range(args.update_epochs):
        order = torch.tensor(rng.sample(range(len(groups)), len(groups)))  # the same for all ranks
        for part in order.tensor_split(args.minibatches):
            minibatch = take_rows(batch, groups[part].flatten())
            for name, value in train_minibatch(model, optimizer, minibatch, args).items():
                logged[name].append(value)
    return {name: fmean(values) for name, values in logged.items()}


def train_minibatch(model, optimizer, batch, args):
    """One optimizer step on a batch with advantages and returns (B, T); returns what to log of it.

    approx_kl, KL(π_old ‖ π), is a mean over the tokens trained on.
    clip_ratio is the share of these tokens that is clipped.
    """
    # The weights are those of the whole minibatch. Micro-batches and processes only slice them,
    # so the gradient is the same however the rows are split.
    batch = batch | {"weights": token_weights(batch["mask"], args)}
    num_tokens = batch["mask"].sum()
    names = ("loss", "value_loss", "approx_kl", "clip_ratio")
    sums = {name: torch.zeros_like(num_tokens) for name in names}
    optimizer.zero_grad()

    for rows in micro_batches(torch.arange(len(batch["mask"])), args):
        micro = take_rows(batch, rows)
        with writing_states_allowed(model):
            all_logprobs = policy_logprobs(completion_logits(model, micro), args.temperature)
            logprobs = of_tokens(all_logprobs, micro)
            inputs = (logprobs, micro["old_logprobs"], micro["advantages"], micro["mask"])
            objective = surrogate(*inputs, args)
            if args.ent_coef > 0:
                entropy = -(all_logprobs.exp() * all_logprobs).sum(2)
                objective = objective + args.ent_coef * entropy
            loss = -(micro["weights"] * objective).sum()
            error = token_values(model, micro) - micro["returns"]
            value_loss = 0.5 * (micro["weights"] * error.square()).sum()
            (loss + args.vf_coef * value_loss).backward()
        sums["loss"] += loss.detach()
        sums["value_loss"] += value_loss.detach()
        sums["approx_kl"] += kl_k3(micro["old_logprobs"], logprobs.detach()).sum() / num_tokens
        sums["clip_ratio"] += is_clipped(*inputs, args).sum() / num_tokens

    for parameter in model.parameters():
        if parameter.grad is None:  # a process may have had no row to train on
            parameter.grad = torch.zeros_like(parameter)
        sum_over_processes(parameter.grad)
    grad_norm = clip_grad_norm_(model.parameters(), args.max_grad_norm)
    optimizer.step()
    metrics = {name: sum_over_processes(value).item() for name, value in sums.items()}
    return metrics | {"grad_norm": grad_norm.item()}


# ---------------------------------------------------------------------------- Log-probabilities


def in_bf16(model):
    """Whether --dtype says so: load_policy has noted it on the model."""
    return getattr(model, "in_bf16", False)


def autocast(model):
    """In bf16, matrix products alone; weights, Adam and log π stay in float32, for bf16 would lose
    small updates. Entered once per pass, as it keeps the weights that it casts."""
    return torch.autocast(model.device.type, torch.bfloat16, enabled=in_bf16(model))


def forward(model, input_ids, attention_mask, cache, logits_to_keep=0):
    """Logits of new tokens after those in the cache; the mask (B, past + new) covers both, and
    positions are counted from the first real token, not from the padding."""
    positions = (attention_mask.cumsum(1)[:, -input_ids.shape[1] :] - 1).clamp(min=0)
    options = {"position_ids": positions, "past_key_values": cache, "use_cache": True}
    options["logits_to_keep"] = logits_to_keep
    return model(input_ids, attention_mask=attention_mask, **options).logits


def policy_logprobs(logits, temperature):
    """log π over the vocabulary, float32, (…, V) → (…, V): for the sampler and the loss alike."""
    # No top-k, no top-p: the sampler's distribution must be the policy, or the ratio is wrong.
    return (logits.float() / temperature).log_softmax(-1)


def read_prompts(model, prompt_ids, prompt_mask, index):
    """Read each prompt once, and hand what the cache holds of it, and the logits of the token to
    come, to all rows of its group: prompts (P, S), index (B,) → cache, logits (B, 1, V)."""
    cache = DynamicCache(config=model.config)
    logits = forward(model, prompt_ids, prompt_mask, cache, logits_to_keep=1)
    cache.reorder_cache(index)
    return cache, logits[index]


def completion_logits(model, batch):
    """Logits for each completion token, with gradient: (B, T, V), or of a critic (B, T, 1).

    Neighbours with the same prompt share it, and gradients flow back through what its cache holds
    (Prefix Grouper, arXiv:2506.05433). All T columns are read, even where every row is shorter:
    in bf16 another width would round differently, and a ratio of 1 would not be 1.
    """
    mask, ids = batch["mask"], batch["completion_ids"]
    rows = torch.stack([batch["prompt_ids"], batch["prompt_mask"]], 1)
    prompts, index = rows.unique_consecutive(dim=0, return_inverse=True)
    prompt_ids, prompt_mask = prompts.unbind(1)
    with autocast(model):
        cache, logits = read_prompts(model, prompt_ids, prompt_mask, index)
        if ids.shape[1] > 1:  # logits are for the token to come: the last token's are not needed
            attention_mask = torch.cat([prompt_mask[index], mask[:, :-1].long()], 1)
            rest = forward(model, ids[:, :-1], attention_mask, cache)
            logits = torch.cat([logits, rest], 1)
    return logits


def of_tokens(all_logprobs, batch):
    """Of the whole vocabulary's (B, T, V) those of the completion tokens: (B, T), 0 for padding."""
    return all_logprobs.gather(2, batch["completion_ids"][..., None])[..., 0] * batch["mask"]


def token_logprobs(model, batch, temperature):
    """log π of each completion token, with gradient: (B, T), 0 where the mask is 0."""
    return of_tokens(policy_logprobs(completion_logits(model, batch), temperature), batch)


def token_values(model, batch):
    """V_it: what the critic expects before each completion token, with gradient: (B, T), 0 where
    the mask is 0."""
    return completion_logits(model.critic, batch)[..., 0].float() * batch["mask"]


def writing_states_allowed(model):
    """Recurrent layers (Qwen3.5, LFM2 …) overwrite their state, which autograd would refuse."""
    layers = DynamicCache(config=model.config).layers
    if any(hasattr(layer, "recurrent_states") for layer in layers):
        return allow_mutation_on_saved_tensors()
    return nullcontext()


@torch.no_grad()
def batch_logprobs(model, batch, args):
    """token_logprobs of a whole rollout, without gradient and in micro-batches: (B, T)."""
    logprobs = torch.zeros_like(batch["mask"])
    for rows in micro_batches(torch.arange(len(logprobs)), args):
        logprobs[rows] = token_logprobs(model, take_rows(batch, rows), args.temperature)
    return sum_over_processes(logprobs)  # each process has filled in its rows


@torch.no_grad()
def batch_values(model, batch, args):
    """token_values of a whole rollout, without gradient and in micro-batches: (B, T)."""
    values = torch.zeros_like(batch["mask"])
    for rows in micro_batches(torch.arange(len(values)), args):
        values[rows] = token_values(model, take_rows(batch, rows))
    return sum_over_processes(values)


def recompute_old_logprobs(model, batch, args):
    """In bf16 sampler and training pass round differently: π_old is taken from the latter, like π
    and π_ref. Returns a batch with that, and the gap for the log."""
    if not in_bf16(model):
        return batch, {}
    old_logprobs = batch_logprobs(model, batch, args)
    gap = (old_logprobs - batch["old_logprobs"]).abs()
    name = "sampling/sampling_logp_difference"
    metrics = {f"{name}/mean": token_mean(gap, batch), f"{name}/max": gap.max()}
    return batch | {"old_logprobs": old_logprobs}, metrics


def micro_batches(rows, args):
    """This process's share of some row numbers, few enough at a time for memory; whole groups as
    far as they fit, since these share a prompt."""
    size = args.micro_batch_size
    if size > args.group_size:
        size -= size % args.group_size
    parts = rows.tensor_split(WORLD)[RANK].split(size)
    return [part for part in parts if len(part) > 0]


def take_rows(batch, rows):
    """The batch of these rows alone."""
    return {name: tensor[rows] for name, tensor in batch.items()}


def token_mean(values, batch):
    """The mean of values (B, T) over the completion tokens of a batch."""
    return (values * batch["mask"]).sum() / batch["mask"].sum()


# --------------------------------------------------------------------------------------- Rollout


@torch.no_grad()
def generate(model, prompts, num_samples, max_new_tokens, temperature):
    """Draw `num_samples` completions of each prompt, a list of token ids; temperature 0 is greedy.

    Returns tensors of B = len(prompts) · num_samples rows:
    prompt_ids, prompt_mask (B, S): padded on the left;
    completion_ids, mask (B, T): the mask is 1 up to and including the first stop token;
    old_logprobs, entropy (B, T): log π of each token and the policy's entropy there, in nats;
    ended (B,): False where a completion was cut off.
    """
    device, G, T = model.device, num_samples, max_new_tokens
    pad_id = model.generation_config.pad_token_id  # this and the stop ids: see load_policy
    stop_ids = torch.tensor(model.generation_config.eos_token_id, device=device)
    left = {"batch_first": True, "padding_side": "left"}
    prompt_ids = pad_sequence(list(map(torch.tensor, prompts)), padding_value=pad_id, **left)
    prompt_mask = pad_sequence([torch.ones(len(ids)) for ids in prompts], **left).long()
    prompt_ids, prompt_mask = prompt_ids.to(device), prompt_mask.to(device)
    group = torch.arange(len(prompts), device=device).repeat_interleave(G)
    rows = torch.arange(len(group), device=device)  # the completions still being written
    completion_ids = torch.full((len(group), T), pad_id, device=device)
    mask, old_logprobs, entropy = torch.zeros(3, len(group), T, device=device)
    ended = torch.zeros(len(group), dtype=torch.bool, device=device)

    with autocast(model):
        cache, logits = read_prompts(model, prompt_ids, prompt_mask, group)
        attention_mask = prompt_mask[group]
        for t in range(T):
            logprobs = policy_logprobs(logits[:, -1], temperature or 1.0)
            probs = logprobs.exp()
            tokens = torch.multinomial(probs, 1) if temperature > 0 else probs.argmax(1)[:, None]
            completion_ids[rows, t] = tokens[:, 0]
            mask[rows, t] = 1.0  # a stop token counts
            old_logprobs[rows, t] = logprobs.gather(1, tokens)[:, 0]
            entropy[rows, t] = torch.special.entr(probs).sum(1)
            stopped = torch.isin(tokens[:, 0], stop_ids)
            ended[rows] = stopped
            if t == T - 1 or stopped.all():
                break
            if stopped.any():  # finished rows leave the cache
                going = (~stopped).nonzero()[:, 0]
                cache.reorder_cache(going)
                rows, tokens, attention_mask = rows[going], tokens[going], attention_mask[going]
            attention_mask = F.pad(attention_mask, (0, 1), value=1)  # the new token is real
            logits = forward(model, tokens, attention_mask, cache)

    batch = {"completion_ids": completion_ids, "mask": mask}
    batch |= {"old_logprobs": old_logprobs, "entropy": entropy}
    longest = int(mask.sum(1).max())
    batch = {name: tensor[:, :longest] for name, tensor in batch.items()} | {"ended": ended}
    return batch | {"prompt_ids": prompt_ids[group], "prompt_mask": prompt_mask[group]}


def rollout(model, tokenizer, problems, num_samples, temperature, args):
    """Completions of each (question, answer): tensors of generate, texts, and rewards (P, G)."""
    prompts = [encode_prompt(question, tokenizer, args) for question, _ in problems]
    mine = prompts[len(prompts) * RANK // WORLD : len(prompts) * (RANK + 1) // WORLD]
    size = args.prompts_per_step // WORLD  # at a time, for memory
    parts = [mine[start : start + size] for start in range(0, len(mine), size)]
    T = args.max_new_tokens
    batches = [generate(model, part, num_samples, T, temperature) for part in parts]
    batch = join(gather(batches, model.device))
    lengths = batch["mask"].sum(1).int().tolist()
    rows = zip(batch["completion_ids"].tolist(), lengths, strict=True)
    completions = tokenizer.batch_decode([ids[:n] for ids, n in rows], skip_special_tokens=True)
    verifier = load_verifier(args.verifier)
    answers = [answer for _, answer in problems for _ in range(num_samples)]
    rewards = [verifier(*pair) for pair in zip(completions, answers, strict=True)]
    try:
        rewards = torch.tensor(list(map(float, rewards)), device=model.device)
    except (TypeError, ValueError) as error:
        stop(f"--verifier {args.verifier}: verify must return a number: {error}")
    rewards = rewards.view(-1, num_samples)
    if WORLD > 1:
        dist.broadcast(rewards, src=0)  # a verifier of one's own may not say the same twice
    if not rewards.isfinite().all():
        stop(f"--verifier {args.verifier}: a reward is not finite")
    return batch, completions, rewards


def join(batches):
    """Batches stacked, padded to one width: prompts on the left, completions on the right."""
    if len(batches) == 1:
        return batches[0]
    joined = {"ended": torch.cat([batch["ended"] for batch in batches])}
    for name in batches[0].keys() - joined:
        rows = [row for batch in batches for row in batch[name]]
        side = "left" if name in ("prompt_ids", "prompt_mask") else "right"
        joined[name] = pad_sequence(rows, batch_first=True, padding_side=side)
    return joined


def rollout_metrics(batch, rewards):
    """What to log of a rollout; the entropy is a mean over its tokens."""
    lengths = batch["mask"].sum(1)
    return {
        "reward": rewards.mean(),
        "reward_std": rewards.std(correction=0),
        "frac_reward_zero_std": (rewards == rewards[:, :1]).all(1).float().mean(),
        "completions/mean_length": lengths.mean(),
        "completions/clipped_ratio": (~batch["ended"]).float().mean(),
        "entropy": token_mean(batch["entropy"], batch),
        "num_tokens": int(lengths.sum()),
        "num_prompts": len(rewards),
    }


def describe_group(problems, completions, rewards, advantages=None):
    """As text: the group whose rewards differ most, its two best and two worst completions."""
    group, G = int(rewards.std(1, correction=0).argmax()), rewards.shape[1]
    which = "held-out group" if advantages is None else "group of this step"
    text = f"    a {which}: {problems[group][0]!r}, right answer {problems[group][1]!r}"
    ranked = rewards[group].argsort(descending=True, stable=True).tolist()
    for i in ranked[:2] + ranked[2:][-2:]:
        credit = "" if advantages is None else f", advantage {advantages[group, i]:+.2f}"
        score = f"reward {rewards[group, i]:.2f}{credit}"
        text += f"\n      {score}: {completions[group * G + i][:400]!r}"
    return text


# ------------------------------------------------------------------------------------------ Task

NUMBER = re.compile(r"[-+]?\\?\$?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")


def number_value(text):
    """The value of what NUMBER finds, $1,234.50 say; exact, and of any size."""
    return Decimal(re.sub(r"[,$\\]", "", text))


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


def verify_flexible(completion: str, answer: str) -> float:
    """1.0 if the last number anywhere is the right one."""
    numbers = NUMBER.findall(completion)
    if not numbers:
        return 0.0
    return float(number_value(numbers[-1]) == number_value(answer))


run_file = functools.cache(runpy.run_path)


def load_verifier(name):
    """The function that --verifier names: (completion, answer) → reward."""
    if name == "strict":
        return verify
    if name == "flexible":
        return verify_flexible
    found = run_file(name) if Path(name).is_file() else {}
    if "verify" not in found:
        stop(f"--verifier {name}: must be strict, flexible, or a file that defines verify")
    return found["verify"]


def make_sum(rng, held_out=False):
    """A chain of 2 to 4 one-digit numbers and its sum: ("3+8+5", "16")."""
    while True:
        terms = [rng.randint(0, 9) for _ in range(rng.randint(2, 4))]
        question = "+".join(map(str, terms))
        # A checksum decides the question's side, so training and held-out sums cannot meet.
        if held_out == (zlib.crc32(f"{question}=".encode()) % 10 == 0):
            return question, str(sum(terms))


def load_jsonl(flag, path, args):
    """[(question, answer)] from a JSONL file; a bad line stops the run. The answer is as it stands
    for a verifier of the reader's own, otherwise the number at its end, as in GSM8K."""
    problems = []
    try:
        with open(path, encoding="utf-8") as file:
            for line in file:
                row = json.loads(line)
                question, answer = row["question"].strip(), row["answer"]
                if args.verifier in ("strict", "flexible"):
                    answer = NUMBER.fullmatch(answer.rpartition("#")[2].strip())[0]
                problems.append((question, answer))
    except Exception as error:  # no such file, not text, not JSON, a field missing, no number …
        form = '{"question": "…", "answer": "… #### 72"}, or any answer with a --verifier FILE.py'
        stop(f"{flag} {path}: line {len(problems) + 1} is not of the form {form}: {error!r}")
    if not problems:
        stop(f"{flag} {path}: the file is empty")
    return problems


def load_data(args):
    """Training problems (None: an endless stream of sums) and held-out ones, none in both."""
    train = None
    if args.dataset != "arithmetic":
        train = load_jsonl("--dataset", args.dataset, args)
    if args.eval_dataset:
        held_out = load_jsonl("--eval-dataset", args.eval_dataset, args)
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
    terms = [int(term) for term in question.split("+")]
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
        texts = []
        for _ in range(128):
            question, _ = make_sum(rng)
            texts.append(f"{question}={demonstration(question, 0.85 * step / steps, rng)}<eos>")
        inputs = tokenizer(texts, padding=True, return_tensors="pt")
        ids, padding = inputs["input_ids"], inputs["attention_mask"] == 0
        equals = (ids == vocabulary["="]).long()
        answer = equals.cumsum(1) > equals  # behind the "=": the question is given, not learned
        labels = ids.masked_fill(~answer | padding, -100)
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
    if int(os.environ.get("LOCAL_RANK", 0)) == 0 and not folder.exists():  # one on each machine
        print(f"warm start: half a minute, this once; the model is kept in {folder}", flush=True)
        save_model(*make_tiny_model(), folder)
    if WORLD > 1:
        dist.barrier()  # the other processes wait for it
    return folder


def load_policy(args, device):
    """The model of --resume or --model, and its tokenizer.

    What others need to know of it travels on the model: generation_config has every stop id and
    the pad id, for generate; in_bf16 says whether --dtype wants its matrix products in bf16.
    """
    flag, source = "--model", args.model
    if args.resume:
        flag, source = "--resume", args.resume
    elif args.model == "tiny":
        source = tiny_model_folder()
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    except Exception as error:  # each library has its own for a missing folder or a torn file
        stop(f"{flag} {source}: cannot be loaded: {error}")
    stop_ids = set()
    for part in (tokenizer, model.config, model.generation_config):
        ids = getattr(part, "eos_token_id", None)
        stop_ids.update(ids if isinstance(ids, list) else [ids])
    stop_ids = sorted(stop_ids - {None})
    if not stop_ids:
        stop(f"{flag} {source}: it has no end-of-sequence token")
    pad_id = stop_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    model.generation_config = GenerationConfig(eos_token_id=stop_ids, pad_token_id=pad_id)
    model.in_bf16 = args.dtype == "bfloat16" or (args.dtype == "auto" and device.type == "cuda")
    return model.to(device).eval(), tokenizer  # eval(): dropout would make the ratio noisy


def add_critic(model, state, args):
    """Give the policy its critic: a copy that ends in one number, 0 at first, or --resume's.

    As a part of the model it is trained with it, by one optimizer, and summed over processes. But
    the model's own files are to hold the policy alone: the critic is saved in the run's state.
    """
    critic = copy.deepcopy(model)
    width = critic.get_output_embeddings().in_features
    head = torch.nn.Linear(width, 1, device=model.device, dtype=model.dtype)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    critic.set_output_embeddings(head)
    if args.resume:
        critic.load_state_dict(state["critic"])
    model._keys_to_ignore_on_save = {f"critic.{name}" for name in critic.state_dict()}
    model.critic = critic


def encode_prompt(question, tokenizer, args):
    """Token ids of --prompt with the question in it, in the chat template if there is one."""
    words, form = "{question}", "\nReason step by step, then end with #### and the number."
    if args.dataset == "arithmetic":
        words, form = "What is {question}?", " End with #### and the number."
    if args.dataset == "arithmetic" and not tokenizer.chat_template:
        words, form = "{question}=", ""  # as the tiny model has learned it
    template = args.prompt or (words + form if args.verifier == "strict" else words)
    text = template.replace("{question}", question)
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    else:
        ids = tokenizer.encode(text)
    unk = tokenizer.unk_token_id  # for some models the same as the token that begins or ends
    if not ids or (unk in ids and unk not in (tokenizer.bos_token_id, tokenizer.eos_token_id)):
        stop(f"--prompt: the tokenizer of --model {args.model} cannot read {text[:60]!r}")
    return ids


@torch.no_grad()
def check_policy(model, tokenizer, problems, args):
    """Stop if a question has no room, or if sampler or training pass are wrong for this model: two
    padded prompts get two completions each; the last is compared with a plain pass over it alone.
    """
    context = getattr(model.config.get_text_config(), "max_position_embeddings", math.inf)
    for question, _ in problems:
        ids = encode_prompt(question, tokenizer, args)
        if len(ids) + args.max_new_tokens > context:
            stop(f"--max-new-tokens: no room for {args.max_new_tokens} after {question[:60]!r}")
    own = model.in_bf16, model.generation_config.eos_token_id
    model.in_bf16, model.generation_config.eos_token_id = False, [-1]  # none ends early
    half = ids[len(ids) // 2 :]  # of the last question's prompt
    n = min(8, args.max_new_tokens)
    try:
        batch = generate(model, [ids, half], 2, n, 0.0)
        found = torch.stack([batch["old_logprobs"], token_logprobs(model, batch, 1.0)])
        row = torch.tensor(half + batch["completion_ids"][-1].tolist(), device=model.device)
        logits = model(row[None], use_cache=False).logits[0, -n - 1 : -1]
        plain = policy_logprobs(logits, 1.0).gather(1, row[-n:, None])[:, 0]
    except Exception as error:  # whatever an architecture, or a lack of memory, may raise
        stop(f"--model {args.model}: cannot be sampled from and trained: {error!r}")
    gap = (found[:, -1] - plain).abs().max()
    if not gap < 1e-3:
        stop(f"--model {args.model}: its cache is not exact: log-probs are off by {gap:.2g} nats")
    model.in_bf16, model.generation_config.eos_token_id = own


# -------------------------------------------------------------------------------------- Plumbing


def stop(message):
    """End a run that cannot succeed: one line that names the flag and the fix, exit status 2."""
    print("error:", message.partition("\n")[0], file=sys.stderr)
    raise SystemExit(2)


def check_args(args):
    """Stop at the first flag whose value no run can use."""
    may_be_zero = ("clip_low", "clip_high", "beta", "gamma", "gae_lambda", "vf_coef", "ent_coef")
    may_be_zero += ("steps", "learning_rate", "warmup_steps", "seed")
    for name, value in vars(args).items():
        flag, low = f"--{name.replace('_', '-')}", 0 if name in may_be_zero else 1e-9
        if type(value) in (int, float) and not low <= value < 2**63:
            stop(f"{flag} {value}: must be {'0 or more' if low == 0 else 'above 0'}, and finite")
    if max(args.gamma, args.gae_lambda) > 1:
        stop("--gamma and --gae-lambda: must be between 0 and 1")
    if args.prompts_per_step % (args.minibatches * WORLD):
        stop("--minibatches: times the number of processes, must divide --prompts-per-step")
    if args.eval_dataset and args.dataset == "arithmetic":
        stop("--eval-dataset: needs a --dataset, too, whose form and prompt it shares")
    if args.prompt is not None and "{question}" not in args.prompt:
        stop("--prompt: must contain {question}")
    load_verifier(args.verifier)


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
    if device.type == "cuda":
        torch.cuda.set_device(device)  # gather sends from the current one
    if WORLD > 1:
        dist.init_process_group(device_id=device if device.type == "cuda" else None)
    return device


def sum_over_processes(tensor):
    """The sum of every process's tensor, in place."""
    if WORLD > 1:
        dist.all_reduce(tensor)
    return tensor


def gather(batches, device):
    """The batches of all processes, in the order of their ranks."""
    if WORLD == 1:
        return batches
    lists = [None] * WORLD
    on_host = [{name: tensor.cpu() for name, tensor in batch.items()} for batch in batches]
    dist.all_gather_object(lists, on_host)
    batches = [batch for part in lists for batch in part]
    return [{name: tensor.to(device) for name, tensor in batch.items()} for batch in batches]


def save_model(model, tokenizer, folder, state=None):
    """Write into a scratch folder, then rename it: a kill at any time leaves whole models only."""
    scratch = folder.with_name(f"saving-{time.time_ns()}.tmp")
    model.save_pretrained(scratch)
    tokenizer.save_pretrained(scratch)
    torch.save(state, scratch / "trainer.pt")
    if folder.exists():
        folder.rename(f"{scratch}.old")
    scratch.rename(folder)


def save_checkpoint(model, tokenizer, optimizer, run_folder, state, args):
    """Save into run_folder/step-…, and keep the last two checkpoints."""
    if RANK > 0:
        return
    state = state | {"optimizer": optimizer.state_dict(), "args": vars(args)}
    state |= {"script": SCRIPT, "processes": WORLD}
    state |= {"critic": model.critic.state_dict()}
    save_model(model, tokenizer, run_folder / f"step-{state['step']:06d}", state)
    outdated = sorted(run_folder.glob("step-" + "[0-9]" * 6))[:-2]
    for folder in [*outdated, *run_folder.glob("saving-*")]:
        shutil.rmtree(folder)


def load_checkpoint(path):
    """The state of a run where it was saved, with the Args it was begun with."""
    try:
        state = torch.load(Path(path) / "trainer.pt", map_location="cpu", weights_only=True)
        state["args"] = Args(**state["args"])
        begun_by = f"{state['script']}.py, processes: {state['processes']}"
    except Exception:  # missing, torn, another program's, or of flags that are no more
        stop(f"--resume {path}: not a checkpoint of this script, a folder step-…")
    if begun_by != f"{SCRIPT}.py, processes: {WORLD}":
        stop(f"--resume {path}: the run was begun by {begun_by}")
    return state


def check_same_run(args, begun):
    """Stop if --resume is given a flag that would make it another run."""
    for name in ("model", "seed", "group_size", "dataset", "eval_dataset"):
        value, was = getattr(args, name), getattr(begun, name)
        if value != was:
            stop(f"--{name.replace('_', '-')} {value}: the run was begun with {was}")


def learning_rate_at(step, args):
    """A line up to the peak, which every run reaches, and one down, to 0 after the last step."""
    warmup = max(1, min(args.warmup_steps, args.steps))
    end = args.steps + 1
    return args.learning_rate * min(step / warmup, (end - step) / (end - warmup))


def open_run(args, step):
    """The run's folder, and a TensorBoard writer in the first process; prints all flags."""
    folder = Path(args.output_dir) / f"{SCRIPT}__{args.seed}__{time.time_ns()}"
    if args.resume:
        folder = Path(args.resume).resolve().parent
    if RANK > 0:
        return folder, None
    try:
        writer = SummaryWriter(folder, purge_step=step + 1 if args.steps > 0 else None)
    except OSError as error:
        stop(f"--output-dir {args.output_dir}: {error.strerror}")
    flags = "\n".join(f"    {name}: {value}" for name, value in vars(args).items())
    writer.add_text("hyperparameters", flags)
    print(f"run in {folder}\n{flags}", flush=True)
    return folder, writer


def log(writer, metrics, step):
    """Write every number to TensorBoard; only the first process has a writer."""
    if writer is not None:
        for name, value in metrics.items():
            writer.add_scalar(name, float(value), step)


def finish(state, args, writer, folder, seconds):
    """Close the log and say how it went; returns what main returns."""
    if WORLD > 1:
        dist.barrier()  # none may leave while another still writes
        dist.destroy_process_group()
    before, after = state["before"]["eval/pass@1"], state["after"]["eval/pass@1"]
    if writer is not None:
        writer.close()
        if args.steps > 0:
            print(f"pass@1 {before:.3f} → {after:.3f}; {seconds:.0f} s; model and logs in {folder}")
    scores = state["after"] | {"eval/pass@1_initial": before}
    return scores | {"seconds": seconds, "folder": str(folder)}


# ------------------------------------------------------------------------------------- Main loop


def evaluate(model, tokenizer, problems, args, writer, step):
    """Scores on held-out problems, from 8 samples each and one greedy completion; logged, printed.

    pass@1: share of right samples, or mean reward; pass@8: the same of each problem's best;
    lenient: pass@1 by the flexible verifier, where answers are numbers.
    """
    torch.manual_seed(RANK)  # the same dice at every evaluation
    batch, completions, rewards = rollout(model, tokenizer, problems, 8, args.temperature, args)
    _, _, greedy_rewards = rollout(model, tokenizer, problems, 1, 0.0, args)
    metrics = rollout_metrics(batch, rewards)
    scores = {
        "pass@1": metrics["reward"],
        "pass@8": rewards.amax(1).mean(),
        "pass@1_greedy": greedy_rewards.mean(),
        "mean_length": metrics["completions/mean_length"],
        "clipped_ratio": metrics["completions/clipped_ratio"],
        "frac_reward_zero_std": metrics["frac_reward_zero_std"],
    }
    if args.verifier in ("strict", "flexible"):
        answers = [answer for _, answer in problems for _ in range(8)]
        scores["pass@1_lenient"] = fmean(map(verify_flexible, completions, answers))
    scores = {name: float(value) for name, value in scores.items()}
    if RANK == 0:
        text = ", ".join(f"{name} {value:.3f}" for name, value in scores.items())
        tqdm.write(f"step {step}: held-out {text}")
        if step == 0 or args.steps == 0:  # else a group is shown that was trained on
            tqdm.write(describe_group(problems, completions, rewards))
    scores = {f"eval/{name}": value for name, value in scores.items()}
    log(writer, scores, step)
    return scores


def diagnose(scores):
    """What keeps a run from learning, and which flag to try; "" where all is well."""
    right = scores["eval/pass@1"]
    lenient = scores.get("eval/pass@1_lenient", right)
    if scores["eval/pass@8"] == 0 < lenient or lenient > right + 0.2:
        return "right numbers in the wrong form: try --verifier flexible, or another --prompt"
    if scores["eval/clipped_ratio"] > 0.5:
        return "more than half of the answers are cut off: try a larger --max-new-tokens"
    if scores["eval/pass@8"] == 0:
        return "no answer is right: try an easier --dataset, or another --model"
    if scores["eval/frac_reward_zero_std"] == 1 and right < 0.9:
        return "the answers to each question score the same: try --temperature or --group-size"
    return ""


def show(writer, scores, group, step):
    """A group of the last step, and what is wrong, if anything is; in the first process."""
    if writer is None:
        return
    if group:
        writer.add_text("group", group, step)
        tqdm.write(group)
    if hint := diagnose(scores):
        tqdm.write(f"    {hint}")


def main(args: Args) -> dict:
    """Train, or with --steps 0 evaluate; returns scores, first pass@1, seconds and the folder."""
    start = time.perf_counter()
    state = {"step": 0, "num_prompts": 0, "num_tokens": 0}
    if args.resume:
        state = load_checkpoint(args.resume)
        check_same_run(args, state["args"])
    check_args(args)
    device = start_device(args)
    train, held_out = load_data(args)
    model, tokenizer = load_policy(args, device)
    check_policy(model, tokenizer, held_out + (train or []), args)
    add_critic(model, state, args)
    reference = None
    if args.beta > 0 and args.steps > 0:
        reference, _ = load_policy(replace(args, resume=""), device)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0, fused=True)
    problems = islice(problem_stream(train, args.seed), state["num_prompts"], None)
    folder, writer = open_run(args, state["step"])
    if args.resume:
        optimizer.load_state_dict(state["optimizer"])
    if args.steps == 0 or not args.resume:
        scores = evaluate(model, tokenizer, held_out, args, writer, state["step"])
        show(writer, scores, "", state["step"])
        state |= {"before": scores, "after": scores}

    steps = range(state["step"] + 1, args.steps + 1)
    bar = tqdm(steps, desc=SCRIPT, disable=RANK > 0 or None)
    for step in bar:
        step_start = time.perf_counter()
        rng = random.Random(f"{args.seed} {step}")  # the same in all processes …
        torch.manual_seed(rng.getrandbits(32) + RANK)  # … but each draws samples of its own
        learning_rate = learning_rate_at(step, args)
        optimizer.param_groups[0]["lr"] = learning_rate
        metrics, group = train_step(model, reference, tokenizer, optimizer, problems, rng, args)
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
            show(writer, state["after"], group, step)
            save_checkpoint(model, tokenizer, optimizer, folder, state, args)
    return finish(state, args, writer, folder, time.perf_counter() - start)


if __name__ == "__main__":
    args = tyro.cli(Args)
    if args.resume:  # once more: what is not given now is as it was
        args = tyro.cli(Args, default=load_checkpoint(args.resume)["args"])
    main(args)

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
