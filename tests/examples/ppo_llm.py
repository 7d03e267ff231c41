"""PPO, Proximal Policy Optimization, for language models: a critic judges every token.

For each question the model writes a group of G answers, and a program, the verifier, rewards each
one: 1 if it is right, otherwise 0. Then the model is trained on these answers, the rollout. And a
second model, the critic, predicts before each token what reward the answer will get. Tokens after
which the outlook is better than before become likelier, and the others rarer.

In letters: π_old is the model, or policy, that wrote the answers, o_i is answer i (in the code, a
completion), and R_i is its reward. π_θ, the model in training, starts as π_old. A few optimizer
steps take it up the gradient of J. All else is constant: A_it, π_old, and π_ref, the first model.

    J    = Σ_i Σ_t L_it / Σ_i |o_i|                  over all tokens of a minibatch
    L_it = min(r_it A_it, clip(r_it, 1 − ε_low, 1 + ε_high) A_it)
    A_it = Σ_l (γλ)^l δ_i,t+l                        GAE: how much better than V the token was
    δ_it = R_it + γ V_i,t+1 − V_it                   V_it: the reward that the critic still expects
    R_it = −β (log π_old − log π_ref)                and, for the last token, plus R_i
    r_it = π_θ(o_it) / π_old(o_it)                   the ratio: 1 at first, then each step moves it
    o_it is token t of o_i's |o_i| tokens; π(o_it) is its probability, given all text before it

What changes from grpo_llm.py                        Where
    a critic V, a copy of the model with one output  add_critic, token_values, --vf-coef
    an advantage per token, scaled over the rollout  compute_advantages, whiten, --gae-lambda
    one mean over all tokens                         token_weights
    a KL penalty in the reward, token by token       train_step, --beta
    an entropy bonus, if wanted                      train_minibatch, --ent-coef

Why: RLOO and GRPO give every token of an answer the same credit. A good critic's V falls at the
token that spoils the answer, and with λ < 1 this token has the lowest advantage. PPO also needs no
other answers to compare with: --group-size 1 --prompts-per-step 256

Weakness: the critic costs as much memory and time as the policy, and learns from the same few
rewards. With λ = 1 it is only a baseline. With λ < 1 its errors bias the policy, and they move it
even if all rewards are equal.

Differs from the paper: the critic starts as the policy, with V = 0 (InstructGPT: the reward model).

Run it without flags: a tiny model learns to add, in a minute or two on a laptop. For a larger model
add --model Qwen/Qwen2.5-0.5B-Instruct --dataset train.jsonl
Schulman et al. 2017, arXiv:1707.06347; GAE: Schulman et al. 2015, arXiv:1506.02438. For language
models: Stiennon et al. 2020, arXiv:2009.01325; Ouyang et al. 2022, InstructGPT, arXiv:2203.02155
"""

import copy
import functools
import importlib
import json
import math
import os
import random
import re
import sys
import time
import zlib
from collections import defaultdict
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
import tyro
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from torch.optim import AdamW
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

TINY_MODEL = Path(__file__).parents[1] / "tiny_model"
# With several GPUs, torchrun starts one process for each and sets these two variables: how many
# there are, and its number. Each process draws, scores and trains on groups of its own, and then
# the gradients of all processes are added up.
WORLD = int(os.environ.get("WORLD_SIZE", 1))
RANK = int(os.environ["RANK"]) if WORLD > 1 else 0


