"""RLOO, REINFORCE Leave-One-Out: the mean reward of the other completions is the baseline.

For each question the policy π_old, the current model, draws a group of G completions o_1 … o_G, and
a verifier gives each a reward R_i (1 if right, otherwise 0). On this rollout the model, π_θ, takes
optimizer steps up J(θ), on minibatches of groups. A_i, π_old and π_ref are constants.

    J    = Σ_i Σ_t L_it / Σ_i |o_i|                  over all tokens of the minibatch
    L_it = A_i log π_θ(o_it)
    A_i  = R'_i − mean of the group's other R'_j     how R'_i compares with its group
    R'_i = R_i − β Σ_t (log π_old − log π_ref)       π_ref is the model before training
    o_it is one of the |o_i| tokens of o_i; π(o_it) is its probability, given all text before it

J is not reinforce.py's E[ R(τ) ]: only its gradient counts, which points roughly along ∇E[R'_i].

What changes from reinforce.py                       Where
    a state is the question and the tokens so far    token_logprobs
    an action is a token, a step appends it          generate
    an episode is a completion, its return R_i       rollout, verify
    Ψ_t is A_i: the baseline is the others' mean     compute_advantages, --baseline
    one mean over all tokens, not over episodes      token_weights
    a KL penalty in the reward                       train_step, --beta

Why: PPO (see ppo.py), the usual method, takes several clipped steps on a rollout. But it needs a
critic, a second language model, though the only reward comes at the end. The mean reward of the
others says how hard the question is, and adds no bias, as o_i has no part in it. The sum in R'_i
has the mean E[ log π_old − log π_ref ], which is KL(π_old ‖ π_ref): 0 if the two agree, otherwise
positive. So the penalty keeps the policy near π_ref, with its language and out of a verifier's
loopholes. (R'_i has log π in it, so it depends on θ, too. But this adds E[ ∇log π ] to ∇E[R'_i],
which is 0.) γ is 1: with less, the reward of a long completion would count less.

Weakness: after one step the samples are an older policy's. No ratio corrects for that and no clip
limits the push on a token, so a rollout serves one step, or a few small ones.

Differs from the paper: a minibatch takes no step if the rewards are equal in each of its groups.
The paper takes a completion as one action, whose log π is the sum over its tokens. Here J divides
by Σ_i |o_i|, which depends on the samples. This adds a little bias.

Without flags a tiny model learns, in a minute or two on a laptop. For a real model, on a GPU, add
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
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

os.environ.setdefault("GOMP_SPINCOUNT", "5000")  # torch's threads that wait soon free their core

import torch
import torch.distributed as dist
import transformers
import tyro
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

TINY_MODEL = Path(__file__).parent / "tests/tiny_model"
# torchrun starts one process per GPU and tells it its rank and the number of processes. Each
# process samples, scores and trains on groups of its own, and the gradients are summed.
RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))


@dataclass
class Args:
    # subtracted from a reward: the mean of the group's others, the rollout's mean, or nothing
    baseline: Literal["leave-one-out", "mean", "none"] = "leave-one-out"
    beta: float = 0.001  # weight of the KL penalty in the reward; 0: no reference model is loaded
    minibatches: int = 1  # optimizer steps per epoch, each on a part of the rollout's groups
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
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of matrix products; auto: bf16 on CUDA
    micro_batch_size: int | None = None  # rows per training pass; default: 256 for tiny, else 8
    eval_every: int = 50  # training steps between evaluations, and between checkpoints
    eval_problems: int = 256  # maximum number of questions per evaluation
    resume: str = ""  # checkpoint folder step-… to continue; give the run's other flags again
    seed: int = 1  # the same seed gives the same run, bit for bit (on a CPU)
    output_dir: str = "runs"  # each run makes a folder in here for its log and checkpoints

    def __post_init__(self):
        tiny, sums = self.model == "tiny", self.dataset == "arithmetic"
        if self.learning_rate is None:
            self.learning_rate = 5e-4 if tiny else 1e-6
        if self.micro_batch_size is None:
            self.micro_batch_size = 256 if tiny else 8
        if self.max_new_tokens is None:
            self.max_new_tokens = 32 if sums else 256
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
#     sampled_logprobs, old_logprobs (B, T): log π_old, by generate and by token_logprobs;
#     all log-probs are 0 on padding
#     advantages (B,); ended (B,): False where a completion was cut off


def train_minibatch(model, optimizer, batch, args):
    """One optimizer step; returns what to log. Of the rows read, approx_kl and clip_ratio are means
    over tokens.

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

    for micro in micro_batches(batch, args):
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


