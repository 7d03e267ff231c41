"""RLOO, REINFORCE Leave-One-Out: the mean reward of the other completions is the baseline.

For each question, draw a group of G completions o_1 … o_G from the policy π_old, the model as it is
now, and let a verifier give each a reward R_i (1 if right, else 0). On this rollout the model, π_θ,
takes steps up J(θ), on minibatches of groups. A_i, π_old and π_ref are constants. J's value says
nothing; its gradient points roughly along that of E[R_i].

    J    = Σ_i Σ_t L_it / Σ_i |o_i|                  over all tokens of the minibatch
    L_it = A_i log π_θ(o_it)
    A_i  = R'_i − mean of the group's other R'_j     how R'_i compares with its group
    R'_i = R_i − β Σ_t (log π_old − log π_ref)       π_ref is the model before training
    o_it is token t of |o_i|; π is its probability, given the question and the tokens before it

What changes from reinforce.py                       Where
    a state is the question and the tokens so far    token_logprobs
    an action is a token, a step appends it          generate
    an episode is a completion, its return R_i       rollout, verify
    the baseline is the mean reward of the others    compute_advantages, --baseline
    one mean over all tokens, not over episodes      token_weights
    a KL penalty in the reward                       train_step, --beta

Why: PPO (see ppo.py), the usual method, takes several clipped steps on a rollout. But it needs a
critic, a second language model, though the only reward comes at the end. The mean reward of the
others says how hard the question is, and adds no bias, as o_i has no part in it. The sum in R'_i
has the mean KL(π_old ‖ π_ref), which is 0 where the two agree, and else more. So the penalty keeps
the policy near π_ref: it keeps its language and does not drift into a verifier's loopholes. (At
sampling π_old is π_θ, so R'_i depends on θ, too. That adds nothing to ∇E[R'_i], as the mean of ∇log
π is 0.) γ is 1: with less, the reward of a long completion would count less.

Weakness: after one step the samples are an older policy's. No ratio corrects for that and no clip
limits the push on a token, so a rollout serves one step, or a few small ones.

Differs from the paper: a minibatch without a signal gets no step (see train_minibatch). In bf16 the
weights begin at random places within their rounding error (see spread).
The paper takes a completion as one action, whose log π is the sum over its tokens. Here J divides
by Σ_i |o_i|, which depends on the samples. This adds a little bias.

Without flags a tiny model learns, in a minute on a laptop. For a real model, on a GPU, add
--model Qwen/Qwen2.5-0.5B-Instruct --dataset train.jsonl
Ahmadian et al. 2024, arXiv:2402.14740; Kool et al. 2019, Buy 4 REINFORCE Samples
"""

import functools
import importlib
import json
import math
import os
import random
import re
import shutil
import sys
import time
import traceback
import zlib
from collections import defaultdict
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Literal

# Both are read when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "5000")  # CPU threads that wait soon free their core
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # wastes less GPU memory

import torch
import torch.distributed as dist
import torch.distributed.nn  # if first imported after init_process_group, it crashes at exit
import torch.nn.functional as F
import tyro
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.cache_utils import LinearAttentionLayer
from transformers.utils.logging import disable_progress_bar

SCRIPT = Path(__file__).stem
TINY_MODEL = Path(__file__).parent / "tests/tiny_model"
# torchrun starts one process per GPU and tells it its rank and the number of processes. Each
# process samples, scores and trains on groups of its own, and the gradients are summed.
RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))


@dataclass
class Args:
    # subtracted from a reward: the mean of the group's others, the rollout's mean, or nothing
    baseline: Literal["leave-one-out", "mean", "none"] = "leave-one-out"
    beta: float = 0.01  # weight of the KL penalty in the reward; 0: no reference model is loaded
    minibatches: int = 1  # optimizer steps per epoch, each on a part of the rollout's groups
    update_epochs: int = 1  # epochs: passes over each rollout, reshuffled each time
    group_size: int = 8  # completions drawn per question (G)
    prompts_per_step: int = 32  # questions per training step, over all processes (P)
    steps: int = 200  # training steps, each a rollout and its updates; 0: only evaluate
    learning_rate: float | None = None  # peak rate; default: 1.2e-3 for the tiny model, else 1e-6
    warmup_steps: int = 10  # steps until the rate peaks; then it falls linearly towards 0
    max_grad_norm: float = 1.0  # gradients with a larger norm are scaled down to it
    temperature: float = 1.0  # softmax temperature of the policy: in rollout, loss and evaluation
    max_new_tokens: int | None = None  # longest completion; default: 24 for sums, else 256
    model: str = "tiny"  # hub id, local folder, or "tiny": the model in tests/tiny_model
    dataset: str = "arithmetic"  # sums; or a JSONL file with "question" and "answer" per line
    eval_dataset: str = ""  # JSONL file to evaluate on; default: a tenth of --dataset
    verifier: str = ""  # FILE.py with verify(completion, answer) → reward; default: see verify
    prompt: str | None = None  # text around {question}; the default depends on data and verifier
    device: str = "auto"  # cpu, cuda, mps …; auto: the CPU for the tiny model, else a GPU if any
    # of matrix products; auto: bf16 on CUDA. In bf16 the weights of a bf16 file begin at random
    # places, each within its rounding error (see `spread`)
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    micro_batch_size: int | None = None  # rows per training pass; default: 256 for tiny, else 8
    eval_every: int = 50  # training steps between evaluations, and between checkpoints
    eval_problems: int = 256  # maximum number of questions per evaluation
    resume: str = ""  # checkpoint folder to continue; flags that are not given keep its values
    seed: int = 1  # the same seed gives the same run, bit for bit (on a CPU)
    output_dir: str = "runs"  # each run makes a folder in here for its log and checkpoints

    def __post_init__(self):
        tiny, sums = self.model == "tiny", self.dataset == "arithmetic"
        if self.learning_rate is None:
            self.learning_rate = 1.2e-3 if tiny else 1e-6
        if self.micro_batch_size is None:
            self.micro_batch_size = 256 if tiny else 8
        if self.max_new_tokens is None:
            self.max_new_tokens = 24 if sums else 256
        if self.verifier:
            self.verifier = str(Path(self.verifier).resolve())  # --resume may come from elsewhere
        if self.prompt is None:
            self.prompt = "{question}=" if sums else "{question}"
            if not (sums or self.verifier):
                self.prompt += "\nReason step by step, then end with #### and the number."