@dataclass
class Args:
    clip_low: float = 0.2  # ε_low: the ratio is clipped below at 1 − ε_low
    clip_high: float = 0.2  # ε_high: the ratio is clipped above at 1 + ε_high
    beta: float = 0.001  # weight of the KL penalty in the reward; 0: no reference model is loaded
    gamma: float = 1.0  # γ, the discount factor from one token to the next
    gae_lambda: float = 1.0  # λ of GAE: 0 trusts the critic (TD error), 1 the rewards (Monte Carlo)
    vf_coef: float = 0.5  # weight of the critic's loss; with Adam, felt by max_grad_norm alone
    ent_coef: float = 0.0  # weight of the entropy bonus, which keeps the policy from being too sure
    minibatches: int = 4  # optimizer steps per epoch, each on a part of the rollout's groups
    update_epochs: int = 1  # epochs: passes over each rollout, reshuffled each time
    group_size: int = 8  # completions drawn per question (G)
    prompts_per_step: int = 32  # questions per training step, over all processes (P)
    steps: int = 120  # training steps, each a rollout and its updates; 0: only evaluate
    learning_rate: float | None = None  # peak rate; default: 5e-4 for the tiny model, else 1e-6
    warmup_steps: int = 10  # steps until the rate peaks; then it falls linearly towards 0
    max_grad_norm: float = 1.0  # gradients with a larger norm are scaled down to it
    temperature: float = 1.0  # softmax temperature of the policy: in rollout, loss and evaluation
    max_new_tokens: int | None = None  # longest completion; default: 32 for sums, else 256
    model: str = "tiny"  # hub id, local folder, or "tiny": the model in tests/tiny_model
    dataset: str = "arithmetic"  # sums; or a JSONL file with "question" and "answer" per line
    eval_dataset: str = ""  # JSONL file to evaluate on; default: a tenth of the file
    verifier: str = ""  # FILE.py with verify(completion, answer) → reward; default: see verify
    prompt: str | None = None  # text around {question}; the default depends on data and verifier
    device: str = "auto"  # cpu, cuda, mps …; auto: the CPU for the tiny model, else a GPU if any
    micro_batch_size: int | None = None  # rows per training pass; default: 256 for tiny, else 4
    eval_every: int = 50  # training steps between evaluations, and between checkpoints (all stay)
    eval_problems: int = 256  # maximum number of questions per evaluation
    resume: str = ""  # checkpoint folder step-… to continue; give the run's other flags again
    seed: int = 1  # the same seed gives the same run, bit for bit (on one CPU)
    output_dir: str = "runs"  # each run makes a folder in here for its log and checkpoints

    def __post_init__(self):
        tiny, sums = self.model == "tiny", self.dataset == "arithmetic"
        if self.learning_rate is None:
            self.learning_rate = 5e-4 if tiny else 1e-6
        if self.micro_batch_size is None:
            self.micro_batch_size = 256 if tiny else 4
        if self.max_new_tokens is None:
            self.max_new_tokens = 32 if sums else 256
        if self.prompt is None:
            self.prompt = "{question}=" if sums else "{question}"
            if not (sums or self.verifier):
                self.prompt += "\nReason step by step, then end with #### and the number."
        if self.device == "auto":
            gpu = torch.accelerator.current_accelerator(check_available=True)
            self.device = "cpu" if tiny or gpu is None else gpu.type
        for flag in "dataset", "eval_dataset", "verifier", "resume":
            path = getattr(self, flag)
            if path not in ("", "arithmetic") and not Path(path).exists():
                sys.exit(f"--{flag.replace('_', '-')} {path}: there is no such file or folder")
        if "{question}" not in self.prompt:
            sys.exit("--prompt: must contain {question}")
        if max(self.gamma, self.gae_lambda) > 1:
            sys.exit("--gamma and --gae-lambda: must be between 0 and 1")
        if self.prompts_per_step % (self.minibatches * WORLD) != 0:
            sys.exit("--prompts-per-step: must be a multiple of --minibatches × processes")


# ------------------------------------------------------------------------------------- Algorithm


def at_last_token(rewards, mask):
    """Rewards of completions (B,), each moved to its last token, ended or cut off: (B, T)."""
    is_last = mask - F.pad(mask[:, 1:], (0, 1))
    return rewards[:, None] * is_last


def compute_advantages(rewards, values, mask, args):
    """A_it, by GAE: all (B, T), rewards of 0 where the mask is 0.

    After the last token V is 0, even if the completion was cut off: it is judged as it stands, so
    no reward is missing.
    """
    values = F.pad(values * mask, (0, 1))  # after the last token, V is 0
    delta = rewards + args.gamma * values[:, 1:] - values[:, :-1]
    advantages = torch.zeros_like(rewards)
    next_advantage = 0.0
    for t in reversed(range(rewards.shape[1])):
        next_advantage = delta[:, t] + args.gamma * args.gae_lambda * next_advantage
        advantages[:, t] = next_advantage
    return advantages


def mean_and_variance(values, mask):
    """Mean and variance of values (B, T) over the tokens of all processes."""
    num_tokens = sum_over_processes(mask.sum())
    mean = sum_over_processes((values * mask).sum()) / num_tokens
    squares = (values - mean).square() * mask
    return mean, sum_over_processes(squares.sum()) / num_tokens


def whiten(advantages, mask):
    """Advantages (B, T) with mean 0 and standard deviation 1 over the tokens of all processes."""
    mean, variance = mean_and_variance(advantages, mask)
    return (advantages - mean) / (variance.sqrt() + 1e-4) * mask


def token_weights(mask, args):
    """Each token's weight in J, 1 / Σ_i |o_i|: mask (B, T) → weights (B, T).

    All tokens weigh the same, so a completion of 6 tokens has three times the say of one of 2.
    """
    num_tokens = sum_over_processes(mask.sum())
    return mask / num_tokens


