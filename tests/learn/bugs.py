"""The bugs of EXERCISES.md, so do not read on if you want to find them: each is a script, a text
that occurs in it once, and the text that replaces it. `python tests/learn/exercise.py --bug 1`
plants the first one, and ANSWERS.md explains them in this order."""

from scripts import PATHS, ROOT

BUGS = {
    "min_before_product": (
        "grpo_llm",
        "torch.minimum(unclipped, clipped_ratio * advantages)",
        "torch.minimum(ratio, clipped_ratio) * advantages",
    ),
    "sampler": (
        "grpo_llm",
        "tokens = logprobs.exp()",
        "tokens = (logprobs / 0.6).exp()",
    ),
    "kl_as_difference": (
        "grpo_llm",
        'kl = kl_k3(logprobs, part["ref_logprobs"])',
        'kl = logprobs - part["ref_logprobs"]',
    ),
    "kl_sign": (
        "grpo_llm",
        "d = other_logprobs - logprobs\n",
        "d = logprobs - other_logprobs\n",
    ),
    "equal_rewards": (
        "grpo_llm",
        "    rewards = rewards - rewards[:, :1]  # no A changes, but equal rewards give 0 despite"
        " rounding\n",
        "",
    ),
    "stop_token": (
        "grpo_llm",
        "    return batch, rewards.view(-1, num_samples), samples\n",
        '    is_text = batch["completion_ids"] != tokenizer.pad_token_id\n'
        '    batch |= {name: batch[name] * is_text for name in ("mask", "old_logprobs")}\n'
        "    return batch, rewards.view(-1, num_samples), samples\n",
    ),
    "product_of_ratios": (
        "grpo_llm",
        "ratio = log_ratio.exp()\n",
        "ratio = (log_ratio.sum(1, keepdim=True) * mask).exp()\n",
    ),
    "mean_per_micro_batch": (
        "dapo_llm",
        '(part["weights"] * objective).sum()',
        '(token_weights(mask, args) * objective).sum() * len(mask) / len(batch["mask"])',
    ),
    "time_limit": (
        "ppo",
        'next_values * ~rollout["terminated"]',
        'next_values * ~rollout["done"]',
    ),
    "critic_fitted_first": (
        "reinforce",
        '        policy = agent.policy(batch["obs"])\n',
        "        for _ in range(4 * args.update_epochs):\n"
        '            errors = agent.value(batch["obs"]) - batch["targets"]\n'
        "            optimizer.zero_grad()\n"
        "            errors.square().mean().backward()\n"
        "            optimizer.step()\n"
        '        batch["advantages"] = batch["targets"] - agent.value(batch["obs"]).detach()\n'
        '        policy = agent.policy(batch["obs"])\n',
    ),
}


def planted(number, folder=None):
    """The path of the script, in this folder or here, and its text with the bug of this number."""
    script, right, wrong = list(BUGS.values())[number - 1]
    path = (folder or ROOT) / PATHS[script]
    text = path.read_text()
    if text.count(right) != 1:
        raise SystemExit(f"error: bug {number}: {path.name} must have once: {right.strip()}")
    return path, text.replace(right, wrong)