# ------------------------------------------------------------------------------------- Algorithm


def compute_advantages(rewards, args):
    """A_i, how much better than expected a completion is: rewards (P, G) → advantages (P, G)."""
    if args.baseline == "none":
        return rewards
    if args.baseline == "mean":
        return rewards - sum_over_processes(rewards.mean()) / WORLD
    sum_of_others = rewards.sum(1, keepdim=True) - rewards
    return rewards - sum_of_others / (rewards.shape[1] - 1)


def token_weights(mask, args):
    """Each token's weight in J, 1 / Σ_i |o_i|: mask (B, T) → weights (B, T).

    All tokens count the same, so a long completion counts more than a short one.
    """
    num_tokens = sum_over_processes(mask.sum())
    return mask / num_tokens


def surrogate(logprobs, old_logprobs, advantages, mask, args):
    """L_it, to be maximized, and whether a clip has removed its gradient: (B, T) and (B, T).

    Here there is no ratio and no clip: old_logprobs and args are for the scripts that come next.
    """
    advantages = advantages[:, None]
    clipped = torch.zeros_like(mask, dtype=torch.bool)
    return advantages * logprobs, clipped


def kl_k3(logprobs, other_logprobs):
    """An estimate of KL(π ‖ other) by each token of π: (B, T), never negative. Only logged here."""
    d = other_logprobs - logprobs
    return d.exp() - d - 1


# ---------------------------------------------------------------------------------------- Update

# A batch is a dict of tensors about B completions of up to T tokens, to prompts of up to S tokens:
#     prompt_ids, prompt_mask (B, S), completion_ids, mask (B, T): token ids; 0 in a mask is padding
#     old_logprobs (B, T): log π_old; 0 on padding
#     advantages (B,); ended (B,): False where a completion was cut off


def train_minibatch(model, optimizer, batch, args):
    """One optimizer step; returns what to log: approx_kl and clip_ratio are means over tokens.

    A group of equal R'_i has advantages of 0, so its rows have no gradient. A batch that has only
    such rows gets no step: what is left of a gradient there is rounding noise, and Adam, which
    divides by the size of past gradients, would scale it up to a full step.
    """
    # Computed for the whole minibatch, so that splitting it into parts changes no gradient.
    batch = batch | {"weights": token_weights(batch["mask"], args)}
    has_signal = batch["advantages"] != 0
    if sum_over_processes(has_signal.sum()) == 0:
        return {}
    batch = take_rows(batch, has_signal)  # only these rows have a gradient
    totals = torch.zeros(4, device=model.device)
    optimizer.zero_grad()

    for micro in micro_batches(model, batch, args):
        old_logprobs, mask = micro["old_logprobs"], micro["mask"]
        with autocast(model, args):
            logprobs = token_logprobs(model, micro, args.temperature)
        objective, clipped = surrogate(logprobs, old_logprobs, micro["advantages"], mask, args)
        loss = -(micro["weights"] * objective).sum()
        loss.backward()
        approx_kl = kl_k3(old_logprobs, logprobs.detach())  # KL(π_old ‖ π_θ), to log
        totals += torch.stack([loss.detach(), approx_kl.sum(), clipped.sum(), mask.sum()])

    sum_gradients_over_processes(model)
    grad_norm = clip_grad_norm_(model.parameters(), args.max_grad_norm).item()
    optimizer.step()
    loss, approx_kl, clipped, tokens = sum_over_processes(totals).tolist()
    metrics = {"loss": loss, "grad_norm": grad_norm}
    return metrics | {"approx_kl": approx_kl / tokens, "clip_ratio": clipped / tokens}