def surrogate(logprobs, old_logprobs, advantages, mask, args):
    """L_it, to be maximized, and whether the clip has removed its gradient: (B, T) and (B, T).

    It is called a surrogate because it stands in for E[R], which backward() cannot reach. The
    gradient of L_it is ratio A ∇log π, or 0 once the ratio has gone far enough the way A pushes it:

                ratio < 1 − ε_low    between           ratio > 1 + ε_high
        A > 0   ratio A ∇log π       ratio A ∇log π    0
        A < 0   0                    ratio A ∇log π    ratio A ∇log π

    Why the min? The clip alone is flat on both sides. Suppose pushes on other answers have made a
    token of a right one rarer: ratio 0.7, A = 1. The clipped product is 0.8, a constant, so the
    token would have no gradient of its own to come back. The min takes 0.7 A, which has one. So the
    clip only ever stops what moves forward. (And pushes on other answers may still move it.)
    """
    log_ratio = (logprobs - old_logprobs) * mask  # 0 on padding
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1 - args.clip_low, 1 + args.clip_high)
    unclipped = ratio * advantages
    objective = torch.minimum(unclipped, clipped_ratio * advantages)
    return objective, objective < unclipped


def kl_k3(logprobs, other_logprobs):
    """An estimate of KL(π ‖ other) by each token of π: (B, T), never negative. Only logged here."""
    d = other_logprobs - logprobs
    return d.expm1() - d


# ---------------------------------------------------------------------------------------- Update

# A batch is a dict of tensors. It describes B completions of up to T tokens, each of them an answer
# to a prompt of up to S tokens:
#     prompt_ids, prompt_mask (B, S): the prompt's tokens; the mask is 1 on tokens and 0 on padding
#     completion_ids, mask (B, T): the completion's tokens and their mask
#     sampled_logprobs, old_logprobs (B, T): log π_old, once from generate, once from token_logprobs
#     (On padding all these log-probabilities are 0.)
#     advantages, targets (B, T): A_it, and the critic's targets
#     ended (B,): False if the completion was cut off at max_new_tokens


def train_minibatch(model, optimizer, batch, args):
    """Take one optimizer step. Returns what to log; approx_kl and clip_ratio are means over tokens.

    A step is taken even if all rewards are equal, because then the critic has something to learn.
    """
    # Weights of the whole minibatch, so that splitting it below changes no gradient.
    batch = batch | {"weights": token_weights(batch["mask"], args)}
    totals = torch.zeros(5, device=model.device)
    optimizer.zero_grad()

    for micro in micro_batches(batch, args):
        old_logprobs, advantages, mask = micro["old_logprobs"], micro["advantages"], micro["mask"]
        all_logprobs = all_token_logprobs(model, micro, args.temperature)
        logprobs = of_tokens(all_logprobs, micro)
        objective, clipped = surrogate(logprobs, old_logprobs, advantages, mask, args)
        if args.ent_coef > 0:
            entropy = -(all_logprobs.exp() * all_logprobs).sum(2)
            objective = objective + args.ent_coef * entropy
        loss = -(micro["weights"] * objective).sum()
        errors = (token_values(model, micro) - micro["targets"]).square()
        value_loss = 0.5 * (micro["weights"] * errors).sum()
        (loss + args.vf_coef * value_loss).backward()
        losses = [loss.detach(), value_loss.detach()]
        approx_kl = kl_k3(old_logprobs, logprobs.detach())  # KL(π_old ‖ π_θ)
        totals += torch.stack([*losses, approx_kl.sum(), clipped.sum(), mask.sum()])

    sum_gradients_over_processes(model)
    grad_norm = clip_grad_norm_(model.parameters(), args.max_grad_norm).item()
    optimizer.step()
    loss, value_loss, approx_kl, clipped, tokens = sum_over_processes(totals).tolist()
    means = {"approx_kl": approx_kl / tokens, "clip_ratio": clipped / tokens}
    return means | {"loss": loss, "value_loss": value_loss, "grad_norm": grad_norm}