def train_step(model, reference, tokenizer, optimizer, train, step, args):
    """Sample completions for this step's problems, train on them, return the means to log."""
    problems = next_problems(train, step, args)
    batch, _, rewards = rollout(model, tokenizer, problems, args.group_size, args.temperature, args)
    batch["old_logprobs"] = batch_logprobs(model, batch, args)  # rounded as in the loss
    record = rollout_metrics(batch, rewards)
    if args.beta > 0:
        kl = batch["old_logprobs"] - batch_logprobs(reference, batch, args)
        rewards = rewards - args.beta * kl.sum(1).view_as(rewards)  # R'_i
        record["kl"] = kl[batch["mask"] > 0]
    advantages = compute_advantages(rewards, args)
    rounding = 1e-6 * rewards.abs().max().clamp(min=1)  # what equal rewards may leave
    advantages[advantages.abs() < rounding] = 0
    batch["advantages"] = advantages.flatten()

    records = [record]
    # rows[g] are the rows of group g.
    rows = torch.arange(rewards.numel(), device=model.device).view_as(rewards)
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
        reference, _ = load_policy(replace(args, resume=""), device)  # the first model, π_ref
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0, fused=True)
    done = restore(optimizer, args.resume) if args.resume else 0
    name = f"{Path(__file__).stem}__{args.seed}__{time.time_ns()}"
    folder = Path(args.output_dir, name).resolve()
    writer = SummaryWriter(folder) if RANK == 0 else None
    first = scores = evaluate(model, tokenizer, held_out, args, writer, done)

    warmup = max(1, min(args.warmup_steps, args.steps))
    bar = tqdm(range(done + 1, args.steps + 1), disable=RANK > 0 or None)
    for step in bar:
        step_start = time.perf_counter()
        transformers.set_seed(checksum((args.seed, step, RANK)))  # so resuming is exact
        rising, falling = step / warmup, (args.steps + 1 - step) / (args.steps + 1 - warmup)
        rate = args.learning_rate * min(rising, falling)
        optimizer.param_groups[0]["lr"] = rate
        metrics = train_step(model, reference, tokenizer, optimizer, train, step, args)
        metrics |= {"learning_rate": rate, "step_time": time.perf_counter() - step_start}
        metrics["tokens_per_second"] = metrics["num_tokens"] * WORLD / metrics["step_time"]
        if not math.isfinite(sum(metrics.values())):
            stop(f"step {step}: not finite, try a lower --learning-rate: {metrics}")
        if metrics["sampling/sampling_logp_difference/mean"] > 0.1:
            stop("--model: sampler and loss disagree on log π (inexact cache); try --dtype float32")
        log(writer, metrics, step, bar)
        if step % args.eval_every == 0 or step == args.steps:
            save_checkpoint(model, tokenizer, optimizer, folder, step)
            scores = evaluate(model, tokenizer, held_out, args, writer, step)

    if WORLD > 1:
        dist.destroy_process_group()
    if RANK == 0 and args.steps > 0:
        gain = f"pass@1 {first['eval/pass@1']:.3f} → {scores['eval/pass@1']:.3f}"
        print(f"{gain}; {time.perf_counter() - start:.0f} s; model and logs in {folder}")
    return scores | {"eval/pass@1_initial": first["eval/pass@1"], "folder": str(folder)}


# From here on, all scripts of this family are the same, byte for byte.
# The next section draws and scores completions. Read the sections after it when you need them.
# --------------------------------------------------------------------------------------- Rollout