def train_step(model, reference, tokenizer, optimizer, train, asked, args):
    """Sample completions for the next problems, train on them, return the means to log."""
    problems = next_problems(train, asked, 0, args)
    batch, _, rewards = rollout(model, tokenizer, problems, args.group_size, args.temperature, args)
    record = rollout_metrics(batch, rewards)
    recompute_old_logprobs(model, batch, record, args)  # only in bf16
    if args.beta > 0:
        log_ratio = batch["old_logprobs"] - batch_logprobs(reference, batch, args)
        rewards = rewards - args.beta * log_ratio.sum(1).view_as(rewards)  # R'_i
        record["kl"] = log_ratio[batch["mask"] > 0]
    advantages = compute_advantages(rewards, args)
    rounding = 1e-6 * rewards.abs().max().clamp(min=1)  # what equal rewards may leave
    advantages[advantages.abs() < rounding] = 0
    batch["advantages"] = advantages.flatten()

    records = [record]
    rows = torch.arange(rewards.numel(), device=model.device).view_as(rewards)  # rows of group g
    for _ in range(args.update_epochs):
        order = torch.randperm(len(rewards))
        for groups in order.tensor_split(args.minibatches):
            minibatch = take_rows(batch, rows[groups].flatten())
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
    check_prompts(train + held_out, model, tokenizer, args)
    reference = None
    if args.beta > 0 and args.steps > 0:
        reference, _ = load_policy(replace(args, resume=""), device)  # not of the checkpoint
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0, fused=True)
    # What --resume may not change; of the data, its content counts, not its path.
    run = {"script": SCRIPT, "number of processes": WORLD, "model": args.model}
    run |= {"training data": checksum(train), "seed": args.seed, "group size": args.group_size}
    done, asked = restore(optimizer, run, args) if args.resume else (0, 0)
    folder = Path(args.output_dir, f"{SCRIPT}__{args.seed}__{time.time_ns()}").resolve()
    with stop_on_error(f"--output-dir {args.output_dir}"):
        writer = SummaryWriter(folder) if RANK == 0 else None
    scores = evaluate(model, tokenizer, held_out, args, writer, done)
    first = scores["eval/pass@1"]

    warmup = max(1, min(args.warmup_steps, args.steps))
    bar = tqdm(range(done + 1, args.steps + 1), disable=RANK > 0 or None)
    for step in bar:
        step_start = time.perf_counter()
        # All randomness follows from these three, so a checkpoint needs no state of it.
        torch.manual_seed(checksum((args.seed, step, RANK)))
        rising, falling = step / warmup, (args.steps + 1 - step) / (args.steps + 1 - warmup)
        rate = args.learning_rate * min(rising, falling)
        optimizer.param_groups[0]["lr"] = rate
        metrics = train_step(model, reference, tokenizer, optimizer, train, asked, args)
        asked += args.prompts_per_step
        if not math.isfinite(sum(metrics.values())):
            sys.exit(f"error: step {step}: not finite, try a lower --learning-rate: {metrics}")
        metrics |= {"learning_rate": rate, "step_time": time.perf_counter() - step_start}
        metrics["tokens_per_second"] = metrics["num_tokens"] / metrics["step_time"]
        log(writer, metrics, step, bar)
        if step % args.eval_every == 0 or step == args.steps:
            state = {"step": step, "asked": asked, "run": run, "args": vars(args)}
            save_checkpoint(model, tokenizer, optimizer, folder, state)
            scores = evaluate(model, tokenizer, held_out, args, writer, step)

    if WORLD > 1:
        dist.barrier()  # wait until the first process has saved
        dist.destroy_process_group()
    if RANK == 0 and args.steps > 0:
        last, seconds = scores["eval/pass@1"], time.perf_counter() - start
        print(f"pass@1 {first:.3f} → {last:.3f}; {seconds:.0f} s; model and logs in {folder}")
    return scores | {"eval/pass@1_initial": first, "folder": str(folder)}


# From here on, all scripts of this family are the same, byte for byte.
# The next two sections draw and score the completions. The sections after them can stay unread.
# ---------------------------------------------------------------------------- Log-probabilities


def autocast(model, args):
    """In bf16, round matrix products alone. In the weights it would round small updates away."""
    return torch.autocast(model.device.type, torch.bfloat16, args.dtype == "bfloat16")


class Cache(DynamicCache):
    """Keeps keys in the values' dtype. In bf16, rotary positions would make them float32."""

    def update(self, key_states, value_states, *args, **kwargs):
        key_states = key_states.to(value_states.dtype)
        return super().update(key_states, value_states, *args, **kwargs)


def forward(model, input_ids, attention_mask, cache, logits_to_keep=0):
    """Logits of new tokens after those in the cache; the mask (B, past + new) covers both."""
    positions = attention_mask.cumsum(1) - 1  # counted from the first real token, not the padding
    return model(
        input_ids,
        attention_mask=attention_mask,
        position_ids=positions[:, -input_ids.shape[1] :].clamp(min=0),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=logits_to_keep,  # 0 keeps all
    ).logits


def prefill(model, prompt_ids, prompt_mask):
    """Run the prompts (B, S) through the model, each once for all its completions. Returns the
    next token's logits (B, 1, V), and the cache: each layer's keys and values, all that later
    tokens need to know of these (Prefix Grouper, arXiv:2506.05433)."""
    rows = torch.stack([prompt_ids, prompt_mask], 1)
    distinct, index = rows.unique_consecutive(dim=0, return_inverse=True)
    cache = Cache(config=model.config)
    logits = forward(model, distinct[:, 0], distinct[:, 1], cache, logits_to_keep=1)
    cache.reorder_cache(index)  # each row gets its prompt's part
    return cache, logits[index]


def policy_logprobs(logits, temperature):
    """log π over the vocabulary, (…, V) → (…, V), for the sampler and the loss alike. No top-k
    and no top-p, which draw from the likeliest tokens alone: samples would not be π's, and the
    ratio would be wrong."""
    return (logits.float() / temperature).log_softmax(-1)