def train_step(model, reference, tokenizer, optimizer, train, step, args):
    """One step of training: draw completions, reward them, train on them. Returns means to log."""
    problems = next_problems(train, step, args)
    batch, _, rewards = rollout(model, tokenizer, problems, args.group_size, args.temperature, args)
    batch["old_logprobs"] = batch_logprobs(model, batch, args)  # as in the loss, so r is 1 at first
    record = rollout_metrics(batch, rewards)
    record["reward_std"] = rewards.std(1, correction=0)  # a group may be of one
    mask = batch["mask"]
    token_rewards = at_last_token(rewards.flatten(), mask)
    if args.beta > 0:
        log_ratio = batch["old_logprobs"] - batch_logprobs(reference, batch, args)
        token_rewards = token_rewards - args.beta * log_ratio  # R_it
        record["kl"] = log_ratio[mask > 0]
    values = batch_values(model, batch, args)
    advantages = compute_advantages(token_rewards, values, mask, args)
    batch["advantages"] = whiten(advantages, mask)
    batch["targets"] = values + advantages  # the critic's, as in ppo.py
    _, unexplained = mean_and_variance(advantages, mask)  # A is the critic's error
    _, total = mean_and_variance(batch["targets"], mask)
    record["explained_variance"] = 1 - unexplained / (total + 1e-8)

    records = [record]
    rows = torch.arange(rewards.numel()).view_as(rewards)  # rows[g]: the rows of group g
    for _ in range(args.update_epochs):
        order = torch.randperm(len(rows))
        for groups in order.tensor_split(args.minibatches):
            minibatch = take_rows(batch, rows[groups].flatten())
            records.append(train_minibatch(model, optimizer, minibatch, args))
    return global_means(records, model.device)


# ------------------------------------------------------------------------------------------ Main


def main(args: Args) -> dict:
    """Train, or with --steps 0 only evaluate. Returns the last scores, the first pass@1, and the
    run's folder."""
    start = time.perf_counter()
    device = start_device(args)
    train, held_out = load_data(args)
    model, tokenizer = load_policy(args, device)
    reference = None
    if args.beta > 0 and args.steps > 0:
        reference = copy.deepcopy(model)  # π_ref: the same weights, never trained
    add_critic(model)
    optimizer = AdamW(model.parameters(), args.learning_rate, weight_decay=0.0, fused=True)
    steps_done = restore(model, optimizer, args) if args.resume else 0
    name = f"{Path(__file__).stem}__{args.seed}__{time.time_ns()}"
    folder = Path(args.output_dir, name).resolve()
    writer = SummaryWriter(folder) if RANK == 0 else None
    first = scores = evaluate(model, tokenizer, held_out, args, writer, steps_done)

    end = args.steps + 1
    warmup = max(1, min(args.warmup_steps, args.steps))
    bar = tqdm(range(steps_done + 1, end), disable=RANK > 0 or None)  # None: if no terminal
    for step in bar:
        step_start = time.perf_counter()
        transformers.set_seed(checksum((args.seed, step, RANK)))  # so a resumed run draws alike
        rising, falling = step / warmup, (end - step) / (end - warmup)
        rate = args.learning_rate * min(rising, falling)
        optimizer.param_groups[0]["lr"] = rate
        metrics = train_step(model, reference, tokenizer, optimizer, train, step, args)
        metrics |= {"learning_rate": rate, "step_time": time.perf_counter() - step_start}
        log(writer, metrics, step, bar)
        if not math.isfinite(sum(metrics.values())):
            sys.exit(f"step {step}: a reward or the loss is not finite: {metrics}")
        if metrics["sampling/sampling_logp_difference/mean"] > 0.1:
            sys.exit("--model: its KV cache is inexact, as generate and the loss disagree on log π")
        if step % args.eval_every == 0 or step == args.steps:
            save_checkpoint(model, tokenizer, optimizer, folder, step, args)
            scores = evaluate(model, tokenizer, held_out, args, writer, step)

    if WORLD > 1:
        dist.destroy_process_group()
    if RANK == 0 and args.steps > 0:
        gain = f"pass@1 {first['eval/pass@1']:.3f} → {scores['eval/pass@1']:.3f}"
        print(f"{gain}; {time.perf_counter() - start:.0f} s; model and logs in {folder}")
    return scores | {"eval/pass@1_initial": first["eval/pass@1"], "folder": str(folder)}


# From here on, the text is grpo_llm.py's, except for what the critic needs.
# The next section draws completions and scores them. You can leave the rest until you need it.
# ------------------------------------------------------------------------ Rollout and evaluation


def forward(model, ids, attention_mask, **options):
    """The logits at these tokens. The mask, (B, past + new), also covers those in the cache."""
    new = ids.shape[1]
    positions = attention_mask.cumsum(1) - 1  # from the first real token on, without the padding
    positions = positions[:, -new:].clamp(min=0)
    return model(ids, attention_mask=attention_mask, position_ids=positions, **options).logits


def completion_logits(model, batch):
    """The logits for each completion token, with gradient: (B, T, V), or of a critic (B, T, 1)."""
    completion_ids, mask = batch["completion_ids"], batch["mask"]
    ids = torch.cat([batch["prompt_ids"], completion_ids], 1)
    attention_mask = torch.cat([batch["prompt_mask"], mask.long()], 1)
    # The logits at a token predict the one after it, so the last token need not be read.
    options = {"use_cache": False, "logits_to_keep": mask.shape[1]}
    return forward(model, ids[:, :-1], attention_mask[:, :-1], **options)


