"""DAPO, Decoupled Clip and Dynamic Sampling Policy Optimization: GRPO with four repairs.

For each question, draw a group of G completions o_1 … o_G from the current policy, π_old. A
verifier gives each a reward R_i; its advantage A_i says how that compares with the group. Then take
gradient steps up the objective J(θ), each on a minibatch of N completions (whole groups). Index i
is a completion, of |o_i| tokens, and t a token; π of a token is its probability given the question
and the tokens before it.

    J    = Σ_i Σ_t min(r_it A_i, clip(r_it, 1 − ε_low, 1 + ε_high) A_i) / Σ_i |o_i|
    A_i  = (R'_i − mean R') / std R'                  over its group, not over the minibatch
    r_it = π_θ(o_it) / π_old(o_it)                    1 at first; each step on a rollout moves it
    R'_i = R_i + a penalty ≤ 0 near the length limit

Only groups whose R_i differ are trained on.
J is a surrogate: only its gradient counts, an estimate of the gradient of the expected reward.

Why. With ε = 0.2 and A_i > 0, the clip stops a token of probability 0.01 at 0.012, but one of 0.9
can reach 1, so ε_high > ε_low lets rare tokens grow more (clip-higher; here they grew faster with
0.56, hardly with 0.28: tests/experiments/EXPERIMENTS.md#cliphigher). A mean per completion
underweights the tokens of long completions, so J is a mean over all tokens (here of the minibatch,
in the paper of a question's group). A sound answer that is cut off counts as wrong, without a
warning, which is noise; DAPO's penalty grows gradually before the length limit (overlong).
All-right and all-wrong groups have no gradient, so DAPO draws until enough groups have one (dynamic
sampling). It also drops GRPO's KL.

Weakness. The better the policy, the more samples are drawn and thrown away. Here as many samples
taught as much without redrawing (tests/experiments/EXPERIMENTS.md#dynamic).

Without flags, a tiny model learns on a laptop, in minutes. A real one, on a GPU:
--model Qwen/Qwen2.5-0.5B-Instruct --dataset train.jsonl

Yu et al. 2025, DAPO: An Open-Source LLM Reinforcement Learning System at Scale, arXiv:2503.14476.
"""

import functools
import importlib
import inspect
import json
import math
import os
import random
import re
import shutil
import sys
import time
import zlib
from collections import defaultdict
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import accumulate, islice
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported later, it would keep gloo's threads alive at the exit
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
# torchrun starts one process per GPU and tells each its rank and their number. Each samples, scores
# and learns from groups of its own; their gradients are summed.
RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))


@dataclass
class Args:
    clip_low: float = 0.2  # the ratio is clipped below at 1 - clip_low
    clip_high: float = 0.28  # the ratio is clipped above at 1 + clip_high: DAPO's clip-higher
    overlong_cache: float = 0.2  # share of max_new_tokens over which a penalty grows (L_cache)
    max_resample: int = 10  # rollouts per training step, at most, to find groups with a signal
    beta: float = 0.0  # weight of GRPO's KL penalty in the loss; DAPO has none
    scale_rewards: bool = True  # divide advantages by the group's std (Dr. GRPO does not)
    minibatches: int = 4  # optimizer steps per epoch, each on a part of the rollout's groups
    update_epochs: int = 1  # epochs: passes over each rollout, reshuffled each time
    group_size: int = 8  # completions drawn per question (G)
    prompts_per_step: int = 32  # questions per training step, over all processes (P)
    steps: int = 200  # training steps, each a rollout and updates; 0: only evaluate
    learning_rate: float | None = None  # AdamW's peak; if not given, 4e-4 for tiny, else 1e-6
    warmup_steps: int = 10  # steps in which the rate rises to its peak; then it falls towards 0
    max_grad_norm: float = 1.0  # longer gradients are scaled down to this norm
    temperature: float = 1.0  # softmax temperature of the policy: in rollout, loss and evaluation
    max_new_tokens: int | None = None  # longest completion; if not given, 24 for sums, else 256
    model: str = "tiny"  # hub id, local folder, or "tiny": a model made by the first run
    dataset: str = "arithmetic"  # arithmetic: sums; or JSONL with "question", "answer" per line
    eval_dataset: str = ""  # JSONL file to evaluate on; if not given, a tenth of --dataset
    # strict: the number after the last #, as in GSM8K; flexible: the last number anywhere; or
    # FILE.py, where verify(completion, answer) returns the reward, any number
    verifier: str = "strict"
    prompt: str | None = None  # text around {question}; the default depends on data and verifier
    device: str = "auto"  # cpu, cuda, mps …; auto: the CPU for the tiny model, else a GPU if any
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # for matmuls; auto: bf16 if CUDA has it
    micro_batch_size: int | None = None  # rows per forward pass; if not given, 256 for tiny, else 8
    eval_every: int = 50  # training steps between evaluations, and between checkpoints
    eval_problems: int = 256  # questions per evaluation, at most
    resume: str = ""  # checkpoint to continue, with its flags except those given now
    seed: int = 1  # same seed, same run, bit for bit (on a CPU)
    output_dir: str = "runs"  # each run makes a folder in here for its log and checkpoints

    def __post_init__(self):
        tiny, sums = self.model == "tiny", self.dataset == "arithmetic"
        prompt = "{question}=" if sums else "{question}"
        if self.verifier == "strict" and not sums:
            prompt += "\nReason step by step, then end with #### and the number."
        defaults = {
            "learning_rate": 4e-4 if tiny else 1e-6,  # for several steps per rollout
            "micro_batch_size": 256 if tiny else 8,
            "max_new_tokens": 24 if sums else 256,
            "prompt": prompt,
        }
        for name, value in defaults.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if self.overlong_cache > 1:
            stop(f"--overlong-cache {self.overlong_cache}: a share of --max-new-tokens, at most 1")
        if self.max_resample < 1:
            stop(f"--max-resample {self.max_resample}: must be 1 or more")