def token_logprobs(model, batch, temperature):
    """log π of each completion token, with gradient: (B, T), 0 where the mask is 0. Padding is
    computed, too: in bf16 a narrower batch would be rounded differently, and the ratio not be 1."""
    ids, mask, prompt_mask = batch["completion_ids"], batch["mask"], batch["prompt_mask"]
    cache, logits = prefill(model, batch["prompt_ids"], prompt_mask)
    if ids.shape[1] > 1:
        # Logits are for the token to come: the prompt's last ones for the first token, and those of
        # the last token are not needed.
        attention_mask = torch.cat([prompt_mask, mask[:, :-1].long()], 1)
        rest = forward(model, ids[:, :-1], attention_mask, cache)
        logits = torch.cat([logits, rest], 1)
    logprobs = policy_logprobs(logits, temperature)
    return logprobs.gather(2, ids[:, :, None]).squeeze(2) * mask


@torch.no_grad()
def batch_logprobs(model, batch, args):
    """token_logprobs of a whole rollout, without gradient: (B, T)."""
    parts = []
    with autocast(model, args):
        for micro in micro_batches(model, batch, args):
            parts.append(token_logprobs(model, micro, args.temperature))
    return torch.cat(parts) if parts else batch["mask"]  # no rows: DAPO may find none


def recompute_old_logprobs(model, batch, record, args):
    """In bf16, replace log π_old by that of a forward pass like the loss's: the sampler rounds
    differently, so the ratio would not start at 1. The samples stay the sampler's: the difference,
    which is logged, should be small."""
    if args.dtype == "bfloat16":
        sampled = batch["old_logprobs"]
        batch["old_logprobs"] = batch_logprobs(model, batch, args)
        gap = (batch["old_logprobs"] - sampled).abs()
        record["sampling/sampling_logp_difference/mean"] = gap[batch["mask"] > 0]


def micro_batches(model, batch, args):
    """Yield the batch in parts of a few rows, to save memory."""
    # Recurrent layers (Qwen3.5, LFM2 …) overwrite their state between the two forward passes of
    # token_logprobs. Autograd allows this only in a context, here around the body of the loop.
    layers = Cache(config=model.config).layers
    recurrent = any(isinstance(layer, LinearAttentionLayer) for layer in layers)
    allow = torch.autograd.graph.allow_mutation_on_saved_tensors if recurrent else nullcontext
    for start in range(0, len(batch["mask"]), args.micro_batch_size):
        with allow():
            yield take_rows(batch, slice(start, start + args.micro_batch_size))


def take_rows(batch, rows):
    """The batch of these rows alone."""
    return {name: tensor[rows] for name, tensor in batch.items()}


# --------------------------------------------------------------------------------------- Rollout


@torch.no_grad()
def generate(model, prompts, num_samples, max_new_tokens, temperature):
    """Draw `num_samples` completions of each prompt, a list of token ids; temperature 0 is greedy.
    A completion ends with an eos_token_id of the model's generation config."""
    device = model.device
    stop_ids = torch.tensor(model.generation_config.eos_token_id or [], device=device)
    ids = [torch.tensor(prompt, device=device) for prompt in prompts]
    ones = [torch.ones_like(prompt) for prompt in ids]
    prompt_ids = pad_sequence(ids, batch_first=True, padding_side="left")
    prompt_mask = pad_sequence(ones, batch_first=True, padding_side="left")
    prompt_ids = prompt_ids.repeat_interleave(num_samples, 0)
    prompt_mask = prompt_mask.repeat_interleave(num_samples, 0)
    completion_ids = prompt_ids.new_zeros(len(prompt_ids), max_new_tokens)
    mask = torch.zeros(completion_ids.shape, device=device)
    old_logprobs = torch.zeros_like(mask)
    ended = torch.zeros(len(mask), dtype=torch.bool, device=device)
    active = torch.arange(len(mask), device=device)  # the completions that have not ended

    cache, logits = prefill(model, prompt_ids, prompt_mask)
    attention_mask = F.pad(prompt_mask, (0, max_new_tokens), value=1)
    for t in range(max_new_tokens):
        if temperature > 0:
            logprobs = policy_logprobs(logits[:, -1], temperature)
            probs = logprobs.exp().clamp(min=1e-30)  # a Mac's GPU draws zeros: pytorch#192577
            tokens = probs.multinomial(1).squeeze(1)
        else:
            logprobs = policy_logprobs(logits[:, -1], 1.0)
            tokens = logprobs.argmax(1)
        completion_ids[active, t] = tokens
        old_logprobs[active, t] = logprobs.gather(1, tokens[:, None]).squeeze(1)
        mask[active, t] = 1.0  # a stop token counts, too
        is_stop = torch.isin(tokens, stop_ids)
        ended[active] = is_stop
        unfinished = is_stop.logical_not().nonzero().squeeze(1)
        if len(unfinished) == 0 or t == max_new_tokens - 1:
            break
        if len(unfinished) < len(active):  # the cache keeps the unfinished rows alone
            cache.reorder_cache(unfinished)
            active, tokens = active[unfinished], tokens[unfinished]
        seen = attention_mask[active, : prompt_ids.shape[1] + t + 1]  # up to the new token
        logits = forward(model, tokens[:, None], seen, cache)

    batch = {"completion_ids": completion_ids, "mask": mask, "old_logprobs": old_logprobs}
    batch = {name: tensor[:, : t + 1] for name, tensor in batch.items()}
    return batch | {"prompt_ids": prompt_ids, "prompt_mask": prompt_mask, "ended": ended}