def autocast(model, args):
    """In bf16, matrix products are rounded, and what follows on them. The weights stay float32, in
    which small updates add up until bf16 sees them."""
    return torch.autocast(model.device.type, torch.bfloat16, args.dtype == "bfloat16")


def forward(model, ids, attention_mask, **options):
    """Logits at these tokens. The mask (B, past + new) also covers the tokens in a cache."""
    positions = attention_mask.cumsum(1) - 1  # counted from the first real token, not the padding
    positions = positions[:, -ids.shape[1] :].clamp(min=0)
    return model(ids, attention_mask=attention_mask, position_ids=positions, **options).logits


def token_logprobs(model, batch, temperature):
    """log π of each completion token, with gradient: (B, T), 0 where the mask is 0."""
    completion_ids, mask = batch["completion_ids"], batch["mask"]
    # The logits at a token are for the token after it, so the last token is not read.
    ids = torch.cat([batch["prompt_ids"], completion_ids[:, :-1]], 1)
    attention_mask = torch.cat([batch["prompt_mask"], mask[:, :-1].long()], 1)
    logits = forward(model, ids, attention_mask, use_cache=False, logits_to_keep=mask.shape[1])
    logprobs = (logits.float() / temperature).log_softmax(-1)
    return logprobs.gather(2, completion_ids[:, :, None]).squeeze(2) * mask


@torch.no_grad()
def batch_logprobs(model, batch, args):
    """token_logprobs of a whole rollout, without gradient: (B, T)."""
    with autocast(model, args):
        parts = [token_logprobs(model, m, args.temperature) for m in micro_batches(batch, args)]
    return torch.cat(parts)


def micro_batches(batch, args):
    """Yield the batch in parts of a few rows, to save memory."""
    for start in range(0, len(batch["mask"]), args.micro_batch_size):
        yield take_rows(batch, slice(start, start + args.micro_batch_size))


def take_rows(batch, rows):
    """The batch of these rows alone."""
    return {name: tensor[rows] for name, tensor in batch.items()}


@torch.no_grad()
def generate(model, prompts, num_samples, max_new_tokens, temperature):
    """Draw num_samples completions of each prompt, a list of token ids; temperature 0 is greedy. A
    completion ends with an eos_token_id of the generation config. There is no top-k and no top-p:
    with them the samples would not be π's."""
    device = model.device
    # Rows of (token id, 1), padded on the left with (0, 0).
    rows = [torch.tensor([(token, 1) for token in prompt], device=device) for prompt in prompts]
    padded = pad_sequence(rows, batch_first=True, padding_side="left")
    prompt_ids, prompt_mask = padded.unbind(2)

    # Each prompt is read once. Then each of its completions gets a copy of its keys and values.
    cache = transformers.DynamicCache(config=model.config)
    options = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
    logits = forward(model, prompt_ids, prompt_mask, **options)
    copies = torch.arange(len(prompts), device=device).repeat_interleave(num_samples)
    cache.reorder_cache(copies)
    logits, prompt_ids, prompt_mask = logits[copies], prompt_ids[copies], prompt_mask[copies]

    stop_ids = torch.tensor(model.generation_config.eos_token_id or [], device=device)
    completion_ids = prompt_ids.new_zeros(len(copies), max_new_tokens)
    sampled_logprobs = torch.zeros(completion_ids.shape, device=device)
    active = torch.arange(len(copies), device=device)  # the completions that have not ended
    seen = prompt_mask
    for t in range(max_new_tokens):
        logprobs = (logits[:, -1].float() / (temperature or 1.0)).log_softmax(-1)
        probs = logprobs.exp().clamp(min=1e-30)  # on a Mac's GPU 0 can be drawn: pytorch#192577
        tokens = probs.multinomial(1).squeeze(1) if temperature > 0 else probs.argmax(1)
        completion_ids[active, t] = tokens
        sampled_logprobs[active, t] = logprobs.gather(1, tokens[:, None]).squeeze(1)
        going = torch.isin(tokens, stop_ids, invert=True).nonzero().squeeze(1)
        if len(going) == 0 or t == max_new_tokens - 1:
            break
        if len(going) < len(active):
            cache.reorder_cache(going)  # finished rows leave the cache
        active, tokens = active[going], tokens[going, None]
        seen = torch.cat([seen[going], torch.ones_like(tokens)], 1)
        logits = forward(model, tokens, seen, **options)

    batch = {"prompt_ids": prompt_ids, "prompt_mask": prompt_mask}
    batch["completion_ids"] = completion_ids[:, : t + 1]
    batch["sampled_logprobs"] = sampled_logprobs[:, : t + 1]
    is_stop = torch.isin(batch["completion_ids"], stop_ids)
    stops_before = is_stop.cumsum(1) - is_stop.long()
    batch["mask"] = (stops_before == 0).float()  # so the first stop token counts, too
    return batch | {"ended": is_stop.any(1)}