def all_token_logprobs(model, batch, temperature):
    """log π of the whole vocabulary at each completion token, with gradient: (B, T, V)."""
    return (completion_logits(model, batch) / temperature).log_softmax(-1)


def of_tokens(all_logprobs, batch):
    """Of the whole vocabulary's (B, T, V) those of the completion tokens: (B, T), 0 for padding."""
    logprobs = all_logprobs.gather(2, batch["completion_ids"][:, :, None])
    return logprobs.squeeze(2) * batch["mask"]


def token_logprobs(model, batch, temperature):
    """log π of each completion token, with gradient: (B, T), 0 where the mask is 0."""
    return of_tokens(all_token_logprobs(model, batch, temperature), batch)


def token_values(model, batch):
    """V_it, before each completion token, with gradient: (B, T), 0 where the mask is 0."""
    return completion_logits(model.critic, batch).squeeze(2) * batch["mask"]


@torch.no_grad()
def batch_logprobs(model, batch, args):
    """token_logprobs of a whole rollout, a few rows at a time and without gradient: (B, T)."""
    parts = []
    for micro in micro_batches(batch, args):
        parts.append(token_logprobs(model, micro, args.temperature))
    return torch.cat(parts)


@torch.no_grad()
def batch_values(model, batch, args):
    """token_values of a whole rollout, a few rows at a time and without gradient: (B, T)."""
    parts = []
    for micro in micro_batches(batch, args):
        parts.append(token_values(model, micro))
    return torch.cat(parts)


def micro_batches(batch, args):
    """Yield the batch in parts of --micro-batch-size rows, so that a large one fits in memory."""
    size = args.micro_batch_size
    for start in range(0, len(batch["mask"]), size):
        yield take_rows(batch, slice(start, start + size))


def take_rows(batch, rows):
    """The same batch with these rows only."""
    return {name: tensor[rows] for name, tensor in batch.items()}


@torch.no_grad()
def generate(model, prompts, num_samples, max_new_tokens, temperature):
    """Draw num_samples completions of each prompt, a list of token ids. Padding is on the left, so
    completions start in one column. No top-k, no top-p: the loss takes the samples for π's own."""
    device = model.device
    rows = [torch.tensor(prompt, device=device) for prompt in prompts]
    ones = [torch.ones_like(row) for row in rows]
    prompt_ids = pad_sequence(rows, batch_first=True, padding_side="left")
    prompt_mask = pad_sequence(ones, batch_first=True, padding_side="left")
    # Each prompt is read once. Its keys and values are then copied for each of its completions.
    cache = transformers.DynamicCache(config=model.config)
    logits = forward(model, prompt_ids, prompt_mask, past_key_values=cache, logits_to_keep=1)
    copies = torch.arange(len(prompts), device=device).repeat_interleave(num_samples)
    cache.reorder_cache(copies)
    logits, prompt_ids, prompt_mask = logits[copies], prompt_ids[copies], prompt_mask[copies]
    stop_ids = torch.tensor(model.generation_config.eos_token_id or [], device=device)
    completion_ids = prompt_ids.new_zeros(len(copies), max_new_tokens)
    sampled_logprobs = torch.zeros(completion_ids.shape, device=device)
    mask = torch.zeros_like(sampled_logprobs)
    active = torch.arange(len(copies), device=device)  # the rows that have not ended
    attention_mask = prompt_mask
    for t in range(max_new_tokens):
        logprobs = (logits[:, -1] / temperature).log_softmax(-1)
        # The clamp is for Macs, where tokens of probability 0 get drawn (pytorch issue 192577).
        tokens = logprobs.exp().clamp(min=1e-30).multinomial(1)
        completion_ids[active, t] = tokens[:, 0]
        sampled_logprobs[active, t] = logprobs.gather(1, tokens)[:, 0]
        mask[active, t] = 1.0  # the stop token counts, too
        going = torch.where(~torch.isin(tokens[:, 0], stop_ids))[0]
        if len(going) == 0:
            break
        if len(going) < len(active):
            cache.reorder_cache(going)  # drops the finished rows
        active, tokens = active[going], tokens[going]
        attention_mask = torch.cat([attention_mask[going], torch.ones_like(tokens)], 1)
        logits = forward(model, tokens, attention_mask, past_key_values=cache)

    completion_ids = completion_ids[:, : t + 1]
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "mask": mask[:, : t + 1],
        "sampled_logprobs": sampled_logprobs[:, : t + 1],
        "ended": torch.isin(completion_ids, stop_ids).any(1),
    }


