"""DAPO's upper bound of the ratio alone, from a model that nearly always guesses."""

import torch
from bench import train
from harness import grid
from llm_parts import load, mean, warm_start

import dapo_llm


@torch.no_grad()
def share_worked_out(model, tokenizer):
    """The policy's probability, mean over 128 held-out sums, not to begin with the bare answer."""
    _, sums = dapo_llm.load_data(dapo_llm.Args(eval_problems=128))
    prompts = [f"{question}=" for question, _ in sums]
    inputs = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
    _, logits = dapo_llm.prefill(model, inputs["input_ids"], inputs["attention_mask"])
    guesses = logits[:, -1].softmax(-1)[:, tokenizer.convert_tokens_to_ids("#")]
    return 1 - guesses.mean().item()


def run(clip_high, seed, minibatches=4, passes=1, steps=24, warm=1000):
    """Guessing is the habit of 97 %. With one pass of DAPO's four minibatches the clip hardly acts;
    with 16 minibatches it does, and with 16 passes more so."""
    folder = warm_start("guess 0.97", warm)
    model, tokenizer = load(folder)
    args = dapo_llm.Args(clip_high=clip_high, seed=seed, steps=steps)
    args.minibatches, args.update_epochs = minibatches, passes
    worked = [share_worked_out(model, tokenizer)]

    def each_step(step, policy, metrics):
        worked.append(share_worked_out(policy, tokenizer))

    found = train(dapo_llm, args, each_step=each_step, folder=folder)
    return {
        "rare style after 5": worked[min(5, steps)],
        "clipped": mean(found["clip_ratio"]),
        "entropy at the end": found["entropy"][-1],
        "pass@1": found["pass@1"],
        "worked out": worked,
        "entropy": found["entropy"],
    }


SMOKE = grid(1, clip_high=[0.28], passes=[2], steps=[2], warm=[2])