def rollout(model, tokenizer, problems, num_samples, temperature, args):
    """Completions of each (question, answer): a batch, their texts, and rewards (P, G)."""
    prompts = encode_prompts(problems, tokenizer, args)
    with autocast(model, args):
        batch = generate(model, prompts, num_samples, args.max_new_tokens, temperature)
    lengths = batch["mask"].sum(1).int().tolist()
    rows = zip(batch["completion_ids"].tolist(), lengths, strict=True)
    completions = [tokenizer.decode(ids[:n], skip_special_tokens=True) for ids, n in rows]
    answers = [answer for _, answer in problems for _ in range(num_samples)]
    failure = f"--verifier {args.verifier}: no finite number from its verify(completion, answer)"
    with stop_on_error(failure, show_traceback=True):
        verifier = load_verifier(args.verifier)
        rewards = [float(verifier(*pair)) for pair in zip(completions, answers, strict=True)]
    rewards = torch.tensor(rewards, device=model.device).view(-1, num_samples)
    if not rewards.isfinite().all():
        stop(failure)
    return batch, completions, rewards


def are_equal(rewards):
    """Which groups have equal rewards, so that no completion is better: (P, G) → (P,), bool."""
    return rewards.amax(1) - rewards.amin(1) < 1e-6


def rollout_metrics(batch, rewards):
    """What to log about a rollout: {name: tensor of numbers, whose mean is logged}."""
    mask = batch["mask"]
    old_logprobs = batch["old_logprobs"][mask > 0]
    gap = (old_logprobs - batch["sampled_logprobs"][mask > 0]).abs()  # rounding, mostly in bf16
    return {
        "reward": rewards,
        "reward_std": rewards.std(1),
        "frac_reward_zero_std": are_equal(rewards),
        "completions/mean_length": mask.sum(1),
        "completions/clipped_ratio": ~batch["ended"],  # cut off at max_new_tokens
        "entropy": -old_logprobs,  # their mean estimates it
        "num_tokens": mask.sum(),  # of one process
        "sampling/sampling_logp_difference/mean": gap,
    }


# ------------------------------------------------------------------------------------ Evaluation


def evaluate(model, tokenizer, problems, args, writer, step):
    """Score held-out problems, each by 8 samples and by one greedy completion. pass@1 is the mean
    reward of the samples, pass@8 that of each problem's best one. Print them and an example."""
    transformers.set_seed(RANK)  # the same seed at every evaluation
    problems = problems[RANK::WORLD] or problems[:1]  # this process's share, at least one
    size = max(1, args.prompts_per_step * args.group_size // (8 * WORLD))  # rows as in training
    records = []
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
            "eval/frac_reward_zero_std": are_equal(rewards),
        }
        records.append(record)
    scores = global_means(records, model.device)
    log(writer, scores, step)
    advantages = compute_advantages(rewards, args)  # in all processes, as RLOO's may sum over them
    if RANK == 0:
        numbers = ", ".join(f"{name} {score:.3f}" for name, score in scores.items())
        tqdm.write(f"step {step}: {numbers}")
        if scores["eval/frac_reward_zero_std"] == 1:
            tqdm.write("    no rewards differ: if they are low, change --prompt or --dataset")
        i = rewards.std(1).argmax()  # of the last part, the group whose rewards differ most
        tqdm.write(f"    {part[i][0]!r:.400}, right answer {part[i][1]!r:.400}")
        order = rewards[i].argsort(descending=True)
        for j in order[0], order[-1]:
            credit = f"reward {rewards[i, j]:.2f}, advantage {advantages[i, j]:+.2f}"
            tqdm.write(f"      {credit}: {completions[8 * i + j][:400]!r}")
    return scores