def rollout(model, tokenizer, problems, num_samples, temperature, args):
    """Completions of each (question, answer): a batch, their texts, and rewards (P, G)."""
    prompts = encode_prompts(problems, tokenizer, args)
    with autocast(model, args):
        batch = generate(model, prompts, num_samples, args.max_new_tokens, temperature)
    verifier = load_verifier(args.verifier)
    lengths = batch["mask"].sum(1).int().tolist()
    completions, rewards = [], []
    for i, ids in enumerate(batch["completion_ids"].tolist()):
        completion = tokenizer.decode(ids[: lengths[i]], skip_special_tokens=True)
        _, answer = problems[i // num_samples]
        completions.append(completion)
        try:
            rewards.append(float(verifier(completion, answer)))
        except (Exception, SystemExit):
            traceback.print_exc()
            failed = f"verify must return a number; for {completion!r:.400} see above"
            stop(f"--verifier {args.verifier}: {failed}")
    rewards = torch.tensor(rewards, device=model.device).view(-1, num_samples)
    if not rewards.isfinite().all():
        stop(f"--verifier {args.verifier}: verify must return a finite number")
    return batch, completions, rewards


def are_equal(rewards):
    """Which groups have equal rewards, and teach nothing but the KL penalty: (P, G) → (P,)."""
    return rewards.amax(1) - rewards.amin(1) < 1e-6


def rollout_metrics(batch, rewards):
    """What to log about a rollout: {name: tensor of numbers, whose mean is logged}."""
    mask = batch["mask"]
    return {
        "reward": rewards,
        "reward_std": rewards.std(1),
        "frac_reward_zero_std": are_equal(rewards),
        "completions/mean_length": mask.sum(1),
        "completions/clipped_ratio": ~batch["ended"],  # cut off at max_new_tokens
        "entropy": -batch["old_logprobs"][mask > 0],  # an estimate, from the samples
        "num_tokens": mask.sum() * WORLD,  # so that its mean over processes is their sum
    }


# ------------------------------------------------------------------------------------ Evaluation


def evaluate(model, tokenizer, problems, args, writer, step):
    """Scores of held-out problems, by 8 samples (pass@1: their mean reward; pass@8: the best one's)
    and a greedy completion each; logged, and printed with one problem's best and worst sample."""
    torch.manual_seed(RANK)  # the same randomness at every evaluation
    problems = problems[RANK::WORLD] or problems[:1]  # this process's share, at least one
    size = max(1, args.prompts_per_step * args.group_size // (8 * WORLD))  # rows as in training
    records = []
    for start in range(0, len(problems), size):
        part = problems[start : start + size]
        batch, completions, rewards = rollout(model, tokenizer, part, 8, args.temperature, args)
        _, _, greedy_rewards = rollout(model, tokenizer, part, 1, 0.0, args)
        record = {"eval/pass@1": rewards, "eval/pass@8": rewards.amax(1)}
        record |= {"eval/pass@1_greedy": greedy_rewards, "eval/mean_length": batch["mask"].sum(1)}
        record["eval/clipped_ratio"] = ~batch["ended"]
        record["eval/frac_reward_zero_std"] = are_equal(rewards)
        records.append(record)
    scores = global_means(records, model.device)
    log(writer, scores, step)
    advantages = compute_advantages(rewards, args)  # in all processes: it may sum over them
    if RANK == 0:
        numbers = ", ".join(f"{name} {score:.3f}" for name, score in scores.items())
        tqdm.write(f"step {step}: {numbers}{hint(scores)}")
        i = rewards.std(1).argmax()  # of the last part, the group whose rewards differ most
        tqdm.write(f"    {part[i][0]!r:.400}, right answer {part[i][1]!r:.400}")
        order = rewards[i].argsort(descending=True)
        for j in order[0], order[-1]:
            credit = f"reward {rewards[i, j]:.2f}, advantage {advantages[i, j]:+.2f}"
            tqdm.write(f"      {credit}: {completions[8 * i + j][:400]!r}")
    return scores


def hint(scores):
    """What keeps a run from learning, and which flags to try; "" if all is well."""
    text = ""
    if scores["eval/clipped_ratio"] > 0.5:
        text += "\n    most completions are cut off: raise --max-new-tokens, or train if pass@8 > 0"
    if scores["eval/frac_reward_zero_std"] == 1 and scores["eval/pass@1"] < 0.9:
        text += "\n    all groups have equal rewards: try another --prompt, --model or --dataset"
        text += ", or a higher --temperature"
    return text


# ------------------------------------------------------------------------- Task, data and policy

# A number as people write it: 7, -7, .5, 1,234, $1,234.50, and LaTeX's 1{,}234 or 1\,234
THOUSANDS = r"[0-9]{1,3}(?:(?:,|\{,\}|\\,|[ \u00a0\u202f])[0-9]{3})+(?![0-9])"
NUMBER = re.compile(rf"[-+]?[\\$€£ ]*(?:(?:{THOUSANDS}|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)")


def verify(completion: str, answer: str) -> float:
    """The reward: 1.0 if the right number stands right after the last `####`, whatever follows, as
    in GSM8K, or after the last `#` if there is no `####`. `#### $5` and `# **5**` will do, too.
    A completion is hostile text: it is never evaluated, and read in linear time."""
    _, marker, tail = completion.rpartition("####" if "####" in completion else "#")
    tail = re.sub("[−–]", "-", tail).replace("\\boxed", "")  # a typeset minus is one, too
    number = NUMBER.match(tail.lstrip(" \t\r\n\u00a0*({$€£\\"))
    if not marker or not number:
        return 0.0
    predicted = re.sub("[^0-9.-]", "", number[0])
    expected = re.sub("[^0-9.-]", "", answer)
    return float(Decimal(predicted) == Decimal(expected))


@functools.cache
def load_verifier(name):
    """The function that --verifier names: (completion, answer) → reward."""
    if not name:
        return verify
    path = Path(name).resolve()
    sys.path.append(str(path.parent))  # for what it imports, and for processes that it starts
    with stop_on_error(f"--verifier {name}: must be a FILE.py that defines verify"):
        module = importlib.import_module(path.stem)
        if Path(module.__spec__.origin).resolve() != path:
            raise ImportError(f"its name is taken by {module}")
        return module.verify


def make_sum(rng, held_out=False):
    """A chain of 2 to 4 one-digit numbers and its sum: ("3+8+5", "16")."""
    while True:
        num_terms = rng.randint(2, 4)
        terms = [rng.randint(0, 9) for _ in range(num_terms)]
        question = "+".join(map(str, terms))
        # The question decides its side, so training and held-out sums cannot meet.
        if held_out == (checksum(f"{question}=") % 10 == 0):
            return question, str(sum(terms))


def load_jsonl(flag, path, args):
    """[(question, answer)] of a JSONL file, sorted by checksum. The built-in verifier gets the
    number at the answer's end, as in GSM8K; a verifier file gets the JSON value as it stands."""
    problems = {}
    with stop_on_error(f"{flag} {path}"):
        lines = Path(path).read_bytes().splitlines()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        with stop_on_error(f'{flag} {path}, line {number}: needs a "question" and an "answer"'):
            row = json.loads(line.decode("utf-8-sig"))  # a file may begin with a BOM
            question, answer = row["question"], row["answer"]
            if not question.strip().encode() or answer is None:  # encode refuses half an emoji
                raise ValueError("one is empty")
            if not args.verifier:
                answer = str(answer).rpartition("#")[2].strip()
                if not NUMBER.fullmatch(answer):
                    raise ValueError("an answer that is no number needs a --verifier")
            problems[question] = answer
    if not problems:
        stop(f"{flag} {path}: has no questions")
    return sorted(problems.items(), key=lambda problem: checksum(problem[0]))


def load_data(args):
    """Problems to train on, and to evaluate on: a file's tenth with the smallest checksums."""
    if args.dataset == "arithmetic":
        rng, eval_rng = random.Random(1), random.Random(0)
        train = [make_sum(rng) for _ in range(10_000)]
        held_out = [make_sum(eval_rng, held_out=True) for _ in range(args.eval_problems)]
    else:
        train = load_jsonl("--dataset", args.dataset, args)
        held_out = train[: max(1, len(train) // 10)]
    if args.eval_dataset:
        held_out = load_jsonl("--eval-dataset", args.eval_dataset, args)
        both = len(dict(train).keys() & dict(held_out).keys())
        if both > 0 and RANK == 0:
            print(f"{both} questions are in both --dataset and --eval-dataset")
    elif args.dataset != "arithmetic":
        train = train[len(held_out) :]
    if not train:
        stop(f"--dataset {args.dataset}: needs two different questions, or give --eval-dataset")
    return train, held_out[: args.eval_problems]


def next_problems(train, asked, draw, args):
    """This process's share of the problems after the first `asked` ones: pass after pass over the
    data, each in an order of its own. DAPO asks for draws 1, 2 … of a step, too."""
    epoch, first = divmod(asked, len(train))
    order = []
    while len(order) < first + args.prompts_per_step:
        generator = torch.Generator().manual_seed(checksum((args.seed, draw, epoch)))
        order += torch.randperm(len(train), generator=generator).tolist()
        epoch += 1
    share = range(first + RANK, first + args.prompts_per_step, WORLD)
    return [train[order[i]] for i in share]


def load_policy(args, device):
    """The model of --resume or --model, and its tokenizer."""
    source = args.resume or args.model
    if source == "tiny":
        source = TINY_MODEL
        if not source.exists():
            stop(f"--model tiny: {source} is missing; copy it, too, or name another model")
    flag = "--resume" if args.resume else "--model"
    with stop_on_error(f"{flag} {source}: cannot be loaded, sampled from and trained"):
        tokenizer = AutoTokenizer.from_pretrained(source, mistral_format=False)  # no chat there
        model, info = AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.float32, output_loading_info=True
        )
        if info["missing_keys"]:  # transformers would draw them at random
            raise ValueError(f"weights are missing: {info['missing_keys']}")
        for parameter in model.parameters():
            if not parameter.requires_grad:
                raise ValueError("some weights are frozen; merge a LoRA adapter first")
            # A copy: where a file's bytes lie in memory changes how sums are rounded.
            parameter.data = parameter.data.clone()
        if args.dtype == "bfloat16" and not args.resume:
            spread(model)
        model.to(device)  # from_pretrained has switched dropout off: the ratio would be noisy
        config = model.generation_config
        ids = config.eos_token_id
        stop_ids = {tokenizer.eos_token_id, *(ids if isinstance(ids, list) else [ids])}
        if tokenizer.chat_template:  # a base model may not name the token that ends a turn
            chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
            ids = tokenizer.apply_chat_template(chat)["input_ids"]
            special = [token for token in ids if token in tokenizer.added_tokens_decoder]
            stop_ids.update(special[-1:])
        config.eos_token_id = None  # in the check no completion ends early
        check_exact(model)
        config.eos_token_id = sorted(stop_ids - {None}) or None
        if config.temperature or config.top_p or config.top_k:
            config.do_sample = True  # without it these settings could not be saved again
        config.validate(strict=True)
    return model, tokenizer


@torch.no_grad()
def spread(model):
    """Move each weight that is a bf16 number to a random place among the float32 numbers that bf16
    rounds to it.

    A hub's weights are bf16 numbers, and in bf16 a matrix product rounds each back to its own until
    training has moved it by half a gap: at 1e-6 that takes hundreds of steps. From random places a
    share of the weights crosses over at any step, and their mean moves by the step.
    """
    generator = torch.Generator().manual_seed(0)  # the same in all processes and in the reference
    linear = [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    for weight in [weight for layer in linear for weight in layer.parameters()]:
        if weight is model.get_input_embeddings().weight:  # tied: as embedding it is not rounded
            continue
        is_bf16 = (weight == weight.bfloat16()) & (weight != 0)
        offset = torch.randint(-32767, 32768, weight.shape, generator=generator)
        moved = (weight.view(torch.int32) + offset.int()).view(torch.float32)
        weight.copy_(moved.where(is_bf16, weight))


@torch.no_grad()
def check_exact(model):
    """For a prompt padded in a batch, the sampler and token_logprobs must give the log-probs of a
    plain float32 forward pass over it alone."""
    prompts = [[4, 3, 2, 1], [5]]  # any tokens
    batch = generate(model, prompts, num_samples=2, max_new_tokens=8, temperature=0.0)
    ids = batch["completion_ids"][-1]
    inputs = F.pad(ids, (1, 0), value=5)
    logits = model(inputs[None], use_cache=False).logits[0, :-1]
    expected = -F.cross_entropy(logits, ids, reduction="none")
    for logprobs in batch["old_logprobs"], token_logprobs(model, batch, temperature=1.0):
        gap = (logprobs[-1] - expected).abs().max()
        if gap.isnan() or gap > 1e-3:
            raise ValueError(f"its cache is not exact: log-probs are off by {gap:.2g} nats")


def encode_prompts(problems, tokenizer, args):
    """Token ids of --prompt with each question in it, in the chat template if there is one."""
    texts = [args.prompt.replace("{question}", question) for question, _ in problems]
    if tokenizer.chat_template:
        chats = [[{"role": "user", "content": text}] for text in texts]
        return tokenizer.apply_chat_template(chats, add_generation_prompt=True)["input_ids"]
    prompts = tokenizer(texts)["input_ids"]
    end = tokenizer.eos_token_id  # some tokenizers end every text, but this one goes on
    return [ids[:-1] if ids and ids[-1] == end else ids for ids in prompts]


def check_prompts(problems, model, tokenizer, args):
    """Stop before the first step if the model cannot read a prompt, or complete the longest one."""
    with stop_on_error(f"--model {args.model}: its tokenizer or chat template fails"):
        prompts = encode_prompts(problems, tokenizer, args)
        if not all(prompts) or len(set(map(tuple, prompts))) < len(dict(problems)):
            raise ValueError("two questions make the same prompt: is the question in it?")
        if max(map(max, prompts)) >= len(model.get_input_embeddings().weight):
            raise ValueError("a token has no embedding: call the model's resize_token_embeddings")
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None) or math.inf
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":  # a longer text changes the angles of its first tokens
        limit = rope["original_max_position_embeddings"]
    room = max(0, min(limit, tokenizer.model_max_length) - max(map(len, prompts)))
    if args.max_new_tokens > room:
        stop(f"--max-new-tokens {args.max_new_tokens}: the longest prompt leaves room for {room}")
    if RANK == 0:
        print(f"a prompt as the model sees it: {tokenizer.decode(prompts[0])!r:.400}")


# -------------------------------------------------------------------------------------- Plumbing


def stop(message):
    """End a run that cannot succeed: one line that names the flag and the fix, exit status 2."""
    print("error:", " ".join(message.split())[:400], file=sys.stderr)
    sys.exit(2)


@contextmanager
def stop_on_error(what):
    """An exception in this block ends the run with one line that says what failed and why."""
    try:
        yield
    except Exception as error:
        stop(f"{what}: {error}")


def check_args(args):
    """Stop at the first flag whose value no run can use."""
    counts = ["minibatches", "update_epochs", "group_size", "prompts_per_step", "max_resample"]
    counts += ["micro_batch_size", "max_new_tokens", "eval_every", "eval_problems"]
    for name, value in vars(args).items():
        least = 1 if name in counts else 0
        if name in ("temperature", "max_grad_norm"):
            least = 1e-9
        if type(value) in (int, float) and not least <= value <= 1e12:
            stop(f"--{name.replace('_', '-')} {value}: must be a number from {least} to 1e12")
    if args.group_size < 2:
        stop("--group-size: must be 2 or more, to compare completions")
    if args.prompts_per_step % (args.minibatches * WORLD) != 0:
        stop("--prompts-per-step: must be a multiple of --minibatches × processes")
    if "{question}" not in args.prompt:
        stop("--prompt: must contain {question}")
    load_verifier(args.verifier)


def start_device(args):
    """The device to compute on; under torchrun, each process has a GPU of its own."""
    name = args.device
    if name == "auto":
        gpu = torch.accelerator.current_accelerator(check_available=True)
        name = "cpu" if gpu is None or args.model == "tiny" else gpu.type
    with stop_on_error(f"--device {args.device}: not found"):
        if name == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        device = torch.zeros(1, device=name).device
    if args.dtype == "auto":
        has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        args.dtype = "bfloat16" if has_bf16 else "float32"
    if args.model == "tiny":
        torch.set_num_threads(1)  # its matrices are too small to share
    torch.backends.cuda.enable_cudnn_sdp(False)  # its gradients can be NaN: pytorch issue 196678
    disable_progress_bar()  # of loading and saving
    if WORLD > 1:
        backend = dist.get_default_backend_for_device(device)
        dist.init_process_group(backend, timeout=timedelta(hours=6))  # verifiers may be slow
    if RANK == 0:
        print(f"{args}\non {device}")
    return device


def checksum(value):
    """A number that follows from how a value is printed, on every machine alike."""
    return zlib.crc32(str(value).encode())


def sum_over_processes(tensor):
    """The sum of every process's tensor, in place."""
    if WORLD > 1:
        dist.all_reduce(tensor)
    return tensor


def sum_gradients_over_processes(model):
    """Give every process the sum of all processes' gradients, in place."""
    for parameter in model.parameters():
        if WORLD > 1 and parameter.grad is None:  # this process may have had no row to train on
            parameter.grad = torch.zeros_like(parameter)
        sum_over_processes(parameter.grad)


def global_means(records, device):
    """The mean of each metric over its numbers in all records, of all processes: {name: float}."""
    numbers = defaultdict(list)
    for record in records:
        for name, values in record.items():
            numbers[name] += torch.as_tensor(values, device=device).flatten().tolist()
    totals = torch.tensor([[sum(v), len(v)] for v in numbers.values()], device=device)
    totals = zip(numbers, sum_over_processes(totals).tolist(), strict=True)
    return {name: total / count for name, (total, count) in totals if count > 0}


def log(writer, metrics, step, bar=None):
    """Write to TensorBoard; of a training step, show the main numbers, too."""
    if RANK > 0:
        return
    for name, value in metrics.items():
        writer.add_scalar(name, value, step)
    writer.flush()
    if bar is not None:
        text = "reward {reward:.3f}, length {completions/mean_length:.1f}, rate {learning_rate:.1e}"
        bar.set_postfix_str(text.format(**metrics))
        if bar.disable and step % 10 == 0:  # no terminal
            print(f"step {step}: {bar.postfix}")


def save_checkpoint(model, tokenizer, optimizer, folder, state):
    """Save model and run; of this run's checkpoints, keep the newest two."""
    if RANK > 0:
        return
    scratch = folder / "saving"  # renamed at the end: a kill leaves no half checkpoint
    with stop_on_error(f"{folder} cannot be saved, is the disk full?"):
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        torch.save(state | {"optimizer": optimizer.state_dict()}, scratch / "trainer.pt")
        scratch.rename(folder / f"step-{state['step']:06d}")
    checkpoints = sorted(folder.glob("step-[0-9][0-9][0-9][0-9][0-9][0-9]"))
    for outdated in checkpoints[:-2]:
        shutil.rmtree(outdated, ignore_errors=True)


def load_checkpoint(path):
    """What save_checkpoint has saved, with the flags as Args."""
    with stop_on_error(f"--resume {path}: not a checkpoint of this script, a folder step-…"):
        state = torch.load(Path(path, "trainer.pt"), map_location="cpu", mmap=True)
        return state | {"args": Args(**state["args"])}


def restore(optimizer, run, args):
    """Load the optimizer's state from --resume; returns the steps and the questions so far."""
    state = load_checkpoint(args.resume)
    changed = [name for name in run if run[name] != state["run"][name]]
    if changed:
        stop(f"--resume {args.resume}: begun with another {', another '.join(changed)}")
    if 0 < args.steps <= state["step"]:
        stop(f"--resume {args.resume}: step {state['step']} is done: raise --steps {args.steps}")
    optimizer.load_state_dict(state["optimizer"])
    return state["step"], state["asked"]


if __name__ == "__main__":
    if hasattr(sys.stdout, "reconfigure"):  # not so in Jupyter
        sys.stdout.reconfigure(errors="replace", line_buffering=True)  # it may know ASCII alone
    args = tyro.cli(Args)
    if args.resume:  # parse again: flags that are not given keep the checkpoint's values
        args = tyro.cli(Args, default=load_checkpoint(args.resume)["args"])
    main(args)

# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "transformers==5.23.0", "tyro==1.0.17",
#                 "tensorboard==2.21.0", "tqdm==4.70.1"]
# ///