# ------------------------------------------------------------------------------------- Algorithm


def compute_advantages(rewards, args):
    """A_i: how much better than its group. rewards (P prompts, G samples) → advantages (P, G)."""
    rewards = rewards - rewards[:, :1]  # a shift, so that equal rewards give exactly 0
    advantages = rewards - rewards.mean(1, keepdim=True)
    if args.scale_rewards:
        advantages = advantages / (rewards.std(1, keepdim=True) + 1e-4)
    return advantages


def token_weights(mask, args):
    """Each token's weight in J, 1 / Σ_i |o_i| over a minibatch in all processes: mask (B, T) →
    weights (B, T)."""
    return mask / sum_over_processes(mask.sum())


def surrogate(logprobs, old_logprobs, advantages, mask, args):
    """PPO's clipped objective of each token, to be maximised, and whether the clip zeroes its
    gradient: all (B, T), but advantages (B,).

    With A < 0 a large ratio is not clipped: a bad token made likelier is pushed back in full.
    """
    advantages = advantages[:, None]
    ratio = ((logprobs - old_logprobs) * mask).exp()  # r_it
    clipped_ratio = ratio.clamp(1 - args.clip_low, 1 + args.clip_high)
    objective = torch.minimum(ratio * advantages, clipped_ratio * advantages)
    return objective, objective < ratio * advantages  # less: min has chosen the clipped one


def kl_k3(logprobs, other_logprobs):
    """Schulman's k3 of each token, (B, T): never negative. Over tokens drawn from π, e^d has mean
    1, so k3 and −d have the same mean, KL(π ‖ other). Autograd does not see that π also decides
    which tokens are drawn: the gradient of k3, (1 − e^d) ∇log π, has the mean −Σ other ∇log π =
    ∇KL(other ‖ π), which pulls π towards the other, too.
    """
    d = other_logprobs - logprobs
    return d.exp() - d - 1


def overlong_penalty(lengths, ended, args):
    """The penalty of each completion for its number of tokens: lengths, ended (B,) → (B,).

    0 until the last overlong_cache of max_new_tokens, then linearly down to −0.5; −0.5 if cut
    off; always 0 if overlong_cache is 0. The paper's −1 is for rewards of ±1: with ours, 0 and 1,
    a right answer could be level with a wrong one.
    """
    cache = args.overlong_cache * args.max_new_tokens  # L_cache, in tokens
    if cache == 0:
        return 0.0 * lengths
    overrun = (lengths + cache - args.max_new_tokens) / cache
    return -0.5 * overrun.clamp(min=0).masked_fill(~ended, 1.0)


# ---------------------------------------------------------------------------------------- Update


def train_minibatch(model, optimizer, batch, args):
    """One optimizer step on a batch, generate's tensors and advantages (B,); returns what to log.

    Rows with an advantage of 0, as in a group of equal rewards (RLOO: equal R'), have no gradient
    but that of a KL term. If all rows are such, no step is taken, not even for the KL: Adam divides
    a gradient by the size of those before it, so its step is no shorter if all are tiny. If batch
    after batch has no signal, even rounding noise becomes a full step.
    approx_kl and clip_ratio (clipped tokens) are means over the tokens trained on.
    """
    # The weights are those of the whole minibatch. Micro-batches and processes only slice it, so
    # the gradient is the same however the rows are split.
    batch = batch | {"weights": token_weights(batch["mask"], args)}
    has_signal = ~(batch["advantages"].abs() <= 1e-6)  # NaN is a signal: main will stop
    if sum_over_processes(has_signal.sum()) == 0:
        return {}
    if "ref_logprobs" not in batch:  # without a KL term, only these rows have a gradient
        batch = take_rows(batch, has_signal)
    sums = torch.zeros(4, device=model.device)  # of loss, KL, clipped tokens and all tokens
    optimizer.zero_grad()

    for micro in micro_batches(model, batch, args):
        old_logprobs, advantages, mask = micro["old_logprobs"], micro["advantages"], micro["mask"]
        logprobs = token_logprobs(model, micro, args.temperature)
        objective, clipped = surrogate(logprobs, old_logprobs, advantages, mask, args)
        if "ref_logprobs" in micro:
            objective = objective - args.beta * kl_k3(logprobs, micro["ref_logprobs"])
        loss = -(micro["weights"] * objective).sum()  # only its gradient means something
        loss.backward()
        approx_kl = kl_k3(old_logprobs, logprobs.detach())
        sums += torch.stack([loss.detach(), approx_kl.sum(), clipped.sum(), mask.sum()])

    sum_gradients_over_processes(model)
    grad_norm = clip_grad_norm_(model.parameters(), args.max_grad_norm)
    optimizer.step()
    loss, approx_kl, clipped, tokens = sum_over_processes(sums).tolist()
    metrics = {"loss": loss, "approx_kl": approx_kl / tokens, "clip_ratio": clipped / tokens}
    return metrics | {"grad_norm": grad_norm.item()}