# ------------------------------------------------------------------------- Task, data and policy

NUMBER = re.compile(r"\s*-?\$?([0-9]{1,3}(,[0-9]{3})+|[0-9]+)(\.[0-9]+)?\.?\s*")  # $1,234.50


def verify(completion: str, answer: str) -> float:
    """The reward: 1.0 if the right number, and nothing else, stands after the last `#`, as in
    GSM8K's `#### 1,234`. A completion is hostile text: never eval() it."""
    _, marker, tail = completion.rpartition("#")
    if not marker or not NUMBER.fullmatch(tail):
        return 0.0
    found, expected = (float(re.sub(r"[$,]|\.\s*$", "", text)) for text in (tail, answer))
    return float(math.isclose(found, expected, rel_tol=1e-12))


@functools.cache
def load_verifier(name):
    """The function that --verifier names: (completion, answer) → reward."""
    if not name:
        return verify
    path = Path(name).resolve()
    sys.path.append(str(path.parent))  # for what it imports, and for processes that it starts
    module = importlib.import_module(path.stem)
    if Path(getattr(module, "__file__", None) or "").resolve() != path:
        raise ImportError(f"another module is called {path.stem}, too")
    return module.verify


def make_sum(rng, held_out=False):
    """A chain of 2 to 6 one-digit numbers and its sum: ("3+8+5", "16")."""
    while True:
        terms = [rng.randint(0, 9) for _ in range(rng.randint(2, 6))]
        question = "+".join(map(str, terms))
        # The prompt's checksum decides the side, so that no question is on both.
        if held_out == (checksum(f"{question}=") % 10 == 0):
            return question, str(sum(terms))


def load_jsonl(flag, path, args):
    """[(question, answer)] of a JSONL file, sorted by checksum. The built-in verifier gets the
    number at the answer's end, as in GSM8K; a verifier file gets the JSON value unchanged."""
    problems = {}
    with stop_on_error(f"{flag} {path}"):
        lines = Path(path).read_bytes().splitlines()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        with stop_on_error(f'{flag} {path}, line {number}: needs a "question" and an "answer"'):
            row = json.loads(line)
            question, answer = row["question"].strip(), row["answer"]
            if not question or answer is None:
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
    if args.eval_dataset:
        held_out = load_jsonl("--eval-dataset", args.eval_dataset, args)
        shared = dict(train).keys() & dict(held_out).keys()
        if RANK == 0:
            print(f"{len(shared)} questions are in both --dataset and --eval-dataset")
    elif args.dataset != "arithmetic":
        # If the file grows, its old questions stay on their side.
        tenth = sum(checksum(question) < 2**32 / 10 for question, _ in train)
        held_out, train = train[: max(1, tenth)], train[max(1, tenth) :]
    if not train:
        stop(f"--dataset {args.dataset}: no question is left to train on; give --eval-dataset")
    return train, held_out[: args.eval_problems]


def next_problems(train, step, args, draw=0):
    """This process's share of a step's problems: pass after pass over the data, each in an order of
    its own. A second draw of the same step, draw 1, has other orders."""
    epoch, first = divmod((step - 1) * args.prompts_per_step, len(train))
    order = []
    while len(order) < first + args.prompts_per_step:
        generator = torch.Generator().manual_seed(checksum((args.seed, draw, epoch)))
        order += torch.randperm(len(train), generator=generator).tolist()
        epoch += 1
    share = order[first : first + args.prompts_per_step][RANK::WORLD]
    return [train[i] for i in share]


