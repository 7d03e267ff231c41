"""RLOO, REINFORCE Leave-One-Out: the mean reward of the other answers is the baseline.

For each question the model writes a group of G answers, and a program, the verifier, rewards each
one: 1 if it is right, otherwise 0. Then the model is trained on these answers, the rollout. Tokens
of answers above their group's average are pushed up, and tokens of answers below it pushed down.

In letters: π_old is the model, or policy, that wrote the answers, o_i is answer i (in the code, a
completion), and R_i is its reward. π_θ, the model in training, starts as π_old. One optimizer step
takes it up J's gradient. All else is constant: A_i, and in it π_old and π_ref, the first model.

    J    = Σ_i Σ_t L_it / Σ_i |o_i|                  over all tokens of a minibatch
    L_it = A_i log π_θ(o_it)
    A_i  = R'_i − mean of the group's other R'_j     the advantage: R'_i beside the others'
    R'_i = R_i − β Σ_t (log π_old − log π_ref)       the reward, less a price for leaving π_ref
    o_it is token t of o_i's |o_i| tokens; π(o_it) is its probability, given all text before it

Compared with reinforce.py                           Where
    a state is the question and the tokens so far    token_logprobs
    an action is a token, a step appends it          generate
    an episode is an answer, its return is R_i       rollout, verify
    Ψ_t is A_i: the baseline is the others' mean     compute_advantages
    one mean over all tokens, not over episodes      token_weights
    a KL penalty in the reward                       train_step, --beta

Why: the only reward comes at the end of an answer. PPO trains a critic, a second language model, to
predict it. Here the other answers to the same question predict it. If six of the other seven are
right, the question is easy: a right answer gets A = 1 − 6/7 = 0.14, and a wrong one −0.86. This
baseline adds no bias, because answer i has no part in it. And the gradient of J points roughly
along ∇E[R'_i]. J itself, a mean of A log π, is no estimate of E[R'_i]: watch the reward.

The sum in R'_i has the mean E[log π_old − log π_ref], which is KL(π_old ‖ π_ref): 0 if the two
agree, otherwise positive. So the penalty pulls the model towards the first one and its language. If
the verifier pays some wrong answers, only a large β keeps them rare: at the optimum the odds of an
answer that earns 1 are the first model's, times up to e^(1/β) (tests/learn/THEORY.md, 19). The log
π_old in R'_i is the policy's own, so R'_i depends on θ, too. But differentiating it would add only
−β E[∇log π] = 0 to ∇E[R'_i], so it may be held constant. There is no discount (γ = 1): with one,
the reward of a long answer would count less.

Weakness: after one step the answers are an older policy's. No ratio corrects for that, and no clip
limits the push on a token. So a rollout serves one step, or a few small ones.

Differs from the paper: there an answer is one action, whose log π is the sum over its tokens. Here
J divides by Σ_i |o_i|, which depends on the samples, and this adds a little bias. The reward comes
from a verifier, not from a learned model. A minibatch takes no step if the R'_i are equal in each
of its groups (see train_minibatch).

Run it without flags: a tiny model learns to add, in a minute or two on a laptop. For a larger model
add --model Qwen/Qwen2.5-0.5B-Instruct --dataset train.jsonl
Ahmadian et al. 2024, arXiv:2402.14740; Kool et al. 2019, Buy 4 REINFORCE Samples
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
import transformers
import tyro
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from torch.optim import AdamW
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

TINY_MODEL = Path(__file__).parent / "tests/tiny_model"
# With several GPUs, torchrun starts one process for each. It sets WORLD_SIZE, how many there are,
# and RANK, the number of this one. Each process draws, scores and trains on groups of its own, and
# then the gradients of all processes are added up.
WORLD = int(os.environ.get("WORLD_SIZE", 1))
RANK = int(os.environ["RANK"]) if WORLD > 1 else 0


@dataclass
class Args:
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
        if self.group_size < 2:
            sys.exit("--group-size: must be 2 or more, to compare answers")
        if self.prompts_per_step % (self.minibatches * WORLD) != 0:
            sys.exit("--prompts-per-step: must be a multiple of --minibatches × processes")


# ------------------------------------------------------------------------------------- Algorithm


def compute_advantages(rewards, args):
    """A_i = R_i − mean of the group's other R_j: rewards (P, G) → advantages (P, G).

    The others say how hard the question is, so A_i says how much better than expected completion i
    did. Its own reward is left out of the mean: then the mean does not depend on completion i, and
    what it takes from the gradient, mean · E[∇log π], is 0.
    """
    sum_of_others = rewards.sum(1, keepdim=True) - rewards
    return rewards - sum_of_others / (rewards.shape[1] - 1)


def token_weights(mask, args):
    """Each token's weight in J, 1 / Σ_i |o_i|: mask (B, T) → weights (B, T).

    All tokens weigh the same, so a completion of 6 tokens has three times the say of one of 2.
    """
    num_tokens = sum_over_processes(mask.sum())
    return mask / num_tokens


def surrogate(logprobs, old_logprobs, advantages, mask, args):
    """L_it, to be maximized, and whether the clip has removed its gradient: (B, T) and (B, T).

    It is called a surrogate because it stands in for E[R], which backward() cannot reach. Here its
    gradient is A ∇log π. There is no ratio and no clip yet: grpo_llm.py brings them, and uses
    old_logprobs and args.
    """
    advantages = advantages[:, None]
    clipped = torch.zeros_like(mask, dtype=torch.bool)
    return advantages * logprobs, clipped


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
#     advantages (B,): A_i; ended (B,): False if the completion was cut off at max_new_tokens


def train_minibatch(model, optimizer, batch, args):
    """Take one optimizer step. Returns what to log; approx_kl and clip_ratio are means over the
    tokens of completions that have an advantage.

    A group whose R'_i are all equal has advantages of 0 and teaches nothing. Its rows have no
    gradient, and they are left out. If a minibatch has only such groups, it takes no step: even at
    a gradient of 0 Adam's momentum would move the weights.
    """
    # Weights of the whole minibatch, so that splitting it below changes no gradient.
    batch = batch | {"weights": token_weights(batch["mask"], args)}
    has_signal = batch["advantages"] != 0
    if sum_over_processes(has_signal.sum()) == 0:
        return {}
    batch = take_rows(batch, has_signal)  # only these rows have a gradient; the weights count all
    totals = torch.zeros(4, device=model.device)
    optimizer.zero_grad()

    for micro in micro_batches(batch, args):
        old_logprobs, advantages, mask = micro["old_logprobs"], micro["advantages"], micro["mask"]
        logprobs = token_logprobs(model, micro, args.temperature)
        objective, clipped = surrogate(logprobs, old_logprobs, advantages, mask, args)
        loss = -(micro["weights"] * objective).sum()
        loss.backward()
        counted = mask * (advantages != 0)[:, None]  # the tokens to be logged
        approx_kl = kl_k3(old_logprobs, logprobs.detach()) * counted  # KL(π_old ‖ π_θ)
        totals += torch.stack([loss.detach(), approx_kl.sum(), clipped.sum(), counted.sum()])

    sum_gradients_over_processes(model)
    grad_norm = clip_grad_norm_(model.parameters(), args.max_grad_norm).item()
    optimizer.step()
    loss, approx_kl, clipped, tokens = sum_over_processes(totals).tolist()
    means = {"approx_kl": approx_kl / tokens, "clip_ratio": clipped / tokens}
    return means | {"loss": loss, "grad_norm": grad_norm}


def train_step(model, reference, tokenizer, optimizer, train, step, args):
    """One step of training: draw completions, reward them, train on them. Returns means to log."""
    problems = next_problems(train, step, args)
    batch, _, rewards = rollout(model, tokenizer, problems, args.group_size, args.temperature, args)
    batch["old_logprobs"] = batch_logprobs(model, batch, args)  # computed as in the loss
    record = rollout_metrics(batch, rewards)
    if args.beta > 0:
        kl = batch["old_logprobs"] - batch_logprobs(reference, batch, args)
        rewards = rewards - args.beta * kl.sum(1).view_as(rewards)  # R'_i
        record["kl"] = kl[batch["mask"] > 0]
    advantages = compute_advantages(rewards, args)
    advantages[are_equal(rewards)] = 0  # where the mean was rounded, they are not quite 0
    batch["advantages"] = advantages.flatten()

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


# From here on, all scripts of this family are the same, byte for byte.
# The next section draws completions and scores them. You can leave the rest until you need it.
# ------------------------------------------------------------------------ Rollout and evaluation


def forward(model, ids, attention_mask, **options):
    """The logits at these tokens. The mask, (B, past + new), also covers those in the cache."""
    new = ids.shape[1]
    positions = attention_mask.cumsum(1) - 1  # from the first real token on, without the padding
    positions = positions[:, -new:].clamp(min=0)
    return model(ids, attention_mask=attention_mask, position_ids=positions, **options).logits


def token_logprobs(model, batch, temperature):
    """log π of each completion token, with gradient: (B, T), 0 where the mask is 0."""
    completion_ids, mask = batch["completion_ids"], batch["mask"]
    ids = torch.cat([batch["prompt_ids"], completion_ids], 1)
    attention_mask = torch.cat([batch["prompt_mask"], mask.long()], 1)
    # The logits at a token predict the one after it, so the last token need not be read.
    options = {"use_cache": False, "logits_to_keep": mask.shape[1]}
    logits = forward(model, ids[:, :-1], attention_mask[:, :-1], **options)
    logprobs = (logits / temperature).log_softmax(-1)
    logprobs = logprobs.gather(2, completion_ids[:, :, None])
    return logprobs.squeeze(2) * mask


@torch.no_grad()
def batch_logprobs(model, batch, args):
    """token_logprobs of a whole rollout, a few rows at a time and without gradient: (B, T)."""
    parts = []
    for micro in micro_batches(batch, args):
        parts.append(token_logprobs(model, micro, args.temperature))
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
    torch.save(state, path / "trainer.pt")
    path.rename(folder / f"step-{step:06d}")


def restore(model, optimizer, args):
    """Load the weights and the optimizer's state from a checkpoint. Returns its step."""
    state = torch.load(f"{args.resume}/trainer.pt", map_location="cpu")
    if state["model"] != args.model:
        sys.exit(f"--resume {args.resume}: give its own --model, too: {state['model']}")
    saved = transformers.AutoModelForCausalLM.from_pretrained(args.resume)
    model.load_state_dict(saved.state_dict())
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