def dynamic_rollout(model, tokenizer, draws, args):
    """Answer one draw after the other, max_resample at most, until there are as many groups of
    unequal rewards as questions in a draw. Returns generate's tensors and the rewards of all draws,
    and the numbers of the groups to train on."""
    batches, rewards = [], []
    for problems in islice(draws, args.max_resample):
        batch, _, verified = rollout(
            model, tokenizer, problems, args.group_size, args.temperature, args
        )
        batches.append(batch)
        rewards.append(verified)
        differ = torch.cat(rewards).std(1) > 1e-6
        kept = differ.nonzero()[: len(problems), 0]
        if len(kept) == len(problems):
            break
    if len(kept) < len(problems) and RANK == 0:
        tqdm.write(f"    only {len(kept)} groups differ: try a harder --dataset, or --max-resample")
    return join(batches), torch.cat(rewards), kept


def join(batches):
    """One batch of all rows, padded to one width: prompts on the left, completions on the right."""
    joined = {}
    for name in batches[0]:
        columns = [batch[name].t() for batch in batches]
        side = "left" if "prompt" in name else "right"
        joined[name] = pad_sequence(columns, padding_side=side).movedim(0, -1).flatten(0, 1)
    return joined


def train_step(model, reference, tokenizer, optimizer, draws, rng, args):
    """Answer as many of the draws, lists of (question, answer), as it takes, and train on the
    completions; returns what to log, as means over all processes."""
    batch, rewards, kept = dynamic_rollout(model, tokenizer, draws, args)
    record = rollout_metrics(batch, rewards)
    record["discarded_groups"] = len(rewards) - len(kept)  # surplus ones, too
    penalty = overlong_penalty(batch["mask"].sum(1), batch["ended"], args).view_as(rewards)
    rows = torch.arange(rewards.numel(), device=model.device).view_as(rewards)[kept].flatten()
    batch, rewards = take_rows(batch, rows), (rewards + penalty)[kept]  # R'_i
    record |= recompute_old_logprobs(model, batch, args)  # in bf16 alone
    if args.beta > 0:
        batch["ref_logprobs"] = batch_logprobs(reference, batch, args)
        record["kl"] = kl_k3(batch["old_logprobs"], batch["ref_logprobs"])[batch["mask"] > 0]
    batch["advantages"] = compute_advantages(rewards, args).flatten()

    records = [record]
    groups = torch.arange(rewards.numel()).view_as(rewards)  # each group's row numbers
    for _ in range(args.update_epochs):
        order = rng.sample(range(len(groups)), len(groups))
        for part in groups[order].tensor_split(args.minibatches):
            minibatch = take_rows(batch, part.flatten())
            records.append(train_minibatch(model, optimizer, minibatch, args))
    return global_means(records, model.device)


# ------------------------------------------------------------------------------------------ Main


def main(args: Args) -> dict:
    """Train, or with --steps 0 only evaluate; returns the last scores and the first pass@1."""
    start = time.perf_counter()
    check_args(args)
    device = start_device(args)
    train, held_out = load_data(args)
    model, tokenizer = load_policy(args, device)
    check_prompts(held_out + train, model, tokenizer, args)
    reference = None
    if args.beta > 0 and args.steps > 0:
        reference, _ = load_policy(replace(args, resume=""), device)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0, fused=True)
    run = [SCRIPT, WORLD, args.model, args.dataset, args.eval_dataset, args.seed, args.group_size]
    first = restore(optimizer, run, args) if args.resume else 0
    folder, writer = open_run(args)
    scores = evaluate(model, tokenizer, held_out, args, writer, first)
    before = scores["eval/pass@1"]

    stream = islice(problem_stream(train, args.seed), first * args.prompts_per_step, None)
    warmup, end = min(args.warmup_steps, args.steps) or 1, args.steps + 1
    for step in tqdm(range(first + 1, end), disable=RANK > 0 or None):
        step_start = time.perf_counter()
        rng = random.Random(f"{args.seed} {step}")  # all randomness is from seed, step …
        torch.manual_seed(rng.getrandbits(32) + RANK)  # … and rank: no RNG state to save
        draws = draws_of_step(stream, train, step, args)
        rate = args.learning_rate * min(step / warmup, (end - step) / (end - warmup))
        optimizer.param_groups[0]["lr"] = rate
        metrics = train_step(model, reference, tokenizer, optimizer, draws, rng, args)
        if not math.isfinite(sum(metrics.values())):
            sys.exit(f"error: step {step}: not finite, try a lower --learning-rate: {metrics}")
        metrics |= {"step_time": time.perf_counter() - step_start, "learning_rate": rate}
        metrics["tokens_per_second"] = metrics["num_tokens"] / metrics["step_time"]
        log(writer, metrics, step)
        if step % args.eval_every == 0 or step == args.steps:
            scores = evaluate(model, tokenizer, held_out, args, writer, step)
            if RANK == 0:
                state = {"step": step, "run": run, "args": vars(args)}
                state["optimizer"] = optimizer.state_dict()
                save(model, tokenizer, folder / f"step-{step:06d}", state)
                for outdated in sorted(folder.glob("step-" + 6 * "[0-9]"))[:-2]:
                    shutil.rmtree(outdated)  # two stay, and whatever else is in the folder

    if WORLD > 1:
        dist.barrier()  # none may leave while another still writes
        dist.destroy_process_group()
    if RANK == 0 and args.steps > 0:
        after, seconds = scores["eval/pass@1"], time.perf_counter() - start
        print(f"pass@1 {before:.3f} → {after:.3f}; {seconds:.0f} s; model and logs in {folder}")
    return scores | {"eval/pass@1_initial": before, "folder": str(folder)}