def load_policy(args, device):
    """The model of --resume or --model, in float32, and its tokenizer."""
    source = args.resume or (TINY_MODEL if args.model == "tiny" else args.model)
    with stop_on_error(f"--{'resume' if args.resume else 'model'} {source}: cannot be loaded"):
        # Mistral's own format has no chat template.
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, mistral_format=False)
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.float32, output_loading_info=True
        )
    if info["missing_keys"]:  # transformers would draw them at random
        stop(f"--model {source}: has no weights for {info['missing_keys']}")
    for parameter in model.parameters():  # unaligned memory would change how sums are rounded
        parameter.data = parameter.data.clone()
    if args.dtype == "bfloat16" and not args.resume:
        spread(model)
    # Its other settings are for sampling, and transformers may refuse to save them.
    hub = model.generation_config
    tokens = {"pad_token_id": hub.pad_token_id, "bos_token_id": hub.bos_token_id}
    tokens["eos_token_id"] = stop_tokens(tokenizer, hub.eos_token_id)
    model.generation_config = transformers.GenerationConfig(**tokens)
    return model.to(device), tokenizer  # from_pretrained has switched dropout off


@torch.no_grad()
def spread(model):
    """Move each weight to a random place among the float32 numbers that bf16 rounds to the same
    number. bf16 sees the same model, but even a small step changes some of what it sees."""
    generator = torch.Generator().manual_seed(0)  # the same in the reference and in all processes
    embedding = model.get_input_embeddings().weight  # if tied: it is used unrounded, too
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear) and layer.weight is not embedding:
            bits = layer.weight.bfloat16().float().view(torch.int32)
            offset = torch.randint(-32767, 32768, bits.shape, generator=generator).int()
            offset[layer.weight == 0] = 0
            layer.weight.copy_((bits + offset).view(torch.float32))


def stop_tokens(tokenizer, eos_token_id):
    """The ids that end a completion: the tokenizer's, the model's, and the one that ends a turn in
    the chat template, which a base model may not name. None if there are none."""
    named = eos_token_id if isinstance(eos_token_id, list) else [eos_token_id]
    ids = {tokenizer.eos_token_id, *named} - {None}
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "§"}]
        _, _, end = tokenizer.apply_chat_template(chat, tokenize=False).partition("§")
        first = tokenizer(end.strip(), add_special_tokens=False)["input_ids"][:1]
        ids |= tokenizer.added_tokens_decoder.keys() & first
    return sorted(ids) or None


def encode_prompts(problems, tokenizer, args):
    """Token ids of --prompt with each question in it, in the chat template if there is one."""
    texts = [args.prompt.replace("{question}", question) for question, _ in problems]
    if tokenizer.chat_template:
        chats = [[{"role": "user", "content": text}] for text in texts]
        return tokenizer.apply_chat_template(chats, add_generation_prompt=True)["input_ids"]
    prompts = tokenizer(texts)["input_ids"]
    end = tokenizer.eos_token_id  # some tokenizers add it, but the text goes on
    return [ids[:-1] if ids[-1] == end else ids for ids in prompts]


def check_prompts(problems, model, tokenizer, args):
    """Print a prompt. Stop if all are alike, or the longest one leaves no room to complete it."""
    prompts = encode_prompts(problems, tokenizer, args)
    if RANK == 0:
        print(f"a prompt as the model sees it: {tokenizer.decode(prompts[0])!r:.400}")
    if len(problems) > 1 and all(prompt == prompts[0] for prompt in prompts):
        stop(f"--model {args.model}: its chat template leaves the question out of the prompt")
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    room = min(limit, tokenizer.model_max_length) - max(map(len, prompts))
    if args.max_new_tokens > room:
        stop(f"--max-new-tokens {args.max_new_tokens}: the longest prompt leaves room for {room}")


# -------------------------------------------------------------------------------------- Plumbing