def rollout(model, tokenizer, problems, num_samples, temperature, args):
    """Draw and score num_samples completions of each problem, a pair (question, answer). Returns a
    batch, the completions as texts, and the rewards (P, G)."""
    prompts = encode_prompts(problems, tokenizer, args)
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    room = limit - max(map(len, prompts))
    if args.max_new_tokens > room:
        sys.exit(f"--max-new-tokens {args.max_new_tokens}: a prompt leaves room for {room} only")
    batch = generate(model, prompts, num_samples, args.max_new_tokens, temperature)
    lengths = batch["mask"].sum(1).int() - batch["ended"].int()  # without the stop token
    rows = zip(batch["completion_ids"].tolist(), lengths.tolist(), strict=True)
    completions = [tokenizer.decode(ids[:n], skip_special_tokens=True) for ids, n in rows]
    rewards = []
    try:
        verifier = load_verifier(args.verifier)
        for i, completion in enumerate(completions):
            _, answer = problems[i // num_samples]
            rewards.append(float(verifier(completion, answer)))
    except SystemExit as error:  # or the run would end here, as if all were well
        raise RuntimeError(f"--verifier {args.verifier} called exit()") from error
    rewards = torch.tensor(rewards, dtype=torch.float32, device=model.device)
    return batch, completions, rewards.view(-1, num_samples)


def are_equal(rewards):
    """Whether all rewards of a group are equal, so that it teaches nothing: (P, G) → (P,), bool."""
    return rewards.amax(1) - rewards.amin(1) < 1e-6


def rollout_metrics(batch, rewards):
    """What to log about a rollout: {name: tensor}; of each tensor the mean is logged."""
    mask = batch["mask"]
    gap = batch["old_logprobs"] - batch["sampled_logprobs"]  # only rounding, if all is well
    return {
        "reward": rewards,
        "reward_std": rewards.std(1),  # within a group
        "frac_reward_zero_std": are_equal(rewards),  # the share of groups that teach nothing
        "frac_reward_all_right": rewards.amin(1) >= 1,  # no answer is below 1
        "frac_reward_all_wrong": rewards.amax(1) <= 0,  # no answer is above 0
        "completions/mean_length": mask.sum(1),
        "completions/clipped_ratio": ~batch["ended"],  # cut off at max_new_tokens; not clip_ratio
        "entropy": -batch["old_logprobs"][mask > 0],  # an estimate, in nats per token
        "sampling/sampling_logp_difference/mean": gap[mask > 0].abs(),
    }


def evaluate(model, tokenizer, problems, args, writer, step):
    """Draw 8 completions of each held-out problem. pass@1 is the mean reward of all of them, pass@8
    that of each problem's best one. Prints both, and one problem's best and worst answer."""
    transformers.set_seed(RANK)  # every evaluation has the same seed
    problems = problems[RANK::WORLD] or problems[:1]  # this process's share, or one
    size = max(1, args.prompts_per_step * args.group_size // 8)  # rows as in a whole rollout
    records = []
    for start in range(0, len(problems), size):
        part = problems[start : start + size]
        batch, completions, rewards = rollout(model, tokenizer, part, 8, args.temperature, args)
        record = {
            "eval/pass@1": rewards,
            "eval/pass@8": rewards.amax(1),
            "eval/mean_length": batch["mask"].sum(1),
            "eval/clipped_ratio": ~batch["ended"],
        }
        records.append(record)
    scores = global_means(records, model.device)
    log(writer, scores, step)
    if RANK == 0:
        numbers = ", ".join(f"{name} {score:.3f}" for name, score in scores.items())
        tqdm.write(f"step {step}: {numbers}")
        i = rewards.std(1).argmax()  # in the last part, the problem whose rewards differ most
        prompt = encode_prompts([part[i]], tokenizer, args)[0]  # as the model sees it
        tqdm.write(f"    {tokenizer.decode(prompt)!r:.400}, right answer {part[i][1]!r:.400}")
        for j in rewards[i].argmax(), rewards[i].argmin():
            tqdm.write(f"      reward {rewards[i, j]:.2f}: {completions[8 * i + j]!r:.400}")
    return scores


# ----------------------------------------------------------------------- Task, data and plumbing

NUMBER = re.compile(r"\s*-?([0-9]{1,3}(,[0-9]{3})+|[0-9]+)(\.[0-9]+)?\s*")  # -1,234.50


def verify(completion: str, answer: str) -> float:
    """The reward: 1.0 if the right number, and nothing else, stands after the last `#`, as in
    GSM8K's `#### 1,234`; otherwise 0.0. Treat a completion as hostile text: never eval() it."""
    _, marker, tail = completion.rpartition("#")
    if not marker or not NUMBER.fullmatch(tail):
        return 0.0
    found, expected = Decimal(tail.replace(",", "")), Decimal(answer.replace(",", ""))
    return float(found == expected)  # exact, however long the numbers are


@functools.cache
def load_verifier(path):
    """The function verify(completion, answer) → reward in the Python file at this path."""
    if not path:
        return verify
    path = Path(path).resolve()
    sys.path.insert(1, str(path.parent))  # behind this script's folder
    return importlib.import_module(path.stem).verify


def make_sum(rng, held_out=False):
    """A chain of 2 to 6 one-digit numbers and its sum: ("3+8+5", "16"). `#16` is right."""
    while True:
        length = rng.randint(2, 6)
        terms = [rng.randint(0, 9) for _ in range(length)]
        question = "+".join(map(str, terms))
        # A checksum decides whether a question is held out, so none is on both sides.
        if held_out == (checksum(f"{question}=") % 10 == 0):
            return question, str(sum(terms))


def load_jsonl(path, args):
    """The file's problems, [(question, answer)], in the order of the questions' checksums. The
    built-in verifier is given the number at the end of an answer, as in GSM8K, and a verifier of
    your own the JSON value as it is."""
    problems, unused = {}, set()
    for number, line in enumerate(Path(path).read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            question, answer = row.pop("question"), row.pop("answer")
            if isinstance(answer, float) and answer.is_integer():
                answer = int(answer)  # data frames write 27 as 27.0
            if not question.strip() or answer in ("", None):
                raise ValueError("one of them is empty")
            if not args.verifier:
                answer = str(answer).rpartition("#")[2].strip()
                if not NUMBER.fullmatch(answer):
                    raise ValueError("an answer that is no number needs a --verifier")
        except Exception as error:
            sys.exit(f'{path}, line {number}: needs a "question" and an "answer": {error!r:.200}')
        problems[question] = answer
        unused |= row.keys()
    if unused and RANK == 0:
        print(f"{path}: these fields are not used: {sorted(unused)}")
    return sorted(problems.items(), key=lambda problem: checksum(problem[0]))


def load_data(args):
    """Problems to train on, and others to evaluate on: a second file, or a tenth of the first."""
    if args.dataset == "arithmetic":
        rng = random.Random(1)
        train = [make_sum(rng) for _ in range(10_000)]
        rng = random.Random(0)
        held_out = [make_sum(rng, held_out=True) for _ in range(args.eval_problems)]
    else:
        train = load_jsonl(args.dataset, args)
        tenth = sum(checksum(question) < 2**32 / 10 for question, _ in train)  # the lowest tenth
        held_out = train[: max(1, tenth)]
    if args.eval_dataset:
        held_out = load_jsonl(args.eval_dataset, args)
    questions = dict(held_out)
    train = [problem for problem in train if problem[0] not in questions]
    held_out = held_out[: args.eval_problems]
    if not held_out or (args.steps > 0 and len(train) < args.prompts_per_step):
        counts = f"{len(train)} questions to train on and {len(held_out)} to evaluate on"
        sys.exit(f"--dataset {args.dataset}: {counts}; a step needs {args.prompts_per_step}")
    return train, held_out


def next_problems(train, step, args, draw=0):
    """This process's share of the problems of a step. Each pass over the data has an order of its
    own, and so has each draw, where a step draws more than once. Problems left over at the end of a
    pass, too few for a step, are not asked."""
    steps_per_pass = len(train) // args.prompts_per_step
    epoch, place = divmod(step - 1, steps_per_pass)
    seed = checksum((args.seed, draw, epoch))
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(train), generator=generator)
    asked = order.split(args.prompts_per_step)[place]
    return [train[i] for i in asked[RANK::WORLD]]


def load_policy(args, device):
    """The model that --model names, in float32, and its tokenizer. What ends a completion is an eos
    token of either of them, or the token that ends a turn in the chat template, because the eos of
    a base model may be another one."""
    source = TINY_MODEL if args.model == "tiny" else args.model
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    eos = model.generation_config.eos_token_id  # a number, a list, or None
    stop_ids = set(eos) if isinstance(eos, list) else {eos}
    stop_ids.add(tokenizer.eos_token_id)
    if tokenizer.chat_template:
        question = {"role": "user", "content": "?"}
        answer = {"role": "assistant", "content": "§"}
        chat = tokenizer.apply_chat_template([question, answer, question], tokenize=False)
        _, _, end = chat.partition("§")
        ids = tokenizer(end.strip(), add_special_tokens=False)["input_ids"]
        stop_ids |= tokenizer.added_tokens_decoder.keys() & ids[:1]
    # Only the stop tokens are kept. The hub's other settings are for sampling, which generate does
    # without, and transformers may refuse to save them.
    stop_ids = sorted(stop_ids - {None})
    model.generation_config = transformers.GenerationConfig(eos_token_id=stop_ids or None)
    return model.to(device), tokenizer  # from_pretrained has turned dropout off


def add_critic(model):
    """Give the policy its critic: a copy that ends in one number, 0 at first."""
    critic = copy.deepcopy(model)
    width = critic.get_output_embeddings().in_features
    head = torch.nn.Linear(width, 1, device=model.device)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    critic.set_output_embeddings(head)
    # Trained as a part of the model, but saved apart from it, in trainer.pt.
    model._keys_to_ignore_on_save = {f"critic.{name}" for name in critic.state_dict()}
    model.critic = critic


def encode_prompts(problems, tokenizer, args):
    """The token ids of --prompt with each question in it, in the chat template if there is one."""
    texts = [args.prompt.replace("{question}", question) for question, _ in problems]
    if tokenizer.chat_template:
        chats = [[{"role": "user", "content": text}] for text in texts]
        return tokenizer.apply_chat_template(chats, add_generation_prompt=True)["input_ids"]
    eos = [tokenizer.eos_token_id]  # some tokenizers add it, but the text goes on
    prompts = tokenizer(texts)["input_ids"]
    return [ids[:-1] if ids[-1:] == eos else ids for ids in prompts]


def start_device(args):
    """Returns the device to compute on, with its precision and threads set. Under torchrun each
    process gets a GPU of its own and joins the others. Prints the flags."""
    device = torch.device(args.device)
    if device.type in ("cuda", "xpu"):
        torch.get_device_module(device).set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if device.type == "cuda":  # products take TF32's 10 bits of mantissa, all else has float32's 23
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    if args.model == "tiny":
        torch.set_num_threads(1)  # its matrices are too small to be shared
    transformers.utils.logging.disable_progress_bar()  # of loading and saving
    if WORLD > 1:
        dist.init_process_group()
    if RANK == 0:
        print(args)
    return device


def checksum(value):
    """A hash of the value's text, the same on every machine, unlike Python's own."""
    return zlib.crc32(str(value).encode())


def sum_over_processes(tensor):
    """Add up the tensors of all processes, in place."""
    if WORLD > 1:
        dist.all_reduce(tensor)
    return tensor


def sum_gradients_over_processes(model):
    """Give each process the sum of all processes' gradients."""
    for parameter in model.parameters():
        if WORLD > 1 and parameter.grad is None:  # this process had no row to train on
            parameter.grad = torch.zeros_like(parameter)
        sum_over_processes(parameter.grad)


def global_means(records, device):
    """{name: mean}, the mean of each metric over all its numbers, in all records and processes."""
    totals = defaultdict(float)
    for record in records:
        for name, values in record.items():
            values = torch.as_tensor(values).float()
            totals[name] += torch.tensor([values.sum().item(), values.numel()])
    means = {}
    for name, total in totals.items():
        total, count = sum_over_processes(total.to(device)).tolist()
        means[name] = total / count
    return means


def log(writer, metrics, step, bar=None):
    """Write the metrics to TensorBoard, and of a training step show some in the bar, too. A log
    file has no bar; there every tenth step prints a line."""
    if RANK > 0:
        return
    for name, value in metrics.items():
        writer.add_scalar(name, value, step)
    writer.flush()
    if bar is not None:
        text = "reward {reward:.3f}, length {completions/mean_length:.1f}".format(**metrics)
        bar.set_postfix_str(text)
        if bar.disable and step % 10 == 0:
            print(f"step {step}: {text}, {metrics['step_time']:.2f} s", flush=True)


def save_checkpoint(model, tokenizer, optimizer, folder, step, args):
    """Save the model as transformers does, and beside it what --resume needs."""
    if RANK > 0:
        return
    path = folder / "saving"  # renamed at the end, so that a kill leaves no half checkpoint
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    state = {"model": args.model, "step": step, "optimizer": optimizer.state_dict()}
    state["critic"] = model.critic.state_dict()
    torch.save(state, path / "trainer.pt")
    path.rename(folder / f"step-{step:06d}")


def restore(model, optimizer, args):
    """Load the weights and the optimizer's state from a checkpoint. Returns its step."""
    state = torch.load(f"{args.resume}/trainer.pt", map_location="cpu")
    if state["model"] != args.model:
        sys.exit(f"--resume {args.resume}: give its own --model, too: {state['model']}")
    saved = transformers.AutoModelForCausalLM.from_pretrained(args.resume)
    model.load_state_dict(saved.state_dict(), strict=False)  # the critic is not in it
    model.critic.load_state_dict(state["critic"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # for terminals without UTF-8
    main(tyro.cli(Args))

# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "transformers==5.23.0", "tyro==1.0.17",
#                 "tensorboard==2.21.0", "tqdm==4.70.1"]
# ///