# From here on, all scripts of this family are the same, byte for byte.
# Log-probabilities and Rollout draw and score the completions; what follows them can stay unread.
# ---------------------------------------------------------------------------- Log-probabilities


def autocast(model):
    """A context in which matrix products alone run in bf16, if load_policy has set model.in_bf16.
    Weights, Adam and log π stay in float32: bf16 would round small updates away."""
    return torch.autocast(model.device.type, torch.bfloat16, getattr(model, "in_bf16", False))


def forward(model, input_ids, attention_mask, cache, **options):
    """Logits of new tokens after those in the cache; the mask (B, past + new) covers both, and
    positions are counted from the first real token, not from the padding."""
    positions = (attention_mask.cumsum(1)[:, -input_ids.shape[1] :] - 1).clamp(min=0)
    options |= {"position_ids": positions, "past_key_values": cache, "use_cache": True}
    return model(input_ids, attention_mask=attention_mask, **options).logits


def prefill(model, prompt_ids, prompt_mask):
    """Run the prompts (B, S) through the model, equal neighbours only once. Returns the cache and
    the next token's logits (B, 1, V) (Prefix Grouper, arXiv:2506.05433)."""
    rows = torch.stack([prompt_ids, prompt_mask], 1)
    prompts, index = rows.unique_consecutive(dim=0, return_inverse=True)
    cache = DynamicCache(config=model.config)
    logits = forward(model, *prompts.unbind(1), cache, logits_to_keep=1)
    cache.reorder_cache(index)
    return cache, logits[index]


def policy_logprobs(logits, temperature):
    """log π over the vocabulary, float32, (…, V) → (…, V): for the sampler and the loss alike."""
    # No top-k, no top-p, which drop unlikely tokens: samples must be the policy's own, or gradient
    # and ratio are wrong.
    return (logits.float() / temperature).log_softmax(-1)


def token_logprobs(model, batch, temperature):
    """log π of each completion token, with gradient: (B, T), 0 where the mask is 0.

    All T columns are read, even where every row is shorter: in bf16 another width would round
    differently, and a ratio of 1 would not be 1.
    """
    ids, mask, prompt_mask = batch["completion_ids"], batch["mask"], batch["prompt_mask"]
    with autocast(model):
        cache, logits = prefill(model, batch["prompt_ids"], prompt_mask)
        if ids.shape[1] > 1:  # logits are for the token to come: the last token's are not needed
            attention_mask = torch.cat([prompt_mask, mask[:, :-1].long()], 1)
            rest = forward(model, ids[:, :-1], attention_mask, cache)
            logits = torch.cat([logits, rest], 1)
    return policy_logprobs(logits, temperature).gather(2, ids[..., None])[..., 0] * mask


@torch.no_grad()
def batch_logprobs(model, batch, args):
    """token_logprobs of a whole rollout, without gradient and in micro-batches: (B, T)."""
    parts = [batch["mask"][:0]]  # there may be no row
    for micro in micro_batches(model, batch, args):
        parts.append(token_logprobs(model, micro, args.temperature))
    return torch.cat(parts)


def recompute_old_logprobs(model, batch, args):
    """In bf16, take π_old from a forward pass like the loss's, not from the sampler, in place: the
    two round differently, and the ratio would not start at 1. Returns the difference, to log."""
    if not model.in_bf16:
        return {}
    old_logprobs = batch_logprobs(model, batch, args)
    gap = (old_logprobs - batch["old_logprobs"]).abs()
    batch["old_logprobs"] = old_logprobs
    return {"sampling/sampling_logp_difference/mean": gap[batch["mask"] > 0]}


def micro_batches(model, batch, args):
    """The batch in parts of a few rows, for memory. Recurrent layers (Qwen3.5, LFM2 …) overwrite
    their state, which autograd refuses except inside a loop over these parts."""
    layers = DynamicCache(config=model.config).layers
    recurrent = any(hasattr(layer, "recurrent_states") for layer in layers)
    allowed = torch.autograd.graph.allow_mutation_on_saved_tensors if recurrent else nullcontext
    for start in range(0, len(batch["mask"]), args.micro_batch_size):
        with allowed():
            yield take_rows(batch, slice(start, start + args.micro_batch_size))


def take_rows(batch, rows):
    """The batch of these rows alone."""
    return {name: tensor[rows] for name, tensor in batch.items()}


# --------------------------------------------------------------------------------------- Rollout