def stop(message):
    """End a run that cannot succeed, with one line and exit status 2."""
    print("error:", " ".join(message.split())[:400], file=sys.stderr)
    sys.exit(2)


@contextmanager
def stop_on_error(what, show_traceback=False):
    """An exception in this block ends the run; its last line says what failed and why."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if show_traceback:
            traceback.print_exc()
        stop(f"{what}: {error}")


def check_args(args):
    """Stop at the first flag whose value no run can use."""
    positive = "minibatches update_epochs prompts_per_step max_new_tokens micro_batch_size"
    positive += " eval_every eval_problems temperature max_grad_norm"
    for name, value in vars(args).items():
        least = 1e-9 if name in positive.split() else 0
        if type(value) in (int, float) and not least <= value <= 1e12:
            bound = "above 0" if least else "0 or more"
            stop(f"--{name.replace('_', '-')} {value}: must be {bound}, and at most 1e12")
    if args.group_size < 2:
        stop("--group-size: must be 2 or more, to compare completions")
    if args.prompts_per_step % (args.minibatches * WORLD) != 0:
        stop("--prompts-per-step: must be a multiple of --minibatches × processes")
    if "{question}" not in args.prompt:
        stop("--prompt: must contain {question}")


def start_device(args):
    """The device to compute on; under torchrun, each process has a GPU of its own. Also sets
    args.dtype and torch's threads, and starts the process group."""
    name = args.device
    if name == "auto":
        gpu = torch.accelerator.current_accelerator(check_available=True)
        name = "cpu" if gpu is None or args.model == "tiny" else gpu.type
    if name == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if args.dtype == "auto":
        has_bf16 = "cuda" in name and torch.cuda.is_bf16_supported(including_emulation=False)
        args.dtype = "bfloat16" if has_bf16 else "float32"
    if args.model == "tiny":
        torch.set_num_threads(1)  # its matrices are too small to share
    torch.backends.cuda.enable_cudnn_sdp(False)  # its gradients can be NaN: pytorch issue 196678
    transformers.utils.logging.disable_progress_bar()  # of loading and saving
    if WORLD > 1:
        backend = dist.get_default_backend_for_device(name)
        dist.init_process_group(backend)
    if RANK == 0:
        print(f"{args}\non {name}")
    return torch.device(name)


def checksum(value):
    """A hash of a value's text, the same on every machine."""
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
    totals = defaultdict(lambda: torch.zeros(2, device=device))  # sum and count
    for record in records:
        for name, values in record.items():
            values = torch.as_tensor(values, device=device).float()
            totals[name] += torch.stack([values.sum(), torch.ones_like(values).sum()])
    totals = {name: sum_over_processes(total).tolist() for name, total in totals.items()}
    return {name: total / count for name, (total, count) in totals.items() if count > 0}


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


def save_checkpoint(model, tokenizer, optimizer, folder, step):
    """Save what --resume needs; of this run's checkpoints, keep the newest two."""
    if RANK > 0:
        return
    scratch = folder / "saving"  # renamed at the end: a kill leaves no half checkpoint
    model.save_pretrained(scratch)
    tokenizer.save_pretrained(scratch)
    torch.save({"step": step, "optimizer": optimizer.state_dict()}, scratch / "trainer.pt")
    scratch.rename(folder / f"step-{step:06d}")
    for outdated in sorted(folder.glob("step-" + 6 * "[0-9]"))[:-2]:
        shutil.rmtree(outdated)


def restore(optimizer, path):
    """Load the optimizer's state from a checkpoint; returns its step."""
    with stop_on_error(f"--resume {path}: not a checkpoint, a folder step-…"):
        state = torch.load(Path(path, "trainer.pt"), map_location="cpu")
        optimizer.load_state_dict(state["optimizer"])
    return state["step"]


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace", line_buffering=True)  # for an ASCII terminal
    main(tyro.cli(Args))

# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "transformers==5.23.0", "tyro==1.0.17",
#                 "tensorboard==2.21.0", "tqdm==4.70.1"]
# ///
