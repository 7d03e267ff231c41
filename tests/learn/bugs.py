"""EXERCISES.md's ten bugs, so do not read on if you look for them: each is a script, a text that
stands there once, and what takes its place. `python tests/learn/exercise.py --bug 1` plants the
first one, and ANSWERS.md has the causes."""

from scripts import PATHS, ROOT

BUGS = [
    (
        "grpo_llm",
        "torch.minimum(unclipped, clipped_ratio * advantages)",
        "torch.minimum(ratio, clipped_ratio) * advantages",
    ),
    (
        "grpo_llm",
        "tokens = logprobs.exp()",
        "tokens = (logprobs / 0.6).exp()",
    ),
    (
        "grpo_llm",
        'args.beta * kl_k3(logprobs, micro["ref_logprobs"])',
        'args.beta * (logprobs - micro["ref_logprobs"])',
    ),
    (
        "grpo_llm",
        "d = other_logprobs - logprobs\n",
        "d = logprobs - other_logprobs\n",
    ),
    (
        "grpo_llm",
        "    advantages[are_equal(rewards)] = 0"
        "  # where the mean was rounded, they are not quite 0\n",
        "",
    ),
    (
        "grpo_llm",
        '- batch["ended"].int()  # without the stop token\n',
        '- batch["ended"].int()\n'
        '    batch["mask"] *= batch["completion_ids"] != tokenizer.pad_token_id\n',
    ),
    (
        "grpo_llm",
        "ratio = log_ratio.exp()\n",
        "ratio = (log_ratio.sum(1, keepdim=True) * mask).exp()\n",
    ),
    (
        "dapo_llm",
        '(micro["weights"] * objective).sum()',
        '(token_weights(mask, args) * objective).sum() * len(mask) / len(batch["mask"])',
    ),
    (
        "ppo",
        'next_values = next_values * ~rollout["terminated"]',
        'next_values = next_values * ~rollout["done"]',
    ),
    (
        "reinforce",
        'advantages = batch["advantages"]\n',
        "fit_critic(agent, optimizer, batch, args)\n"
        '    batch["advantages"] = batch["targets"] - agent.value(batch["obs"]).detach()\n'
        '    advantages = batch["advantages"]\n',
    ),
]


def planted(number, folder=None):
    """The path of the script, in this folder or here, and its text with the bug."""
    name, right, wrong = BUGS[number - 1]
    path = (folder or ROOT) / PATHS[name]
    text = path.read_text()
    if text.count(right) != 1:
        raise SystemExit(f"error: bug {number}: {path.name} must have once: {right.strip()}")
    return path, text.replace(right, wrong)