@torch.no_grad()
def generate(model, prompts, num_samples, max_new_tokens, temperature):
    """Draw `num_samples` completions of each prompt, a list of token ids; temperature 0 is greedy.

    Returns B = len(prompts) · num_samples rows: prompt_ids, prompt_mask (B, S), padded on the left;
    completion_ids, mask, old_logprobs (B, T): the mask is 1 up to and including the first stop
    token; old_logprobs is log π of each token; ended (B,): False where a completion was cut off.
    """
    device = model.device
    stop_ids = torch.tensor(model.generation_config.eos_token_id, device=device)
    prompts = pad_sequence(list(map(torch.tensor, prompts)), True, -1, "left").to(device)
    prompts = prompts.repeat_interleave(num_samples, 0)
    prompt_ids, prompt_mask = prompts.clamp(min=0), (prompts >= 0).long()
    completion_ids = prompts.new_zeros(len(prompts), max_new_tokens)
    mask, old_logprobs = torch.zeros(2, *completion_ids.shape, device=device)
    rows = torch.arange(len(prompts), device=device)  # the completions still being written

    with autocast(model):
        cache, logits = prefill(model, prompt_ids, prompt_mask)
        attention_mask = prompt_mask
        for t in range(max_new_tokens):
            logprobs = policy_logprobs(logits[:, -1], temperature or 1.0)
            tokens = logprobs.exp().multinomial(1)[:, 0] if temperature > 0 else logprobs.argmax(1)
            completion_ids[rows, t] = tokens
            mask[rows, t] = 1.0  # a stop token counts
            old_logprobs[rows, t] = logprobs.gather(1, tokens[:, None])[:, 0]
            going = torch.isin(tokens, stop_ids, invert=True).nonzero()[:, 0]
            if t == max_new_tokens - 1 or len(going) == 0:
                break
            if len(going) < len(rows):  # finished rows leave the cache
                cache.reorder_cache(going)
                rows, tokens, attention_mask = rows[going], tokens[going], attention_mask[going]
            attention_mask = F.pad(attention_mask, (0, 1), value=1)  # the new token is real
            logits = forward(model, tokens[:, None], attention_mask, cache)

    batch = {"completion_ids": completion_ids, "mask": mask, "old_logprobs": old_logprobs}
    batch = {name: tensor[:, : t + 1] for name, tensor in batch.items()}
    batch["ended"] = torch.isin(completion_ids, stop_ids).any(1)  # id 0 pads, but not where cut off
    return batch | {"prompt_ids": prompt_ids, "prompt_mask": prompt_mask}


def rollout(model, tokenizer, problems, num_samples, temperature, args):
    """Completions of each (question, answer): tensors of generate, texts, and rewards (P, G)."""
    prompts = encode_prompts(problems, tokenizer, args)
    batch = generate(model, prompts, num_samples, args.max_new_tokens, temperature)
    rows = zip(batch["completion_ids"].cpu(), batch["mask"].cpu() > 0, strict=True)
    completions = [tokenizer.decode(ids[real], skip_special_tokens=True) for ids, real in rows]
    answers = [answer for _, answer in problems for _ in range(num_samples)]
    rewards = list(map(load_verifier(args.verifier), completions, answers))
    with blame(f"--verifier {args.verifier}: verify must return a finite number"):
        rewards = torch.tensor(list(map(float, rewards)), device=model.device)
        assert rewards.isfinite().all(), "a reward is NaN or infinite"
    return batch, completions, rewards.view(-1, num_samples)


def rollout_metrics(batch, rewards):
    """What to log about a rollout: {name: tensor of numbers, of which the mean counts}."""
    tokens, std = batch["mask"] > 0, rewards.std(1)
    return {
        "reward": rewards,
        "reward_std": std,
        "frac_reward_zero_std": std < 1e-6,
        "completions/mean_length": batch["mask"].sum(1),
        "completions/clipped_ratio": ~batch["ended"],  # cut off at max_new_tokens
        "entropy": -batch["old_logprobs"][tokens],  # an estimate, from the samples
        "num_tokens": tokens.sum() * WORLD,  # so that its mean over processes is their sum
    }


# ------------------------------------------------------------------------------------ Evaluation


def evaluate(model, tokenizer, problems, args, writer, step):
    """Scores of held-out problems, by 8 samples and one greedy completion each: logged, and printed
    with one problem's best and worst completion, and maybe a hint.

    pass@1: share of right samples, or mean reward; pass@8: mean reward of each problem's best
    sample; flexible: pass@1 by the flexible verifier.
    """
    torch.manual_seed(RANK)  # same draws at every evaluation
    first = RANK % len(problems)  # where problems are too few, processes share some
    problems, records = problems[first::WORLD], []  # each WORLD-th problem is this process's
    size = args.prompts_per_step // WORLD  # at a time, as in training, for memory
    for start in range(0, len(problems), size):
        part = problems[start : start + size]
        batch, completions, rewards = rollout(model, tokenizer, part, 8, args.temperature, args)
        _, _, greedy_rewards = rollout(model, tokenizer, part, 1, 0.0, args)
        record = {
            "eval/pass@1": rewards,
            "eval/pass@8": rewards.amax(1),
            "eval/pass@1_greedy": greedy_rewards,
            "eval/mean_length": batch["mask"].sum(1),
            "eval/clipped_ratio": ~batch["ended"],
            "eval/frac_reward_zero_std": rewards.std(1) < 1e-6,
        }
        if args.verifier in ("strict", "flexible"):
            flexible = [verify(text, part[j // 8][1], True) for j, text in enumerate(completions)]
            record["eval/pass@1_flexible"] = flexible
        records.append(record)
    scores = global_means(records, model.device)
    log(writer, scores, step)
    advantages = compute_advantages(rewards, args)
    if RANK == 0:
        numbers = ", ".join(f"{name} {scores[name]:.3f}" for name in scores)
        tqdm.write(f"step {step}: {numbers}{hint(scores)}")
        i = rewards.std(1).argmax()  # of the last part, the group whose rewards differ most
        tqdm.write(f"    {part[i][0]!r:.400}, right answer {part[i][1]!r:.400}")
        for j in (rewards[i].argmax(), rewards[i].argmin()):
            credit = f"reward {rewards[i, j]:.2f}, advantage {advantages[i, j]:+.2f}"
            tqdm.write(f"      {credit}: {completions[8 * i + j][:400]!r}")
    return scores


def hint(scores):
    """What keeps a run from learning, and which flag to try; "" where all is well."""
    right, best = scores["eval/pass@1"], scores["eval/pass@8"]
    flexible = scores.get("eval/pass@1_flexible", right)
    if best == 0 < flexible or flexible > right + 0.2:
        return "\n    right numbers in the wrong form: try --verifier flexible, or another --prompt"
    if scores["eval/clipped_ratio"] > 0.5:
        return "\n    completions are cut off: raise --max-new-tokens; train only if pass@8 > 0"
    if best == 0:
        return "\n    no completion is right: try an easier --dataset, or another --model"
    if scores["eval/frac_reward_zero_std"] == 1 and right < 0.9:
        return "\n    every question's completions tie: try a higher --temperature or --group-size"
    return ""


# ------------------------------------------------------------------------------------------ Task

NUMBER = re.compile(r"[-+]?\\?\$?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")


def verify(completion: str, answer: str, flexible=False) -> float:
    """The reward: 1.0 if the right number stands right after the last `#`, whatever follows, as in
    GSM8K: `#### 5`, `# 5`, `#### $5`, `#### **5**`; if flexible, if it is the last number.
    A completion is hostile text: it is never evaluated, and read in linear time."""
    completion = completion.replace("\u2212", "-")  # a typeset minus sign
    if flexible:
        numbers = NUMBER.findall(completion)
    else:
        _, marker, tail = completion.rpartition("#")
        found = NUMBER.match(tail.replace("\\boxed", "").lstrip(" \t\r\n*${\\"))
        numbers = [found[0]] if marker and found else []
    if not numbers:
        return 0.0
    said, right = [Decimal(re.sub(r"[,$\\]", "", number)) for number in (numbers[-1], answer)]
    return float(said == right)


@functools.cache
def load_verifier(name):
    """The function that --verifier names: (completion, answer) → reward."""
    if name in ("strict", "flexible"):
        return functools.partial(verify, flexible=name == "flexible")
    path = Path(name).resolve()
    sys.path.append(str(path.parent))  # for what it imports, and for processes that it starts
    with blame(f"--verifier {name}: must be strict, flexible, or a file that defines verify"):
        module = importlib.import_module(path.stem)
        found = Path(module.__spec__.origin).resolve()  # sys.path may hold a link to its folder
        assert found == path, f"its name is taken by {module}"
        return module.verify


def make_sum(rng, held_out=False):
    """A chain of 2 to 4 one-digit numbers and its sum: ("3+8+5", "16")."""
    while True:
        terms = [rng.randint(0, 9) for _ in range(rng.randint(2, 4))]
        question = "+".join(map(str, terms))
        # A checksum decides the question's side, so training and held-out sums cannot meet.
        if held_out == (zlib.crc32(f"{question}=".encode()) % 10 == 0):
            return question, str(sum(terms))


def load_jsonl(flag, path, args):
    """[(question, answer)] from a JSONL file; a bad line stops the run. Built-in verifiers get the
    number at the answer's end, as in GSM8K; a verifier file gets the JSON value, whatever type."""
    problems = {}
    with blame(f"{flag} {path}"):
        lines = Path(path).read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        with blame(f'{flag} {path}, line {number}: needs a "question" and an "answer"'):
            row = json.loads(line.decode("utf-8-sig"))  # a file may begin with a BOM
            question, answer = row["question"].strip(), row["answer"]
            assert question.encode(), "the question is empty"  # half an emoji raises, too
            assert answer is not None, "the answer is null"
            if args.verifier in ("strict", "flexible"):
                found = NUMBER.fullmatch(str(answer).rpartition("#")[2].strip())
                assert found, f"--verifier {args.verifier} needs a number, not {answer!r}"
                answer = found[0]
        problems[question] = answer
    if not problems:
        stop(f"{flag} {path}: has no questions")
    return list(problems.items())


def load_data(args):
    """[(question, answer)] to train on (empty for sums, which are made as needed), and to hold out:
    of a file, the tenth with the smallest checksums."""
    if args.dataset == "arithmetic":
        rng = random.Random(0)
        return [], [make_sum(rng, held_out=True) for _ in range(args.eval_problems)]
    train = load_jsonl("--dataset", args.dataset, args)
    if args.eval_dataset:
        held_out = load_jsonl("--eval-dataset", args.eval_dataset, args)
        if RANK == 0:
            print(len(dict(train).keys() & dict(held_out)), "questions are in both files")
    else:
        train.sort(key=lambda problem: zlib.crc32(problem[0].encode()))
        tenth = len(train) // 10 or 1
        held_out, train = train[:tenth], train[tenth:]
    if not train:
        stop(f"--dataset {args.dataset}: needs two different questions, or give --eval-dataset")
    return train, held_out[: args.eval_problems]


def problem_stream(train, seed):
    """Training problems without end: fresh sums, or pass after pass over the data, shuffled."""
    rng = random.Random(seed)
    while True:
        yield from rng.sample(train, len(train)) if train else [make_sum(rng)]


def draws_of_step(stream, train, step, args):
    """Yield lists of as many problems as this process rolls out at a time. The first is its share
    of the stream's next --prompts-per-step; the others (for DAPO) depend on seed, step, rank.
    """
    yield list(islice(stream, args.prompts_per_step))[RANK::WORLD]
    further = problem_stream(train, f"{args.seed} {step} {RANK}")
    while True:
        yield list(islice(further, args.prompts_per_step // WORLD))


# ---------------------------------------------------------------------------------------- Policy


def tiny_model_folder(steps=400):
    """Folder of the tiny model, a character-level Llama of 84 k parameters. The first run trains it
    for `steps` steps to imitate sums worked out in running totals (3+8+5= → 11,16#16) or guessed
    (#14). Guesses begin rare and end as the habit of 85 %: the skill is learned, then buried."""
    recipe = inspect.getsource(tiny_model_folder) + inspect.getsource(make_sum)
    key = zlib.crc32(f"{recipe} {torch.__version__} {transformers.__version__}".encode())
    folder = Path(torch.hub.get_dir()) / f"policy-gradients-{key:08x}"
    if folder.exists():
        return folder
    vocabulary = {token: i for i, token in enumerate(["<eos>", "<unk>", *"0123456789+=,#"])}
    bpe = Tokenizer(models.BPE(vocabulary, merges=[], unk_token="<unk>"))
    bpe.decoder = decoders.Fuse()
    tokens = {"eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<eos>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, **tokens)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    shape |= {"num_hidden_layers": 2, "vocab_size": len(vocabulary)}
    shape |= {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
    config = transformers.LlamaConfig(**shape, initializer_range=0.05)  # 0.02 is for large widths
    torch.manual_seed(0)  # the same model for every --seed
    rng = random.Random(0)
    model = transformers.LlamaForCausalLM(config)
    matrices = [weight for weight in model.parameters() if weight.ndim == 2]  # Muon takes no others
    optimizer = torch.optim.Muon(matrices, momentum=0.9, weight_decay=0.0, ns_steps=3)
    for step in tqdm(range(steps), desc="warm start, this once", disable=None):
        texts = []
        for _ in range(128):
            question, total = make_sum(rng)
            terms = list(map(int, question.split("+")))
            answer = f"#{sum(rng.randint(0, 9) for _ in terms)}"  # a guess
            if rng.random() >= 0.85 * (step / steps) ** 3:
                answer = ",".join(map(str, list(accumulate(terms))[1:])) + f"#{total}"
            texts.append(f"{question}={answer}<eos>")
        inputs = tokenizer(texts, padding=True, return_tensors="pt")
        ids, padding = inputs["input_ids"], inputs["attention_mask"] == 0
        equals = (ids == vocabulary["="]).long()
        answer = equals.cumsum(1) > equals  # behind the "=": the question is given, not learned
        labels = ids.masked_fill(~answer | padding, -100)
        optimizer.param_groups[0]["lr"] = 3e-2 * min((step + 1) / 50, 1 - step / steps)
        model.zero_grad()
        model(ids, labels=labels, use_cache=False).loss.backward()  # it shifts the labels itself
        optimizer.step()
    save(model, tokenizer, folder)
    return folder


def load_policy(args, device):
    """The model of --resume or --model, and its tokenizer. The model also carries all stop ids
    (generation_config) and whether --dtype wants matrix products in bf16 (in_bf16)."""
    source = args.resume or args.model
    if source == "tiny":
        source = tiny_model_folder()
    with blame(f"--model or --resume: {source} cannot be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(source)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    ids = model.generation_config.eos_token_id
    stop_ids = {tokenizer.eos_token_id, *(ids if isinstance(ids, list) else [ids])} - {None}
    for parameter in model.parameters():  # how a copy lies in memory, and so how sums are rounded,
        parameter.data = parameter.data.clone()  # does not depend on the file: --resume is exact
    model.to(device).eval()  # eval(): dropout would make the ratio noisy
    check_exact(model, source)
    stop_ids = sorted(stop_ids) or [-1]  # transformers' generate cannot read an empty list
    model.generation_config = GenerationConfig(eos_token_id=stop_ids)
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    model.in_bf16 = has_bf16 if args.dtype == "auto" else args.dtype == "bfloat16"
    return model, tokenizer


@torch.no_grad()
def check_exact(model, source):
    """Stop if the sampler or token_logprobs is wrong for this model: for a prompt padded in a
    batch, both must give the log-probs of a plain float32 forward pass over it alone."""
    model.generation_config.eos_token_id = [-1]  # none ends early
    with blame(f"--model {source}: cannot be sampled from and trained"):
        batch = generate(model, [[4, 3, 2, 1], [5]], 2, 8, 0.0)  # any tokens
        found = torch.stack([batch["old_logprobs"], token_logprobs(model, batch, 1.0)])
        new = batch["completion_ids"][-1:]
        logits = model(F.pad(new, (1, 0), value=5), use_cache=False).logits[:, :-1]
        plain = -F.cross_entropy(logits.mT, new, reduction="none")
    gap = (found[:, -1] - plain).abs().max()
    if not gap < 1e-3:
        stop(f"--model {source}: its cache is not exact: log-probs are off by {gap:.2g} nats")


def encode_prompts(problems, tokenizer, args):
    """Token ids of --prompt with each question in it, in the chat template if there is one."""
    texts = [args.prompt.replace("{question}", question) for question, _ in problems]
    chat = tokenizer.chat_template
    with blame("--model: its tokenizer or chat template fails"):
        if chat:
            turns = [[{"role": "user", "content": text}] for text in texts]
            texts = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        prompts = tokenizer(texts, add_special_tokens=not chat)["input_ids"]
    # Some tokenizers end every text.
    return [ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] else ids for ids in prompts]


def check_prompts(problems, model, tokenizer, args):
    """Stop before the first step if the model cannot read a prompt, or complete the longest one."""
    prompts = encode_prompts(problems, tokenizer, args)
    if not all(prompts):
        stop(f"--model {args.model}: its tokenizer or chat template makes a prompt without tokens")
    if max(map(max, prompts)) >= len(model.get_input_embeddings().weight):
        stop(f"--model {args.model}: a token has no embedding: call its resize_token_embeddings")
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    longest = min(tokenizer.model_max_length, positions or math.inf)
    room = max(0, longest - max(map(len, prompts)))
    if args.max_new_tokens > room:
        stop(f"--max-new-tokens {args.max_new_tokens}: the longest prompt leaves room for {room}")


# -------------------------------------------------------------------------------------- Plumbing


def stop(message):
    """End a run that cannot succeed: one line that names the flag and the fix, exit status 2."""
    print("error:", " ".join(message.split())[:400], file=sys.stderr)
    sys.exit(2)


@contextmanager
def blame(what):
    """An exception in this block ends the run with one line that says what failed and why."""
    try:
        yield
    except Exception as error:
        stop(f"{what}: {error}")


def check_args(args):
    """Stop at the first flag whose value no run can use."""
    positive = "minibatches update_epochs group_size prompts_per_step max_grad_norm temperature"
    positive += " max_new_tokens micro_batch_size eval_every eval_problems"
    for name, value in vars(args).items():
        least = 0
        if name in positive.split():
            least = 1 if type(value) is int else 1e-9
        if type(value) in (int, float) and not least <= value < 2**63:
            stop(f"--{name.replace('_', '-')} {value}: must be finite, and {least} or more")
    if args.group_size < 2:
        stop("--group-size: must be 2 or more, to compare completions")
    if args.prompts_per_step % (args.minibatches * WORLD):
        stop("--prompts-per-step: must be a multiple of --minibatches × processes")
    if "{question}" not in args.prompt:
        stop("--prompt: must contain {question}")
    if args.eval_dataset and args.dataset == "arithmetic":
        stop("--eval-dataset: needs a --dataset")
    load_verifier(args.verifier)


def start_device(args):
    """The device to compute on; under torchrun each process has a GPU of its own."""
    name = args.device
    if name == "auto":
        gpu = torch.accelerator.current_accelerator(check_available=True)
        name = "cpu" if gpu is None or args.model == "tiny" else gpu.type
    with blame(f"--device {args.device}: not found"):
        if name == "cuda":
            torch.cuda.set_device(RANK % max(1, torch.cuda.device_count()))
        device = torch.zeros(1, device=name).device
    if args.model == "tiny":  # more threads slow it down, and two runs at once wait for each other
        torch.set_num_threads(max(1, min(2, torch.get_num_threads() // 2)))
    torch.backends.cuda.enable_cudnn_sdp(False)  # its gradients can be NaN: pytorch issue 196678
    transformers.utils.logging.disable_progress_bar()
    if WORLD > 1:
        dist.init_process_group()
    return device


def sum_over_processes(tensor):
    """The sum of every process's tensor, in place."""
    if WORLD > 1:
        dist.all_reduce(tensor)
    return tensor


def sum_gradients_over_processes(model):
    """Give every process the sum of all processes' gradients, in place."""
    for parameter in model.parameters():
        if WORLD > 1 and parameter.grad is None:  # a process may have had no row to train on
            parameter.grad = torch.zeros_like(parameter)
        sum_over_processes(parameter.grad)


def global_means(records, device):
    """The mean of each metric over its numbers in all records, of all processes: {name: float}."""
    numbers = defaultdict(list)
    for record in records:
        for name, values in record.items():
            numbers[name] += torch.as_tensor(values).flatten().tolist()
    sums = torch.tensor([[sum(values), len(values)] for values in numbers.values()], device=device)
    pairs = zip(numbers, sum_over_processes(sums).tolist(), strict=True)
    return {name: total / count for name, (total, count) in pairs if count > 0}


def open_run(args):
    """The run's folder, and a TensorBoard writer in the first process; prints all flags."""
    folder = Path(args.output_dir) / f"{SCRIPT}__{args.seed}__{time.time_ns()}"
    if RANK > 0:
        return folder, None
    with blame(f"--output-dir {args.output_dir}"):
        writer = SummaryWriter(folder)
    print(f"{args}\nrun in {folder}")
    return folder, writer


def log(writer, metrics, step):
    """Write every number to TensorBoard; only the first process has a writer."""
    if RANK == 0:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()


def save(model, tokenizer, folder, state=None):
    """Write elsewhere, then rename: even after a kill, the folder is complete or absent."""
    scratch = folder.with_name(f"saving-{os.getpid()}")
    try:
        with blame(f"{folder} cannot be saved, is the disk full?"):
            model.save_pretrained(scratch)
            tokenizer.save_pretrained(scratch)
            torch.save(state, scratch / "trainer.pt")
            if not folder.exists():  # another first run may have made the same tiny model
                scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def load_checkpoint(path):
    """The saved state of a run, with the Args that the run was started with."""
    with blame(f"--resume {path}: not a checkpoint of this script, a folder step-…"):
        state = torch.load(Path(path, "trainer.pt"), map_location="cpu", mmap=True)
        return state | {"args": Args(**state["args"])}


def restore(optimizer, run, args):
    """Load the optimizer's state from the checkpoint of --resume; returns its step."""
    state = load_checkpoint(args.resume)
    if state["run"] != run:
        stop(f"--resume {args.resume}: begun as {state['run']}, which is not {run}")
    if 0 < args.steps <= state["step"]:
        stop(f"--resume {args.resume}: step {state['step']} is done: raise --steps {args.steps}")
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a terminal may know ASCII alone
    args = tyro.cli(Args)
    if args.resume:  # again: flags not given now keep old values
        args = tyro.cli(Args, default=load_checkpoint(args.resume)["args"])
    main(args)

# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "transformers==5.23.0", "tyro==1.0.17",
#                 "tensorboard==2.21.0", "tqdm==4.70.1"]
# ///
